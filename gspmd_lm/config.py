"""The settings of one run, frozen and strictly typed: what is computed. A YAML file is loaded into them."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, get_type_hints

import pydantic
from pydantic.dataclasses import dataclass

from gspmd_lm import core_yaml
from gspmd_lm.errors import InputError, did_you_mean
from gspmd_lm.paths import find_file, read_text

_STRICT = pydantic.ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
_MOST = 2**31 - 1  # the largest int32

Size = Annotated[int, pydantic.Field(ge=1, le=_MOST)]
Count = Annotated[int, pydantic.Field(ge=0, le=_MOST)]
Seed = Annotated[int, pydantic.Field(ge=0, lt=_MOST)]
Positive = Annotated[float, pydantic.Field(gt=0)]
NotNegative = Annotated[float, pydantic.Field(ge=0)]
Share = Annotated[float, pydantic.Field(ge=0, le=1)]
BelowOne = Annotated[float, pydantic.Field(ge=0, lt=1)]


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class RopeScaling:
    """RoPE whose frequencies are slowed by `factor`.

    linear (arXiv 2306.15595) slows all frequencies. llama3 slows those whose wavelength is above original_context /
    low_freq_factor, and blends those whose wavelength is between that and original_context / high_freq_factor.
    """

    kind: Literal["llama3", "linear"] = "llama3"
    factor: Positive = 8.0
    low_freq_factor: Positive = 1.0
    high_freq_factor: Positive = 4.0
    original_context: Size = 8192

    def __post_init__(self):
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor={self.high_freq_factor} must be above low_freq_factor={self.low_freq_factor}"
            )


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class Lora:
    """Low-rank adapters (LoRA, arXiv 2106.09685) beside the weights in `targets`. Only the adapters are trained."""

    rank: Size = 16
    alpha: Positive = 32.0  # an adapter's output is scaled by alpha / rank
    targets: tuple[Literal["wq", "wk", "wv", "wo", "w_gate", "w_up", "w_down"], ...]

    def __post_init__(self):
        if not self.targets or len(set(self.targets)) < len(self.targets):
            raise ValueError(f"targets={list(self.targets)} must name at least one weight, and each once")

    @property
    def scale(self) -> float:
        """The factor that an adapter's output is multiplied by."""
        return self.alpha / self.rank


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class Model:
    """One decoder. Sizes carry the names of the logical axes they belong to (see axes.py)."""

    layers: Size
    embed: Size
    heads: Size
    kv_heads: Size
    head_dim: Size
    mlp: Size
    vocab: Size
    padded_vocab: Count = 0  # rows of the embedding table; 0 means vocab. The added rows are never predicted.
    padded_heads: Count = 0  # query heads in the weights; 0 means heads. Added heads, and their keys, add nothing.
    context: Size  # the longest sequence, and the rows of a learned position table

    block: Literal["sequential", "parallel"] = "sequential"  # parallel: x + attention(norm(x)) + mlp(norm(x))
    shared_norm: bool = True  # a parallel block: attention and MLP read the same norm
    post_norms: bool = False  # the outputs of attention and MLP go through a norm too (Gemma 2)
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    norm_scale: bool = True
    norm_bias: bool = False
    norm_eps: BelowOne = 1e-6
    norm_offset: float = 0.0  # added to scales; 1 if the weights store scale - 1 (Gemma)
    embedding_norm: bool = False  # a norm right after the token table (BLOOM)
    embedding_scale: Positive = 1.0  # rows of the token table are multiplied by it
    qk_norm: bool = False
    mlp_kind: Literal["gated", "plain"] = "gated"
    activation: Literal["silu", "gelu", "gelu_tanh", "relu"] = "silu"
    positions: Literal["rope", "learned", "sinusoidal", "alibi", "none"] = "rope"
    position_offset: Count = 0  # rows of a learned table that stand before position 0's (OPT: 2)
    rope_theta: Positive = 10000.0
    rope_dim: Count = 0  # how many dimensions of a head are rotated, the first ones; 0 means all
    rope_scaling: RopeScaling | None = None
    sliding_window: Count = 0  # how many tokens a token attends to, itself included; 0 means all before it
    sliding_rope_theta: NotNegative = 0.0  # layers with a sliding window then have no rope_scaling; 0 means rope_theta
    # Which layers have the window. The pattern is repeated over the depth; () means all layers.
    layer_pattern: tuple[Literal["sliding", "full"], ...] = ()
    query_scale: NotNegative = 0.0  # attention scores are multiplied by it; 0 means head_dim ** -0.5
    qkv_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    unembedding_bias: bool = False
    tied_embeddings: bool = False
    dropout: BelowOne = 0.0
    attention_softcap: NotNegative = 0.0  # 0 means none; otherwise cap * tanh(scores / cap)
    logit_softcap: NotNegative = 0.0
    z_loss: NotNegative = 0.0  # weight of the squared log-partition function
    init_std: NotNegative = 0.02
    lora: Lora | None = None

    compute_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    weight_dtype: Literal["bfloat16", "float32"] = "float32"
    matmul_precision: Literal["default", "high", "highest"] = "default"

    def __post_init__(self):
        wrong = []
        if self.heads % self.kv_heads:
            wrong.append(f"heads={self.heads} is not a multiple of kv_heads={self.kv_heads}")
        if self.padded_vocab and self.padded_vocab < self.vocab:
            wrong.append(f"padded_vocab={self.padded_vocab} is smaller than vocab={self.vocab}")
        group = max(self.heads // self.kv_heads, 1)
        if self.padded_heads and (self.padded_heads < self.heads or (self.kv_heads > 1 and self.padded_heads % group)):
            of = f", and a multiple of {group}, the query heads of each key head" if self.kv_heads > 1 else ""
            wrong.append(f"padded_heads={self.padded_heads} must be at least heads={self.heads}{of}")
        if self.positions == "rope" and (self.head_dim % 2 or self.rope_dim % 2 or self.rope_dim > self.head_dim):
            sizes = f"head_dim={self.head_dim}, rope_dim={self.rope_dim}"
            wrong.append(f"positions: rope needs even sizes, and a rope_dim of at most head_dim: {sizes}")
        if "sliding" in self.layer_pattern and not self.sliding_window:
            wrong.append("layer_pattern has sliding layers: set sliding_window")
        if self.lora and self.mlp_kind == "plain" and "w_gate" in self.lora.targets:
            wrong.append("lora.targets: a plain MLP has no w_gate, only w_up and w_down")
        if wrong:
            raise ValueError("\n".join(wrong))

    @property
    def vocab_rows(self) -> int:
        """Rows of the embedding table, padding included."""
        return self.padded_vocab or self.vocab

    @property
    def head_rows(self) -> int:
        """Query heads in the weights, padding included."""
        return self.padded_heads or self.heads

    @property
    def kv_head_rows(self) -> int:
        """Key heads in the weights, padding included; a single one serves all query heads."""
        return 1 if self.kv_heads == 1 else self.head_rows * self.kv_heads // self.heads

    @property
    def layer_kinds(self) -> tuple["Model", ...]:
        """The settings of each layer of `layer_pattern`; a single one if all layers are alike."""
        if not self.layer_pattern:
            return (self.sliding_layer if self.sliding_window else self,)
        full = dataclasses.replace(self, sliding_window=0, layer_pattern=())
        return tuple(full if kind == "full" else self.sliding_layer for kind in self.layer_pattern)

    @property
    def sliding_layer(self) -> "Model":
        """The settings of a layer with a sliding window."""
        if not self.sliding_rope_theta:
            return dataclasses.replace(self, layer_pattern=())
        return dataclasses.replace(self, layer_pattern=(), rope_theta=self.sliding_rope_theta, rope_scaling=None)


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class Data:
    """Where tokens come from and how they are put into rows."""

    # stdlib | random:ROWS | one or more globs of .txt .md .py .jsonl .parquet .array_record, separated by spaces
    source: str = "stdlib"
    tokenizer: str = "bytes"  # bytes | path of a Hugging Face tokenizer.json
    text_field: str = "text"  # the field of a .jsonl object or the column of a .parquet file
    # The field of a .jsonl object that holds a conversation: a list of {role, content}. Rows are then written with the
    # tokenizer's chat template, and the loss is on the assistant's tokens. "" means that the source is text.
    messages_field: str = ""
    # stream: rows are cut from one text, and attention crosses documents.
    packing: Literal["documents", "stream"] = "documents"
    batch: Size = 32  # sequences per step, over all devices
    seq: Size = 256  # tokens per sequence
    held_out: BelowOne = 0.02  # share of the documents kept for evaluation, chosen by their content
    seed: Seed = 0  # decides the order of rows

    def __post_init__(self):
        if self.messages_field and self.packing != "documents":
            raise ValueError(
                f"messages_field={self.messages_field} needs packing: documents, which keeps conversations apart"
            )


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class Optimizer:
    """The update rule and its schedule, in optax's terms."""

    name: Literal["adamw", "adafactor", "lion", "muon"] = "adamw"
    learning_rate: NotNegative = 3e-4
    schedule: Literal["warmup_cosine", "warmup_exponential", "warmup_stable_decay", "constant"] = "warmup_cosine"
    warmup_steps: Count = 0
    decay_steps: Count = 0  # warmup_stable_decay: the length of the final decay
    decay_rate: Positive = 1.0  # warmup_exponential: the factor of each step after the warmup
    final_fraction: Share = 0.1  # the share of learning_rate that is left at the end of a decay
    weight_decay: NotNegative = 0.1  # on matrices only
    b1: BelowOne = 0.9
    b2: BelowOne = 0.95
    eps: NotNegative = 1e-8
    clip_norm: NotNegative = 1.0  # 0 means none


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class Samples:
    """Texts that the model writes at each evaluation, to see what it has learnt. They change nothing in training."""

    prompts: tuple[str, ...]
    tokens: Size = 64  # how many are written after a prompt
    temperature: NotNegative = 0.8  # 0 takes the most likely token

    def __post_init__(self):
        if not self.prompts or not all(self.prompts):
            raise ValueError(f"prompts={list(self.prompts)} must have at least one prompt, and none that is empty")


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class Train:
    """How long a run trains, and how often it logs, evaluates and saves."""

    steps: Size  # the length of the schedule; --steps only says where to stop
    seed: Seed = 0  # decides the initial weights and dropout
    # A run without a checkpoint of its own begins with the newest weights of this workdir. "" means new weights.
    init_from: str = ""
    log_every: Size = 10
    eval_every: Count = 0  # 0 means only at the end
    eval_batches: Size = 8
    checkpoint_every: Count = 0  # 0 means only at the end
    keep_checkpoints: Size = 3  # how many of the newest are kept
    keep_every: Count = 0  # every checkpoint whose step is a multiple of it is kept too; 0 means none
    keep_best: bool = False  # each evaluation with the lowest held-out loss so far is saved, and the best one is kept
    # A run ends after this many evaluations in a row without a lower held-out loss, and keeps the best. 0 means never.
    patience: Count = 0
    samples: Samples | None = None
    max_skipped: Size = 10  # a run stops after this many steps in a row whose loss or gradient is not finite
    trackers: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ("tensorboard",)
    project: str = "gspmd_lm"  # wandb and trackio: where the run is listed
    group: str = ""  # wandb and trackio: runs that belong together
    tags: tuple[str, ...] = ()  # wandb

    def __post_init__(self):
        if (self.keep_best or self.patience) and not self.eval_every:
            name = "patience" if self.patience else "keep_best"
            raise ValueError(f"{name} needs evaluations during training: set eval_every, such as 100")

    @property
    def keeps_best(self) -> bool:
        """Whether the checkpoint of the best evaluation is kept."""
        return self.keep_best or self.patience > 0


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class Config:
    """Everything that decides what is computed. The rules file decides where it is computed."""

    name: str
    model: Model
    data: Data = dataclasses.field(default_factory=Data)
    optimizer: Optimizer = dataclasses.field(default_factory=Optimizer)
    train: Train

    def __post_init__(self):
        if self.data.seq > self.model.context:
            raise ValueError(f"data.seq={self.data.seq} is longer than model.context={self.model.context}")
        if self.data.held_out == 0 and (self.train.keeps_best or self.train.samples):
            raise ValueError(
                "train.keep_best, train.patience and train.samples belong to evaluation, for which data.held_out=0 "
                "leaves no rows: set data.held_out, such as 0.02"
            )


def load(name: str, overrides: Sequence[str] = ()) -> Config:
    """The config of a file (a path, or a name in configs/) with `section.key=value` overrides applied.

    Raises an InputError that lists every problem of the file and of the overrides.
    """
    path = find_file(name, "configs")
    raw = core_yaml.parse(read_text(path), str(path))
    if not isinstance(raw, dict):
        kind = "is empty" if raw is None else f"is a {type(raw).__name__}"
        raise InputError(f"{path}: a config is a mapping of sections; this one {kind}")
    override(raw, overrides, str(path))
    raw.setdefault("name", path.stem)
    return from_dict(raw, " ".join([str(path), *(f"--set {override}" for override in overrides)]))


def override(raw: dict[str, Any], overrides: Sequence[str], place: str) -> None:
    """Lays `section.key=value` over the plain values of a config. Raises an InputError that names the override."""
    for text in overrides:
        key, equals, value = text.partition("=")
        *sections, field = key.strip().split(".")
        if not equals or not field:
            raise InputError(f"--set {text}: write --set section.key=value")
        target = raw
        for section in sections:
            if target.get(section) is None:
                target[section] = {}
            target = target[section]
            if not isinstance(target, dict):
                raise InputError(f"--set {text}: in {place}, {section} is not a mapping")
        target[field] = core_yaml.parse(value, f"--set {text}")


def from_dict(raw: Mapping[str, Any], place: str) -> Config:
    """A checked Config. Raises an InputError that names `place` and every wrong field."""
    try:
        # In JSON mode a strict tuple may be written as a list.
        return pydantic.TypeAdapter(Config).validate_json(json.dumps(raw))
    except pydantic.ValidationError as error:
        lines = [line for problem in error.errors() for line in _explain(problem)]
        raise InputError(f"{place}: {len(lines)} problem{'s' * (len(lines) > 1)}\n" + "\n".join(lines)) from error


def to_dict(config: Config) -> dict[str, Any]:
    """The plain values of a config, ready for YAML or JSON."""
    return pydantic.TypeAdapter(Config).dump_python(config, mode="json")


_KINDS = {
    "int_type": "must be a whole number",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "string_type": "must be text",
    "tuple_type": "must be a list",
    "dataclass_type": "must be a mapping",
}
_BOUNDS = {
    "greater_than": ("above", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("below", "lt"),
    "less_than_equal": ("at most", "le"),
}


def _explain(problem: Any) -> list[str]:
    """The lines of a message about one of pydantic's findings, in the words of the config file."""
    where, kind, got = ".".join(str(part) for part in problem["loc"]), problem["type"], problem.get("input")
    if kind == "value_error":  # raised by a section's own checks, with one problem on each line
        found = problem["msg"].removeprefix("Value error, ").split("\n")
        return [f"  {where}: {line}" if where else f"  {line}" for line in found]
    if kind == "unexpected_keyword_argument":
        message = f"unknown key{did_you_mean(str(problem['loc'][-1]), _fields_at(problem['loc'][:-1]))}"
    elif kind in ("missing", "missing_argument"):
        message = "missing"
    elif kind in _BOUNDS:
        words, name = _BOUNDS[kind]
        bound = problem["ctx"][name]
        message = f"must be {words} {int(bound) if bound == int(bound) else bound}, got {got!r}"
    else:
        hint = did_you_mean(str(got), problem["ctx"]["expected"].split("'")) if kind == "literal_error" else ""
        message = f"{_KINDS.get(kind) or problem['msg'].replace('Input should be', 'must be')}, got {got!r}{hint}"
    return [f"  {where}: {message}"]


def _fields_at(path: Sequence[Any]) -> list[str]:
    kind: Any = Config
    for part in path:
        kind = get_type_hints(kind).get(str(part), object)
        kind = next((arm for arm in getattr(kind, "__args__", ()) if dataclasses.is_dataclass(arm)), kind)
    return [field.name for field in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else []
