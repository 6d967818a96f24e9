"""Lower bounds of a step: compute at peak, memory at full bandwidth, and the bytes that its trace must send."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from gspmd_lm.config import Config
from gspmd_lm.foresight.graph import AttentionOp, DataflowGraph, Matmul, Node, breadth_first
from gspmd_lm.foresight.propagation import Reading
from gspmd_lm.foresight.propagation.record import ArrayTransfers
from gspmd_lm.hardware.chips import Chip
from gspmd_lm.program.task import Task
from gspmd_lm.sharding.rules import Rules
from gspmd_lm.sharding.shapes import Arrays, pairs, place_array

FLOAT32_BYTES = 4
_ROUNDING = 1e-3  # of what is sent


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
    branch_bytes: int = 0  # what one device must send beyond that if conditionals run the branches that send most


def training_bounds(
    task: Task, rules: Rules, arrays: Arrays, chip: Chip | None, graph: DataflowGraph, reading: Reading
) -> LowerBounds:
    """The lower bounds of a train step under `rules`, filled and checked; `chip` is None if simulated.

    `graph` is what was recorded of the forward pass of one microbatch under these rules, `reading` that of the whole
    step. Of a model of one's own, the FLOPs are those of `reading`, and the bytes of memory are without those of
    weights in use.

    Redundant work is not counted: FLOPs are shared out evenly over all devices, however few of them the rules use.

    Of memory, everything else is taken to stay on the chip. Weights that are trained and optimizer state are read and
    written once. So are gradients, if they wait for each other's norm or for other microbatches. Otherwise compilers
    update a weight in the operation that makes its gradient. Weights in use are read forward and backward in each
    microbatch, in the compute dtype. What the backward pass needs of the forward pass is written and read.
    """
    waits = rules.microbatches > 1 or bool(task.config and task.config.optimizer.clip_norm)
    moved_bytes = updated_bytes(rules, arrays, waits)
    moved_bytes += 2 * (reading.saved_bytes if task.config else _waiting_bytes(reading))
    if task.config:
        params = pairs(arrays.named_params, arrays.params)
        moved_bytes += 2 * rules.microbatches * compute_bytes(rules, params, graph)
        matmuls = _matmul_flops(task.config, rules, graph)
        flops, narrow_flops = step_flops(rules, graph) / rules.devices, sum(narrow for _, narrow in matmuls)
        flops_by_dtype = _flops_by_dtype(task.config, flops, narrow_flops)
    else:
        flops_by_dtype = _device_flops(reading, rules.devices)
    return _bounds(chip, reading, task.compute_dtype, flops_by_dtype, moved_bytes)


def generation_bounds(
    config: Config,
    rules: Rules,
    arrays: Arrays,
    chip: Chip | None,
    graph: DataflowGraph,
    reading: Reading,
    cache_bytes: int,
) -> LowerBounds:
    """The lower bounds of prefill (all slots of a prompt) or decode (one token per row).

    The same logic as in `training_bounds`, of the forward pass alone, whose graph is given. Every weight and, in
    decode, every slot of the cache is read once; prefill writes the cache. Sources: the counts of arXiv 2211.05102.

    `cache_bytes` is what one device holds of keys and values, of as many slots as a row has tokens.
    """
    model = config.model
    state_bytes = compute_bytes(rules, pairs(arrays.named_params, arrays.params), graph) + cache_bytes
    flops = sum(flops for _, flops in _products(graph)) / rules.devices
    narrow_flops = sum(one.node.flops * one.node.trip_count for one in graph.matmuls if _is_narrow(one))
    flops_by_dtype = _flops_by_dtype(config, flops, narrow_flops / rules.devices)
    return _bounds(chip, reading, model.compute_dtype, flops_by_dtype, round(state_bytes))


def program_bounds(chip: Chip | None, devices: int, reading: Reading) -> LowerBounds:
    """The lower bounds of a program of which nothing is known but its trace."""
    dtype = "float32" if reading.bytes_if_wider(FLOAT32_BYTES) == reading.communication_bytes else "bfloat16"
    moved_bytes = reading.held_bytes + 2 * _waiting_bytes(reading)
    return _bounds(chip, reading, dtype, _device_flops(reading, devices), moved_bytes)


def _waiting_bytes(reading: Reading) -> float:
    """The bytes that must wait for the backward pass; 0 if the program leaves open how they are split."""
    return 0.0 if reading.estimated_because else reading.saved_bytes


def _flops_by_dtype(config: Config, flops: float, narrow_flops: float) -> dict[str, float]:
    """The FLOPs of one device by the dtype of the operands; narrow_flops: those of them with operands of 8 bits."""
    model = config.model
    narrow = {model.matmul_dtype: narrow_flops} if model.matmul_dtype else {}
    return {model.compute_dtype: flops - narrow_flops, **narrow}


def _device_flops(reading: Reading, devices: int) -> dict[str, float]:
    """The FLOPs that a program has for each of its devices, by the dtype of the operands."""
    return {dtype: flops / devices for dtype, flops in reading.model_flops_by_dtype.items()}


def _bounds(
    chip: Chip | None, reading: Reading, dtype: str, flops_by_dtype: Mapping[str, float], moved_bytes: float
) -> LowerBounds:
    """The lower bounds of one device, of its FLOPs and of the bytes that it reads and writes.

    Compilers multiply float32 as bfloat16 where that suffices, and widen bfloat16 where a chip has no faster products.
    """

    def peak(operands: str) -> float:
        assert chip
        return max(map(chip.matmul_flops_per_s, (operands, "bf16", "f32")))

    sent = {axes: round(size) for axes, size in reading.bytes_by_axes.items()}
    return LowerBounds(
        compute_s=chip and sum((flops / peak(operands) for operands, flops in flops_by_dtype.items()), 0.0),
        memory_s=chip and moved_bytes / chip.hbm_bytes_per_s,
        communication_bytes=round(reading.communication_bytes),
        communication_by_axis={axes: size for axes, size in sent.items() if size},
        flops=sum(flops_by_dtype.values(), 0.0),
        dtype=dtype,
        float32_bytes=round(reading.bytes_if_wider(FLOAT32_BYTES)),
        estimated_because=reading.estimated_because,
        by_array=reading.by_array,
        branch_bytes=round(reading.branch_bytes),
    )


def checked_bounds(bounds: LowerBounds, above_floor: float | None) -> LowerBounds:
    """The same bounds, beside a compiled program that sends `above_floor` times the bound of communication, if known.

    If the program sends less than the bound, the bound is called an estimate.
    """
    if above_floor is None or above_floor >= 1 - _ROUNDING:
        return bounds
    return dataclasses.replace(bounds, estimated_because=f"the compiled program sends {above_floor:.2f} times as much")


def step_flops(rules: Rules, graph: DataflowGraph) -> float:
    """The model FLOPs of a train step, of all devices: forward, and of the gradients that it computes.

    Each product counts as the trace has it, but attention for the keys alone that a token sees. Norms and biases
    multiply nothing. PaLM (arXiv 2204.02311, appendix B) counts 6 for each parameter and token, and all keys.
    """
    return rules.microbatches * sum((1 + graph.gradients(node)) * flops for node, flops in _products(graph))


def necessary_flops(config: Config, rules: Rules, graph: DataflowGraph) -> float:
    """The FLOPs that matmuls and attention kernels of one device must do in a train step: a check on predictions."""
    total = sum(flops for flops, _ in _matmul_flops(config, rules, graph))
    without_weights = ((node, flops) for node, flops in _products(graph) if not graph.weight_of(node))
    attention = sum((1 + graph.gradients(node)) * flops for node, flops in without_weights)
    return total + rules.microbatches * attention / rules.devices


def _products(graph: DataflowGraph) -> Iterator[tuple[Node, float]]:
    """The matmuls and convolutions of a forward pass, each with its FLOPs in all iterations of the loops around it.

    In attention, the keys that a token does not see are left out. Where a factor depends on no weight and on no float
    of the batch, such as which expert a row has, the product is a look-up, and is left out.
    """
    inputs = [node for node in graph.nodes if node.primitive == "input" and node.is_float]
    after = breadth_first(inputs, lambda node: [user for user in node.users if user.is_float], lambda _: True)
    floats = {*inputs, *after}
    of_attention = dict[Node, float]()
    for op in graph.attention_ops:
        of_attention |= _attention_flops(op)
    for node in graph.nodes:
        if node.flops and floats.issuperset(node.inputs[:2]):
            yield node, of_attention.get(node, node.flops) * node.trip_count


def _attention_flops(op: AttentionOp) -> dict[Node, float]:
    """The FLOPs of the products of queries with keys and of weights with values, for the keys that each query sees.

    Numbers by which one of the arrays was made as wide as another one are not counted.
    """

    def factors(array: Node) -> dict[Node, Node]:
        """The products that read an array with no other product in between, and the factor that is the array."""
        known = {array} | {
            *breadth_first(
                [array],
                lambda node: [user for user in node.users if user in op.nodes or user.primitive == "name"],
                lambda node: not node.flops,
            )
        }
        products = [node for node in known if node.flops and node in op.nodes]
        return {node: next(one for one in node.inputs if one in known) for node in products}

    keys = {node: factor for node, factor in factors(op.keys).items() if node in factors(op.queries)}
    values = {node: factor for node, factor in factors(op.values).items() if node not in keys}
    share, widths = seen_share(op), [(keys, op.keys.shape[-1]), (values, op.values.shape[-1])]
    return {
        node: share * node.flops * min(1, width / factor.shape[-1])
        for products, width in widths
        for node, factor in products.items()
    }


def seen_share(op: AttentionOp) -> float:
    """The share of the pairs of a query and a key in which the query sees the key. Queries are the last tokens."""
    queries, keys = op.queries.shape[1], op.keys.shape[1]
    at, chunk = np.arange(keys - queries, keys), op.mask_chunk or keys
    if op.mask_window == "all":
        seen = np.minimum(chunk, keys - at // chunk * chunk) if op.mask_chunk else np.full(queries, keys)
    else:
        seen = np.minimum(at % chunk + 1, int(op.mask_window or keys))
    return float(seen.mean() / keys)


def _matmul_flops(config: Config, rules: Rules, graph: DataflowGraph) -> Iterator[tuple[float, float]]:
    """For each matmul of an activation and a weight, its FLOPs on one device in a train step, and those of 8 bits."""
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


def updated_bytes(rules: Rules, arrays: Arrays, with_gradients: bool = True) -> float:
    """The bytes of trained weights, gradients and optimizer state that one device reads and writes in an update."""
    trained, optimizer = pairs(arrays.named_trained, arrays.trained), pairs(arrays.named_optimizer, arrays.optimizer)
    state = [*trained, *optimizer] if with_gradients else optimizer
    return 2 * (held_bytes(rules, "weights", trained) + held_bytes(rules, "optimizer", state))


def compute_bytes(rules: Rules, params: Iterable[tuple[Any, Any]], graph: DataflowGraph) -> float:
    """The bytes of weights that one device reads in use, once, in the dtype of activations or in 8 bits.

    The layers of a stage of a pipeline are read for each of its microbatches. Of a table in which rows are looked up,
    only a few are read; of experts, no more than there are rows for them.
    """
    itemsize = graph.matmuls[0].input.itemsize
    looked_up = set(graph.looked_up) - graph.matrix_paths
    rows_read = {
        matmul.path: matmul.node.shape[0] / matmul.weight.shape[0] for matmul in graph.matmuls if matmul.group_axis
    }
    narrow = {matmul.path for matmul in graph.matmuls if matmul.weight.itemsize == 1}
    return sum(
        place_array(rules, "rules", *leaf, 1 if leaf[0].path in narrow else itemsize)[1]
        * min(1.0, rows_read.get(leaf[0].path, 1.0))
        * (rules.pipeline.microbatches if rules.pipeline and rules.split("rules", leaf[0].path, "layers") else 1)
        for leaf in params
        if leaf[0].path not in looked_up
    )


def held_bytes(rules: Rules, table: str, leaves: Iterable[tuple[Any, Any]], itemsize: int = 0) -> float:
    """The bytes that one device holds of arrays where `table` puts them, each in its dtype if `itemsize` is 0."""
    return sum(place_array(rules, table, *leaf, itemsize)[1] for leaf in leaves)
