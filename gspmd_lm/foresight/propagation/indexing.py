"""The rules of primitives that read or write a part of an array."""

import itertools
from collections.abc import Sequence
from typing import Any

from gspmd_lm.foresight.equations import ROLL
from gspmd_lm.foresight.propagation.reader import Operation, Reader, Rule
from gspmd_lm.foresight.propagation.sharding import (
    ArraySharding,
    Dims,
    MeshAxes,
    ScatterAdd,
    array_bytes,
    axes_of,
    total_bytes,
    without,
)


def gather(reader: Reader, operation: Operation) -> ArraySharding:
    """The rule for `gather`. If a dimension in which rows are looked up is split, the cheaper of two ways is taken.

    Each device looks up the rows that it has, and these are added up; or the whole table is gathered.
    """
    numbers = operation.params["dimension_numbers"]
    table, indices = operation.operands
    batching = dict(zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True))
    shape, sizes = operation.inputs[0].shape, operation.params["slice_sizes"]
    looked_up = [d for d, size in enumerate(sizes) if size != shape[d] and d not in batching]
    split = axes_of(table.dims[d] for d in looked_up)
    whole = tuple(() if d in looked_up else names for d, names in enumerate(table.dims))
    aligned = all(set(indices.dims[b]) <= set(table.dims[d]) for d, b in batching.items())
    if reader.mesh.shards(split) > 1 and aligned:
        remaining = without(indices.dims, split | axes_of(whole))
        summed = _looked_up(operation, whole, remaining, table.unreduced | split)
        table_bytes = reader.mesh.local_bytes(operation.inputs[0], table.dims)
        gathered_bytes = total_bytes(reader.mesh.cost("all-gather", split, table_bytes))
        if _masked_bytes(reader, operation, split, whole) < gathered_bytes:
            reader.move_operand(operation, 1, remaining)
            return summed
    wanted = list(whole)
    for d, b in batching.items():  # rows lie where their indices lie
        names = table.dims[d] if table.dims[d] == indices.dims[b] or not indices.dims[b] else indices.dims[b]
        others = axes_of(each for at, each in enumerate(whole) if at != d)
        wanted[d] = tuple(name for name in names if name not in others)
    columns = axes_of(names for d, names in enumerate(wanted) if d not in batching)
    exchanged = columns & indices.mesh_axes
    if _table_is_less(reader, operation, tuple(wanted), exchanged):
        wanted, columns = list(without(wanted, exchanged)), columns - exchanged
        rows = _looked_up(operation, tuple(wanted), indices.dims, frozenset())
        # Where the program says that rows stay where their indices are, both ways have the same result.
        reader.move_operand(operation, 0, tuple(wanted), keep_unreduced=True, chosen=operation.wanted_dims != rows.dims)
    remaining = list(without(indices.dims, columns))
    for d, b in batching.items():
        remaining[b] = wanted[d]
    reader.move_operand(operation, 0, tuple(wanted), keep_unreduced=True)
    reader.move_operand(operation, 1, tuple(remaining))
    columns_split = _looked_up(operation, tuple(wanted), tuple(remaining), table.unreduced)
    if indices.mesh_axes <= axes_of(remaining) or operation.wanted_dims:
        return columns_split
    # A mesh axis splits the columns of the table and the rows of the indices. The rows that are found go back to the
    # devices that asked for them.
    rows = _looked_up(operation, without(wanted, indices.mesh_axes), indices.dims, table.unreduced)
    back = reader.move(operation, operation.output, columns_split.without_partial_sums(), rows.dims, chosen=True)
    return back._replace(unreduced=rows.unreduced)


def _table_is_less(reader: Reader, operation: Operation, table: Dims, exchanged: frozenset[str]) -> bool:
    """Whether to gather a table costs less than to exchange the rows that are found in its columns.

    exchanged: the mesh axes that split the columns of the table as well as the rows of the indices.
    """
    if not exchanged:
        return False
    indices = operation.operands[1]
    gathered = reader.cheapest(operation.inputs[0], operation.operands[0], without(table, exchanged)).costs
    ids = reader.cheapest(operation.inputs[1], indices, without(indices.dims, exchanged)).costs
    columns = _looked_up(operation, table, without(indices.dims, exchanged), frozenset()).dims
    rows = _looked_up(operation, without(table, exchanged), indices.dims, frozenset()).dims
    found = reader.mesh.reshard(array_bytes(operation.output), columns, operation.wanted_dims or rows)
    return total_bytes(gathered) < total_bytes([*ids, *found])


