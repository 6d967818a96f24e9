"""The transfers and FLOPs of one device in a step, read from the traced program of the whole step: `read_step`.

A jaxpr of a step has all of it: the forward and the backward pass, what is computed again, and the update. Its
arguments have shardings, and it has sharding constraints. The reader follows the shardings from the
arguments to the results, one operation after the other, and knows nothing but primitives of jax: no model, and no rules
file.

  The result of an operation is split as its operands are. If operands do not fit each other, one of them is moved.
  A matmul whose contracted dimension is split gives a partial sum on each device. It stays a partial sum through all
  operations that may be done before adding up as well as after it, until an operation needs the sum itself, or the
  program says where the array is to be. There the sum is made: scattered where it is wanted split, else for all.
  Where several ways lead to the same result, the one that sends least is taken, operation by operation.
  An array is brought to a sharding once. In a loop, what does not change from one iteration to the next is sent once.
  A loop counts as often as it runs; of branches, the cheapest.

So the bytes are a lower bound as far as the program says how arrays are sharded. Where the reader itself chose between
ways to compute (`Transfer.chosen`), another choice could send less later, and the sum is an estimate
(`Reading.estimated_because`). XLA sends more where it adds up partial sums apart, or earlier.

    mesh = AbstractMesh((2, 4), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)
    with jax.sharding.use_abstract_mesh(mesh):
        traced = jitted_step.trace(*arguments)  # ShapeDtypeStructs whose shardings are NamedShardings of the mesh
    read_step(traced.jaxpr, arguments, traced.out_info).bytes_by_axes

A mesh of devices does as well as an abstract one. Without a mesh, `read_step(jaxpr).flops` are those of all devices.

`reader.py` walks. `sharding.py` says which collectives bring an array to another sharding; `network.sent_bytes` says
what they send. The other modules have the rules of primitives.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import NamedSharding

from gspmd_lm.foresight import equations
from gspmd_lm.foresight.propagation import control, elementwise, indexing, matmuls, per_device
from gspmd_lm.foresight.propagation.arguments import held_bytes
from gspmd_lm.foresight.propagation.counted_loops import with_scans
from gspmd_lm.foresight.propagation.reader import Operation, Reader, Rule
from gspmd_lm.foresight.propagation.record import Reading, Transfer
from gspmd_lm.foresight.propagation.sharding import ArraySharding, MeshAxes, rank_of, replicated_sharding

if TYPE_CHECKING:
    from gspmd_lm.train.step import Step

__all__ = ["Reading", "Transfer", "read_step", "read_train"]

RULES: dict[str, Rule] = elementwise.RULES | indexing.RULES | matmuls.RULES | control.RULES | per_device.RULES


def read_step(
    program: Any,
    arguments: Any = (),
    results: Any = (),
    mesh: Mapping[str, int] | None = None,
    name: str = "",
    joined: Mapping[str, MeshAxes] | None = None,
    platform: str = "",
) -> Reading:
    """The transfers and FLOPs of one device when a traced program runs.

    program: a closed jaxpr. That of a call of a jitted function says itself how the results are sharded.
    arguments, results: trees of arrays or ShapeDtypeStructs, each with a NamedSharding or None. An argument without one
    is held by every device; a result without one may be anywhere.
    mesh: sizes by the name of a mesh axis; None takes the mesh of the arguments.
    name: that of the jitted function. The phases of a step depend on it, see `op_names.parse`.
    joined: the axes of `mesh` that an axis of another mesh is, by its name.
    platform: cpu, cuda or tpu, whose functions `jax.lax.platform_dependent` takes; '' takes those that compute most.
    """
    leaves = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(arguments)]
    if mesh is None:
        mesh = next((leaf.mesh.shape for leaf in leaves if isinstance(leaf, NamedSharding)), {})
    reader = Reader(mesh, RULES, platform)
    reader.mesh.join_axes(joined or {})
    jaxpr = with_scans(equations.live(program.jaxpr))
    leaves += [None] * (len(jaxpr.invars) - len(leaves))
    operands = [
        ArraySharding(reader.mesh.dims(leaf.spec, rank_of(var.aval)))
        if isinstance(leaf, NamedSharding)
        else replicated_sharding(rank_of(var.aval))
        for var, leaf in zip(jaxpr.invars, leaves, strict=True)
    ]
    places = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(results)]
    places += [None] * (len(jaxpr.outvars) - len(places))
    wanted = [
        reader.mesh.dims(leaf.spec, rank_of(var.aval)) if isinstance(leaf, NamedSharding) else None
        for var, leaf in zip(jaxpr.outvars, places, strict=True)
    ]
    stack = f"jit({name})" if name else ""  # as a compiler begins the names of its operations
    shardings = reader.read(jaxpr, operands, stack, wanted)
    places = [result.dims if dims is None else dims for result, dims in zip(shardings, wanted, strict=True)]
    makers = {var: equation for equation in jaxpr.eqns for var in equation.outvars}
    for var, result, dims, placed in zip(jaxpr.outvars, shardings, wanted, places, strict=True):
        if jaxpr.eqns and (dims is not None or result.unreduced):  # what is returned is no partial sum
            maker = jaxpr.eqns[-1] if hasattr(var, "val") else makers.get(var, jaxpr.eqns[-1])
            operation = Operation(maker, equations.join_names(stack, maker), [], {})
            reader.move(operation, var.aval, result, placed)
    record = reader.record
    return Reading(
        tuple(record.transfers),
        dict(record.flops),
        dict(record.unknown),
        dict(record.model_flops),
        record.values.least_bytes(),
        held_bytes(reader.mesh, jaxpr, [one.dims for one in operands], places),
        record.branch_bytes,
    )


def read_train(step: "Step", traced: Any = None) -> Reading:
    """The transfers and FLOPs of one device in a train step; `traced` is its program, if it is traced already."""
    traced = traced or step.trace_train()
    return read_step(traced.jaxpr, (step.abstract_state, step.abstract_batch), traced.out_info, name=traced.fun_name)
