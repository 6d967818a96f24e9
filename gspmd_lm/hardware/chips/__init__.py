"""The chips, by name and by jax's `device_kind`: rates, memory and links. Each is a file of this folder.

A file has the fields of `Chip`, and each figure stands beside its source. `reading.py` reads such files, also those of
users. Rates and memory are those of one jax device. Links are those of one chip. The sources:
  cloud: Google Cloud TPU documentation, the page of each version, read in 2026
  book: "How to Scale Your Model", jax-ml.github.io/scaling-book: its chapter on TPUs, or on GPUs
  paper: "TPU v4: An Optically Reconfigurable Supercomputer", arXiv 2304.01433
  libtpu: what libtpu says when it refuses a program. 0.0.42.1: "exceeds available HBM (31.25G)", and how much memory
    on the chip a kernel may have. 0.0.50.1: on which chips collectives may run in fusions
  jax: the table of chips in jax 0.10.2, jax/_src/pallas/mosaic/tpu_info.py
  sheet: the maker's data sheet, without sparsity; of NVIDIA's A100, H100, H200 and B200 that of the SXM module
  whitepaper: NVIDIA's whitepaper of the GPU's architecture
  cacm: "A Domain-Specific Supercomputer for Training Deep Neural Networks", CACM 63(7), 2020
  rule: nothing is published; the text says what is taken instead
  xla: openxla/xla, xla/backends/gpu/target_config/specs
  schedules: cycles in libtpu 0.0.42.1's compiled schedules, which `python -m benchmarks.kernel_schedules` reads
  google, lambda, nebius: prices on demand in skypilot-org/skypilot-catalog, catalogs/v8/{gcp,lambda,nebius}/vms.csv at
    006059e0f, 0f4070387 and 0082b0435, which carry no date; looked up on 2026-11-21. "book" of 2025-02 has the same of
    v5e and v5p. GPUs cost up to four times as much elsewhere: an H100 10.98 at Google Cloud (a3-highgpu-8g, us-east4)
"""

import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gspmd_lm.units import bits

PLATFORMS = ("cpu", "gpu", "tpu")
COMPLEX = ("c64", "c128")  # as programs write complex numbers of float32 and float64
KINDS = ("matmul", "attention", "other")  # of compute
LINKS = ("ici", "die", "dcn", "nvlink", "pcie", "memory", "network")  # as `network.Network.link` calls them
# Operations of a CPU's programs: arithmetic that takes longer than an addition, and those that move or sum elements.
SLOW_ARITHMETIC = ("exponential", "log", "tanh", "logistic", "erf", "rsqrt", "sqrt", "divide", "power", "sine")
MOVES = ("reduce", "reduce columns", "transpose", "gather", "scatter", "sort", "reduce-window")
KERNEL_MEMORY_BYTES = 16 * 2**20  # libtpu: of most TPUs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpu:
    """Facts about a GPU with which XLA can compile for it. The names are those of XLA's GpuDeviceInfoProto."""

    description: str
    core_count: int  # streaming multiprocessors
    fpus_per_core: int  # float32 lanes
    shared_memory_per_core_bytes: int
    shared_memory_per_block_optin_bytes: int
    l2_cache_bytes: int
    compute_capability: tuple[int, int]


NO_CUDA = (0, 0)  # the compute capability of a GPU that has none
SPLASH_BLOCKS = (256, 512, 1024)


@dataclasses.dataclass(frozen=True)
class Cycles:
    """Cycles of splash attention on one core, for blocks of SPLASH_BLOCKS queries and as many keys."""

    visited: tuple[int, ...]  # the computation of one block that the mask does not skip
    step: int  # every step of the grid, even if its block is skipped: waiting for copies and starting them
    row: int  # per 512 rows, the first and last step of a row of blocks: clearing and storing its sums


class MatmulRate(NamedTuple):
    """The rate of a product of `batch` matrices of rows x contracted and of contracted x columns."""

    dtype: str  # of the factors, as programs write it: f32
    batch: int
    rows: int
    contracted: int
    columns: int
    flops_per_s: float


class Bandwidth(NamedTuple):
    """The bytes/s of an operation that reads and writes so many bytes in all, which caches may hold."""

    moved_bytes: int
    bytes_per_s: float


