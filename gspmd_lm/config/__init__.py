"""The settings of one run, frozen and strictly typed: what is computed. A YAML file is loaded into them."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import pydantic
from pydantic.dataclasses import dataclass

from gspmd_lm.config import core_yaml
from gspmd_lm.config.data import MOST_OF_SEVERAL, Data
from gspmd_lm.config.layers import AttentionTemperature as AttentionTemperature
from gspmd_lm.config.layers import Convolution as Convolution
from gspmd_lm.config.layers import LatentAttention as LatentAttention
from gspmd_lm.config.layers import LinearAttention as LinearAttention
from gspmd_lm.config.layers import Lora as Lora
from gspmd_lm.config.layers import RelativePositions as RelativePositions
from gspmd_lm.config.layers import RelativeVectors as RelativeVectors
from gspmd_lm.config.layers import RopeScaling as RopeScaling
from gspmd_lm.config.masks import Masks as Masks
from gspmd_lm.config.masks import problems_of_masks
from gspmd_lm.config.media import Frames as Frames
from gspmd_lm.config.media import Images as Images
from gspmd_lm.config.media import Patches as Patches
from gspmd_lm.config.model import ModelConfig
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
from gspmd_lm.config.types import Count, Decay, NotNegative, Positive, Seed, Share, Size, explain_problem
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
from gspmd_lm.errors import InputError
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
    eps: NotNegative = 1e-8  # added to the denominator of an update
    # In which the mean of gradients is kept: the momentum of lion and muon. null: that of the weights.
    mu_dtype: Literal["float32", "bfloat16"] | None = None
    clip_norm: NotNegative = 1.0  # 0 means none

    def __post_init__(self):
        if self.mu_dtype and self.name == "adafactor":
            raise ValueError(f"mu_dtype={self.mu_dtype}: adafactor keeps no mean of gradients; leave mu_dtype out")
        if self.eps < 1e-30 and self.name in ("adamw", "muon"):
            raise ValueError(f"eps={self.eps}: must be 1e-30 or more: a gradient of 0 would be divided by 0")


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class Samples:
    """Texts that the model writes at each evaluation, to see what it has learnt. They change nothing in training."""

    prompts: tuple[str, ...]  # the beginnings that are continued, one text for each
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
    # What is predicted. causal: each next token. masked: the tokens that were hidden (BERT). classes: the class of a
    # text, one of model.classes; or what else data.label_kind says. seq2seq: each next token of a text that is made
    # from a source, which model.encoder reads. contrastive: which image of the batch belongs to a text, and which text
    # to an image, which model.vision encodes. replaced: which tokens were replaced (ELECTRA). masks: which pixels of an
    # image are of the object that a prompt means, by model.masks.
    objective: Literal["causal", "masked", "classes", "seq2seq", "contrastive", "replaced", "masks"] = "causal"
    model: ModelConfig
    data: Data = dataclasses.field(default_factory=Data)
    optimizer: Optimizer = dataclasses.field(default_factory=Optimizer)
    train: Train

    def __post_init__(self):
        if not self.name.isprintable() or {*self.name} & {*"/\\"} or self.name in (".", ".."):
            raise ValueError(f"name: {self.name!r} names a folder, so it has no slash and no control character")
        if self.data.seq > self.model.context and not self.model.patches:
            raise ValueError(f"data.seq={self.data.seq} is longer than model.context={self.model.context}")
        if wrong := self._wrong_objective():
            raise ValueError("\n".join(wrong))
        if self.data.held_out == 0 and (self.train.keeps_best or self.train.samples):
            raise ValueError(
                "train.keep_best, train.patience and train.samples belong to evaluation, for which data.held_out=0 "
                "leaves no rows: set data.held_out, such as 0.02"
            )

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

    def _wrong_objective(self) -> list[str]:
        """The settings of other sections that contradict `objective`, in words."""
        model, objective, data, classes = self.model, self.objective, self.data, self.model.classes
        queries, vision = model.vision.queries if model.vision else None, model.vision_config
        predicts = "model.vision.queries" if queries else f"objective: {objective}"
        problems = {
            f"model.attention.mask: full shows a token what objective: {objective} asks for: "
            "set objective: masked or attention.mask: causal":
                objective in ("causal", "seq2seq") and model.attention.mask == "full",
            f"objective: {objective} needs model.attention.mask: full":
                objective in ("masked", "replaced") and model.attention.mask == "causal",
            "objective: classes needs model.classes, and model.classes needs objective: classes":
                (objective in ("classes", "replaced")) != bool(classes),
            "objective: replaced needs model.classes.of: tokens, which needs objective: replaced":
                classes and (objective == "replaced") != (classes.of == "tokens"),
            "model.classes.count: 1 is the number that data.label_kind: number predicts, which needs it":
                objective == "classes" and (model.num_classes == 1) != (self.data.label_kind == "number"),
            f"data.label_kind: classes supports up to {MOST_OF_SEVERAL} classes, and model.classes.count is "
            f"{model.num_classes}": self.data.label_kind == "classes" and model.num_classes > MOST_OF_SEVERAL,
            "objective: classes needs model.attention.mask: full: a text is read at its first token":
                objective == "classes" and model.attention.mask == "causal",
            "objective: contrastive needs model.vision, and model.vision needs objective: contrastive":
                (objective == "contrastive") != bool(model.vision and not queries),
            "model.vision.queries needs objective: causal or seq2seq":
                queries and objective not in ("causal", "seq2seq"),
            f"model.vision.queries has {queries and queries.rows} rows, and a text has a token before it: set data.seq="
            f"{data.seq} to more than both": queries and not model.encoder and data.seq <= queries.rows + 1,
            f"model.vision.queries has {queries and queries.rows} rows, and a token stands behind them: set "
            f"data.source_seq={self.source_seq} to as many, or above for padding":
                queries and model.encoder and self.source_seq <= queries.rows,
            "model.memory_width belongs to vision.queries, which sets it": model.memory_width > 0,
            f"model.vision gives {vision and vision.context} rows of an image: set data.source_seq="
            f"{self.image_rows} to as many, or above for padding": vision and self.image_rows < vision.context,
            "objective: seq2seq needs model.encoder, and model.encoder needs objective: seq2seq":
                (objective == "seq2seq") != bool(model.encoder),
            f"data.source_seq={self.source_seq} is longer than the encoder's context":
                (encoder := model.encoder_config) and not model.frames and self.source_seq > encoder.context,
            f"model.frames gives {encoder and encoder.context} rows of a sound: set data.source_seq={self.source_seq} "
            "to as many, or above for padding":
                encoder and model.frames and self.source_seq < encoder.context,
            "model.frames needs model.encoder, which reads them": model.frames and not encoder,
            f"model.row_multiple={model.row_multiple} needs model.windows, or model.vision and model.encoder":
                model.row_multiple > 1 and not model.windows and not (model.vision and model.encoder),
            "data.fields needs label too: the texts and the label of a record belong together":
                data.fields and not data.label and not queries and objective not in ("seq2seq", "contrastive", "masks"),
            f"data.fields={list(data.fields)}: a record of texts has one or two":
                len(data.fields) > 2 and objective != "masks",
            f"{predicts} needs data.fields=[source, text], without data.label":
                (queries or objective in ("seq2seq", "contrastive")) and (data.label or len(data.fields) not in (0, 2)),
            f"model.embedding.token_types goes with objective: masked, replaced or classes, not {objective}":
                model.embedding.token_types > 0 and objective not in ("masked", "replaced", "classes"),
            f"{predicts} needs data.packing: documents, which keeps texts and padding apart":
                (queries or objective != "causal") and data.packing != "documents",
            f"train.samples needs objective: causal, not {objective}, and no images":
                (queries or objective != "causal") and self.train.samples is not None,
        }  # fmt: skip
        wrong = [message for message, is_wrong in problems.items() if is_wrong]
        return wrong + problems_of_masks(self) + self._wrong_patches()

    def _wrong_patches(self) -> list[str]:
        """What does not go with images."""
        model, data = self.model, self.data
        key, patches = "model.patches", model.patches
        if model.vision:
            key, patches = "model.vision.patches", model.vision.patches
        if not patches:
            plane = model.attention.relative_positions and model.attention.relative_positions.side
            return ["model.attention.relative_positions.side needs model.patches"] if plane else []
        rows, relative = patches.rows, model.attention.relative_positions
        problems = {
            f"data.images.resize={data.images.resize} is below {key}.image={patches.image}":
                0 < data.images.resize < patches.image,
            f"data.images: mean and std need 1 number, or {patches.channels}, one for each channel":
                {len(data.images.mean), len(data.images.std)} - {1, patches.channels},
        }  # fmt: skip
        problems |= {} if not model.patches else {
            f"model.patches does not go with data.label_kind: {data.label_kind}": data.label_kind != "class",
            "model.patches needs objective: classes or masks": self.objective not in ("classes", "masks"),
            f"data.fields={list(data.fields)}: a record of an image with a class has one":
                self.objective == "classes" and len(data.fields) > 1,
            f"model.patches has {model.patches.side} patches on a side, and one learned row: set "
            "attention.relative_positions.side and patches.distillation":
                relative and not model.windows and (relative.side, model.patches.first) != (model.patches.side, 1),
            f"model.patches has no tokens: set vocab={model.vocab} to 0": model.vocab > 0,
            f"model.patches gives {rows} rows of an image: set context={model.context} to {rows}":
                model.context != rows,
            f"model.patches gives {rows} rows of an image: set data.seq={data.seq} to {rows}, or above for padding":
                data.seq < rows,
            f"model.patches goes with positions: learned or none, not {model.positions}":
                model.positions not in ("learned", "none"),
        }  # fmt: skip
        return [message for message, is_wrong in problems.items() if is_wrong]


def load(name: str, overrides: Sequence[str] = ()) -> Config:
    """The config of a file (a path, or a name in configs/) with `section.key=value` overrides applied.

    Raises an InputError that lists every problem of the file and of the overrides.
    """
    path = find_file(name, "configs")
    raw = core_yaml.parse(read_text(path), str(path))
    if not isinstance(raw, dict):
        kind = "is empty" if raw is None else f"is a {type(raw).__name__}"
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
