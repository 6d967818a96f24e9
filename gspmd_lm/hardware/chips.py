"""The chips, by name and by jax's `device_kind`: rates, memory and links, each figure with its source on its line.

Rates and memory are those of one jax device. Links are those of one chip. The sources:
  cloud: Google Cloud TPU documentation, the page of each version, read in 2026
  book: "How to Scale Your Model", jax-ml.github.io/scaling-book: its chapter on TPUs, or on GPUs
  paper: "TPU v4: An Optically Reconfigurable Supercomputer", arXiv 2304.01433
  libtpu: what libtpu says when it refuses a program. 0.0.42.1: "exceeds available HBM (31.25G)", and how much memory
    on the chip a kernel may have. 0.0.50.1: on which chips collectives may run in fusions
  jax: the table of chips in jax 0.10.2, jax/_src/pallas/mosaic/tpu_info.py
  sheet: NVIDIA's data sheet of the SXM module, without sparsity
  xla: openxla/xla, xla/backends/gpu/target_config/specs
  schedules: cycles in libtpu 0.0.42.1's compiled schedules, which `python -m benchmarks.kernel_schedules` reads
  google, lambda, nebius: prices on demand in skypilot-org/skypilot-catalog, catalogs/v8/{gcp,lambda,nebius}/vms.csv at
    006059e0f, 0f4070387 and 0082b0435, which carry no date; looked up on 2026-11-21. "book" of 2025-02 has the same of
    v5e and v5p. GPUs cost up to four times as much elsewhere: an H100 10.98 at Google Cloud (a3-highgpu-8g, us-east4)
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gspmd_lm.units import bits

PLATFORMS = ("cpu", "gpu", "tpu")
_GIB = 2**30
KERNEL_MEMORY_BYTES = 16 * 2**20  # libtpu: of most TPUs


class Processor(NamedTuple):
    """What decides which kernels can run."""

    platform: str  # cpu, gpu or tpu
    name: str  # h100; of a device that is no chip of the table, what jax calls it
    compute_capability: tuple[int, ...] = ()  # of a GPU; () where it is not known


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpu:
    """Facts about a GPU with which XLA can compile for it. The names are those of XLA's GpuDeviceInfoProto."""

    description: str
    core_count: int  # streaming multiprocessors
    fpus_per_core: int  # float32 lanes
    shared_memory_per_core: int
    shared_memory_per_block_optin: int
    l2_cache_bytes: int
    compute_capability: tuple[int, int]


SPLASH_BLOCKS = (256, 512, 1024)


@dataclasses.dataclass(frozen=True)
class Cycles:
    """Cycles of splash attention on one core, for blocks of SPLASH_BLOCKS queries and as many keys."""

    visited: tuple[int, ...]  # the computation of one block that the mask does not skip
    step: int  # every step of the grid, even if its block is skipped: waiting for copies and starting them
    row: int  # per 512 rows, the first and last step of a row of blocks: clearing and storing its sums


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """One generation of chips. Bandwidths are bytes/s in one direction; 0 means that a chip has no such link."""

    name: str  # the name in a target: v5p
    kinds: tuple[str, ...]  # jax's names for device_kind
    platform: str  # tpu or gpu
    peak_bf16_flops_per_s: float
    clock_hz: float
    hbm_bytes: int
    usable_hbm_bytes: int  # the part that the compiler, or startup.start, lets a program use
    hbm_bytes_per_s: float
    host_link_bytes_per_s: float  # PCIe of each chip
    host_bytes: int  # memory of the host, the share of each chip
    network_bytes_per_s: float  # between slices or hosts, the share of each chip
    usd_per_hour: float | None = None  # the lowest public price, with the share of the host; None: no public one
    peak_int8_ops_per_s: float = 0  # 0: int8 is multiplied no faster than bf16
    peak_fp8_flops_per_s: float = 0  # likewise
    int8_share: float = 0  # of their peak, which dense matmuls of int8 reach; 0: as others do
    tensor_cores: int = 1  # the cores of one jax device, which share its work
    devices_per_chip: int = 1  # jax devices that a compile-only topology lists
    torus_dimensions: int = 0
    fuses_collectives: bool = False  # whether libtpu 0.0.50 lets collectives run in the background of fusions
    kernel_memory_bytes: int = KERNEL_MEMORY_BYTES  # of the chip itself, which one kernel of a TPU gets by default
    wraps_multiples_of: int = 0  # see `wraps`
    ici_link_bytes_per_s: float = 0
    die_link_bytes_per_s: float = 0  # between the two devices of a chip
    nvlink_bytes_per_s: float = 0  # from each GPU into the switches of its host
    gpu: Gpu | None = None
    # The time of matmuls in a long run over the compiler's estimate (TPU) or over that of short benchmarks (GPU, and
    # there of attention too).
    matmul_slowdown: float = 1.0
    offloading_slowdown: float = 1.0  # the same for programs that copy to the host and back, times matmul_slowdown
    # Size of a head -> cycles of splash attention, forward and fused backward.
    splash: Mapping[int, tuple[Cycles, Cycles]] = dataclasses.field(default_factory=dict)

    def matmul_flops_per_s(self, dtype: str) -> float:
        """The peak of matmuls whose operands have a dtype, as programs write it: bf16, f8e4m3fn, s4.

        A dtype that a chip does not multiply is widened: int4 to int8, and 8 bits to bf16. GPUs multiply float32 as
        TF32 by default, half as fast as bf16.
        """
        width = bits(dtype)
        if width > 16:
            return self.peak_bf16_flops_per_s * 16 / width
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