class CollectiveTime(NamedTuple):
    """The time of a collective in groups of so many devices, which so many processes hold.

    Of TPUs and GPUs that are known, it is so many slices, or hosts that NVLink does not join: `network.Route.outer`.
    """

    kind: str  # all-reduce
    devices: int
    processes: int
    size_bytes: int  # as of `network.sent_bytes`
    seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """One generation of chips. Bandwidths are bytes/s in one direction; 0 means that a chip has no such link."""

    name: str  # the name in a target: v5p
    kinds: tuple[str, ...]  # jax's names for device_kind
    platform: str  # tpu, gpu or cpu
    peak_bf16_flops_per_s: float
    hbm_bytes: int
    hbm_bytes_per_s: float
    host_link_bytes_per_s: float  # PCIe of each chip
    host_bytes: int  # memory of the host, the share of each chip
    network_bytes_per_s: float  # between slices or hosts, the share of each chip
    usable_hbm_bytes: int = 0  # the part that the compiler, or startup.start, lets a program use
    note: str = ""  # what a report says of the figures, where they were never compared with a measured step
    compiler_name: str = ""  # libtpu's name of a TPU
    clock_hz: float = 0  # 0: not known, of a CPU
    usd_per_hour: float | None = None  # the lowest public price, with the share of the host; None: no public one
    peak_f32_flops_per_s: float = 0  # 0: half of bf16, as of GPUs that multiply float32 as TF32
    peak_f64_flops_per_s: float = 0  # 0: not known
    peak_f16_flops_per_s: float = 0  # 0: as bf16
    peak_int8_ops_per_s: float = 0  # 0: int8 is multiplied no faster than bf16
    peak_fp8_flops_per_s: float = 0  # likewise
    int8_share: float = 0  # of their peak, which dense matmuls of int8 reach; 0: as others do
    hbm_share: float = 0  # of the bandwidth of HBM, which operations reach; 0: as on other chips of the platform
    tensor_cores: int = 1  # the cores of one jax device, which share its work
    devices_per_chip: int = 1  # jax devices that a compile-only topology lists
    torus_dimensions: int = 0
    fuses_collectives: bool = False  # whether libtpu 0.0.50 lets collectives run in the background of fusions
    kernel_memory_bytes: int = KERNEL_MEMORY_BYTES  # of the chip itself, which one kernel of a TPU gets by default
    wraps_multiples_of: int = 0  # see `wraps`
    ici_link_bytes_per_s: float = 0
    die_link_bytes_per_s: float = 0  # between the two devices of a chip
    nvlink_bytes_per_s: float = 0  # from each GPU into NVLink; 0: the GPUs of a host are joined by PCIe alone
    nvlink_gpus: int = 0  # how many GPUs NVLink joins; 0: those of a host
    peer_bytes_per_s: float = 0  # between GPUs of a host that NVLink does not join; a file may leave it out: PCIe
    gpus_per_host: int = 8  # at most
    gpu: Gpu | None = None
    # The time of matmuls in a long run over the compiler's estimate (TPU) or over that of short benchmarks (GPU, and
    # there of attention too).
    matmul_slowdown: float = 1.0
    offloading_slowdown: float = 1.0  # the same for programs that copy to the host and back, times matmul_slowdown
    # What `calibrate` measures of devices at hand; empty: rules of the platform say it.
    kernel_gap_s: float = 0  # an operation's time besides its work; 0: as on other chips of the platform
    matmul_rates: tuple[MatmulRate, ...] = ()
    bandwidths: tuple[Bandwidth, ...] = ()  # in the order of their bytes
    collective_times: tuple[CollectiveTime, ...] = ()
    # An operation of a CPU's programs -> the elements that it computes in a second; "add" of all other arithmetic.
    element_rates: Mapping[str, float] = dataclasses.field(default_factory=dict, hash=False)
    # One of KINDS or LINKS -> how many times as long it takes as the other figures say. A run has measured it, and
    # `plan --measured` reads it.
    slowdowns: Mapping[str, float] = dataclasses.field(default_factory=dict, hash=False)
    # Size of a head -> cycles of splash attention, forward and fused backward.
    splash: Mapping[int, tuple[Cycles, Cycles]] = dataclasses.field(default_factory=dict, hash=False)

    def matmul_flops_per_s(self, dtype: str, whole: bool = False) -> float:
        """The peak of matmuls whose operands have a dtype, as programs or jax write it: bf16, f8e4m3fn, s4, int4.

        A dtype that a chip does not multiply is widened: int4 to int8, and 8 bits to bf16. Complex numbers are
        multiplied as pairs of real ones. GPUs multiply float32 as TF32 by default, half as fast as bf16.
        whole: float32 keeps all its bits, as at jax's precision `highest`. The tensor cores of GPUs cannot do that.
        """
        width = bits(dtype)
        if dtype in COMPLEX:
            return self.matmul_flops_per_s(f"f{width // 2}", whole)
        if width == 32 and whole and self.gpu:
            return 2 * self.gpu.core_count * self.gpu.fpus_per_core * self.clock_hz
        if width == 32 and self.peak_f32_flops_per_s:
            return self.peak_f32_flops_per_s
        if dtype in ("f64", "float64") and self.peak_f64_flops_per_s:
            return self.peak_f64_flops_per_s
        if width > 16:
            return self.peak_bf16_flops_per_s * 16 / width
        if dtype in ("f16", "float16") and self.peak_f16_flops_per_s:
            return self.peak_f16_flops_per_s
        narrow = self.peak_fp8_flops_per_s if dtype.startswith("f") else self.peak_int8_ops_per_s
        return narrow if 0 < width <= 8 and narrow else self.peak_bf16_flops_per_s

    def peak_of_operands(self, matmul_dtype: str) -> float:
        """The peak of matmuls whose operands are int8 or fp8; 0 where they are no faster than bf16."""
        return self.peak_int8_ops_per_s if matmul_dtype == "int8" else self.peak_fp8_flops_per_s

    @property
    def host_bytes_per_s(self) -> float:
        """What one jax device can copy to its host, or back."""
        return self.host_link_bytes_per_s / self.devices_per_chip

    def wraps(self, topology: Sequence[int]) -> tuple[bool, ...]:
        """Whether each dimension of a slice of `topology` chips is a ring.

        On v5e and v6e, a dimension is a ring if it is as long as the pod, 16. On v4, v5p and tpu7x, optical switches
        join the faces of cubes of 4 x 4 x 4: all dimensions of a slice of whole cubes are rings, and none of a smaller
        slice. Source: book, TPU chapter, "TPU Networking".
        """
        multiples = [size > 1 and size % self.wraps_multiples_of == 0 for size in topology]
        return tuple(multiples) if self.torus_dimensions == 2 else (all(multiples),) * len(multiples)