def _masked_bytes(reader: Reader, operation: Operation, split: frozenset[str], whole: Dims) -> float:
    """The least bytes that a device sends if each looks up in its own rows, and the results are added up."""
    mesh, indices = reader.mesh, operation.operands[1]
    rows_bytes = array_bytes(operation.output) / mesh.shards(axes_of(whole) | (indices.mesh_axes - split))
    kind = "reduce-scatter" if split <= axes_of(operation.wanted_dims or ()) else "all-reduce"
    ids = mesh.local_bytes(operation.inputs[1], indices.dims)
    return total_bytes([*mesh.cost(kind, split, rows_bytes), *mesh.cost("all-gather", indices.mesh_axes & split, ids)])


def _looked_up(operation: Operation, table: Dims, indices: Dims, unreduced: frozenset[str]) -> ArraySharding:
    """The sharding of the rows, from those of the table and of the indices."""
    numbers = operation.params["dimension_numbers"]
    gone = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    kept, rows = iter(d for d in range(len(table)) if d not in gone), iter(indices[:-1])
    dims = tuple(table[next(kept)] if d in numbers.offset_dims else next(rows) for d in range(operation.output.ndim))
    return ArraySharding(dims, frozenset(unreduced) - axes_of(dims))


def scatter_add(reader: Reader, operation: Operation) -> ArraySharding:
    """Rows are added to an array. Over what splits the rows, the result is a partial sum."""
    begin, indices, updates = operation.operands
    numbers = operation.params["dimension_numbers"]
    if not begin.is_constant:
        return scatter(reader, operation)
    windows = _window_dimensions(numbers, operation.output.ndim)
    scattered = [d for d in range(operation.inputs[2].ndim) if d not in windows]
    batching = dict(zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True))
    dims: list[MeshAxes] = [()] * operation.output.ndim
    for d, to in windows.items():
        dims[to] = updates.dims[d]
    for to, d in batching.items():
        dims[to] = updates.dims[scattered[d]]
    sums = updates.unreduced | axes_of(updates.dims[d] for d in scattered)
    rows = ScatterAdd(operation.inputs[2], updates, operation.inputs[1], indices, windows)
    return ArraySharding(tuple(dims), sums - axes_of(dims), scatter=rows)


def scatter_extreme(reader: Reader, operation: Operation) -> ArraySharding:
    """Rows are multiplied with those of an array, or the larger or smaller ones stay. Devices add nothing up later."""
    if not operation.operands[0].is_constant:
        return scatter(reader, operation)
    own = scatter_add(reader, operation)._replace(scatter=None)
    return reader.move(operation, operation.output, own, own.dims)


def scatter(reader: Reader, operation: Operation) -> ArraySharding:
    """Rows of an array are set: each device sets those that it has, and so is given the columns of them."""
    begin, _, updates = operation.operands
    numbers, shape = operation.params["dimension_numbers"], operation.output.shape
    windows = _window_dimensions(numbers, len(shape))
    if begin.is_constant:
        dims: list[MeshAxes] = [()] * len(shape)
        for d, to in windows.items():
            dims[to] = updates.dims[d] if operation.inputs[2].shape[d] == shape[to] else ()
        begin = ArraySharding(tuple(dims))
    target = tuple(begin.dims[windows[d]] if d in windows else () for d in range(operation.inputs[2].ndim))
    reader.move_operand(operation, 2, target)
    return ArraySharding(begin.dims)


def _window_dimensions(numbers: Any, rank: int) -> dict[int, int]:
    """Dimensions of the updates that are not looked up -> those of the result."""
    kept = [d for d in range(rank) if d not in (*numbers.inserted_window_dims, *numbers.operand_batching_dims)]
    return dict(zip(sorted(numbers.update_window_dims), kept, strict=True))


def slice_(reader: Reader, operation: Operation) -> ArraySharding:
    """A part of an array. A split dimension stays split, where it can: rows at the borders go to neighbours."""
    operand, aval, output = operation.operands[0], operation.inputs[0], operation.output
    strides = operation.params["strides"] or (1,) * aval.ndim
    dims, masked = list(operand.dims), frozenset[str]()
    for d, names in enumerate(operand.dims):
        shards, size, begin = reader.mesh.shards(names), output.shape[d], operation.params["start_indices"][d]
        if shards == 1 or size == aval.shape[d]:
            continue
        if strides[d] == 1 and size >= shards:
            _add_permute(reader, operation, d, _foreign_rows(aval.shape[d], size, begin, shards))
            continue
        dims[d] = ()
        if 2 * size * shards < aval.shape[d] * (shards - 1) + 2 * shards:  # few rows: who has them adds them to zeros
            masked |= frozenset(names)
    target = tuple(names if set(names) <= masked else dims[d] for d, names in enumerate(operand.dims))
    reader.move_operand(operation, 0, target, keep_unreduced=True)
    return ArraySharding(tuple(dims), operand.unreduced | (masked - axes_of(dims)), operand.is_constant)


