"""What a model's arrays are: paths, logical axes, shapes and activations, and which rules do not fit them."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import flax.linen as nn
import jax

from gspmd_lm import placement
from gspmd_lm.config import Config, Model
from gspmd_lm.errors import InputError, did_you_mean
from gspmd_lm.kernels.attention import unsupported
from gspmd_lm.kernels.context import ALIKE, deals
from gspmd_lm.placement import Named, Recorder
from gspmd_lm.rules import Problem, Rules, check
from gspmd_lm.vocabulary import Vocabulary

Activations = dict[str, tuple[tuple[str, ...], tuple[int, ...]]]  # name -> logical axes, shape


@dataclasses.dataclass(frozen=True)
class Arrays:
    """The arrays of a model, from shapes alone: nothing is allocated."""

    named_params: Any  # trees of placement.Named
    params: Any  # trees of jax.ShapeDtypeStruct
    named_trained: Any  # the part of the parameters that is trained
    trained: Any
    named_optimizer: Any = ()  # where nothing is trained, the optimizer has no state
    optimizer: Any = ()
    transform: Any = None  # optax.GradientTransformation

    @property
    def parameter_count(self) -> int:
        return _count(self.params)

    @property
    def trained_count(self) -> int:
        return _count(self.trained)

    def active_count(self, model: Model, trained: bool = False) -> int:
        """How many parameters compute one token: of routed experts, the chosen ones. `trained`: of those trained."""
        leaves = pairs(self.named_trained, self.trained) if trained else pairs(self.named_params, self.params)
        share = model.experts_per_token / model.experts if model.experts else 1.0
        return round(sum(like.size * (share if "expert" in leaf.axes else 1.0) for leaf, like in leaves))


def arrays(
    init: Callable[[jax.Array], Any], vocabulary: Vocabulary, trained: Callable[[Any], Any] = lambda params: params
) -> Arrays:
    """The parameters that `init` draws with a random key, annotated by `nn.with_logical_partitioning`.

    `trained` takes a tree shaped like the parameters and gives the part of it that training changes. Raises InputError
    for parameters and axes that the vocabulary does not have.
    """
    boxed = jax.eval_shape(init, jax.eval_shape(jax.random.key, 0))
    params = nn.unbox(boxed)
    named = jax.tree_util.tree_map_with_path(
        lambda path, spec: Named(".".join(key.key for key in path), tuple(spec)), nn.get_partition_spec(boxed)
    )
    _check_names(pairs(named, params), vocabulary)
    return Arrays(named, params, trained(named), trained(params))


def pairs(named: Any, abstract: Any) -> list[tuple[Named, Any]]:
    """The leaves of a tree of Named, each with the leaf of `abstract` that it names."""
    leaves = jax.tree.leaves(named, is_leaf=lambda leaf: isinstance(leaf, Named))
    return list(zip(leaves, jax.tree.leaves(abstract), strict=True))


def checked(
    found: Arrays, rules: Rules, recorded: Iterable[Recorder] = (), more: Iterable[Problem] = ()
) -> list[Problem]:
    """The warnings about `rules` for the arrays of a model. Nothing is compiled or allocated.

    `recorded` are the activations that the model names in each of its programs under the same rules, and `more` the
    problems that its arrays do not show. Raises ShardingError that lists everything that does not fit.
    """
    params = pairs(found.named_params, found.params)
    optimizer = pairs(found.named_optimizer, found.optimizer)
    problems = [
        problem
        for activations in list(recorded) or [None]
        for problem in placement.problems(rules, params, activations, optimizer)
    ]
    return check(dict.fromkeys([*problems, *more]))


def _check_names(params: Sequence[tuple[Named, Any]], vocabulary: Vocabulary) -> None:
    """Raises InputError for parameters whose names or axes are not the model's: no rule could speak of them."""
    wrong = []
    for leaf, like in params:
        name, known = leaf.path.rpartition(".")[2], f"  {leaf.path}: {' '.join(leaf.axes)}"
        if len(leaf.axes) != len(like.shape):
            wrong.append(f"  {leaf.path}: {len(leaf.axes)} logical axes for {len(like.shape)} dimensions")
        if name not in vocabulary.weights:
            wrong.append(f"{known}: no weight is named {name}{did_you_mean(name, vocabulary.weights)}")
        wrong += [
            f"{known}: unknown axis {axis}{did_you_mean(str(axis), vocabulary.axes)}"
            for axis in leaf.axes
            if axis not in vocabulary.axes
        ]
    if wrong:
        lines = "\n".join(dict.fromkeys(wrong))
        raise InputError(
            f"the model's parameters do not agree with its vocabulary\n{lines}\n"
            "  fix   make each with `parameter` or nn.with_logical_partitioning, one axis per dimension, and have its "
            "name and its axes in the vocabulary"
        )


