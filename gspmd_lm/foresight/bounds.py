"""Lower bounds of a step: compute at peak, memory at full bandwidth, and the bytes that its trace must send."""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Any

from gspmd_lm.config import Config
from gspmd_lm.foresight.graph import DataflowGraph, Node
from gspmd_lm.foresight.propagation import Reading
from gspmd_lm.foresight.propagation.record import ArrayTransfers
from gspmd_lm.hardware.chips import Chip
from gspmd_lm.model.task import Task
from gspmd_lm.sharding.rules import Rules
from gspmd_lm.sharding.shapes import Arrays, pairs
from gspmd_lm.train.metrics import attention_flops, flops_per_token, model_flops

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
    step. Of a model of one's own, the FLOPs are those of the trace, and the activations that are kept for the backward
    pass are not counted among the bytes of memory.

    Redundant work is not counted: FLOPs are shared out evenly over all devices, however few of them the rules use.
    """
    if task.config:
        flops, moved_bytes = model_flops(task.config, arrays), memory_bytes(rules, arrays, graph)
    else:
        flops, moved_bytes = reading.model_flops, updated_bytes(rules, arrays)
    return _bounds(chip, reading, task.compute_dtype, flops / rules.devices, moved_bytes)


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
    flops = per_token * data.batch * tokens / rules.devices
    return _bounds(chip, reading, model.compute_dtype, flops, round(state_bytes))


def of_program(chip: Chip | None, devices: int, reading: Reading) -> LowerBounds:
    """The lower bounds of a program of which nothing is known but its trace."""
    dtype = "float32" if reading.bytes_if_wider(FLOAT32_BYTES) == reading.communication_bytes else "bfloat16"
    return _bounds(chip, reading, dtype, reading.model_flops / devices, None)


def _bounds(chip: Chip | None, reading: Reading, dtype: str, flops: float, moved_bytes: float | None) -> LowerBounds:
    """The lower bounds of one device, of its FLOPs and of the bytes that it reads and writes; None: not known."""
    sent = {axes: round(size) for axes, size in reading.bytes_by_axes.items()}
    return LowerBounds(
        compute_s=chip and flops / chip.peak_bf16_flops_per_s,
        memory_s=None if chip is None or moved_bytes is None else moved_bytes / chip.hbm_bytes_per_s,
        communication_bytes=round(reading.communication_bytes),
        communication_by_axis={axes: size for axes, size in sent.items() if size},
        flops=flops,
        dtype=dtype,
        float32_bytes=round(reading.bytes_if_wider(FLOAT32_BYTES)),
        estimated_because=reading.estimated_because,
        by_array=reading.by_array,
    )


def necessary_flops(config: Config, rules: Rules, arrays: Arrays, graph: DataflowGraph) -> float:
    """The FLOPs that matmuls and attention kernels of one device must do in a train step: a check on predictions.

    Less than the model's FLOPs: weights count only where they are multiplied.
    """
    model, seq = config.model, config.data.seq
    trained = {leaf.path for leaf, _ in pairs(arrays.named_trained, arrays.trained)}
    total = 0.0
    for matmul in graph.matmuls:
        # The derivative to the first layer's input is left out where nothing before it is trained.
        passes = 3.0 if matmul.path in trained else 2.0 - 1.0 / model.layers
        total += rules.microbatches * passes * matmul.node.flops * matmul.node.trip_count
    total += attention_flops(model, seq) * config.data.batch * seq
    return total / rules.devices


def memory_bytes(rules: Rules, arrays: Arrays, graph: DataflowGraph) -> float:
    """The bytes that one device reads and writes in a step if everything else stays on the chip.

    Weights that are trained, gradients and optimizer state are read and written once; weights in use are read forward
    and backward in each microbatch, in the compute dtype; activations kept for the backward pass are written and read.
    """
    params = pairs(arrays.named_params, arrays.params)
    per_pass = rules.microbatches * compute_bytes(rules, params, graph) + _saved_bytes(rules, graph)
    return updated_bytes(rules, arrays) + 2 * per_pass


def updated_bytes(rules: Rules, arrays: Arrays) -> float:
    """The bytes of trained weights, gradients and optimizer state that one device reads and writes in an update."""
    trained, optimizer = pairs(arrays.named_trained, arrays.trained), pairs(arrays.named_optimizer, arrays.optimizer)
    once = sum(bytes_per_device(rules, "weights", *leaf, leaf[1].dtype.itemsize) for leaf in trained)
    once += sum(bytes_per_device(rules, "optimizer", *leaf, leaf[1].dtype.itemsize) for leaf in (*trained, *optimizer))
    return 2 * once


def compute_bytes(rules: Rules, params: Iterable[tuple[Any, Any]], graph: DataflowGraph) -> float:
    """The bytes of weights that one device reads in use, once, in the dtype of activations.

    Of a table in which rows are looked up, only a few are read; of experts, no more than there are rows for them.
    """
    itemsize = graph.matmuls[0].input.itemsize
    looked_up = set(graph.looked_up) - graph.multiplied
    rows_read = {
        matmul.path: matmul.node.shape[0] / matmul.weight.shape[0] for matmul in graph.matmuls if matmul.group_axis
    }
    return sum(
        bytes_per_device(rules, "rules", *leaf, itemsize) * min(1.0, rows_read.get(leaf[0].path, 1.0))
        for leaf in params
        if leaf[0].path not in looked_up
    )


def bytes_per_device(rules: Rules, table: str, leaf: Any, like: Any, itemsize: int) -> float:
    """The bytes that one device holds of an array where `table` puts it."""
    spec = rules.resolve(table, leaf.path, leaf.axes, like.shape)[0]
    return math.prod(like.shape) * itemsize / rules.num_shards(itertools.chain(*spec))


def _saved_bytes(rules: Rules, graph: DataflowGraph) -> float:
    """Activations of all layers and microbatches that a device keeps for the backward pass."""
    remat = rules.remat
    inputs = [node for node in graph.nodes if node.checkpoint_name == "layer_input"]  # whatever name it is kept under
    placed = [(graph.carried(node), node.trip_count) for node in inputs]
    if remat.policy == "names":
        names = {*remat.save, *remat.offload} - {"residual", "layer_input"}
        named = {(node.placed.array, node.name.modules): node for node in graph.activations if node.placed}
        placed += [(node, node.trip_count) for (name, modules), node in named.items() if name in names and modules]
    elif remat.policy != "block":
        placed += [(node, node.trip_count) for node in graph.matmul_results]
    return sum(times * _activation_bytes(rules, node) for node, times in placed if node) * rules.microbatches


def _activation_bytes(rules: Rules, node: Node) -> float:
    assert node.placed
    spec = rules.resolve("rules", node.placed.array, node.placed.axes, node.shape)[0]
    return node.bytes / rules.num_shards(itertools.chain(*spec))
