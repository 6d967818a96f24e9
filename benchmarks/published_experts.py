"""What published mixtures took longer since their experts were computed otherwise than here: benchmarks/known_runs.md.

    python -m benchmarks.published_experts [--compiled]    # also what copies to the host take in row 51's own program

The public source of MaxText says what its programs did (src/MaxText/layers/moe.py, its `sparse_matmul`). Each of these
differences is priced by the rules that `plan` prices this project's layouts by, on top of what results/ has for the row
or, where the row was not compiled, of its estimate. Nothing is fitted, and without --compiled nothing is compiled.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any
from unittest import mock

from benchmarks import foresight, measure, step_times
from gspmd_lm.foresight.timing import op_time
from gspmd_lm.foresight.timing.simulate import Simulation
from gspmd_lm.hardware import target as targets
from gspmd_lm.model.kernels import grouped
from gspmd_lm.plan.estimate import Estimator
from gspmd_lm.plan.operations import MoveOp, Op
from gspmd_lm.plan.timed_ops import TimedOp
from gspmd_lm.sharding.rules import Rules

DEFAULT_TILE = 512, 1024, 1024  # MaxText's tile of megablox, if a recipe sets none: rows, inner columns, columns
# Cycles for each row of 2,880 numbers of bfloat16: to look it up in a table of 128 rows, and to add it to such a table,
# as the gradient of a bias is. Source: `python -m benchmarks.gather_schedules tpu7x`.
LOOKED_UP, ADDED = 2423 / 128, 13590 / 512
COLUMNS = {"number": "row", "row": "published run", "what": "what", "step_s": "s", "error": "error"}


def rows() -> list[dict[str, Any]]:
    """The prediction of each published mixture with what its run did otherwise, one difference after the other."""
    found = []
    for number in (51, 52, 53):
        row, total_s = step_times.rows()[number], 0.0
        for what, seconds in differences(row):
            total_s += seconds
            error = f"{total_s / row.step_time_s - 1:+.1%}"
            found.append({"number": number, "row": row.name, "what": what, "step_s": f"{total_s:.3f}", "error": error})
    return found


def differences(row: step_times.Row) -> Iterator[tuple[str, float]]:
    """What is predicted of a row, and then what each difference adds to it."""
    estimator = Estimator(row.config(), targets.parse(row.target))
    rules, chip = row.rules().fill(estimator.target.devices), estimator.chip
    assert chip
    step_s = estimator.estimate(rules).step_time_s
    compiled_s = next((one["predicted_s"] for one in measure.read("foresight_times") if one["row"] == row.name), None)
    yield ("as compiled", compiled_s) if compiled_s else ("as estimated", step_s)
    tokens = row.per_device_batch * row.seq
    row_bytes, copies = 2 * row.D, tokens * row.experts_per_token
    with mock.patch.object(grouped, "_tile", _default_tile):
        other = Estimator(row.config(), estimator.target, estimator.traces)
        tiled_s, ops = other.estimate(rules).step_time_s, list(_of_experts(other, rules))
    if row.more.get("feed_forward.bias"):  # this run had another kernel, and kept the results of experts on the host
        row_s = copies * row.L / chip.tensor_cores / chip.clock_hz  # for each cycle of a row, in all layers
        yield "biases are looked up for each row, three times forward and twice again", 5 * LOOKED_UP * row_s
        yield "their gradients are added up row by row, three times", 3 * ADDED * row_s
        ours_s = sum(_both_passes(one) for one in _of_experts(estimator, rules) if _is_bias(one))
        yield "in place of products with one-hot rows", -ours_s
    else:
        yield "tiles of 512 x 1024 x 1024", tiled_s - step_s
        downs = [one for one in ops if isinstance(one.op, Op) and one.op.is_grouped][2::3]
        combined = [one for one in ops if isinstance(one.op, MoveOp) and one.op.node.primitive == "gather"][1::2]
        if not row.more.get("experts.weighted_input"):
            again_s = sum(one.trip_count * one.forward_s for one in (*downs, *combined))
            yield "results of experts are computed and gathered again, for the gradients of their weights", again_s
    if row.experts_per_token > 1:
        moved_bytes = 2 * row.L * (copies + tokens) * row_bytes
        yield "tokens are repeated before they are sorted, twice", moved_bytes / op_time.hbm_bytes_per_s(chip)


def _default_tile(
    rows: float, inner: float, columns: float, itemsize: int, kind: str, outer: bool = False
) -> tuple[int, int, int]:
    return DEFAULT_TILE[0], min(DEFAULT_TILE[1], int(inner)), min(DEFAULT_TILE[2], int(columns))


def _of_experts(estimator: Estimator, rules: Rules) -> Iterator[TimedOp]:
    """What the experts of all layers do, in the order of the program."""
    for costs in estimator._layout(rules).parts:
        for one in costs.timed_ops:
            if one.in_loop and any("mlp" in node.name.modules for node in one.op.nodes):
                yield one


def _is_bias(one: TimedOp) -> bool:
    """Whether it multiplies one-hot rows with the biases of experts."""
    op = one.op
    return (
        isinstance(op, Op)
        and op.flops > 0
        and not op.is_grouped
        and any("mlp" in n.name.modules[-1:] for n in op.nodes)
    )


def _both_passes(one: TimedOp) -> float:
    return one.trip_count * (2 * one.forward_s + one.backward_s)


def copied_s(row: step_times.Row) -> tuple[float, float]:
    """The seconds of a row's compiled program: as it is, and where the host gets each expert's result."""
    module, chip, network = foresight.program(row)
    more = (1 + row.experts_per_token) / 2  # the input of a layer goes there too
    slower = dataclasses.replace(chip, host_link_bytes_per_s=chip.host_link_bytes_per_s / more)
    as_is, longer = (Simulation(module, one, dataclasses.replace(network, chip=one)).clock_s for one in (chip, slower))
    return as_is, longer


def main() -> None:
    parser = measure.flags(__doc__, writes=False)
    parser.add_argument("--compiled", action="store_true")
    compiled = parser.parse_args().compiled
    print(measure.markdown(rows(), COLUMNS))
    if compiled:
        print("row 51: {:.3f} s, and {:.3f} s with more copies to the host".format(*copied_s(step_times.rows()[51])))


if __name__ == "__main__":
    main()
