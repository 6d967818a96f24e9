"""The values that settings may have, and what is said of wrong ones."""

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, get_type_hints

import pydantic

from gspmd_lm.config.renamed import RENAMED
from gspmd_lm.errors import did_you_mean

STRICT = pydantic.ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
_MOST = 2**31 - 1  # the largest int32

Size = Annotated[int, pydantic.Field(ge=1, le=_MOST)]
Count = Annotated[int, pydantic.Field(ge=0, le=_MOST)]
Seed = Annotated[int, pydantic.Field(ge=0, lt=_MOST)]
Positive = Annotated[float, pydantic.Field(gt=0)]
NotNegative = Annotated[float, pydantic.Field(ge=0)]
Share = Annotated[float, pydantic.Field(ge=0, le=1)]
BelowOne = Annotated[float, pydantic.Field(ge=0, lt=1)]
Decay = Annotated[float, pydantic.Field(ge=0, le=0.9999999)]  # what is nearer to 1 is 1 in float32
NonEmptyText = Annotated[str, pydantic.Field(min_length=1)]
Item = TypeVar("Item")
NonEmpty = Annotated[tuple[Item, ...], pydantic.Field(min_length=1)]
# What layers may differ in.
LayerKind = Literal["sliding", "chunked", "linear", "shifted", "whole", "reading", "full", "nope"]
# Modules of layers in a loop.
StackName = Literal["layers", "convolved_layers", "dense_layers", "sparse_layers", "shared_kv_layers"]

# What other projects call a key -> its last name here.
OTHER_WORDS = {
    "lr": "learning_rate", "max_lr": "learning_rate", "peak_lr": "learning_rate", "betas": "b1", "beta1": "b1",
    "beta2": "b2", "grad_clip": "clip_norm", "max_grad_norm": "clip_norm", "warmup": "warmup_steps",
    "lr_scheduler": "schedule", "min_lr": "final_fraction", "batch_size": "batch", "global_batch_size": "batch",
    "per_device_train_batch_size": "batch", "seq_len": "seq", "seq_length": "seq", "max_seq_len": "seq",
    "block_size": "seq", "dataset": "source", "dataset_path": "source", "max_steps": "steps", "num_steps": "steps",
    "max_iters": "steps", "num_train_epochs": "steps", "num_epochs": "steps", "epochs": "steps",
    "eval_interval": "eval_every", "eval_steps": "eval_every", "save_steps": "checkpoint_every",
    "save_every": "checkpoint_every", "logging_steps": "log_every", "log_interval": "log_every",
    "early_stopping": "patience", "report_to": "trackers", "hidden_size": "embed", "d_model": "embed", "dim": "embed",
    "n_embd": "embed", "n_layer": "layers", "n_layers": "layers", "num_layers": "layers", "num_hidden_layers": "layers",
    "n_head": "heads", "n_heads": "heads", "num_heads": "heads", "num_attention_heads": "heads",
    "n_kv_heads": "kv_heads", "num_kv_heads": "kv_heads", "num_key_value_heads": "kv_heads",
    "intermediate_size": "mlp", "d_ff": "mlp", "ffn_dim": "mlp", "hidden_dim": "mlp", "vocab_size": "vocab",
    "max_position_embeddings": "context", "num_experts": "experts.count", "top_k": "experts.per_token",
}  # fmt: skip


def is_end_of(words: str, path: str) -> bool:
    """Whether the path of a key ends with `words`, one of its names or several, such as experts.count."""
    return f".{path}".endswith(f".{words}")


class Stack(NamedTuple):
    """Layers that run in one loop, and those that are left if `kinds` does not divide their number."""

    name: StackName
    first: int  # the number of its first layer, counted from 0
    layers: int
    kinds: tuple[Any, ...]  # the settings of its layers, of config.ModelConfig, repeated over its depth

    @property
    def scanned_layers(self) -> int:
        """How many of the layers run in the loop: whole turns of `kinds`. The others stand behind it."""
        return self.layers - self.layers % len(self.kinds)


_KINDS = {
    "int_type": "must be a whole number",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
    "string_type": "must be text",
    "tuple_type": "must be a list",
    "dataclass_type": "must be a mapping",
    "too_short": "must have at least one entry",
    "string_too_short": "must not be empty",
}
_BOUNDS = {
    "greater_than": ("above", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("below", "lt"),
    "less_than_equal": ("at most", "le"),
    "multiple_of": ("a multiple of", "multiple_of"),
}


def explain_problem(problem: Any, settings: type) -> list[str]:
    """The lines of a message about one of pydantic's findings in `settings`, in the words of the config file.

    Parts of a place that begin with < are tags, which stand in no file.
    """
    where = ".".join(str(part) for part in problem["loc"] if not str(part).startswith("<"))
    kind, got = problem["type"], problem.get("input")
    if kind == "value_error":  # raised by a section's own checks, with one problem on each line
        lines = problem["msg"].removeprefix("Value error, ").split("\n")
        return [f"  {where}: {line}" if where else f"  {line}" for line in lines]
    if kind == "unexpected_keyword_argument":
        section, key = problem["loc"][:-1], str(problem["loc"][-1])
        near = did_you_mean(key, _fields_at(settings, section))
        words = key, OTHER_WORDS.get(key, key)
        elsewhere = [path for path in _paths(settings) if any(is_end_of(word, path) for word in words)]
        below = ".".join([*(str(part) for part in section if isinstance(part, str)), ""])
        elsewhere.sort(key=lambda path: not path.startswith(below))  # a section inside of this one comes first
        message = f"unknown key{f' (did you mean {elsewhere[0]}?)' if elsewhere else near}"
        message = f"this key is now {RENAMED[where]}" if where in RENAMED else message
    elif kind in ("missing", "missing_argument"):
        message = "missing"
    elif kind in _BOUNDS:
        words, name = _BOUNDS[kind]
        bound = problem["ctx"][name]
        message = f"must be {words} {int(bound) if bound == int(bound) else bound}, got {got!r}"
    else:
        hint = did_you_mean(str(got), problem["ctx"]["expected"].split("'")) if kind == "literal_error" else ""
        if kind == "string_type" and isinstance(got, int | float):
            hint = f'; with quotes it is text: "{got}"'
        if kind == "dataclass_type" and where in RENAMED:
            hint = f"; its key is now {RENAMED[where]}"
        message = f"{_KINDS.get(kind) or problem['msg'].replace('Input should be', 'must be')}, got {got!r}{hint}"
    return [f"  {where}: {message}"]


def _fields_at(kind: Any, path: Sequence[Any]) -> list[str]:
    for part in path:
        if isinstance(part, str) and not part.startswith("<"):
            kind = get_type_hints(kind).get(part, object)
            kind = dataclass_in(kind) or kind
    return [field.name for field in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else []


def _paths(kind: Any, above: str = "") -> list[str]:
    """The paths of all keys of a mapping and of those that it contains: train.samples.prompts."""
    paths = []
    for name, hint in get_type_hints(kind).items() if dataclasses.is_dataclass(kind) else ():
        paths += [above + name, *_paths(dataclass_in(hint), f"{above}{name}.")]
    return paths


def dataclass_in(kind: Any) -> Any:
    """The dataclass that a type is, or is made of; None if there is none."""
    if dataclasses.is_dataclass(kind):
        return kind
    return next(filter(None, map(dataclass_in, getattr(kind, "__args__", ()))), None)