def attention_lacks(kernel: str, config: Config, rules: Rules, seq: int, segments: bool) -> str | None:
    """What `kernel` cannot do of the attention that a pass over `seq` tokens computes, or None.

    `segments` says whether a row holds several texts, or a text and padding before it.
    """
    over, piece = split_sequence(rules), seq
    if kernel != "xla" and not over and (rules.split("rules", "q", "seq") or rules.split("rules", "k", "kv_seq")):
        return "a sequence that is split in some arrays only (rules for q.seq or k.kv_seq)"
    if over and rules.context != "ulysses":
        if kernel == "cudnn" and rules.context == "gather":
            return "context: gather (only ring and ulysses)"
        pieces = rules.piece_count(over)
        piece = seq // pieces // (2 if deals(seq, pieces, rules.context) else 1)
    kinds = [  # a chunk that is as long as a row restricts nothing
        kind if kind.attention_chunk < seq else dataclasses.replace(kind, attention_chunk=0)
        for kind in config.model.layer_kinds
        if not kind.linear_attention
    ]
    lacking = (unsupported(kernel, kind, seq=piece, segments=segments) for kind in kinds)
    found = next(filter(None, lacking), None)
    if found and piece != seq:
        found = found.replace(f"data.seq: {piece}", f"pieces of {piece} tokens of data.seq: {seq}")
    return found


def split_sequence(rules: Rules) -> tuple[str, ...]:
    """The mesh axes that split the sequence of all arrays within a block alike."""
    found = {rules.split("rules", array, "seq") for array in ALIKE}
    return found.pop() if len(found) == 1 else ()


def attention_problems(
    config: Config, rules: Rules, platform: str, seq: int, segments: bool, padded: bool = False
) -> list[Problem]:
    """The problems that the attention kernel of the rules cannot do what a pass asks (see `attention_lacks`), and that
    the keys of a split sequence cannot reach their queries as `context` says.

    `padded`: the rows hold one text each, with padding before it.
    """
    problems = _context_problems(config, rules, seq, dealt=not padded)
    kernel = rules.attention[platform]
    reason = attention_lacks(kernel, config, rules, seq, segments or padded)
    if not reason:
        return problems
    if padded and "segments" in reason:
        reason = "prompts that are padded on the left"
    place = rules.place(f"attention.{platform}", kernel)
    fix = f"--set rules.attention.{platform}=xla, or change the config"
    if reason.startswith("context"):
        fix = f"--set rules.context=ring, or --set rules.attention.{platform}=xla"
    return [*problems, Problem(f"attention: {kernel} cannot do {reason}", place, fix)]