_SPLASH_V5P = {
    64: (Cycles((502, 1144, 5040), 277, 702), Cycles((858, 2560, 10240), 527, 388)),
    128: (Cycles((502, 1163, 4935), 392, 691), Cycles((833, 2560, 10240), 527, 324)),
    256: (Cycles((621, 2130), 399, 844), Cycles((1280, 5120), 563, 644)),
}  # schedules

_TPUS = (
    Chip(
        name="v4",
        kinds=("TPU v4",),
        platform="tpu",
        peak_bf16_flops_per_s=275e12,  # cloud; both TensorCores, which jax sees as one device ("megacore")
        tensor_cores=2,  # cloud; int8 is no faster: 275 TOP/s
        clock_hz=275e12 / 262_144,  # inferred, 1.05 GHz: FLOP per cycle of 2 x 4 matrix units, 128 x 128 multiply-adds
        hbm_bytes=32 * _GIB,  # cloud
        usable_hbm_bytes=int(30.5 * _GIB),  # libtpu: 15.25 GiB for each of two cores
        hbm_bytes_per_s=1200e9,  # cloud
        host_link_bytes_per_s=16e9,  # book: PCIe, each way
        host_bytes=407 * 10**9 // 4,  # cloud: machine ct4p-hightpu-4t
        network_bytes_per_s=25e9 / 4,  # book: typically 25 GB/s per host
        torus_dimensions=3,  # cloud
        wraps_multiples_of=4,  # book
        ici_link_bytes_per_s=50e9,  # paper: 6 links of 50 GB/s (book: 45, a usual share of it)
        splash=_SPLASH_V5P,  # inferred: as v5p
    ),
    Chip(
        name="v5e",
        kinds=("TPU v5 lite", "TPU v5e"),
        platform="tpu",
        peak_bf16_flops_per_s=197e12,  # cloud
        peak_int8_ops_per_s=393e12,  # cloud
        clock_hz=197e12 / 131_072,  # inferred, 1.50 GHz: 4 matrix units, 128 x 128 multiply-adds; book says 1.5 GHz
        hbm_bytes=16 * _GIB,  # cloud
        usable_hbm_bytes=int(15.75 * _GIB),  # libtpu
        hbm_bytes_per_s=819e9,  # cloud
        host_link_bytes_per_s=15e9,  # book: PCIe, typically
        host_bytes=48 * 10**9,  # cloud: machine ct5lp-hightpu-8t, 384 GB
        network_bytes_per_s=25e9 / 8,  # cloud: 2 x 100 Gbit/s per host; 6.4 Tbit/s per pod of 256
        usd_per_hour=1.20,  # google: US regions
        fuses_collectives=True,  # libtpu
        torus_dimensions=2,  # cloud
        wraps_multiples_of=16,  # book: only a dimension of 16
        ici_link_bytes_per_s=50e9,  # cloud: 400 GB/s per chip, 4 links, both directions
        splash={
            64: (Cycles((514, 1192, 4830), 220, 697), Cycles((860, 2560, 10240), 366, 388)),
            128: (Cycles((510, 1192, 4886), 274, 688), Cycles((825, 2560, 10240), 406, 324)),
            256: (Cycles((620, 2179, 8721), 319, 841), Cycles((1280, 5120, 20480), 378, 644)),
        },  # schedules
    ),
    Chip(
        name="v5p",
        kinds=("TPU v5p", "TPU v5"),
        platform="tpu",
        peak_bf16_flops_per_s=459e12,  # cloud
        peak_int8_ops_per_s=918e12,  # book, jax; fp8 is no faster than bf16: cloud, 459 TFLOP/s
        tensor_cores=2,  # cloud
        clock_hz=459e12 / 262_144,  # inferred, 1.75 GHz: 2 x 4 matrix units, 128 x 128 multiply-adds
        hbm_bytes=96 * _GIB,  # book (cloud: 95)
        usable_hbm_bytes=int(95.74 * _GIB),  # libtpu
        hbm_bytes_per_s=2765e9,  # cloud
        host_link_bytes_per_s=15e9,  # book: PCIe, typically
        host_bytes=112 * 10**9,  # cloud: machine ct5p-hightpu-4t, 448 GB
        network_bytes_per_s=50e9 / 8,  # cloud: 50 Gbit/s per chip
        usd_per_hour=4.20,  # google: us-central1, us-east1 and us-east5
        torus_dimensions=3,  # cloud
        wraps_multiples_of=4,  # book
        ici_link_bytes_per_s=100e9,  # cloud: 1200 GB/s per chip, 6 links, both directions
        matmul_slowdown=1.09,  # fitted to one published step, that of 32B on v5p:4x4x4; the cause is not known
        splash=_SPLASH_V5P,
    ),
    Chip(
        name="v6e",
        kinds=("TPU v6 lite", "TPU v6e"),
        platform="tpu",
        peak_bf16_flops_per_s=918e12,  # cloud
        peak_int8_ops_per_s=1836e12,  # cloud; fp8 is no faster than bf16: cloud, 918 TFLOP/s
        clock_hz=918e12 / 524_288,  # inferred, 1.75 GHz: FLOP per cycle fitted to the compiler's cycles of matmuls
        hbm_bytes=32 * _GIB,  # cloud
        usable_hbm_bytes=int(31.25 * _GIB),  # libtpu
        hbm_bytes_per_s=1638e9,  # cloud
        host_link_bytes_per_s=64e9,  # fitted to published steps (book: 32); it would be PCIe Gen5, 16 lanes
        host_bytes=180 * 10**9,  # cloud: machine ct6e-standard-8t, 1440 GB
        network_bytes_per_s=100e9 / 8,  # cloud: 100 Gbit/s per chip
        usd_per_hour=2.70,  # google: US regions
        kernel_memory_bytes=2 * KERNEL_MEMORY_BYTES,  # libtpu
        torus_dimensions=2,  # cloud
        wraps_multiples_of=16,  # book: only a dimension of 16
        ici_link_bytes_per_s=100e9,  # cloud: 800 GB/s per chip, 4 links, both directions
        # Its value was fitted to one published step, Llama3.1-8B on v6e:2x4, and its form to five of v6e: the four that
        # offload ask for it, and the fifth does not.
        offloading_slowdown=1.15,
        splash={
            64: (Cycles((563, 899, 3258), 222, 348), Cycles((794, 1537, 5749), 309, 195)),
            128: (Cycles((563, 895, 3260), 379, 338), Cycles((779, 1507, 5734), 309, 163)),
            256: (Cycles((596, 948, 3311), 373, 418), Cycles((856, 1597, 5883), 417, 323)),
        },  # schedules
    ),
    Chip(
        name="tpu7x",
        kinds=("TPU7x", "TPU v7x"),
        platform="tpu",
        devices_per_chip=2,  # cloud: two chiplets, each one a jax device
        peak_bf16_flops_per_s=2307e12 / 2,  # cloud: 2307 TFLOP/s per chip
        peak_fp8_flops_per_s=4614e12 / 2,  # cloud: 4614 TFLOP/s per chip; no figure for int8 is published
        clock_hz=2307e12 / 2 / 524_288,  # inferred, 2.2 GHz: FLOP per cycle fitted to the compiler's cycles of matmuls
        hbm_bytes=96 * _GIB,  # cloud: 192 GiB per chip
        usable_hbm_bytes=int(94.75 * _GIB),  # libtpu
        hbm_bytes_per_s=7380e9 / 2,  # cloud: 7380 GB/s per chip
        host_link_bytes_per_s=64e9,  # inferred: as v6e
        host_bytes=240 * 10**9,  # cloud: machine tpu7x-standard-4t, 960 GB
        network_bytes_per_s=100e9 / 8,  # cloud: 100 Gbit/s per chip
        kernel_memory_bytes=2 * KERNEL_MEMORY_BYTES,  # libtpu
        torus_dimensions=3,  # cloud
        wraps_multiples_of=4,  # inferred: cubes of 4 x 4 x 4, as v5p
        ici_link_bytes_per_s=100e9,  # cloud: 1200 GB/s per chip; 6 links, as v5p, both directions
        die_link_bytes_per_s=600e9,  # cloud: six times a one-dimensional ICI link
        matmul_slowdown=1.15,  # fitted to one published step, Llama-3.1-70B on tpu7x:4x4x4; the cause is not known
        splash={
            64: (Cycles((507, 904, 3357), 255, 334), Cycles((723, 1466, 5276), 463, 183)),
            128: (Cycles((509, 904, 3361), 255, 324), Cycles((721, 1424, 5315), 460, 149)),
            256: (Cycles((558, 1296), 380, 403), Cycles((801, 1497), 484, 311)),
        },  # schedules
    ),
)

