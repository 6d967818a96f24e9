"""What is computed: the frozen, strictly typed settings of one run, and how a YAML file becomes them."""

import dataclasses
import difflib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_type_hints

import platformdirs
import pydantic
import yaml
from pydantic.dataclasses import dataclass

_STRICT = pydantic.ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class InputError(ValueError):
    """The user's input is wrong. The message names the place and a fix; the command line exits with 2."""


class RunFailed(RuntimeError):
    """A run cannot go on, though its input is right. The message says why and what to do; the exit code is 1."""


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class RopeScaling:
    """Frequencies slowed by `factor`: all of them (linear, arXiv 2306.15595), or as Llama 3.1 has it only those whose
    wavelength is above original_context / low_freq_factor, with a blend up to original_context / high_freq_factor.
    """

    kind: Literal["llama3", "linear"] = "llama3"
    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class Lora:
    """Low-rank adapters (LoRA, arXiv 2106.09685) beside the `targets`; they alone are trained."""

    rank: int = 16
    alpha: float = 32.0  # what an adapter adds is scaled by alpha / rank
    targets: tuple[Literal["wq", "wk", "wv", "wo", "w_gate", "w_up", "w_down"], ...]

    def __post_init__(self):
        wrong = _below(self, 1, "rank")
        if self.alpha <= 0:
            wrong.append(f"alpha={self.alpha} must be above 0")
        if not self.targets or len(set(self.targets)) < len(self.targets):
            wrong.append(f"targets={list(self.targets)} must name at least one weight, and each once")
        _refuse(wrong)

    @property
    def scale(self) -> float:
        """The factor of what an adapter adds."""
        return self.alpha / self.rank


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class Model:
    """One decoder. Sizes carry the names of the logical axes they belong to (see axes.py)."""

    layers: int
    embed: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocab: int
    padded_vocab: int = 0  # rows of the embedding table; 0 means vocab. The added rows are never predicted.
    padded_heads: int = 0  # query heads in the weights; 0 means heads. The added ones, and their keys, add nothing.
    context: int  # longest sequence; the rows of a learned position table

    block: Literal["sequential", "parallel"] = "sequential"  # parallel: x + attention(norm(x)) + mlp(norm(x))
    shared_norm: bool = True  # of a parallel block: attention and MLP read the same norm
    post_norms: bool = False  # what attention and MLP write goes through a norm too (Gemma 2)
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    norm_scale: bool = True
    norm_bias: bool = False
    norm_eps: float = 1e-6
    norm_offset: float = 0.0  # added to scales; 1 where weights store what differs from one (Gemma)
    embedding_norm: bool = False  # a norm right after the token table (BLOOM)
    embedding_scale: float = 1.0  # of the token table's rows
    qk_norm: bool = False
    mlp_kind: Literal["gated", "plain"] = "gated"
    activation: Literal["silu", "gelu", "gelu_tanh", "relu"] = "silu"
    positions: Literal["rope", "learned", "sinusoidal", "alibi", "none"] = "rope"
    position_offset: int = 0  # rows of a learned table before that of position 0 (OPT: 2)
    rope_theta: float = 10000.0
    rope_dim: int = 0  # the first dimensions of a head, which turn; 0 means all
    rope_scaling: RopeScaling | None = None
    sliding_window: int = 0  # how many tokens a token sees, itself included; 0 means all before it
    sliding_rope_theta: float = 0.0  # of layers with a sliding window, then without rope_scaling; 0 means rope_theta
    # Which layers have the window, repeated over the depth; () means all of them.
    layer_pattern: tuple[Literal["sliding", "full"], ...] = ()
    query_scale: float = 0.0  # of attention scores; 0 means head_dim ** -0.5
    qkv_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    unembedding_bias: bool = False
    tied_embeddings: bool = False
    dropout: float = 0.0
    attention_softcap: float = 0.0  # 0 means none; otherwise cap * tanh(scores / cap)
    logit_softcap: float = 0.0
    z_loss: float = 0.0  # weight of the squared log-partition function
    init_std: float = 0.02
    lora: Lora | None = None

    compute_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    weight_dtype: Literal["bfloat16", "float32"] = "float32"
    matmul_precision: Literal["default", "high", "highest"] = "default"

    def __post_init__(self):
        wrong = _below(self, 1, "layers", "embed", "heads", "kv_heads", "head_dim", "mlp", "vocab", "context")
        if self.kv_heads > 0 and self.heads % self.kv_heads:
            wrong.append(f"heads={self.heads} is not a multiple of kv_heads={self.kv_heads}")
        if self.padded_vocab and self.padded_vocab < self.vocab:
            wrong.append(f"padded_vocab={self.padded_vocab} is smaller than vocab={self.vocab}")
        group = max(self.heads // max(self.kv_heads, 1), 1)
        if self.padded_heads and (self.padded_heads < self.heads or (self.kv_heads > 1 and self.padded_heads % group)):
            of = f", of {group} for each key head" if self.kv_heads > 1 else ""
            wrong.append(f"padded_heads={self.padded_heads} must be at least heads={self.heads}{of}")
        if not 0 <= self.dropout < 1:
            wrong.append(f"dropout={self.dropout} must be at least 0 and below 1")
        if self.positions == "rope" and (self.head_dim % 2 or self.rope_dim % 2 or self.rope_dim > self.head_dim):
            wrong.append(f"positions: rope needs even head_dim={self.head_dim} and rope_dim={self.rope_dim}, up to it")
        if "sliding" in self.layer_pattern and not self.sliding_window:
            wrong.append("layer_pattern has sliding layers: set sliding_window")
        wrong += _below(self, 0, "sliding_window", "position_offset", "rope_dim")
        if self.lora and self.mlp_kind == "plain" and "w_gate" in self.lora.targets:
            wrong.append("lora.targets: a plain MLP has no w_gate, only w_up and w_down")
        _refuse(wrong)

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
        """The settings of each layer of the pattern that is repeated over the depth; one where all are alike."""
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
    # tokenizer's chat template, and the loss is on what the assistant says. "": the source is text.
    messages_field: str = ""
    packing: Literal["documents", "stream"] = "documents"  # stream: rows are cut from one text, attention is not
    batch: int = 32  # sequences per step, over all devices
    seq: int = 256  # tokens per sequence
    held_out: float = 0.02  # share of the documents kept for evaluation, chosen by their content
    seed: int = 0  # of the order of rows

    def __post_init__(self):
        wrong = _below(self, 1, "batch", "seq")
        if not 0 <= self.held_out < 1:
            wrong.append(f"held_out={self.held_out} must be at least 0 and below 1")
        if self.messages_field and self.packing != "documents":
            wrong.append(
                f"messages_field={self.messages_field} needs packing: documents, which keeps conversations apart"
            )
        _refuse(wrong)


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class Optimizer:
    """The update rule and its schedule, in optax's terms."""

    name: Literal["adamw", "adafactor", "lion", "muon"] = "adamw"
    learning_rate: float = 3e-4
    schedule: Literal["warmup_cosine", "warmup_exponential", "warmup_stable_decay", "constant"] = "warmup_cosine"
    warmup_steps: int = 0
    decay_steps: int = 0  # warmup_stable_decay: the length of the final decay
    decay_rate: float = 1.0  # warmup_exponential: factor per step after the warmup
    final_fraction: float = 0.1  # of learning_rate, at the end of a decay
    weight_decay: float = 0.1  # on matrices only
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    clip_norm: float = 1.0  # 0 means none

    def __post_init__(self):
        _refuse(_below(self, 0, "learning_rate", "warmup_steps", "decay_steps", "weight_decay", "clip_norm"))


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class Train:
    """How long, and what is written down on the way."""

    steps: int  # the length of the schedule; --steps only says where to stop
    seed: int = 0  # of the initial weights and of dropout
    init_from: str = ""  # workdir whose newest weights a run begins with that has no checkpoint of its own
    log_every: int = 10
    eval_every: int = 0  # 0 means only at the end
    eval_batches: int = 8
    checkpoint_every: int = 0  # 0 means only at the end
    keep_checkpoints: int = 3  # the newest ones
    keep_every: int = 0  # besides, every checkpoint whose step is a multiple; 0 means none
    max_skipped: int = 10  # stop after so many steps in a row whose loss or gradient was not finite
    trackers: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ("tensorboard",)

    def __post_init__(self):
        _refuse(
            _below(self, 1, "steps", "log_every", "eval_batches", "keep_checkpoints", "max_skipped")
            + _below(self, 0, "eval_every", "checkpoint_every", "keep_every")
        )


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class Config:
    """Everything that decides what is computed. Where it is computed is the rules file's business."""

    name: str
    model: Model
    data: Data = dataclasses.field(default_factory=Data)
    optimizer: Optimizer = dataclasses.field(default_factory=Optimizer)
    train: Train

    def __post_init__(self):
        if self.data.seq > self.model.context:
            raise ValueError(f"data.seq={self.data.seq} is longer than model.context={self.model.context}")


def _below(section: Any, least: int, *names: str) -> list[str]:
    low = [name for name in names if getattr(section, name) < least]
    return [f"{name}={getattr(section, name)} must be at least {least}" for name in low]


def _refuse(wrong: list[str]) -> None:
    if wrong:
        raise ValueError("\n".join(wrong))


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A hint such as ' (did you mean heads?)' for a misspelt `word`, or ''."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" (did you mean {near[0]}?)" if near else ""


class _UniqueKeyLoader(yaml.SafeLoader):
    """PyYAML keeps the last of two equal keys without a word; this one raises."""

    def construct_mapping(self, node, deep=False):
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, list | dict):
                raise yaml.YAMLError(f"line {key_node.start_mark.line + 1}: a key must be a word, not {key!r}")
            if key in seen:
                raise yaml.YAMLError(f"line {key_node.start_mark.line + 1}: the key {key!r} stands twice")
            seen.add(key)
        return super().construct_mapping(node, deep)


