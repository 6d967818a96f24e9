"""The rules of matmuls, convolutions and kernels."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from gspmd_lm.foresight import equations
from gspmd_lm.foresight.propagation.reader import Operation, Reader, Rule, gather_operands, unknown
from gspmd_lm.foresight.propagation.sharding import (
    ArraySharding,
    Dims,
    array_bytes,
    axes_of,
    replicated_sharding,
    total_bytes,
)

LEFT, RIGHT = 0, 1
KEYS, BIAS, PAGE_TABLES = 1, 3, (8, 9)  # of cuDNN's attention; the gradient of a bias is its result of the same number


@dataclasses.dataclass
class Product:
    """A product of two operands, whose dimensions are matched with each other.

    `batch` and `contracted` are pairs of dimensions, of the left operand and of the right one. `result` says of each
    dimension of the result which operand has it, and where.
    """

    operation: Operation
    batch: Sequence[tuple[int, int]]
    contracted: Sequence[tuple[int, int]]
    result: Sequence[tuple[int, int]]
    dims: tuple[list[list[str]], list[list[str]]] = dataclasses.field(init=False)  # as they will be, of both operands

    def __post_init__(self) -> None:
        left, right = self.operation.operands[:2]
        self.dims = [list(names) for names in left.dims], [list(names) for names in right.dims]

    def partner(self, side: int, dimension: int) -> int | None:
        """The dimension of the other operand that is the same one; None if only this operand has it."""
        return {pair[side]: pair[1 - side] for pair in (*self.batch, *self.contracted)}.get(dimension)

    def dimension(self, side: int, name: str) -> int | None:
        """The dimension of an operand that a mesh axis splits."""
        return next((d for d, names in enumerate(self.dims[side]) if name in names), None)


def product(reader: Reader, product: Product) -> ArraySharding:
    """The sharding of a product; its operands are moved where they do not fit each other.

    If the operands have a mesh axis on different dimensions, the cheaper way is taken: the cost of a way is that of
    moving the other operand, and of adding up what is then a partial sum.
    """
    operation = product.operation
    left, right = operation.operands[:2]
    if left.unreduced and right.unreduced:  # a product of two sums is no sum of products
        reader.move_operand(operation, LEFT, left.dims)
        left = operation.operands[LEFT]
    for name in reader.mesh:
        places = [product.dimension(side, name) for side in (LEFT, RIGHT)]
        if all(place is None for place in places):
            continue
        if None in places or product.partner(LEFT, places[LEFT]) != places[RIGHT]:  # type: ignore[arg-type]
            _agree(reader, product, name)
    for a, b in (*product.batch, *product.contracted):  # in the same order
        both = [name for name in product.dims[LEFT][a] if name in product.dims[RIGHT][b]]
        if product.dims[LEFT][a] != product.dims[RIGHT][b]:
            product.dims[LEFT][a], product.dims[RIGHT][b] = both, list(both)
    for side in (LEFT, RIGHT):
        reader.move_operand(operation, side, tuple(map(tuple, product.dims[side])), keep_unreduced=True)
    used: set[str] = set()
    dims = []
    for side, d in product.result:
        names = tuple(name for name in product.dims[side][d] if name not in used)
        used |= set(names)
        dims.append(names)
    sums = axes_of(product.dims[LEFT][a] for a, _ in product.contracted) | left.unreduced | right.unreduced
    split = axes_of([*product.dims[LEFT], *product.dims[RIGHT]])
    reader.add_flops(operation, equations.flops(operation.equation) / reader.mesh.shards(split))
    return ArraySharding(tuple(dims), sums - used)


def _agree(reader: Reader, product: Product, name: str) -> None:
    """Chooses for which dimensions both operands have a mesh axis that they have for different ones."""
    sides = [side for side in (LEFT, RIGHT) if product.dimension(side, name) is not None]
    costs = {side: _cost(reader, product, name, side) for side in sides}
    side = min(sides, key=costs.__getitem__)
    dimension, other = product.dimension(side, name), product.dimension(1 - side, name)
    assert dimension is not None
    if other is None and _gathered_cost(reader, product, name, side) < costs[side]:
        product.dims[side][dimension].remove(name)
        return
    partner = product.partner(side, dimension)
    if other is not None:
        product.dims[1 - side][other].remove(name)
    if partner is not None:
        if _divides(reader, product, name, 1 - side, partner):
            product.dims[1 - side][partner].append(name)
        else:
            product.dims[side][dimension].remove(name)


def _divides(reader: Reader, product: Product, name: str, side: int, dimension: int) -> bool:
    """Whether a mesh axis can split a dimension besides those that split it already."""
    shards = reader.mesh.shards({*product.dims[side][dimension], name})
    return product.operation.inputs[side].shape[dimension] % shards == 0


def _cost(reader: Reader, product: Product, name: str, side: int) -> float:
    """The bytes that are sent if both operands have a mesh axis where the operand at `side` has it."""
    operation, dimension, other = product.operation, product.dimension(side, name), product.dimension(1 - side, name)
    assert dimension is not None
    partner, cost = product.partner(side, dimension), 0.0
    if partner is not None and not _divides(reader, product, name, 1 - side, partner):
        return float("inf")
    if other is not None:
        dims = [tuple(each for each in names if each != name) for names in product.dims[1 - side]]
        if partner is not None:
            dims[partner] += (name,)
        operand = operation.operands[1 - side].without_partial_sums()
        cost += total_bytes(reader.cheapest(operation.inputs[1 - side], operand, tuple(dims)).costs)
    if any(pair[side] == dimension for pair in product.contracted):
        split = axes_of([*product.dims[LEFT], *product.dims[RIGHT]]) - {name}
        local = array_bytes(operation.output) / reader.mesh.shards(split)
        cost += total_bytes(reader.mesh.cost("reduce-scatter", {name}, local))
    return cost


def _gathered_cost(reader: Reader, product: Product, name: str, side: int) -> float:
    """The bytes that are sent if an operand is gathered over a mesh axis that splits it alone."""
    dims = tuple(tuple(each for each in names if each != name) for names in product.dims[side])
    operand = product.operation.operands[side].without_partial_sums()
    return total_bytes(reader.cheapest(product.operation.inputs[side], operand, dims).costs)


def dot_general(reader: Reader, operation: Operation) -> ArraySharding:
    contracted, batch = operation.params["dimension_numbers"]
    result = [(LEFT, d) for d in batch[LEFT]]
    for side in (LEFT, RIGHT):
        shared = (*batch[side], *contracted[side])
        result += [(side, d) for d in range(operation.inputs[side].ndim) if d not in shared]
    same, summed = list(zip(*batch, strict=True)), list(zip(*contracted, strict=True))
    return product(reader, Product(operation, same, summed, result))


def convolution(reader: Reader, operation: Operation) -> ArraySharding:
    """A convolution, as a product over its channels. The rows and columns of a picture are not split.

    Of channels in groups, mesh axes that divide the groups split input and output alike; others are gathered.
    """
    numbers, params = operation.params["dimension_numbers"], operation.params
    lhs, rhs, out = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
    by_features, by_batch = params["feature_group_count"], params["batch_group_count"]
    grouped = by_features > 1 or by_batch > 1
    in_groups = {(LEFT, lhs[1] if by_features > 1 else lhs[0]), (RIGHT, rhs[0])} if grouped else set()
    whole = {(RIGHT, rhs[1])} if by_features > 1 else set()
    for side, spec in enumerate((lhs, rhs)):
        dims = list(operation.operands[side].dims)
        for d, names in enumerate(dims):
            undivided = (side, d) in in_groups and max(by_features, by_batch) % reader.mesh.shards(names)
            if d not in spec[:2] or (side, d) in whole or undivided:
                dims[d] = ()
        reader.move_operand(operation, side, tuple(dims), keep_unreduced=True)
    result: list[tuple[int, int]] = [(LEFT, lhs[2])] * operation.output.ndim
    result[out[1]] = RIGHT, rhs[0]
    if by_batch == 1:
        result[out[0]] = LEFT, lhs[0]
    groups = [(lhs[1], rhs[0])] if by_features > 1 else [(lhs[0], rhs[0])] if by_batch > 1 else []
    channels = [(lhs[1], rhs[1])] if by_features == 1 else []
    return product(reader, Product(operation, groups, channels, result))


def kernel(reader: Reader, operation: Operation) -> list[ArraySharding]:
    """A kernel that the partitioner does not look into: every device is given all operands, and computes all of it."""
    gather_operands(reader, operation)
    reader.add_flops(operation, kernel_flops(operation.params))
    return [replicated_sharding(var.aval.ndim) for var in operation.equation.outvars]


def kernel_flops(params: Any) -> float:
    """The FLOPs that a Pallas kernel says that it does; 0 where it does not say."""
    estimate = params.get("cost_estimate")
    return float(estimate.flops) if estimate else 0.0


def cudnn_attention(reader: Reader, operation: Operation) -> list[ArraySharding]:
    """Attention of cuDNN, or its gradients: its rows and heads stay split, and of sequences a device needs all.

    The gradient of a bias that rows or heads share is a partial sum. FLOPs count nothing, as those of cuDNN do not.
    """
    inputs, results = operation.inputs, [var.aval for var in operation.equation.outvars]
    if any(inputs[number].size for number in PAGE_TABLES):
        return unknown(reader, operation)
    heads_at = 1 if operation.params["layout"] else 2
    lead = max(operation.operands[:3], key=lambda one: reader.mesh.shards((*one.dims[0], *one.dims[heads_at])))
    rows, heads = lead.dims[0], lead.dims[heads_at]
    if inputs[KEYS].shape[heads_at] % reader.mesh.shards(heads):
        heads = ()

    def dims(number: int, aval: Any) -> Dims:
        by_head = heads_at if aval.ndim == 4 and number != BIAS else 1  # that of sums of rows, too
        split = {0: rows, by_head: heads} if aval.ndim > 2 else {0: rows}
        return tuple(split.get(d, ()) if size > 1 else () for d, size in enumerate(aval.shape))

    for number, aval in enumerate(inputs):
        reader.move_operand(operation, number, dims(number, aval))
    split = axes_of((rows, heads))
    return [
        ArraySharding(dims(number, aval), split - axes_of(dims(number, aval))) for number, aval in enumerate(results)
    ]


RULES: dict[str, Rule] = {
    "dot_general": dot_general,
    "conv_general_dilated": convolution,
    "pallas_call": kernel,
    "dot_product_attention_fwd_wrapper": cudnn_attention,
    "dot_product_attention_bwd_wrapper": cudnn_attention,
}