CUDNN = 9, 8  # the oldest version that the extra `cuda` of jax 0.10.2 installs
# The share of a GPU's memory that a process takes: see `startup.start`. What is left is for CUDA itself, NCCL's buffers
# and cuDNN's workspaces. It was not measured on a card. jax itself would take 0.75.
GPU_MEMORY_SHARE = 0.92

_HOPPER = Gpu(
    description="NVIDIA H100 80GB HBM3",
    core_count=132,  # xla, as the rest
    fpus_per_core=128,
    shared_memory_per_core=233_472,
    shared_memory_per_block_optin=232_448,
    l2_cache_bytes=52_428_800,
    compute_capability=(9, 0),
)

_H100 = Chip(
    name="h100",
    kinds=("H100",),
    platform="gpu",
    peak_bf16_flops_per_s=989e12,  # sheet: 1979 with sparsity
    peak_int8_ops_per_s=1979e12,  # sheet: 3958 with sparsity
    peak_fp8_flops_per_s=1979e12,  # sheet: 3958 with sparsity
    # Measured: cuBLAS's matmuls of two train steps on one H100, weighted by time and without what tiles take
    # (benchmarks/results/on_device.json). Each takes 0.06 to 0.83 of the peak: many shapes have no fast kernel.
    int8_share=0.28,
    clock_hz=1.98e9,  # xla: boost clock
    hbm_bytes=84_978_434_048,  # seen on H100 SXM (xla: 84,942,979,072)
    usable_hbm_bytes=int(GPU_MEMORY_SHARE * 84_978_434_048),
    hbm_bytes_per_s=3352.32e9,  # xla; sheet: 3.35 TB/s
    host_link_bytes_per_s=55e9,  # measured on one H100, each way; sheet: PCIe Gen5, 128 GB/s both ways
    host_bytes=256 * 10**9,  # DGX H100: 2 TB
    network_bytes_per_s=400e9 / 8,  # DGX H100: one 400 Gbit/s port per GPU
    usd_per_hour=2.95,  # nebius
    nvlink_bytes_per_s=450e9,  # sheet: 900 GB/s both ways
    # Of several GPUs. One alone, which the limit of 700 W slows down too, reaches MATMUL_SHARE. Fitted to two published
    # steps, Llama-2-7B on h100:2x8 and Llama-3.1-70B on h200:32x8, for both chips.
    matmul_slowdown=1.16,
    gpu=_HOPPER,
)