def parse_yaml(text: str, place: str) -> Any:
    """The value of one YAML document. Raises InputError, naming `place` and the line, where it is not YAML."""
    try:
        return yaml.load(text, Loader=_UniqueKeyLoader)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date that no calendar has
        reason = " ".join(str(error).replace('in "<unicode string>", ', "at ").split())
        raise InputError(f"{place}: not valid YAML\n  {reason}") from error


def read_text(path: Path) -> str:
    """The text of a file. Raises InputError where it cannot be read or is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from error
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from error


def cache_folder(name: str) -> Path:
    """The folder `name` in $GSPMD_LM_CACHE, or in the user's cache directory. It need not exist."""
    chosen = os.environ.get("GSPMD_LM_CACHE")
    return (Path(chosen) if chosen else Path(platformdirs.user_cache_dir("gspmd_lm", appauthor=False))) / name


def find_file(name: str, folder: str) -> Path:
    """The file `name` as given, or in the working directory's, checkout's or wheel's `folder`, .yaml optional.

    Raises InputError with the nearest known name.
    """
    package = Path(__file__).parent
    roots = [Path(), Path(folder), package.parent / folder, package / folder]
    for root in roots:
        for candidate in (root / name, root / f"{name}.yaml"):
            if candidate.is_file():
                return candidate
    shipped = sorted({file.stem for root in roots[1:] for file in root.glob("*.yaml")})
    raise InputError(
        f"{name}: no such file, here or in {folder}/{did_you_mean(Path(name).stem, shipped)}\n"
        f"  fix   give a path, or one of {', '.join(shipped)}"
    )