def split(reader: Reader, operation: Operation) -> list[ArraySharding]:
    """An array is cut into several along a dimension. Where it is split along it, the parts are too, if they can be and
    are not wanted otherwise: rows move to where they lie in their part.
    """
    operand, axis, wanted = operation.operands[0], operation.params["axis"], operation.wanted_dims
    names, sizes = operand.dims[axis], operation.params.get("sizes", (1,))
    shards = reader.mesh.shards(names)
    if 1 < shards <= min(filter(None, sizes)) and (not wanted or wanted[axis] == names):
        for begin, size in zip(itertools.accumulate(sizes, initial=0), sizes, strict=False):
            rows = _foreign_rows(operation.inputs[0].shape[axis], size, begin, shards)
            _add_permute(reader, operation, axis, rows, chosen=wanted is None)
        return [ArraySharding(operand.dims, operand.unreduced, operand.is_constant)] * len(sizes)
    target = tuple(() if d == axis else names for d, names in enumerate(operand.dims))
    reader.move_operand(operation, 0, target, keep_unreduced=True, chosen=wanted != target)
    return [ArraySharding(target, operand.unreduced, operand.is_constant)] * len(operation.equation.outvars)


def unstack(reader: Reader, operation: Operation) -> list[ArraySharding]:
    """An array is cut along a dimension into arrays that lack it."""
    axis = operation.params["axis"] % operation.inputs[0].ndim
    return [one._replace(dims=(*one.dims[:axis], *one.dims[axis + 1 :])) for one in split(reader, operation)]


def pad(reader: Reader, operation: Operation) -> ArraySharding:
    """An array between rows of a constant. A split dimension stays split: rows move to where they lie afterwards."""
    operand, aval = operation.operands[0], operation.inputs[0]
    dims = list(operand.dims)
    for d, (low, high, inner) in enumerate(operation.params["padding_config"]):
        shards = reader.mesh.shards(operand.dims[d])
        if shards == 1 or low == high == inner == 0:
            continue
        if inner or aval.shape[d] < shards:
            dims[d] = ()
            continue
        _add_permute(reader, operation, d, _foreign_rows(operation.output.shape[d], aval.shape[d], low, shards))
    reader.move_operand(operation, 0, tuple(dims), keep_unreduced=True)
    return ArraySharding(tuple(dims), operand.unreduced, operand.is_constant)


