"""Lower bounds of a step: compute at peak, memory at full bandwidth, and the bytes that its trace must send."""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from gspmd_lm.config import Config
from gspmd_lm.foresight.graph import DataflowGraph, Matmul
from gspmd_lm.foresight.propagation import Reading
from gspmd_lm.foresight.propagation.record import ArrayTransfers
from gspmd_lm.hardware.chips import Chip
from gspmd_lm.model.task import Task
from gspmd_lm.sharding.rules import Rules
from gspmd_lm.sharding.shapes import Arrays, pairs, placed
from gspmd_lm.train.metrics import attention_flops_of_row, flops_per_token, model_flops

_FORWARD = 1 / 3  # of the FLOPs of a training step
FLOAT32_BYTES = 4


@dataclasses.dataclass(frozen=True)
class LowerBounds:
    """Lower bounds for one step on one device."""

    compute_s: float | None  # model FLOPs over peak; None on cpu
    memory_s: float | None  # bytes that must be read and written once over bandwidth; None on cpu
    communication_bytes: int | None  # what one device must send; None where it is not known
    communication_by_axis: Mapping[str, int]  # of one mesh axis, or several at once: fsdp, fsdp+tensor
    flops: float  # of the model, of one device, recomputation not counted
    dtype: str  # in which activations, and weights in use, are counted to be sent
    float32_bytes: int = 0  # what one device must send if all that is sent is as wide as float32
    estimated_because: str = ""  # why communication is an estimate; '' where it is a bound
    by_array: tuple[ArrayTransfers, ...] = ()  # what communication is made of, the largest first


def of_training(
    task: Task, rules: Rules, arrays: Arrays, chip: Chip | None, graph: DataflowGraph, reading: Reading
) -> LowerBounds:
    """The lower bounds of a train step under `rules`, filled and checked; `chip` is None if simulated.

    `graph` is what was recorded of the forward pass of one microbatch under these rules, `reading` that of the whole
    step. Of a model of one's own, the FLOPs are those of the trace, and the bytes of memory are without those of
    weights in use.

    Redundant work is not counted: FLOPs are shared out evenly over all devices, however few of them the rules use.

    Of memory, everything else is taken to stay on the chip. Weights that are trained, gradients and optimizer state are
    read and written once. Weights in use are read forward and backward in each microbatch, in the compute dtype. What
    the backward pass needs of the forward pass is written and read.
    """
    moved_bytes = updated_bytes(rules, arrays) + 2 * (reading.saved_bytes if task.config else _waiting_bytes(reading))
    if task.config:
        params = pairs(arrays.named_params, arrays.params)
        flops = model_flops(task.config, arrays) - lacking_flops(task.config, rules, graph)
        moved_bytes += 2 * rules.microbatches * compute_bytes(rules, params, graph)
        matmuls = _matmul_flops(task.config, rules, graph)
        narrow = task.config.model.matmul_dtype, sum(narrow_flops for _, narrow_flops in matmuls)
    else:
        flops, narrow = reading.model_flops, (None, 0.0)
    return _bounds(chip, reading, task.compute_dtype, flops / rules.devices, moved_bytes, narrow)


def of_generation(
    config: Config,
    rules: Rules,
    arrays: Arrays,
    chip: Chip | None,
    graph: DataflowGraph,
    reading: Reading,
    tokens: int,
    cache_bytes: int,
) -> LowerBounds:
    """The lower bounds of prefill (`tokens` per row, all slots of a prompt) or decode (one token per row).

    The same logic as in `of_training`, of the forward pass alone, whose graph is given. Every weight and, in decode,
    every slot of the cache is read once; prefill writes the cache. Sources: the counts of arXiv 2211.05102.

    `cache_bytes` is what one device holds of keys and values, of as many slots as a row has tokens.
    """
    model, data = config.model, config.data
    per_token = flops_per_token(model, arrays.active_count(model), data.seq, last=tokens == 1) * _FORWARD
    per_token -= 2 * model.vocab_rows * model.embed * (1 - 1 / tokens)  # only the last token of a row has logits
    state_bytes = compute_bytes(rules, pairs(arrays.named_params, arrays.params), graph) + cache_bytes
    flops = (reading.model_flops if config.other_stacks else per_token * data.batch * tokens) / rules.devices
    narrow_flops = sum(one.node.flops * one.node.trip_count for one in graph.matmuls if _is_narrow(one))
    narrow = model.matmul_dtype, narrow_flops / rules.devices
    return _bounds(chip, reading, model.compute_dtype, flops, round(state_bytes), narrow)


def of_program(chip: Chip | None, devices: int, reading: Reading) -> LowerBounds:
    """The lower bounds of a program of which nothing is known but its trace."""
    dtype = "float32" if reading.bytes_if_wider(FLOAT32_BYTES) == reading.communication_bytes else "bfloat16"
    moved_bytes = reading.held_bytes + 2 * _waiting_bytes(reading)
    return _bounds(chip, reading, dtype, reading.model_flops / devices, moved_bytes)


def _waiting_bytes(reading: Reading) -> float:
    """What must wait for the backward pass; 0 where the program leaves open how much of it each device has."""
    return 0.0 if reading.estimated_because else reading.saved_bytes


