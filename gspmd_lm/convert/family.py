"""What a row of the table of families is, and the fields that many families share."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from gspmd_lm import config
from gspmd_lm.convert.config_reader import ConfigReader
from gspmd_lm.convert.fields import MOST_LAYERS, Activation, FieldCodec, Fixed, Flag, Given, KeyHeads, Renamed, Values
from gspmd_lm.convert.layout import Tensor
from gspmd_lm.convert.rope import Rope


@dataclasses.dataclass(frozen=True)
class Family:
    """One row of the table: the name of a family in config.json, its fields, and its tensors."""

    name: str
    model_type: str
    architecture: str  # the class of transformers that a written config.json names
    codecs: tuple[FieldCodec, ...]
    tensors: tuple[Tensor, ...]
    prefix: str = "model."  # the base model's prefix, which many published tensors lack
    no_weights: tuple[str, ...] = ()  # patterns of names that files may hold although they are not weights
    irrelevant: tuple[str, ...] = ()  # further fields of config.json that change nothing, besides IRRELEVANT
    also: tuple[str, ...] = ()  # other names of the same family in config.json
    copies: tuple[str, ...] = ()  # tensors that files may hold beside the token table, and that are equal to it
    # Of a model_type with several rows, one for each head: patterns of the tensors of all heads.
    heads: tuple[str, ...] = ()
    older_names: Mapping[str, str] = dataclasses.field(default_factory=dict)  # ends of names in old files -> today's
    twice: Mapping[str, str] = dataclasses.field(default_factory=dict)  # tensor that files may have -> its equal
    # Fields of config.json that hold fields themselves, text_config.hidden_size: see `Part`.
    parts: tuple[str, ...] = ()
    text_type: str = ""  # of a model_type with several rows, one for each kind of decoder: text_config.model_type

    def relative(
        self,
        name: str,
        model_type: str,
        architecture: str,
        codecs: tuple[FieldCodec, ...],
        tensors: tuple[Tensor, ...] = (),
        **changes: Any,
    ) -> "Family":
        """Another family with these fields, which has this one's tensors and all else that is not given."""
        tensors = tensors or self.tensors
        changes |= {"model_type": model_type, "architecture": architecture, "codecs": codecs, "tensors": tensors}
        return dataclasses.replace(self, name=name, **changes)

    def classifier(
        self, architecture: str, codecs: tuple[FieldCodec, ...], tensors: tuple[Tensor, ...], **changes: Any
    ) -> "Family":
        """The row of the same model_type whose head scores classes in place of tokens."""
        changes = {"twice": {}, "irrelevant": (*self.irrelevant, "tie_word_embeddings")} | changes
        return self.relative(self.name, self.model_type, architecture, codecs, tensors, **changes)

    def is_no_weight(self, name: str) -> bool:
        return any(re.search(pattern, name) for pattern in self.no_weights)

    def is_head_tensor(self, name: str) -> bool:
        """Whether a tensor belongs to what stands on the stack of blocks, in this row or in another one."""
        return any(re.search(pattern, name) for pattern in self.heads)

    def todays_name(self, name: str) -> str:
        """The name of a tensor whose file may be old."""
        return next((name.removesuffix(old) + new for old, new in self.older_names.items() if name.endswith(old)), name)

    def flatten(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of a config.json, with those of its parts among them.

        transformers once wrote the fields of a part as text_config_dict, too. Where these are, they are what counts.
        """
        found = {name: value for name, value in raw.items() if name.removesuffix("_dict") not in self.parts}
        for part in self.parts:
            inner = next((one for one in (raw.get(f"{part}_dict"), raw.get(part)) if one is not None), {})
            if isinstance(inner, Mapping):
                found |= {f"{part}.{name}": value for name, value in inner.items()}
            else:
                found[part] = inner
        return found

    def nest(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """The nested fields that `flatten` made flat ones of."""
        made: dict[str, Any] = {}
        for name, value in fields.items():
            part, dot, inner = name.partition(".")
            if dot and part in self.parts:
                made.setdefault(part, {})[inner] = value
            else:
                made[name] = value
        return made

    def keeps_float32(self, name: str) -> bool:
        """Whether a tensor has float32 numbers, whatever the dtype of the others."""
        return any(tensor.float32 and name.endswith(tensor.name.rpartition("{}.")[2]) for tensor in self.tensors)


@dataclasses.dataclass(frozen=True)
class Part:
    """The fields of a part of a config.json, such as text_config, as those of a family of its own."""

    name: str
    codecs: tuple[FieldCodec, ...]
    model_type: str = ""  # as it is written; "": not at all

    def read(self, reader: ConfigReader, values: Values) -> None:
        ahead = f"{self.name}."
        inner = ConfigReader({name.removeprefix(ahead): value for name, value in reader.raw.items()
                              if name.startswith(ahead)})  # fmt: skip
        for codec in self.codecs:
            codec.read(inner, values)
        reader.names_read |= {ahead + name for name in inner.names_read}
        reader.problems += [ahead + problem for problem in inner.problems]
        reader.notes += [ahead + note for note in inner.notes]

    def write(self, model: config.ModelConfig) -> dict[str, Any]:
        fields: dict[str, Any] = {"model_type": self.model_type} if self.model_type else {}
        for codec in self.codecs:
            fields |= codec.write(model)
        return {f"{self.name}.{name}": value for name, value in fields.items()}


def divide_width(values):
    return values["embed"] // values["heads"]


def heads(values):
    return values["heads"]


def four_times(values):
    return 4 * values["embed"]


ONE_WIDTH = Given({"kv_heads": heads, "head_dim": divide_width})  # heads share the width, each with keys
BIASES = Given({"attention.qkv_bias": True, "attention.out_bias": True, "feed_forward.bias": True})
PLAIN_LAYERNORM = Given({"norm.kind": "layernorm", "norm.bias": True, "feed_forward.kind": "plain"})
ALL_BIASES = ("attention.qkv_bias", "attention.out_bias", "feed_forward.bias")
LAYERS = Renamed("num_hidden_layers", "layers", most=MOST_LAYERS)
SIZES = (
    Renamed("vocab_size", "vocab"),
    Renamed("hidden_size", "embed"),
    LAYERS,
    Renamed("num_attention_heads", "heads"),
)


LAYERNORM_EPS = Renamed("layer_norm_eps", "norm.eps", 1e-5)
NO_HEAD_DIM = Given({"head_dim": divide_width})
TANH = {"gelu_tanh": "gelu_pytorch_tanh"}
GELU_NEW = {"gelu_tanh": "gelu_new"}
SILU = Activation("hidden_act", "silu", TANH)
GELU = Activation("hidden_act", "gelu", GELU_NEW)
UNTIED = Flag("tie_word_embeddings", ("embedding.tied",), False)
TIED = Flag("tie_word_embeddings", ("embedding.tied",), True)
ATTENTION_BIAS = Flag("attention_bias", ("attention.qkv_bias", "attention.out_bias"), False)
MLP_BIAS = Flag("mlp_bias", ("feed_forward.bias",), False)
NO_CLIP = Fixed("clip_qkv", False, "cuts off large queries, keys and values, which is not supported")
ROTATED = (r"rotary_(pos_)?emb\.inv_freq$",)  # tensors that follow from the sizes
CAUSAL_MASKS = (r"\.attn\.(bias|masked_bias)$", r"\.attention\.(bias|masked_bias)$")


def llama_fields(
    kv_heads: int = 0,
    head_dim: int | FieldCodec = 0,
    eps: float | FieldCodec = 1e-6,
    rope: FieldCodec = Rope(),  # noqa: B008
    activation: FieldCodec = SILU,
    tied: bool = False,
) -> tuple[FieldCodec, ...]:
    """The fields of Llama and its kin. Numbers are those of a config.json that leaves the field out.

    kv_heads: as for `KeyHeads`. head_dim: 0 means the width divided by the heads. head_dim, eps: or other fields.
    """
    sizes = (Renamed("intermediate_size", "mlp"), Renamed("max_position_embeddings", "context"))
    norms = Renamed("rms_norm_eps", "norm.eps", eps) if isinstance(eps, float | int) else eps
    head = Renamed("head_dim", "head_dim", head_dim or divide_width) if isinstance(head_dim, int) else head_dim
    return (*SIZES, KeyHeads(kv_heads), *sizes, norms, head, rope, activation, TIED if tied else UNTIED)


def mixture(names: str, experts: int, per_token: int, width: int = 0) -> tuple[FieldCodec, ...]:
    """How many experts there are, and how many compute a token. width: theirs where no field says it; 0: the MLP's."""
    return (
        Renamed(names, "experts.count", experts),
        Renamed("num_experts_per_tok", "experts.per_token", per_token),
        *(Renamed("moe_intermediate_size", "experts.mlp", width) for _ in range(width > 0)),
    )
