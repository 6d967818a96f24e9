"""Published runs as configs and rules of this project: what a prediction is checked against.

`rows` reads published/step_times.yaml, whose rows have a time, or published/trained.yaml, whose rows ran on the
hardware they name and so must fit. `config` and `rules` of a row are ordinary ones, which `explain` compiles like any
other.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gspmd_lm import config as configs
from gspmd_lm import core_yaml, paths, rules_file, runtime
from gspmd_lm.config import Config
from gspmd_lm.rules import Rules

PUBLISHED = Path(__file__).parent / "published" / "step_times.yaml"
TRAINED = PUBLISHED.with_name("trained.yaml")

# MaxText's names of what a layer keeps, as ours. What a row calls attention_out is MaxText's `out_proj` in the recipes
# for Trillium, the product that is added to the residual stream: as many bytes as the sum, our `residual`, which spares
# the same computation. In later recipes it is `context`, what the attention kernel returns.
_KEPT = {"block_input": "layer_input", "attention_out": "attention_out", "q": "q", "k": "k", "v": "v"}
_OUT_PROJ = "training/trillium"
_POLICIES = {"full": "block", "minimal": "dots"}
_KERNELS = {"splash": ("tpu", "splash"), "flash": ("tpu", "splash"), "unfused": ("tpu", "xla"),
            "cudnn": ("gpu", "cudnn")}  # fmt: skip

# What a run told the compiler otherwise than this project's defaults do, where it changes the program and today's
# compiler takes it. Sources: the run_recipe.sh of AI-Hypercomputer/tpu-recipes, and AI-Hypercomputer/maxtext,
# benchmarks/xla_flags_library.py.
_OPTIONS: dict[str, dict[str, Any]] = {
    "": {},
    "more vmem": {"xla_tpu_scoped_vmem_limit_kib": 98304},
    "2023": dict.fromkeys(runtime.DEFAULT_OPTIONS["tpu 3d"]),  # of later years
    "trillium": {
        "xla_tpu_scoped_vmem_limit_kib": 98304,
        "xla_tpu_enable_async_collective_fusion_fuse_all_reduce": False,
        "xla_tpu_use_minor_sharding_for_major_trivial_input": True,
        "xla_tpu_relayout_group_size_threshold_for_reduce_scatter": 1,
        "xla_tpu_assign_all_reduce_scatter_layout": True,
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
    per_device_batch: int
    seq: int
    remat: str | Mapping[str, Sequence[str]]
    attention: str
    source: str
    measured: str = ""
    step_time_s: float = math.nan
    activation: str = "silu"
    block: str = "sequential"
    shared_norm: bool = True
    weights: str = "float32"
    tflops_per_device: float | None = None
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
        """'llama3.1-8b on v6e:2x4'"""
        return f"{self.model} on {self.target}"

    def config(self) -> Config:
        """What was computed."""
        raw = {
            "name": self.model,
            "model": {
                "layers": self.L, "embed": self.D, "heads": self.N, "kv_heads": self.K, "head_dim": self.H,
                "mlp": self.F, "vocab": self.V, "context": self.seq, "mlp_kind": "gated" if self.gated else "plain",
                "activation": self.activation, "tied_embeddings": self.tied, "weight_dtype": self.weights,
                "block": self.block, "shared_norm": self.shared_norm,
            },
            "data": {"packing": "stream", "batch": self.per_device_batch * self.devices, "seq": self.seq},
            "train": {"steps": 1000},
        }  # fmt: skip
        return configs.from_dict(raw, self.name)

    def rules(self) -> Rules:
        """Where and how it ran: ZeRO-3 over fsdp and, where the row has it, tensor and sequence parallelism."""
        rows = {"batch": "fsdp"}
        if "tensor" in self.mesh:
            rows |= dict.fromkeys(("vocab", "heads", "kv_heads", "mlp", "residual.seq"), "tensor")
        platform, kernel = _KERNELS[self.attention]
        raw = {
            "mesh": dict(self.mesh),
            "rules": rows,
            "weights": {"embed": "fsdp"},
            "remat": self._remat(),
            "attention": {platform: kernel},
        }
        if options := _OPTIONS[self.options]:
            raw["compiler_options"] = {platform: options}
        return rules_file.from_dict(raw, self.name)

    def _remat(self) -> str | dict[str, list[str]]:
        if isinstance(self.remat, str):
            return _POLICIES[self.remat]
        names = _KEPT | ({"attention_out": "residual"} if _OUT_PROJ in self.source else {})
        kept = {how: [names[name] for name in some] for how, some in self.remat.items()}
        # `residual` is the layer's input too, and that stays on the device unless it is offloaded.
        return {
            how: [name for name in some if name != "layer_input" or (how == "offload" and "residual" not in some)]
            for how, some in kept.items()
        }


def rows(path: Path = PUBLISHED) -> list[Row]:
    """The published runs, in the order of the file."""
    listed: Iterable[Mapping[str, Any]] = core_yaml.parse(paths.read_text(path), str(path))
    return [Row(**row) for row in listed]