def _bounds(
    chip: Chip | None,
    reading: Reading,
    dtype: str,
    flops: float,
    moved_bytes: float,
    narrow: tuple[str | None, float] = (None, 0.0),
) -> LowerBounds:
    """The lower bounds of one device, of its FLOPs and of the bytes that it reads and writes.

    narrow: a dtype of 8 bits, and how many of the FLOPs have operands of it.
    """
    matmul_dtype, narrow_flops = narrow
    faster_peak = chip.peak_of_operands(matmul_dtype) if chip and matmul_dtype else math.inf
    wide_flops = flops - narrow_flops
    sent = {axes: round(size) for axes, size in reading.bytes_by_axes.items()}
    return LowerBounds(
        compute_s=chip and wide_flops / chip.peak_bf16_flops_per_s + narrow_flops / faster_peak,
        memory_s=chip and moved_bytes / chip.hbm_bytes_per_s,
        communication_bytes=round(reading.communication_bytes),
        communication_by_axis={axes: size for axes, size in sent.items() if size},
        flops=flops,
        dtype=dtype,
        float32_bytes=round(reading.bytes_if_wider(FLOAT32_BYTES)),
        estimated_because=reading.estimated_because,
        by_array=reading.by_array,
    )


def necessary_flops(config: Config, rules: Rules, graph: DataflowGraph) -> float:
    """The FLOPs that matmuls and attention kernels of one device must do in a train step: a check on predictions.

    Less than the model's FLOPs: weights count only where they are multiplied.
    """
    total = sum(flops for flops, _ in _matmul_flops(config, rules, graph))
    attention = sum(attention_flops_of_row(config).values()) * config.data.batch
    return total + (attention - _lacking_of_attention(config, graph)) / rules.devices


def lacking_flops(config: Config, rules: Rules, graph: DataflowGraph) -> float:
    """The FLOPs of the gradients that a train step does without, of all devices.

    Frozen weights have none, and no input of a matmul has one if nothing that is trained lies below it.
    """
    of_weights = sum(
        (2 - graph.gradients(node)) * node.flops * node.trip_count
        for node in graph.nodes
        if node.flops and graph.weight_of(node)
    )
    return rules.microbatches * of_weights + _lacking_of_attention(config, graph)


def _lacking_of_attention(config: Config, graph: DataflowGraph) -> float:
    """The same of the scores of stacks and of the sums of their values."""
    by_stack, lacking = attention_flops_of_row(config), 0.0
    own = {stack.name for stack in config.model.stacks}
    for word, flops in by_stack.items():
        words = {word} if word else own
        matmuls = [
            node for node in graph.nodes
            if node.flops and words & {*node.name.modules[:1]} and not graph.weight_of(node)
        ]  # fmt: skip
        both = sum(2 * node.flops * node.trip_count for node in matmuls)
        made = sum(graph.gradients(node) * node.flops * node.trip_count for node in matmuls)
        lacking += flops * (1 - _FORWARD) * (1 - made / both) if both else 0.0
    return lacking * config.data.batch


def _matmul_flops(config: Config, rules: Rules, graph: DataflowGraph) -> Iterator[tuple[float, float]]:
    """Of each matmul of an activation and a weight: its FLOPs on one device in a train step, and those of 8 bits."""
    for matmul in graph.matmuls:
        passes, trained = 1.0 + graph.gradients(matmul.node), matmul.path in graph.trained
        if not trained and passes > 1:
            # The derivative to the first layer's input is left out where nothing before it is trained.
            passes -= 1.0 / config.model.layers
        # Gradients of the matrices of experts are products of wider operands.
        narrow = passes - (trained and bool(matmul.group_axis)) if _is_narrow(matmul) else 0.0
        each = rules.microbatches * matmul.node.flops * matmul.node.trip_count / rules.devices
        yield passes * each, narrow * each


def _is_narrow(matmul: Matmul) -> bool:
    """Whether both operands have 8 bits."""
    return max(operand.itemsize for operand in matmul.node.inputs[:2]) == 1


def updated_bytes(rules: Rules, arrays: Arrays) -> float:
    """The bytes of trained weights, gradients and optimizer state that one device reads and writes in an update."""
    trained, optimizer = pairs(arrays.named_trained, arrays.trained), pairs(arrays.named_optimizer, arrays.optimizer)
    return 2 * (held_bytes(rules, "weights", trained) + held_bytes(rules, "optimizer", [*trained, *optimizer]))


def compute_bytes(rules: Rules, params: Iterable[tuple[Any, Any]], graph: DataflowGraph) -> float:
    """The bytes of weights that one device reads in use, once, in the dtype of activations or in 8 bits.

    The layers of a stage of a pipeline are read for each of its microbatches. Of a table in which rows are looked up,
    only a few are read; of experts, no more than there are rows for them.
    """
    itemsize = graph.matmuls[0].input.itemsize
    looked_up = set(graph.looked_up) - graph.multiplied
    rows_read = {
        matmul.path: matmul.node.shape[0] / matmul.weight.shape[0] for matmul in graph.matmuls if matmul.group_axis
    }
    narrow = {matmul.path for matmul in graph.matmuls if matmul.weight.itemsize == 1}
    return sum(
        placed(rules, "rules", *leaf, 1 if leaf[0].path in narrow else itemsize)[1]
        * min(1.0, rows_read.get(leaf[0].path, 1.0))
        * (rules.pipeline.microbatches if rules.pipeline and rules.split("rules", leaf[0].path, "layers") else 1)
        for leaf in params
        if leaf[0].path not in looked_up
    )


def held_bytes(rules: Rules, table: str, leaves: Iterable[tuple[Any, Any]], itemsize: int = 0) -> float:
    """The bytes that one device holds of arrays where `table` puts them, each in its dtype if `itemsize` is 0."""
    return sum(placed(rules, table, *leaf, itemsize)[1] for leaf in leaves)
