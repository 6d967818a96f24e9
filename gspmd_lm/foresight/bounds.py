"""Lower bounds of a step: compute at peak, memory at full bandwidth, and the bytes that its trace must send."""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from gspmd_lm.config import Config, ModelConfig, levels, padded_rows
from gspmd_lm.foresight.graph import DataflowGraph, Matmul, Node, breadth_first
from gspmd_lm.foresight.propagation import Reading
from gspmd_lm.foresight.propagation.record import ArrayTransfers
from gspmd_lm.hardware.chips import Chip
from gspmd_lm.model.addresses import addresses
from gspmd_lm.program.task import Task
from gspmd_lm.sharding.rules import Rules
from gspmd_lm.sharding.shapes import Arrays, pairs, placed

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
    step. Of a model of one's own, the FLOPs are those of `reading`, and the bytes of memory are without those of
    weights in use.

    Redundant work is not counted: FLOPs are shared out evenly over all devices, however few of them the rules use.

    Of memory, everything else is taken to stay on the chip. Weights that are trained, gradients and optimizer state are
    read and written once. Weights in use are read forward and backward in each microbatch, in the compute dtype. What
    the backward pass needs of the forward pass is written and read.
    """
    moved_bytes = updated_bytes(rules, arrays) + 2 * (reading.saved_bytes if task.config else _waiting_bytes(reading))
    if task.config:
        params = pairs(arrays.named_params, arrays.params)
        flops = step_flops(task.config, rules, graph)
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
    state_bytes = compute_bytes(rules, pairs(arrays.named_params, arrays.params), graph) + cache_bytes
    if config.other_stacks:
        flops = reading.model_flops
    else:
        attention = attention_flops(model, data.seq, last=tokens == 1) * _FORWARD * tokens * data.batch
        flops = attention + sum(node.flops * node.trip_count for node in _products(config, graph))
    flops /= rules.devices
    narrow_flops = sum(one.node.flops * one.node.trip_count for one in graph.matmuls if _is_narrow(one))
    narrow = model.matmul_dtype, narrow_flops / rules.devices
    return _bounds(chip, reading, model.compute_dtype, flops, round(state_bytes), narrow)


def of_program(chip: Chip | None, devices: int, reading: Reading) -> LowerBounds:
    """The lower bounds of a program of which nothing is known but its trace."""
    dtype = "float32" if reading.bytes_if_wider(FLOAT32_BYTES) == reading.communication_bytes else "bfloat16"
    moved_bytes = reading.held_bytes + 2 * _waiting_bytes(reading)
    return _bounds(chip, reading, dtype, reading.model_flops / devices, moved_bytes)


def _waiting_bytes(reading: Reading) -> float:
    """The bytes that must wait for the backward pass; 0 if the program leaves open how they are split."""
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


def step_flops(config: Config, rules: Rules, graph: DataflowGraph) -> float:
    """The model FLOPs of a train step, of all devices: forward, and of the gradients that it computes.

    Each product counts as the trace has it, but attention for the keys alone that a token sees. Norms and biases
    multiply nothing. PaLM (arXiv 2204.02311, appendix B) counts 6 for each parameter and token, and all keys.
    """
    passes = ((1 + graph.gradients(node)) * node.flops * node.trip_count for node in _products(config, graph))
    return rules.microbatches * sum(passes) + _attention_flops(config, graph)


def necessary_flops(config: Config, rules: Rules, graph: DataflowGraph) -> float:
    """The FLOPs that matmuls and attention kernels of one device must do in a train step: a check on predictions."""
    total = sum(flops for flops, _ in _matmul_flops(config, rules, graph))
    return total + _attention_flops(config, graph) / rules.devices


def _products(config: Config, graph: DataflowGraph) -> list[Node]:
    """The matmuls and convolutions outside of attention.

    Where a factor depends on no weight and on no float of the batch, such as which expert a row has, the product is a
    look-up, and is left out.
    """
    inputs = [node for node in graph.nodes if node.primitive == "input" and node.is_float]
    after = breadth_first(inputs, lambda node: [user for user in node.users if user.is_float], lambda _: True)
    floats, attention = {*inputs, *after}, set[Node]().union(*_attention_nodes(config, graph).values())
    return [node for node in graph.nodes if node.flops and node not in attention and floats.issuperset(node.inputs[:2])]


def _attention_nodes(config: Config, graph: DataflowGraph) -> dict[str, list[Node]]:
    """The products of attention in the stacks of `attention_flops_of_row`: those without a weight."""
    own = {address.module[0] for address in addresses(config.model)}
    return {
        word: [
            node
            for node in graph.nodes
            if node.flops and ({word} if word else own) & {*node.name.modules[:1]} and not graph.weight_of(node)
        ]
        for word in attention_flops_of_row(config)
    }


def _attention_flops(config: Config, graph: DataflowGraph) -> float:
    """The FLOPs of attention in a train step, of all devices, without those of gradients that nothing needs."""
    total, of_row = 0.0, attention_flops_of_row(config)
    for word, nodes in _attention_nodes(config, graph).items():
        both = sum(2 * node.flops * node.trip_count for node in nodes)
        made = sum(graph.gradients(node) * node.flops * node.trip_count for node in nodes)
        total += of_row[word] * (_FORWARD + (1 - _FORWARD) * made / both) if both else 0.0
    return total * config.data.batch


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


# What tokens attend to


def attention_flops(model: ModelConfig, seq: int, *, last: bool = False) -> float:
    """The FLOPs of scores and sums of values of one token, forward and backward: 6 N (H + V) S, S summed over layers.

    H and V are the sizes of a key and a value, and S the keys that a token sees: see `keys_seen`.
    """
    with_ranges = 2 * model.head_dim * model.relative_vectors.ranges * model.layers if model.relative_vectors else 0
    with_ranges += sum(
        2 * model.head_dim * layer.windows.size for layer in model.each_layer if layer.windows and layer.windows.vectors
    )
    return 6.0 * model.heads * (_numbers(model, last) * keys_seen(model, seq, last=last) + with_ranges)


def _numbers(model: ModelConfig, last: bool) -> int:
    """The numbers of a key and a value of a head. A single token of latent attention reads what they are made from."""
    if last and (latent := model.latent_attention):
        return 2 * latent.kv_rank + model.rope_dim
    return model.head_dim + model.v_head_dim


def rows_of_levels(config: Config) -> list[tuple[ModelConfig, int]]:
    """The settings of each level of blocks, and its rows of an image or text, with padding."""
    first, *rest = levels(config.model)
    return [(first, config.data.seq), *((level, padded_rows(level.context, level.row_multiple)) for level in rest)]


def attention_flops_of_row(config: Config) -> dict[str, float]:
    """`attention_flops` of all tokens of one row of the batch, and of its source.

    By the first word of the names of the weights of a stack; those of a model's own layers, which may have several, are
    "".
    """
    model, levels_have_names = config.model, config.model.windows and not config.model.masks
    total = {
        f"level_{number}" if levels_have_names else "": attention_flops(level, rows) * rows
        for number, (level, rows) in enumerate(rows_of_levels(config))
    }
    words = {"the encoder": "encoder", "images": "vision", "queries": "queries"}
    for name, (other, _, rows) in config.other_stacks.items():
        total[words[name]] = attention_flops(other, rows) * rows
    if queries := model.of_queries:
        total["queries"] += cross_attention_flops(queries, config.image_rows) * queries.context
    if model.encoder:
        total[""] += cross_attention_flops(model, config.source_seq) * config.data.seq
    return total


def cross_attention_flops(model: ModelConfig, source_seq: int) -> float:
    """As `attention_flops`, of one token that attends to a source of `source_seq` tokens."""
    reading = sum(layer.reads > 0 for layer in model.each_layer)
    return 6.0 * model.heads * _numbers(model, last=False) * source_seq * reading


def keys_seen(model: ModelConfig, seq: int, *, last: bool = False) -> float:
    """The keys that a token of a row of `seq` tokens sees in all layers: the mean of the row, or of its last token."""
    return sum(_seen(layer, seq, last) for layer in model.each_layer)


def _seen(layer: ModelConfig, seq: int, last: bool) -> float:
    """The keys that a token sees in one layer, or a row of it, of which some may be padding."""
    if layer.windows:
        return layer.windows.size**2 * layer.context / seq
    if layer.mask == "full":
        whole, rest = divmod(seq, layer.attention_chunk or seq)
        return (whole * (layer.attention_chunk or seq) ** 2 + rest**2) / seq
    if linear := layer.linear_attention:  # keys with as many FLOPs: a token reads its state twice and writes it once
        return 3 * linear.value_heads * linear.head_dim**2 / (layer.heads * _numbers(layer, last))
    if layer.attention_chunk:
        whole, rest = divmod(seq, layer.attention_chunk)
        if last:
            return float(rest or layer.attention_chunk)
        return (whole * layer.attention_chunk * (layer.attention_chunk + 1) + rest * (rest + 1)) / (2 * seq)
    keys = min(layer.sliding_window or seq, seq)
    return float(keys if last else keys - keys * (keys - 1) / (2 * seq))