def load(name: str, overrides: Sequence[str] = ()) -> Config:
    """The config of a file (a path, or a name in configs/) with `section.key=value` overrides applied.

    Raises InputError that lists every problem of the file and of the overrides at once.
    """
    path = find_file(name, "configs")
    raw = parse_yaml(read_text(path), str(path))
    if not isinstance(raw, dict):
        kind = "is empty" if raw is None else f"is a {type(raw).__name__}"
        raise InputError(f"{path}: a config is a mapping of sections; this one {kind}")
    override(raw, overrides, str(path))
    raw.setdefault("name", path.stem)
    return from_dict(raw, " ".join([str(path), *(f"--set {override}" for override in overrides)]))


def override(raw: dict[str, Any], overrides: Sequence[str], place: str) -> None:
    """Lays `section.key=value` over the plain values of a config. Raises InputError, naming the override."""
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
        target[field] = parse_yaml(value, f"--set {text}")


def from_dict(raw: Mapping[str, Any], place: str) -> Config:
    """A checked Config. Raises InputError, naming `place` and every wrong field."""
    try:
        # In JSON mode a strict tuple may be written as a list.
        return pydantic.TypeAdapter(Config).validate_json(json.dumps(raw, default=str))
    except pydantic.ValidationError as error:
        lines = [line for problem in error.errors() for line in _explain(problem)]
        raise InputError(f"{place}: {len(lines)} problem{'s' * (len(lines) > 1)}\n" + "\n".join(lines)) from error


def to_dict(config: Config) -> dict[str, Any]:
    """Plain values, ready for YAML or JSON."""
    return pydantic.TypeAdapter(Config).dump_python(config, mode="json")


_KINDS = {
    "int_type": "must be a whole number",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "string_type": "must be text",
    "tuple_type": "must be a list",
    "dataclass_type": "must be a mapping",
}


def _explain(problem: Any) -> list[str]:
    """The lines for one of pydantic's findings, in the words of the file."""
    where, kind, got = ".".join(str(part) for part in problem["loc"]), problem["type"], problem.get("input")
    if kind == "value_error":  # of a section's own checks, one on each line
        found = problem["msg"].removeprefix("Value error, ").split("\n")
        return [f"  {where}: {line}" if where else f"  {line}" for line in found]
    if kind == "unexpected_keyword_argument":
        message = f"unknown key{did_you_mean(str(problem['loc'][-1]), _fields_at(problem['loc'][:-1]))}"
    elif kind in ("missing", "missing_argument"):
        message = "missing"
    elif kind in ("float_type", "int_type") and isinstance(got, str) and (number := _yaml_number(got, kind)):
        message = f"YAML reads {got} as text; write {number}"
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


def _yaml_number(word: str, kind: str) -> str | None:
    """The spelling of a number that PyYAML reads as one: 3e-4 becomes 3.0e-4. None for a word that is no number."""
    try:
        number = float(word)
    except ValueError:
        return None
    if kind == "int_type":
        return str(int(number)) if number.is_integer() else None
    mantissa, _, exponent = f"{number:.15e}".partition("e")
    return f"{float(mantissa)}e{int(exponent):+d}"
