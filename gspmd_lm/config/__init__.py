"""The settings of one run, frozen and strictly typed: what is computed. A YAML file is loaded into them."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import pydantic
from pydantic.dataclasses import dataclass

from gspmd_lm.config import core_yaml
from gspmd_lm.config.data import Data
from gspmd_lm.config.layers import AttentionTemperature as AttentionTemperature
from gspmd_lm.config.layers import Convolution as Convolution
from gspmd_lm.config.layers import LatentAttention as LatentAttention
from gspmd_lm.config.layers import LinearAttention as LinearAttention
from gspmd_lm.config.layers import Lora as Lora
from gspmd_lm.config.layers import RelativePositions as RelativePositions
from gspmd_lm.config.layers import RelativeVectors as RelativeVectors
from gspmd_lm.config.layers import RopeScaling as RopeScaling
from gspmd_lm.config.masks import Masks as Masks
from gspmd_lm.config.media import Frames as Frames
from gspmd_lm.config.media import Images as Images
from gspmd_lm.config.media import Patches as Patches
from gspmd_lm.config.model import ModelConfig
from gspmd_lm.config.objective import Objective, problems
from gspmd_lm.config.objective import objective_of as objective_of
from gspmd_lm.config.paths import find_file, read_text
from gspmd_lm.config.sections import Attention as Attention
from gspmd_lm.config.sections import Classes as Classes
from gspmd_lm.config.sections import Embedding as Embedding
from gspmd_lm.config.sections import Experts as Experts
from gspmd_lm.config.sections import FeedForward as FeedForward
from gspmd_lm.config.sections import Logits as Logits
from gspmd_lm.config.sections import Norm as Norm
from gspmd_lm.config.sections import Residual as Residual
from gspmd_lm.config.sections import Rope as Rope
from gspmd_lm.config.stacks import Encoder as Encoder
from gspmd_lm.config.stacks import Queries as Queries
from gspmd_lm.config.stacks import Vision as Vision
from gspmd_lm.config.types import STRICT as _STRICT
from gspmd_lm.config.types import (
    Count,
    Decay,
    NonEmpty,
    NonEmptyText,
    NotNegative,
    Positive,
    Seed,
    Share,
    Size,
    explain_problem,
)
from gspmd_lm.config.types import Stack as Stack
from gspmd_lm.config.types import StackName as StackName
from gspmd_lm.config.values import default_at as default_at
from gspmd_lm.config.values import differing as differing
from gspmd_lm.config.values import flat as flat
from gspmd_lm.config.values import from_values as from_values
from gspmd_lm.config.values import nest as nest
from gspmd_lm.config.values import value_at as value_at
from gspmd_lm.config.values import with_values as with_values
from gspmd_lm.config.windows import Windows as Windows
from gspmd_lm.config.windows import is_whole as is_whole
from gspmd_lm.config.windows import levels as levels
from gspmd_lm.config.windows import padded_rows as padded_rows
from gspmd_lm.errors import InputError, name_kind
from gspmd_lm.units import plural


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class Optimizer:
    """The update rule and its schedule, in optax's terms."""

    name: Literal["adamw", "adafactor", "lion", "muon"] = "adamw"  # which update rule
    # The highest one of the schedule. Where a config says none: 2e-5 with train.init_from, 2e-4 with model.lora.
    learning_rate: NotNegative = 3e-4
    # How the learning rate changes.
    schedule: Literal["warmup_cosine", "warmup_exponential", "warmup_stable_decay", "constant"] = "warmup_cosine"
    warmup_steps: Count = 0  # over these it rises from 0
    decay_steps: Count = 0  # warmup_stable_decay: the length of the final decay
    decay_rate: Positive = 1.0  # warmup_exponential: the factor of each step after the warmup
    final_fraction: Share = 0.1  # the share of learning_rate that is left at the end of a decay
    weight_decay: NotNegative = 0.1  # on matrices only
    b1: Decay = 0.9  # the decay of the mean of gradients
    b2: Decay = 0.95  # the decay of the mean of their squares
    # Added to the denominator of an update. Without it, a gradient of 0 would be divided by 0.
    eps: Annotated[float, pydantic.Field(ge=1e-30)] = 1e-8
    # In which the mean of gradients is kept: the momentum of lion and muon. null: that of the weights.
    mu_dtype: Literal["float32", "bfloat16"] | None = None
    clip_norm: NotNegative = 1.0  # 0 means none

    def __post_init__(self):
        if self.mu_dtype and self.name == "adafactor":
            raise ValueError(f"mu_dtype={self.mu_dtype}: adafactor keeps no mean of gradients; leave mu_dtype out")


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class Samples:
    """Texts that the model writes at each evaluation, to see what it has learnt. They change nothing in training."""

    prompts: NonEmpty[NonEmptyText]  # the beginnings that are continued, one text for each
    tokens: Size = 64  # how many are written after a prompt
    temperature: NotNegative = 0.8  # 0 takes the most likely token


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class Train:
    """How long a run trains, and how often it logs, evaluates and saves."""

    steps: Size  # the length of the schedule; --steps only says where to stop
    seed: Seed = 0  # decides the initial weights and dropout
    # A run without a checkpoint of its own begins with the newest weights of this workdir. "" means new weights.
    init_from: str = ""
    log_every: Size = 10  # in steps
    eval_every: Count = 0  # 0 means only at the end
    eval_batches: Size = 8  # how many batches an evaluation takes
    checkpoint_every: Count = 0  # in steps; 0 means that steps do not decide
    # A checkpoint is also saved this long after the last one, or later where saving takes long. 0 means that time does
    # not decide.
    checkpoint_minutes: NotNegative = 10.0
    hang_minutes: NotNegative = 10.0  # a run ends with the stacks of its processes after a step of this long; 0: never
    keep_checkpoints: Size = 3  # how many of the newest are kept
    keep_every: Count = 0  # every checkpoint whose step is a multiple of it is kept too; 0 means none
    keep_best: bool = False  # each evaluation with the lowest held-out loss so far is saved, and the best one is kept
    # A run ends after this many evaluations in a row without a lower held-out loss, and keeps the best. 0 means never.
    patience: Count = 0
    samples: Samples | None = None
    max_skipped: Size = 10  # a run stops after this many steps in a row whose loss or gradient is not finite
    # Where figures go, besides metrics.jsonl.
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

    name: str  # of the run's folder and its reports; by default that of the file
    # What is predicted. It follows from the model, and null takes what follows. causal: each next token. masked: the
    # tokens that were hidden, with model.attention.mask: full (BERT). classes: the class of a text or an image, one of
    # model.classes; or what else data.label_kind says. seq2seq: each next token of a text that is made from a source,
    # which model.encoder reads. contrastive: which image of the batch belongs to a text, and which text to an image,
    # which model.vision encodes. replaced: which tokens were replaced (ELECTRA). masks: which pixels of an image are of
    # the object that a prompt means (SAM).
    objective: Objective | None = None
    model: ModelConfig
    data: Data = dataclasses.field(default_factory=Data)
    optimizer: Optimizer = dataclasses.field(default_factory=Optimizer)
    train: Train

    def __post_init__(self):
        if not self.name.isprintable() or {*self.name} & {*"/\\"} or self.name in (".", ".."):
            raise ValueError(f"name: {self.name!r} names a folder, so it has no slash and no control character")
        if wrong := problems(self, self.objective):
            raise ValueError("\n".join(wrong))
        object.__setattr__(self, "objective", objective_of(self.model))

    @property
    def source_seq(self) -> int:
        """Tokens of a source, or rows of a sound or image that stands beside a text; 0 where there is none."""
        if self.model.vision_config and not self.model.encoder:
            return self.image_rows
        if not (encoder := self.model.encoder_config):
            return 0
        if queries := self.model.queries_config:
            return self.data.source_seq or queries.context + 1
        return self.data.source_seq or (encoder.context if self.model.frames else self.data.seq)

    @property
    def image_rows(self) -> int:
        """Rows of an image that stands beside a text; 0 where there is none."""
        if not (vision := self.model.vision_config):
            return 0
        padded = padded_rows(vision.context, self.model.row_multiple)
        return padded if self.model.encoder else self.data.source_seq or padded

    @property
    def other_stacks(self) -> dict[str, tuple[ModelConfig, str, int]]:
        """The stacks of blocks beside the model's own: the settings, the key of the number of rows, and that number."""
        model, key, queries = self.model, "data.source_seq", self.model.queries_config
        found = {
            "the encoder": (model.encoder_config, key, self.source_seq),
            "images": (model.vision_config, key, self.image_rows),
            "queries": (queries, "model.vision.queries.rows", queries.context if queries else 0),
        }  # fmt: skip
        return {name: (stack, key, rows) for name, (stack, key, rows) in found.items() if stack}