def _context_problems(config: Config, rules: Rules, seq: int, dealt: bool) -> list[Problem]:
    """`dealt`: whether rows are dealt to devices, as in training. A prompt is not, and its keys are gathered."""
    form, over, model = rules.context, split_sequence(rules), config.model
    place, found = rules.place("context", form), []

    def wrong(message: str, fix: str, warning: bool = False) -> None:
        found.append(Problem(f"context: {message}", place, fix, warning=warning))

    if not over:
        if form != "gather" and any(rules.split("rules", array, "seq") for array in ALIKE):
            fix = "write rules.seq in place of rows for single arrays, or --set rules.context=gather"
            wrong(f"{form} needs a sequence that is split alike in {', '.join(ALIKE)}", fix)
        return found
    if "linear" in model.kind_of_each_layer:
        found.append(
            Problem(
                "model.linear_attention: a state goes from token to token, and no device has all of a row", place,
                f"do not split seq over {', '.join(over)}",
            )
        )  # fmt: skip
    pieces = rules.piece_count(over)
    split = " x ".join(f"{name}={rules.mesh[name]}" for name in over)
    if form == "ulysses":
        own = model.kv_head_rows
        heads = rules.split("rules", "q", "heads")
        if rules.split("rules", "k", "kv_heads") != heads:  # keys are repeated for each device's heads
            own = model.head_rows
        each = own // rules.piece_count(heads)
        if own % rules.piece_count(heads) == 0 and each % pieces:
            most = " x ".join(["kv_heads" if own == model.kv_head_rows else "heads", *heads])
            wrong(f"ulysses: {each} key heads of a device ({most}) do not divide over {split}",
                  f"--set rules.context=gather, or use a divisor of {each}")  # fmt: skip
    elif dealt and seq % (2 * pieces) and seq % pieces == 0:
        fix = f"make data.seq a multiple of {2 * pieces}"
        if form == "ring":
            wrong(f"ring: data.seq={seq} does not divide into 2 pieces for each of {split}", fix)
        else:
            wrong(f"data.seq={seq} does not divide into 2 pieces for each of {split}, so the last device has most of "
                  "the work of a causal mask", fix, warning=True)  # fmt: skip
    if form == "ring" and dealt:
        window = next((kind.sliding_window for kind in model.layer_kinds if kind.sliding_window), 0)
        lacking = {
            f"sliding_window: {window}": window,
            f"positions: {model.positions}": model.positions in ("alibi", "alibi_bf16"),
            f"attention_scores_dtype: {model.attention_scores_dtype}": model.attention_scores_dtype != "float32",
            "attention_sinks: true": model.attention_sinks,
        }
        for asked in filter(lacking.get, lacking):
            wrong(f"ring cannot do model.{asked}", "--set rules.context=gather, or ulysses")
    return found


def layer_problems(
    config: Config, rules: Rules, platform: str, seq: int, segments: bool, padded: bool = False
) -> list[Problem]:
    """What a pass asks of attention (see `attention_problems`) and of experts that does not fit the rules."""
    found = attention_problems(config, rules, platform, seq, segments, padded)
    return [*found, *_experts_problems(config, rules)]


def _experts_problems(config: Config, rules: Rules) -> list[Problem]:
    """The problems that rules and the mixtures of experts of a config do not fit each other."""
    model, found = config.model, []
    if not model.experts:
        return []
    path = "layers.mlp.w_down"
    names, row = rules.split("rules", path, "expert"), rules.row("rules", path, "expert")
    tokens = {name for axis in ("batch", "seq") for name in rules.split("rules", "block_input", axis)}
    if row and {*names} & tokens and {*names} - tokens:
        there, not_there = (", ".join(name for name in names if (name in tokens) is kind) for kind in (True, False))
        message = f"experts: expert would be split over {there}, which splits tokens, and {not_there}, which does not"
        fix = f"--set rules.{row.key}={there}, so that tokens travel"
        found.append(Problem(message, row.place, fix, f"--set rules.{row.key}={not_there}, so that none does"))
    if model.capacity_factor and (over := split_sequence(rules)):
        message = "model.capacity_factor: an expert computes the first tokens of a row, and no device has all of a row"
        seq = rules.row("rules", "block_input", "seq")
        place = seq.place if seq else rules.path
        fix = f"--set model.capacity_factor=0, or do not split seq over {', '.join(over)}"
        found.append(Problem(message, place, fix))
    return found


def _count(tree: Any) -> int:
    return sum(like.size for like in jax.tree.leaves(tree))
