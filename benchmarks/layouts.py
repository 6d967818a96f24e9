"""Pairs of a good and a bad layout whose order is known: what a prediction must get right before its seconds count."""

import dataclasses

from gspmd_lm import config as configs
from gspmd_lm.config import Config
from gspmd_lm.sharding import rules_file
from gspmd_lm.sharding.rules import Rules

_SPLASH = {"tpu": "splash"}
LLAMA_1B = ("model.embed=2048", "model.heads=16", "model.kv_heads=8", "model.mlp=8192", "model.layers=16",
            "model.vocab=32000", "data.seq=2048", "model.context=2048")  # fmt: skip
_FSDP = {"rules": {"batch": "fsdp"}, "weights": {"embed": "fsdp"}, "remat": "block", "attention": _SPLASH}
_TENSOR = {"vocab": "tensor", "heads": "tensor", "kv_heads": "tensor", "mlp": "tensor"}


@dataclasses.dataclass(frozen=True)
class Side:
    """A rules file, as its plain values, and what it changes in the config."""

    raw: dict
    sets: tuple[str, ...] = ()
    batch: int = 64

    def config(self) -> Config:
        return configs.load("llama3_8b", [*LLAMA_1B, f"data.batch={self.batch}", *self.sets])

    def rules(self) -> Rules:
        return rules_file.from_dict(self.raw, "pair")


@dataclasses.dataclass(frozen=True)
class Pair:
    """Of two layouts, `good` is the faster per token, for the reason in `why`."""

    name: str
    target: str
    good: Side
    bad: Side
    why: str


def _fsdp(size: int = 8, **changes) -> dict:
    return {"mesh": {"fsdp": size}, **_FSDP, **changes}


def _mixed(fsdp: int, tensor: int, residual: bool = True, **changes) -> dict:
    rules = {"batch": "fsdp", **_TENSOR, **({"residual.seq": "tensor"} if residual else {})}
    return {"mesh": {"fsdp": fsdp, "tensor": tensor}, **_FSDP, "rules": rules, **changes}


_TP8 = {"mesh": {"tensor": 8}, "rules": _TENSOR, "remat": "block", "attention": _SPLASH}
_DP = {"mesh": {"data": 8}, "rules": {"batch": "data"}, "remat": "block", "attention": _SPLASH}
_XLA = {"gpu": "xla"}
_LONG = ("model.context=32768", "data.seq=32768")
_EXPERTS = ("model.experts.count=8", "model.experts.per_token=2", "model.experts.mlp=8192")
_KEPT = {"remat": {"save": ["attention_out"]}, "attention": _SPLASH}
_CP8 = {"mesh": {"context": 8}, "rules": {"seq": "context"}, "weights": {"embed": "context"}, **_KEPT}
_EP4 = {**_FSDP, "mesh": {"fsdp": 2, "expert": 4}, "rules": {"batch": ["fsdp", "expert"], "expert": "expert"}}

PAIRS = (
    Pair("tensor 8 against fsdp 8, 1B", "v5p:2x2x2", Side(_fsdp()), Side(_TP8),
         "a small model's matmuls become thin, and every layer's activations are reduced four times"),
    Pair("tensor 8 against fsdp 8, 1B", "v6e:2x4", Side(_fsdp()), Side(_TP8), "the same on two dimensions of links"),
    Pair("remat none against block", "v5p:2x2x2", Side(_fsdp(remat="none")), Side(_fsdp()),
         "where both fit, a third of the forward pass is not computed again"),
    Pair("remat dots against block", "v5p:2x2x2", Side(_fsdp(remat="dots")), Side(_fsdp()),
         "matmuls are not computed again"),
    Pair("splash against XLA attention", "v5p:2x2x2", Side(_fsdp()), Side(_fsdp(attention={"tpu": "xla"})),
         "scores of T x T go through memory"),
    Pair("1 microbatch against 8", "v5p:2x2x2", Side(_fsdp()), Side(_fsdp(microbatches=8)),
         "weights are gathered and gradients reduced eight times"),
    Pair("bfloat16 against float32", "v5p:2x2x2", Side(_fsdp()), Side(_fsdp(), ("model.compute_dtype=float32",)),
         "twice the bytes everywhere, and no faster matmuls"),
    Pair("large against tiny batch", "v5p:2x2x2", Side(_fsdp()), Side(_fsdp(), batch=8),
         "per token: gathers and the optimizer are paid by an eighth of the tokens"),
    Pair("a batch that is not split", "v5p:2x2x2", Side(_fsdp()), Side(_fsdp(rules={"mlp": None})),
         "every device computes all rows: the forgotten constraint"),
    Pair("fsdp 2 x tensor 4 against tensor 8", "v5p:2x2x2", Side(_mixed(2, 4)), Side(_TP8),
         "fewer pieces of each matmul, fewer bytes of activations"),
    Pair("with sequence parallelism against without", "v5p:2x2x2",
         Side(_mixed(2, 4)), Side(_mixed(2, 4, residual=False)),
         "norms and sums of whole sequences are computed and kept on all four devices"),
    Pair("optimizer state split against replicated", "v5p:2x2x2",
         Side({**_DP, "optimizer": {"embed": "data"}}), Side(_DP),
         "as many bytes, but each device updates all weights"),
    Pair("data across slices against fsdp across slices", "2@v6e:2x4",
         Side({"mesh": {"data": 2, "fsdp": 8}, "dcn": {"data": 2}, **_FSDP, "rules": {"batch": ["data", "fsdp"]}}),
         Side(_fsdp(16, dcn={"fsdp": 2})), "weights cross the slow link in every layer"),
    Pair("tensor within hosts against across", "h100:2x8", Side(_mixed(2, 8, attention=_XLA)),
         Side({"mesh": {"tensor": 16}, "rules": {**_TENSOR, "kv_heads": None}, "remat": "block", "attention": _XLA}),
         "activations cross the network in every layer"),
    Pair("fsdp 8 against tensor 8 on GPUs", "h100:8", Side(_fsdp(attention=_XLA)), Side({**_TP8, "attention": _XLA}),
         "the same as on TPU, over NVLink"),
    Pair("context 8 against tensor 8, rows of 32k tokens", "v5p:2x2x2",
         Side(_CP8, _LONG, batch=4), Side({**_TP8, **_KEPT}, _LONG, batch=4),
         "keys and values travel, which few heads share, and not every activation"),
    Pair("fsdp 8 against an expert axis, few large experts", "v5p:2x2x2", Side(_fsdp(), _EXPERTS), Side(_EP4, _EXPERTS),
         "a device has so many tokens that the weights of eight experts are fewer bytes than its rows"),
)  # fmt: skip
