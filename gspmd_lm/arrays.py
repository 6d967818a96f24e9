"""What a model's arrays are: paths, logical axes, shapes and activations, and which rules do not fit them."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from gspmd_lm import placement
from gspmd_lm.chips import Processor
from gspmd_lm.config import Config, Model
from gspmd_lm.errors import InputError, did_you_mean
from gspmd_lm.kernels import grouped_gpu
from gspmd_lm.kernels.attention import unsupported
from gspmd_lm.kernels.context import ALIKE, deals
from gspmd_lm.placement import Named, Recorder
from gspmd_lm.rules import KERNELS, Problem, Rules, check
from gspmd_lm.vocabulary import Vocabulary

Activations = dict[str, tuple[tuple[str, ...], tuple[int, ...]]]  # name -> logical axes, shape

_FASTEST = "--set rules.attention=null for the fastest kernel that can do it"


class Pass(NamedTuple):
    """What a program asks of attention, besides what the model asks."""

    seq: int  # tokens of a row
    segments: bool = False  # whether a row holds several texts
    padded: bool = False  # whether a row holds one text with padding before it


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
    for another tree than nested dicts, and for parameters and axes that the vocabulary does not have.
    """
    boxed = jax.eval_shape(init, jax.eval_shape(jax.random.key, 0))
    params = nn.unbox(boxed)
    _check_dicts(params)
    named = jax.tree_util.tree_map_with_path(
        lambda path, spec: Named(".".join(str(key.key) for key in path), tuple(spec)), nn.get_partition_spec(boxed)
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


def _check_dicts(params: Any) -> None:
    """Raises InputError for parameters that are not nested dicts of arrays, such as the state of an NNX module."""
    for path, _ in jax.tree_util.tree_leaves_with_path(params):
        if other := [key for key in path if not isinstance(key, jax.tree_util.DictKey)]:
            raise InputError(
                f"the model's parameters are not nested dicts of arrays: {other[0]} in {jax.tree_util.keystr(path)}\n"
                "  fix   have init return such dicts, as that of flax.nnx.bridge.to_linen does for an NNX module"
            )


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


def attention_lacks(
    kernel: str, config: Config, rules: Rules, asked: Pass, capability: tuple[int, ...] = ()
) -> str | None:
    """What `kernel` cannot do of the attention that a pass computes, or None.

    capability: the compute capability of a GPU; () where it is not known, or is none.
    """
    over, seq, piece = split_sequence(rules), asked.seq, asked.seq
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

    def lacking(segments: bool) -> str | None:
        known: Any = {"seq": piece, "segments": segments, "capability": capability}
        found = (unsupported(kernel, kind, **known) for kind in kinds)
        return next(filter(None, found), None)

    found = lacking(asked.segments)
    if not found and asked.padded and lacking(True):
        return "prompts that are padded on the left"
    if found and piece != seq:
        found = found.replace(f"data.seq: {piece}", f"pieces of {piece} tokens of data.seq: {seq}")
    return found


def split_sequence(rules: Rules) -> tuple[str, ...]:
    """The mesh axes that split the sequence of all arrays within a block alike."""
    found = {rules.split("rules", array, "seq") for array in ALIKE}
    return found.pop() if len(found) == 1 else ()


def settled(rules: Rules, config: Config, on: Processor, asked: Pass) -> Rules:
    """`rules` with an attention kernel: the one that they choose for the platform, or else the fastest that the
    processor has and that can do what a pass asks.

    Raises ShardingError where the rules choose a kernel that could do so, but not on this processor.
    """
    kernel, capability = rules.attention.get(on.platform), on.compute_capability
    if kernel is None:
        able = (one for one in KERNELS[on.platform] if not attention_lacks(one, config, rules, asked, capability))
        return dataclasses.replace(rules, attention={**rules.attention, on.platform: next(able)})
    reason = attention_lacks(kernel, config, rules, asked, capability)
    if reason and not attention_lacks(kernel, config, rules, asked):  # other reasons are found by `attention_problems`
        place = rules.place(f"attention.{on.platform}", kernel)
        check([Problem(f"attention: {kernel} on {on.name} cannot do {reason}", place, _FASTEST)])
    return rules


def kernel_said(rules: Rules, config: Config, on: Processor, asked: Pass) -> str:
    """The attention kernel of settled rules, with the reason where it is not the fastest of the platform.

    '' where the platform has only one.
    """
    kernel, reasons = rules.kernel(on.platform), []
    for faster, reason, instead in _faster(rules, config, on, asked):
        if reason is None:
            return f"{kernel}, as {rules.place(f'attention.{on.platform}', kernel)} says; {faster} can do it too"
        fix = f"; fix {instead}" if instead else ""
        reasons.append(f"{faster} on {on.name} does not support {reason}{fix}")
    because = f", since {'; '.join(reasons)}" if reasons else ""
    return f"{kernel}{because}" if len(KERNELS[on.platform]) > 1 else ""


def faster_kernel(rules: Rules, config: Config, on: Processor, asked: Pass) -> str:
    """The flags that would have a faster kernel compute attention; '' where none can."""
    flags = (
        f"--set rules.attention.{on.platform}={faster} {instead}".rstrip()
        for faster, reason, instead in _faster(rules, config, on, asked)
        if reason is None or instead
    )
    return next(flags, "")


def _faster(rules: Rules, config: Config, on: Processor, asked: Pass) -> Iterator[tuple[str, str | None, str]]:
    """The kernels that are faster than that of settled rules, what each cannot do, and the flag with which it can."""
    kernels = KERNELS[on.platform]
    for faster in kernels[: kernels.index(rules.kernel(on.platform))]:
        reason = attention_lacks(faster, config, rules, asked, on.compute_capability)
        yield faster, reason, _instead(faster, reason, config, rules, asked) if reason else ""


def _instead(kernel: str, reason: str, config: Config, rules: Rules, asked: Pass) -> str:
    """The flag with which `kernel` can do what a pass asks; '' where the model itself asks for it."""
    if reason.startswith("data.packing") and not config.data.messages_field:  # conversations are always kept apart
        able = not attention_lacks(kernel, config, rules, asked._replace(segments=False))
        return "--set data.packing=stream" if able else ""
    if reason.startswith("context"):
        ring = dataclasses.replace(rules, context="ring")
        wrong = [one for one in _context_problems(config, ring, asked.seq, not asked.padded) if not one.warning]
        able = not wrong and not attention_lacks(kernel, config, ring, asked)
        return "--set rules.context=ring" if able else ""
    return ""


def attention_problems(config: Config, rules: Rules, platform: str, asked: Pass) -> list[Problem]:
    """The problems that the attention kernel that the rules choose cannot do what a pass asks (see `attention_lacks`),
    and that the keys of a split sequence cannot reach their queries as `context` says."""
    problems = _context_problems(config, rules, asked.seq, dealt=not asked.padded)
    kernel = rules.kernel(platform)
    reason = attention_lacks(kernel, config, rules, asked)
    if not reason:
        return problems
    place = rules.place(f"attention.{platform}", kernel)
    instead = _instead(kernel, reason, config, rules, asked) or "change the config"
    fix = f"{_FASTEST}, or {instead}"
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


def layer_problems(config: Config, rules: Rules, platform: str, asked: Pass) -> list[Problem]:
    """What a pass asks of attention (see `attention_problems`) and of experts that does not fit the rules."""
    found = attention_problems(config, rules, platform, asked)
    return [*found, *_experts_problems(config, rules, platform)]


def _experts_problems(config: Config, rules: Rules, platform: str) -> list[Problem]:
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
    sides = [size // rules.piece_count(rules.split("rules", path, axis))
             for axis, size in (("embed", model.embed), ("mlp", model.expert_width))]  # fmt: skip
    if platform == "gpu" and not grouped_gpu.takes(jnp.dtype(model.compute_dtype), *sides):
        narrow = model.compute_dtype == "bfloat16"
        lacks = f"matrices of {sides[0]} x {sides[1]} on a device (only multiples of 16)"
        lacks = lacks if narrow else f"model.compute_dtype: {model.compute_dtype} (only bfloat16)"
        fix = "use multiples of 16" if narrow else "--set model.compute_dtype=bfloat16"
        message = f"experts: a slow loop computes them, since the kernel for GPUs does not support {lacks}"
        found.append(Problem(message, row.place if row else rules.path, fix, warning=True))
    return found


def _count(tree: Any) -> int:
    return sum(like.size for like in jax.tree.leaves(tree))