def load(name: str, overrides: Sequence[str] = ()) -> Config:
    """The config of a file (a path, or a name in configs/) with `section.key=value` overrides applied.

    Raises an InputError that lists every problem of the file and of the overrides.
    """
    path = find_file(name, "configs")
    raw = core_yaml.parse(read_text(path), str(path))
    if not isinstance(raw, dict):
        kind = "is empty" if raw is None else f"is {name_kind(raw)}"
        raise InputError(f"{path}: a config is a mapping of sections; this one {kind}")
    if "task" in raw:
        raise InputError(
            f"{path}: a run of the task {raw['task']}, whose model is no decoder of a config\n"
            "  fix   gspmd_lm.train(task, rules, workdir, data=batch) goes on with it, "
            "gspmd_lm.load_task(workdir, task) reads its weights, and plot shows it"
        )
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
        glob = value.startswith("*")  # in YAML it would be an alias, which has no meaning here
        target[field] = value if glob else core_yaml.parse(value, f"--set {text}")


def usual_rate(model: Any, train: Any) -> float:
    """The learning rate of a config that says none, from the plain values of its sections.

    Weights that have been trained are changed with a small one, that of Llama 2's fine-tuning (arXiv 2307.09288), and
    adapters with ten times as much (arXiv 2405.09673).
    """
    if isinstance(model, Mapping) and model.get("lora"):
        return 2e-4
    return 2e-5 if isinstance(train, Mapping) and train.get("init_from") else Optimizer.learning_rate


def from_dict(raw: Mapping[str, Any], place: str) -> Config:
    """A checked Config. Raises an InputError that names `place` and every wrong field."""
    optimizer = raw.get("optimizer") or {}
    if isinstance(optimizer, Mapping) and optimizer.get("learning_rate") is None:
        raw = {**raw, "optimizer": {**optimizer, "learning_rate": usual_rate(raw.get("model"), raw.get("train"))}}
    try:
        # In JSON mode a strict tuple may be written as a list.
        return pydantic.TypeAdapter(Config).validate_json(json.dumps(raw))
    except pydantic.ValidationError as error:
        lines = [line for problem in error.errors() for line in explain_problem(problem, Config)]
        raise InputError(f"{place}: {plural(len(lines), 'problem')}\n" + "\n".join(lines)) from error


def to_dict(config: Config | Train) -> dict[str, Any]:
    """The plain values of a config or of its section `train`, ready for YAML or JSON."""
    return pydantic.TypeAdapter(type(config)).dump_python(config, mode="json")
