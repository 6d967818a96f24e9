"""The rules of primitives that compute each element by itself, reduce dimensions or change the form of an array."""

from collections.abc import Collection

from gspmd_lm.foresight.propagation.reader import Operation, Reader, Rule, unknown
from gspmd_lm.foresight.propagation.sharding import (
    ArraySharding,
    Dims,
    MeshAxes,
    axes_of,
    replicated_sharding,
    without,
)
from gspmd_lm.foresight.propagation.views import ELEMENTWISE, reshaped_dims
from gspmd_lm.foresight.propagation.wanted import ADDITIVE


def elementwise(reader: Reader, operation: Operation) -> ArraySharding | list[ArraySharding]:
    """The rule for elementwise primitives: all operands take the sharding of the one with the most shards."""
    shape = operation.output.shape
    arrays = [number for number, aval in enumerate(operation.inputs) if getattr(aval, "ndim", 0)]
    if any(not _broadcasts(operation.inputs[number].shape, shape) for number in arrays):
        return unknown(reader, operation)
    operands = [operation.operands[number] for number in arrays]
    if not operands:
        keeps = operation.primitive in ADDITIVE or operation.primitive in ("mul", "div")
        sums = frozenset[str]().union(*(one.unreduced for one in operation.operands))
        return ArraySharding(((),) * len(shape), sums if keeps else frozenset())
    for number in range(len(operation.operands)):
        if number not in arrays:
            reader.move_operand(operation, number, ())
    dims = _leading(reader, operands, operation.wanted_dims, len(shape))
    keeps = _keeps_sum(operation, operands)
    for number in arrays:
        aval = operation.inputs[number]
        target = tuple(names if aval.shape[d] == shape[d] else () for d, names in enumerate(dims))
        reader.move_operand(operation, number, target, keep_unreduced=keeps, chosen=target != operation.wanted_dims)
    sums = frozenset[str]().union(*(operation.operands[number].unreduced for number in arrays))
    scatter = operands[0].scatter if operation.primitive in ("convert_element_type", "copy", "mul") else None
    constant = all(one.is_constant for one in operation.operands)
    return ArraySharding(dims, sums if keeps else frozenset(), constant, scatter=scatter)


def _broadcasts(shape: tuple[int, ...], result: tuple[int, ...]) -> bool:
    return len(shape) == len(result) and all(a in (1, b) for a, b in zip(shape, result, strict=True))


def _leading(reader: Reader, operands: list[ArraySharding], wanted: Dims | None, rank: int) -> Dims:
    """The sharding of the operand with the most shards, and the mesh axes that split the others alone.

    Of several with as many shards, the operand counts that has the sharding in which the result is wanted.
    """
    lead = max(operands, key=lambda one: (reader.mesh.shards(one.mesh_axes), not one.is_constant, one.dims == wanted))
    used: set[str] = set()
    dims: list[MeshAxes] = []
    for d in range(rank):
        names = lead.dims[d] or max((one.dims[d] for one in operands), key=len)
        names = tuple(n for n in names if n not in used and (n in lead.dims[d] or n not in lead.mesh_axes))
        used |= set(names)
        dims.append(names)
    return tuple(dims)


def _keeps_sum(operation: Operation, operands: list[ArraySharding]) -> bool:
    """Whether the result is a partial sum where the operands are: not if sums are multiplied, or only some added."""
    if operation.primitive in ("mul", "div", "select_n"):
        several = sum(bool(one.unreduced) for one in operands) > 1
        return not several and not (operation.primitive == "div" and operation.operands[-1].unreduced)
    sums = {one.unreduced for one in operands if not one.is_constant}
    return operation.primitive in ADDITIVE and len(sums) == 1


def select(reader: Reader, operation: Operation) -> ArraySharding | list[ArraySharding]:
    """Elements of one of several arrays. The condition is added up first, if it is a partial sum."""
    reader.move_operand(operation, 0, operation.operands[0].dims)
    return elementwise(reader, operation)


def constant(_: Reader, operation: Operation) -> list[ArraySharding]:
    """Numbers that every device can make for itself."""
    return [replicated_sharding(var.aval.ndim, is_constant=True) for var in operation.equation.outvars]


def reduction(reader: Reader, operation: Operation) -> ArraySharding:
    """A sum, or a maximum, over dimensions. Over a split one, a device has a part of it."""
    operand, gone = operation.operands[0], operation.params["axes"]
    dims = tuple(names for d, names in enumerate(operand.dims) if d not in gone)
    over = {name for d in gone for name in operand.dims[d]}
    result = ArraySharding(dims, operand.unreduced | over, operand.is_constant, operand.loop_depth)
    if operation.primitive == "reduce_sum" or not result.unreduced:
        return result
    return reader.move(operation, operation.output, result, dims)