CUDNN = 9, 8  # the oldest version that the extra `cuda` of jax 0.10.2 installs
# The share of a GPU's memory that a process takes: see `startup.start`. What is left is for CUDA itself, NCCL's buffers
# and cuDNN's workspaces. It was not measured on a card. jax itself would take 0.75.
GPU_MEMORY_SHARE = 0.92


class Processor(NamedTuple):
    """What decides which kernels can run."""

    platform: str  # cpu, gpu or tpu
    name: str  # h100; of a device whose chip is not known, what jax calls it
    compute_capability: tuple[int, ...] = ()  # of a GPU; () where it is not known
    chip: Chip | None = None


class Chips(Mapping[str, Chip]):
    """The chips that a folder describes, by name. A file is read when its chip is first asked for."""

    def __init__(self, folder: Path):
        self.files = {file.stem: file for file in sorted(folder.glob("*.yaml"))}

    def __getitem__(self, name: str) -> Chip:
        return _read_file(self.files[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.files)

    def __len__(self) -> int:
        return len(self.files)

    def __contains__(self, name: object) -> bool:
        return name in self.files


@functools.cache
def _read_file(file: Path) -> Chip:
    from gspmd_lm.hardware.chips import reading

    return reading.read_chip(file)


CHIPS = Chips(Path(__file__).parent)  # by their names in targets


def platform_of(device: Any) -> str:
    """The platform of a jax device as in a rules file: cpu, gpu or tpu. jax also calls GPUs cuda or rocm."""
    name = str(device.platform)
    return {"cuda": "gpu", "rocm": "gpu"}.get(name, name)


@functools.cache
def chip_of(device_kind: str) -> Chip | None:
    """The chip of a jax device; None if it is not in the table."""
    if device_kind == "cpu":  # of no chip; the files need not be read
        return None
    matching = {
        kind: chip
        for chip in CHIPS.values()
        for kind in chip.kinds
        if re.search(rf"\b{re.escape(kind)}\b", device_kind)
    }
    return matching[max(matching, key=len)] if matching else None


def gpu_target_config(chip: Chip) -> str:
    """The text of the GpuTargetConfigProto with which XLA compiles for a GPU that is not at hand."""
    gpu = chip.gpu
    assert gpu, chip.name
    major, minor = gpu.compute_capability
    return f"""gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {gpu.shared_memory_per_core_bytes}
  threads_per_core_limit: 2048
  core_count: {gpu.core_count}
  fpus_per_core: {gpu.fpus_per_core}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {chip.hbm_bytes_per_s:.0f}
  l2_cache_size: {gpu.l2_cache_bytes}
  clock_rate_ghz: {chip.clock_hz / 1e9:g}
  device_memory_size: {chip.hbm_bytes}
  shared_memory_per_block_optin: {gpu.shared_memory_per_block_optin_bytes}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: {CUDNN[0]} minor: {CUDNN[1]} }}
runtime_version {{ major: 12 minor: 8 }}
device_description_str: "{gpu.description}"
"""
