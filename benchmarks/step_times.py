"""Published runs as configs and rules of this project: what a prediction is checked against.

`rows` reads published/step_times.yaml, whose rows have a time, published/trained.yaml, whose rows ran on the hardware
they name and so must fit, or published/pipelines.yaml, whose rows have stages. `config` and `rules` of a row are
ordinary ones, which `explain` compiles like any other.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gspmd_lm import config as configs
from gspmd_lm.config import Config, core_yaml, nest, paths
from gspmd_lm.hardware.chips import CHIPS
from gspmd_lm.runtime import compiler
from gspmd_lm.sharding import rules_file
from gspmd_lm.sharding.rules import Rules

PUBLISHED = Path(__file__).parent / "published" / "step_times.yaml"
TRAINED, PIPELINES, EIGHT_BITS = (
    PUBLISHED.with_name(f"{kind}.yaml") for kind in ("trained", "pipelines", "eight_bits")
)

# MaxText's names of what a layer keeps, as ours. What a row calls attention_out is MaxText's `out_proj` in the recipes
# for Trillium and A3 Ultra, the product that is added to the residual stream: as many bytes as the sum, our `residual`,
# which spares the same computation. In later recipes it is `context`, what the attention kernel returns.
# torchtitan keeps every second matmul. Of the MLP that is its gate and its output, which have no names here: `hidden`,
# the product that the gate goes into, and `residual`, the sum that the output goes into, are as large.
_KEPT = {"block_input": "layer_input", "attention_out": "attention_out", "q": "q", "k": "k", "v": "v",
         "mlp_gate": "hidden", "mlp_out": "residual"}  # fmt: skip
_OUT_PROJ = ("training/trillium", "training/a3ultra")
_POLICIES = {"full": "block", "minimal": "dots", "none": "none", "minimal flash": "dots"}
_KERNELS = {"splash": "splash", "flash": "splash", "unfused": "xla", "cudnn": "cudnn"}

# What a run told the compiler otherwise than this project's defaults do, where it changes the program and today's
# compiler takes it. Sources: the run_recipe.sh of AI-Hypercomputer/tpu-recipes, and AI-Hypercomputer/maxtext,
# benchmarks/xla_flags_library.py.
_OPTIONS: dict[str, dict[str, Any]] = {
    "": {},
    "more vmem": {"xla_tpu_scoped_vmem_limit_kib": 98304},
    "2023": dict.fromkeys(compiler.DEFAULT_OPTIONS["tpu 3d"]),  # of later years
    "trillium": {
        "xla_tpu_scoped_vmem_limit_kib": 98304,
        "xla_tpu_enable_async_collective_fusion_fuse_all_reduce": False,
        "xla_tpu_use_minor_sharding_for_major_trivial_input": True,
        "xla_tpu_relayout_group_size_threshold_for_reduce_scatter": 1,
        "xla_tpu_assign_all_reduce_scatter_layout": True,
    },
    # Its other thresholds are XLA's own.
    "pax": {
        "xla_gpu_all_reduce_combine_threshold_bytes": 51200,
        "xla_gpu_all_gather_combine_threshold_bytes": None,
        "xla_gpu_reduce_scatter_combine_threshold_bytes": None,
    },
    "ironwood": {
        "xla_tpu_scoped_vmem_limit_kib": 65536,
        "xla_tpu_bf16_emission_mode": "NATIVE_EMISSION",
        "xla_tpu_enable_sparse_core_reduce_scatter_v2": True,
        "xla_tpu_enable_sparse_core_collective_offload_all_gather": True,
        "xla_tpu_enable_sparse_core_collective_offload_2d_all_gather": True,
        "xla_tpu_enable_sparse_core_collective_offload_3d_all_gather": True,
        "xla_tpu_enable_sparse_core_collective_offload_all_reduce": True,
        "xla_tpu_enable_sparse_core_collective_offload_nd_reduce_scatter": None,
        "xla_tpu_use_single_sparse_core_for_all_gather_offload": True,
        "xla_tpu_enable_all_gather_offload_tracing": True,
        "xla_tpu_enable_async_collective_fusion_fuse_all_gather": False,
        "xla_tpu_use_tc_device_shape_on_sc": True,
        "xla_sc_disable_megacore_partitioning": True,
    },
}
_OPTIONS["trillium mixtral"] = _OPTIONS["trillium"] | {"xla_tpu_scoped_vmem_limit_kib": 81920}
_OPTIONS["trillium long"] = _OPTIONS["trillium"] | {"xla_tpu_scoped_vmem_limit_kib": 122880}
# Options for loops over layers are left out where the run had no such loop.
for _name, _sizes_mib in {"cublas": None, "a3 of 2": (64, 128, 64), "a3 of 8": (1024, 128, 64),
                          "a3 ultra": (2047, 2047, 16)}.items():  # fmt: skip
    _OPTIONS[_name] = {"xla_gpu_enable_triton_gemm": False}
    for _kind, _mib in zip(("all_reduce", "all_gather", "reduce_scatter"), _sizes_mib or (), strict=False):
        _OPTIONS[_name][f"xla_gpu_{_kind}_combine_threshold_bytes"] = _mib * 2**20
_OPTIONS["a3 ultra"] |= {
    "xla_gpu_enable_pipelined_all_gather": True,
    "xla_gpu_enable_pipelined_reduce_scatter": True,
    "xla_gpu_enable_pipelined_all_reduce": True,
    "xla_gpu_enable_while_loop_double_buffering": True,
    "xla_disable_hlo_passes": "rematerialization",
}
for _name in ("cublas", "a3 of 2", "a3 of 8", "a3 ultra", "pax"):
    _OPTIONS[_name]["xla_gpu_memory_limit_slop_factor"] = None  # XLA's own
JAX_FRAMEWORKS = ("MaxText", "Pax")


@dataclasses.dataclass(frozen=True)
class Row:
    """One published run. Sizes carry the letters of the logical axes.

    `options` are what its compiler was told otherwise than this project's defaults; None means what the recipes of
    its chip say.
    """

    model: str
    target: str
    devices: int
    L: int
    D: int
    N: int
    K: int
    H: int
    F: int
    V: int
    gated: bool
    tied: bool
    mesh: Mapping[str, int]
    per_device_batch: float
    seq: int
    remat: str | Mapping[str, Sequence[str]]
    attention: str
    source: str
    framework: str = "MaxText"
    measured: str = ""
    step_time_s: float = math.nan
    activation: str = "silu"
    block: str = "sequential"
    shared_norm: bool = True
    norm: str = "rmsnorm"
    biases: bool = False
    positions: str = "rope"
    qk_norm: bool = False
    post_norms: bool = False
    sliding_window: int = 0  # of five layers in six
    experts: int = 0  # of F hidden units each
    experts_per_token: int = 0
    capacity_factor: float = 0.0  # 0: no token was dropped
    more: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # keys of `model` that have no name here
    weight_rows: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # of the rules' table, besides embed's
    context: str = ""  # how keys reach the queries of a sequence that is split over context: gather, ring or ulysses
    weights: str = "float32"
    matmul_dtype: str | None = None  # of operands of 8 bits
    bf16_s: float | None = None  # the step of the same run in bfloat16
    dcn: Mapping[str, int] = dataclasses.field(default_factory=dict)
    microbatches: int = 1
    pipeline: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # of stages, over `stage`
    sequence_parallel: bool = True  # where there is tensor parallelism
    optimizer_over: str = ""
    first_moment: str = "float32"  # the dtype of Adam's first moment, where it is kept as it was
    tflops_per_device: float | None = None
    tokens_per_s_per_device: float | None = None
    sequences_per_s: float | None = None
    counted: str = ""  # the formula of tflops_per_device, if it is not MaxText's
    derived: bool = False
    causal_attention_flops: bool = False
    options: str = ""  # of _OPTIONS
    doubtful: Sequence[str] = ()  # what was assumed of the run
    differs: Sequence[str] = ()  # what this project does otherwise

    @property
    def chip(self) -> str:
        return self.target.rpartition("@")[2].partition(":")[0]

    @property
    def name(self) -> str:
        """'llama3.1-8b on v6e:2x4, 3 x 8192'"""
        operands = f", {self.matmul_dtype}" if self.matmul_dtype else ""
        return f"{self.model} on {self.target}, {self.per_device_batch:g} x {self.seq}{operands}"

    @property
    def jax(self) -> bool:
        """Whether the program was one of JAX and XLA, as ours is."""
        return self.framework in JAX_FRAMEWORKS

    @property
    def tokens_per_device(self) -> float:
        return self.per_device_batch * self.seq

    def config(self) -> Config:
        """What was computed."""
        experts = {
            "experts.count": self.experts,
            "experts.per_token": self.experts_per_token,
            "experts.capacity_factor": self.capacity_factor,
            "experts.balance": "batch",
        }
        raw = {
            "name": self.model,
            "model": nest({
                "layers": self.L, "embed": self.D, "heads": self.N, "kv_heads": self.K, "head_dim": self.H,
                "mlp": self.F, "vocab": self.V, "context": self.seq,
                "feed_forward.kind": "gated" if self.gated else "plain",
                "feed_forward.activation": self.activation, "embedding.tied": self.tied, "weight_dtype": self.weights,
                "matmul_dtype": self.matmul_dtype,
                "block": self.block, "norm.shared": self.shared_norm, "norm.kind": self.norm, "norm.bias": self.biases,
                "attention.qkv_bias": self.biases, "attention.out_bias": self.biases, "feed_forward.bias": self.biases,
                "positions": self.positions, "attention.qk_norm": self.qk_norm, "norm.post": self.post_norms,
                "attention.window": self.sliding_window,
                "layer_pattern": ["sliding"] * 5 + ["full"] if self.sliding_window else [],
                **(experts if self.experts else {}),
                **self.more,
            }),
            "data": {"packing": "stream", "batch": round(self.per_device_batch * self.devices), "seq": self.seq},
            "optimizer": {"mu_dtype": self.first_moment},
            "train": {"steps": 1000},
        }  # fmt: skip
        return configs.from_dict(raw, self.name)

    def rules(self) -> Rules:
        """Where and how it ran: ZeRO-3 over fsdp, copies over data and, where the row has them, stages, tensor
        parallelism and a split sequence, over whose devices weights are split too."""
        rows: dict[str, Any] = {"batch": [axis for axis in ("stage", "data", "fsdp") if axis in self.mesh]}
        rows |= {"seq": "context"} if self.context else {}
        if "tensor" in self.mesh:
            rows |= dict.fromkeys(("vocab", "heads", "kv_heads", "mlp"), "tensor")
            rows |= {"residual.seq": "tensor"} if self.sequence_parallel else {}
        platform = CHIPS[self.chip].platform
        raw = {
            "mesh": dict(self.mesh),
            "rules": rows,
            "weights": {"embed": [axis for axis in ("fsdp", "context") if axis in self.mesh], **self.weight_rows},
            "remat": self._remat(),
            "attention": {platform: _KERNELS[self.attention]},
            "microbatches": self.microbatches,
        }
        if self.pipeline:
            raw |= {"pipeline": dict(self.pipeline), "weights": {"layers": "stage", **raw["weights"]}}
        raw |= {"context": self.context} if self.context else {}
        raw |= {"dcn": dict(self.dcn)} if self.dcn else {}
        raw |= {"optimizer": {"embed": self.optimizer_over}} if self.optimizer_over else {}
        if options := _OPTIONS[self.options]:
            raw["compiler_options"] = {platform: options}
        return rules_file.from_dict(raw, self.name.replace("/", " at "))

    def _remat(self) -> str | dict[str, list[str]]:
        if isinstance(self.remat, str):
            return _POLICIES[self.remat]
        names = _KEPT | ({"attention_out": "residual"} if any(name in self.source for name in _OUT_PROJ) else {})
        kept = {how: [names[name] for name in some] for how, some in self.remat.items()}
        # `residual` is the layer's input too, and that stays on the device unless it is offloaded.
        return {
            how: [name for name in some if name != "layer_input" or (how == "offload" and "residual" not in some)]
            for how, some in kept.items()
        }


@functools.cache
def rows(path: Path = PUBLISHED) -> list[Row]:
    """The published runs, in the order of the file."""
    listed: Iterable[Mapping[str, Any]] = core_yaml.parse(paths.read_text(path), str(path))
    return [Row(**row) for row in listed]