def broadcast(reader: Reader, operation: Operation) -> ArraySharding:
    """An array along more dimensions. A partial sum is added up before it grows."""
    if operation.output.size > operation.inputs[0].size:
        reader.move_operand(operation, 0, operation.operands[0].dims)
    operand, shape = operation.operands[0], operation.inputs[0].shape
    dims: list[MeshAxes] = [()] * len(operation.params["shape"])
    for d, to in enumerate(operation.params["broadcast_dimensions"]):
        if shape[d] == operation.params["shape"][to]:
            dims[to] = operand.dims[d]
    return ArraySharding(tuple(dims), operand.unreduced, operand.is_constant)


def transpose(_: Reader, operation: Operation) -> ArraySharding:
    operand = operation.operands[0]
    dims = tuple(operand.dims[d] for d in operation.params["permutation"])
    return ArraySharding(dims, operand.unreduced, operand.is_constant)


def squeeze(_: Reader, operation: Operation) -> ArraySharding:
    operand, gone = operation.operands[0], operation.params["dimensions"]
    dims = tuple(names for d, names in enumerate(operand.dims) if d not in gone)
    return ArraySharding(dims, operand.unreduced, operand.is_constant)


def reshape(reader: Reader, operation: Operation) -> ArraySharding:
    """Dimensions are joined and cut apart. What splits the major part of them splits the major part afterwards."""
    operand = operation.operands[0]
    dims, lost = reshaped_dims(reader.mesh, operand.dims, operation.inputs[0].shape, operation.params["new_sizes"])
    reader.move_operand(operation, 0, without(operand.dims, lost), keep_unreduced=True)
    return ArraySharding(dims, operand.unreduced, operand.is_constant)


def along_dimension(reader: Reader, operation: Operation) -> list[ArraySharding]:
    """Something is computed along some dimensions, of which a device needs all. Others stay split.

    Operands and results of fewer dimensions lack the last ones, such as the eigenvalues of a batch of matrices.
    """
    rank = max(aval.ndim for aval in operation.inputs)
    along = _whole_dimensions(operation, rank)
    targets = [
        tuple(() if d in along else names for d, names in enumerate(one.dims))
        for one in operation.operands
        if len(one.dims) == rank
    ]
    target = max(targets, key=lambda dims: reader.mesh.shards(axes_of(dims)))
    for number, aval in enumerate(operation.inputs):
        reader.move_operand(operation, number, target[: aval.ndim])
    return [ArraySharding(target[: var.aval.ndim]) for var in operation.equation.outvars]


def _whole_dimensions(operation: Operation, rank: int) -> Collection[int]:
    """The dimensions that are sorted, added up step by step, repeated, or those of a signal or of a matrix."""
    params = operation.params
    if operation.primitive in OF_MATRICES:
        return range(rank - OF_MATRICES[operation.primitive], rank)
    if operation.primitive == "fft":
        return range(rank - len(params["fft_lengths"]), rank)
    if operation.primitive == "tile":
        return [d for d, times in enumerate(params["reps"]) if times > 1]
    if "dimensions" in params:
        return params["dimensions"]
    return [params.get("dimension", params.get("axis", -1)) % rank]


CONSTANT = (
    "iota",
    "empty",
    "random_seed",
    "random_split",
    "random_fold_in",
    "random_bits",
    "threefry2x32",
    "threefry4x32",
    "philox2x32",
    "philox4x32",
    "rng_bit_generator",
)
REDUCTIONS = ["reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or", "reduce_prod", "argmax", "argmin"]

# Of batches of matrices, or of permutations -> how many dimensions one has.
OF_MATRICES = {
    **dict.fromkeys(
        (
            "cholesky",
            "eig",
            "eigh",
            "geqp3",
            "geqrf",
            "hessenberg",
            "householder_product",
            "lu",
            "ormqr",
            "qr",
            "schur",
            "svd",
            "triangular_solve",
            "tridiagonal",
            "tridiagonal_solve",
        ),
        2,
    ),
    "lu_pivots_to_permutation": 1,
}
ALONG_DIMENSIONS = (
    "cumsum",
    "cumprod",
    "cummax",
    "cummin",
    "cumlogsumexp",
    "sort",
    "top_k",
    "tile",
    "fft",
    *OF_MATRICES,
)


RULES: dict[str, Rule] = {
    **dict.fromkeys(ELEMENTWISE, elementwise),
    **dict.fromkeys(CONSTANT, constant),
    **dict.fromkeys(("random_wrap", "random_unwrap", "random_clone"), constant),
    **dict.fromkeys(REDUCTIONS, reduction),
    **dict.fromkeys(ALONG_DIMENSIONS, along_dimension),
    "select_n": select,
    "broadcast_in_dim": broadcast,
    "transpose": transpose,
    "squeeze": squeeze,
    "reshape": reshape,
}