_GPUS = (
    Chip(
        name="a100",
        kinds=("A100",),
        platform="gpu",
        peak_bf16_flops_per_s=312e12,  # sheet
        peak_int8_ops_per_s=624e12,  # sheet: 1248 with sparsity; no fp8
        clock_hz=1.41e9,  # xla, and sheet: boost clock
        hbm_bytes=85_100_068_864,  # xla: A100-SXM4-80GB
        usable_hbm_bytes=int(GPU_MEMORY_SHARE * 85_100_068_864),
        hbm_bytes_per_s=2039.04e9,  # xla; sheet: 2039 GB/s
        host_link_bytes_per_s=32e9,  # sheet: PCIe Gen4, 64 GB/s both ways
        host_bytes=256 * 10**9,  # DGX A100: 2 TB
        network_bytes_per_s=200e9 / 8,  # DGX A100: one 200 Gbit/s port per GPU
        usd_per_hour=2.79,  # lambda: hosts of 8
        nvlink_bytes_per_s=300e9,  # sheet: 600 GB/s both ways
        gpu=Gpu(
            description="NVIDIA A100-SXM4-80GB",
            core_count=108,  # xla, as the rest
            fpus_per_core=64,
            shared_memory_per_core=167_936,
            shared_memory_per_block_optin=166_912,
            l2_cache_bytes=41_943_040,
            compute_capability=(8, 0),
        ),
    ),
    _H100,
    dataclasses.replace(  # in all else an H100: sheet, xla and DGX H200 say the same of both
        _H100,
        name="h200",
        kinds=("H200",),
        hbm_bytes=151_397_597_184,  # xla
        usable_hbm_bytes=int(GPU_MEMORY_SHARE * 151_397_597_184),
        hbm_bytes_per_s=4800e9,  # xla; sheet: 4.8 TB/s
        usd_per_hour=3.50,  # nebius
        gpu=dataclasses.replace(_HOPPER, description="NVIDIA H200 141GB HBM3e"),
    ),
    Chip(
        name="b200",
        kinds=("B200",),
        platform="gpu",
        peak_bf16_flops_per_s=2250e12,  # sheet: 4500 with sparsity
        peak_int8_ops_per_s=4500e12,  # sheet: 9000 with sparsity
        peak_fp8_flops_per_s=4500e12,  # sheet: 9000 with sparsity
        clock_hz=1.965e9,  # xla: boost clock
        hbm_bytes=191_514_411_008,  # xla
        usable_hbm_bytes=int(GPU_MEMORY_SHARE * 191_514_411_008),
        hbm_bytes_per_s=7672.32e9,  # xla; sheet: up to 8 TB/s
        host_link_bytes_per_s=64e9,  # DGX B200: PCIe Gen5
        host_bytes=256 * 10**9,  # DGX B200: 2 TB, or 4
        network_bytes_per_s=400e9 / 8,  # DGX B200: one 400 Gbit/s port per GPU
        usd_per_hour=5.50,  # nebius: us-central1
        nvlink_bytes_per_s=900e9,  # sheet: 1800 GB/s both ways
        gpu=dataclasses.replace(  # the rest as of Hopper: xla
            _HOPPER, description="NVIDIA B200", core_count=148, l2_cache_bytes=132_644_864, compute_capability=(10, 0)
        ),
    ),
)

CHIPS = {chip.name: chip for chip in (*_TPUS, *_GPUS)}  # by their names in targets


def chip_of(device_kind: str) -> Chip | None:
    """The chip of a jax device; None if it is not in the table."""
    matching = {kind: chip for chip in CHIPS.values() for kind in chip.kinds if kind in device_kind}
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
  shared_memory_per_core: {gpu.shared_memory_per_core}
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
  shared_memory_per_block_optin: {gpu.shared_memory_per_block_optin}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: {CUDNN[0]} minor: {CUDNN[1]} }}
runtime_version {{ major: 12 minor: 8 }}
device_description_str: "{gpu.description}"
"""