def _foreign_rows(large: int, small: int, begin: int, shards: int) -> float:
    """Rows that a device sends, on average: an array of `small` rows lies at `begin` of one of `large` rows.

    Both are split equally. The rows are the same in both, and some of them are on another device in the other array.
    """
    in_large, in_small = -(-large // shards), -(-small // shards)
    stay = 0
    for device in range(shards):
        first = max(device * in_large - begin, device * in_small)
        last = min((device + 1) * in_large - begin, (device + 1) * in_small, small)
        stay += max(0, last - first)
    return (small - stay) / shards


def _add_permute(
    reader: Reader, operation: Operation, dimension: int, rows: float, chosen: bool = True, number: int = 0
) -> None:
    """Notes that a device sends `rows` rows of an operand, along a dimension, to another device."""
    operand, aval = operation.operands[number], operation.inputs[number]
    others = operand.mesh_axes - set(operand.dims[dimension])
    row_bytes = array_bytes(aval) / aval.shape[dimension] / reader.mesh.shards(others)
    costs = reader.mesh.cost("collective-permute", operand.dims[dimension], rows * row_bytes)
    reader.add_transfers(operation, aval, operand, costs, chosen)


def dynamic_slice(_: Reader, operation: Operation) -> ArraySharding:
    """The rule for `dynamic_slice` at a computed index: devices that have the rows add them to the others' zeros."""
    operand = operation.operands[0]
    shapes = zip(operand.dims, operation.inputs[0].shape, operation.output.shape, strict=True)
    dims = tuple(names if before == after else () for names, before, after in shapes)
    sums = operand.unreduced | (operand.mesh_axes - axes_of(dims))
    return ArraySharding(dims, sums, operand.is_constant)


def dynamic_update_slice(reader: Reader, operation: Operation) -> ArraySharding:
    """The rule for `dynamic_update_slice` at a computed index: rows that are written into zeros keep their sharding."""
    array, update = operation.operands[:2]
    shapes = list(zip(operation.inputs[1].shape, operation.output.shape, strict=True))
    if array.is_constant:
        return ArraySharding(tuple(n if a == b else () for n, (a, b) in zip(update.dims, shapes, strict=True)))
    target = tuple(n if a == b else () for n, (a, b) in zip(array.dims, shapes, strict=True))
    reader.move_operand(operation, 1, target)
    return ArraySharding(array.dims)


def windows(reader: Reader, operation: Operation) -> ArraySharding:
    """Something of each window of an array. The dimensions over which windows extend are not split.

    Of a maximum, the gradient has two operands: the sharding is that of the one with the most shards.
    """
    lead, sizes = _lead(reader, operation), operation.params["window_dimensions"]
    target = tuple(names if size == 1 else () for names, size in zip(lead.dims, sizes, strict=True))
    for number in range(len(operation.operands)):
        if operation.inputs[number].ndim:
            reader.move_operand(operation, number, target, keep_unreduced=True)
    return ArraySharding(target, lead.unreduced)


def concatenate(reader: Reader, operation: Operation) -> ArraySharding:
    """The rule for `concatenate`: the result takes the sharding of the operand with the most shards.

    The concatenated dimension stays sharded too, unless another sharding is wanted: rows then move to the devices that
    hold them in the result.
    """
    joined, wanted, size = operation.params["dimension"], operation.wanted_dims, operation.output.shape
    names = _lead(reader, operation).dims[joined]
    shards = reader.mesh.shards(names)
    if not 1 < shards <= size[joined] or (wanted and wanted[joined] != names):
        return _join(reader, operation, [joined])
    split = [one.dims[joined] == names and not one.is_constant for one in operation.operands]
    result, begin = _join(reader, operation, ()), 0
    for number, (aval, is_split) in enumerate(zip(operation.inputs, split, strict=True)):
        if is_split:
            rows = _foreign_rows(size[joined], aval.shape[joined], begin, shards)
            _add_permute(reader, operation, joined, rows, chosen=wanted is None, number=number)
        begin += aval.shape[joined]
    return result


def _lead(reader: Reader, operation: Operation) -> ArraySharding:
    return max(operation.operands, key=lambda one: reader.mesh.shards(one.mesh_axes))


def _join(reader: Reader, operation: Operation, gone: Sequence[int]) -> ArraySharding:
    target = tuple(() if d in gone else names for d, names in enumerate(_lead(reader, operation).dims))
    sums = {one.unreduced for one in operation.operands if not one.is_constant}
    keeps = len(sums) == 1
    for number in range(len(operation.operands)):
        reader.move_operand(operation, number, target, keeps, chosen=operation.wanted_dims != target)
    constant = all(one.is_constant for one in operation.operands)
    return ArraySharding(target, next(iter(sums)) if keeps else frozenset(), constant)


def roll(reader: Reader, operation: Operation) -> ArraySharding:
    """An array turned round along a dimension. Its devices hand on the rows that lie on the next ones afterwards."""
    operand, d = operation.operands[0], operation.params["dimension"]
    size, shards = operation.output.shape[d], reader.mesh.shards(operand.dims[d])
    shift = min(operation.params["shift"], size - operation.params["shift"])
    _add_permute(reader, operation, d, min(shift, -(-size // shards)), chosen=False)
    return ArraySharding(operand.dims, operand.unreduced, operand.is_constant)


def reverse(reader: Reader, operation: Operation) -> ArraySharding:
    """An array whose dimensions are turned over. Of a split one, all devices but one in the middle hand on all rows."""
    operand = operation.operands[0]
    for d in operation.params["dimensions"]:
        shards = reader.mesh.shards(operand.dims[d])
        rows = operation.output.shape[d] / shards * (shards - shards % 2) / shards
        _add_permute(reader, operation, d, rows, chosen=False)
    return ArraySharding(operand.dims, operand.unreduced, operand.is_constant)


def stack(reader: Reader, operation: Operation) -> ArraySharding:
    """Arrays along a new dimension."""
    result, axis = _join(reader, operation, ()), operation.params.get("axis", 0)
    return result._replace(dims=(*result.dims[:axis], (), *result.dims[axis:]))


RULES: dict[str, Rule] = {
    "gather": gather,
    **dict.fromkeys(("scatter-add", "scatter-sub"), scatter_add),
    **dict.fromkeys(("scatter-mul", "scatter-min", "scatter-max"), scatter_extreme),
    "scatter": scatter,
    "slice": slice_,
    "split": split,
    "unstack": unstack,
    "pad": pad,
    "dynamic_slice": dynamic_slice,
    "dynamic_update_slice": dynamic_update_slice,
    "concatenate": concatenate,
    ROLL.name: roll,
    "rev": reverse,
    "stack": stack,
    **dict.fromkeys(
        (
            "reduce_window",
            "reduce_window_sum",
            "reduce_window_max",
            "reduce_window_min",
            "select_and_scatter_add",
            "select_and_gather_add",
        ),
        windows,
    ),
}
