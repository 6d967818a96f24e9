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
from gspmd_lm import rules as layouts
from gspmd_lm import runtime
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
_KERNELS = {"splash": ("tpu", "splash"), "flash": ("tpu", "splash"), "cudnn": ("gpu", "cudnn")}

# What the recipes tell the compiler otherwise than this project's defaults do, where it changes the program and today's
# compiler takes it. Sources: the run_recipe.sh of AI-Hypercomputer/tpu-recipes, and AI-Hypercomputer/maxtext,
# benchmarks/xla_flags_library.py and configs/a3/llama_2_7b/1vm.sh.
_OPTIONS: dict[str, dict[str, Any]] = {
    "v5p": dict.fromkeys(runtime.DEFAULT_OPTIONS["tpu 3d"]),  # those runs, of 2023, had none of these
    "v6e": {
        "xla_tpu_scoped_vmem_limit_kib": 98304,
        "xla_tpu_enable_async_collective_fusion_fuse_all_reduce": False,
        "xla_tpu_use_minor_sharding_for_major_trivial_input": True,
        "xla_tpu_relayout_group_size_threshold_for_reduce_scatter": 1,
        "xla_tpu_assign_all_reduce_scatter_layout": True,
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
    step_time_s: float = math.nan
    activation: str = "silu"
    weights: str = "float32"
    tflops_per_device: float | None = None
    derived: bool = False
    causal_attention_flops: bool = False
    options: Mapping[str, Any] | None = None

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
        if options := _OPTIONS.get(self.chip) if self.options is None else self.options:
            raw["compiler_options"] = {platform: dict(options)}
        return layouts.from_dict(raw, self.name)

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
    listed: Iterable[Mapping[str, Any]] = configs.parse_yaml(configs.read_text(path), str(path))
    return [Row(**row) for row in listed]
