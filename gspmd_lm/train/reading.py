"""Lines at the start of training: the rows that the run will read, and whether its source is fast enough."""

from collections.abc import Mapping
from typing import NamedTuple

import jax

from gspmd_lm.data.loader import Loader
from gspmd_lm.data.speed import describe_speed, mean_row_bytes, measure_speed
from gspmd_lm.errors import InputError, RunFailed
from gspmd_lm.units import human_bytes, human_count, human_seconds, human_short


class StepTime(NamedTuple):
    """The time of a step, without waiting for data."""

    seconds: float
    known: str  # predicted, or measured


def find_step_time(predicted_s: float | None, wall_s: Mapping[str, float], steps: int) -> StepTime | None:
    """The time of a step, as predicted, or as earlier starts had it; None if neither is known.

    wall_s: where the time of earlier starts went, in `steps` steps.
    """
    if predicted_s:
        return StepTime(predicted_s, "predicted")
    earlier_s = wall_s.get("steps", 0.0)
    return StepTime(earlier_s / steps, "measured before") if steps and earlier_s else None


def describe(
    rows: Loader,
    shardings: Mapping[str, jax.sharding.Sharding],
    span: tuple[int, int],
    step: StepTime | None,
    processes: int,
) -> str:
    """Lines about the rows of the steps from `span[0]` to before `span[1]`. Some rows are read to measure the source.

    A row that cannot be read is said, and ends the run when a step needs it.
    """
    steps, local = span[1] - span[0], rows.local_rows(shardings)
    local = local[local < rows.batch]  # those of padding are not read
    count, wanted = steps * rows.batch, len(local) / step.seconds if step else 0.0
    mean_bytes = mean_row_bytes(rows)
    step_bytes = len(local) * mean_bytes
    tokens = f", {human_count(count * rows.tokens / len(rows.rows))} tokens" if rows.tokens else ""
    epochs = "" if rows.shares else f": {count / len(rows.rows):.3g} epochs"
    lines = [f"steps    {steps:,} steps read {count:,} rows{tokens}{epochs}"]
    if step_bytes:
        who = f" in each of {processes} processes" if processes > 1 else ""
        rate = f", {human_bytes(wanted * mean_bytes)}/s" if step else ""
        at = f" at {human_seconds(step.seconds)} a step, {step.known}" if step else ""
        lines.append(f"reading  {human_bytes(step_bytes)} a step{who}{rate}{at}")
    try:
        speed = measure_speed(rows, local, span[0])
    except (InputError, RunFailed) as error:
        return "\n".join([*lines, f"source   not measured: {error}"])
    more = f", {speed.rows_per_s / wanted:.3g} times what the steps need" if wanted else ""
    lines.append(f"source   gives {describe_speed(speed)}{more}")
    if speed.rows_per_s < wanted:
        needed, given = human_short(wanted), human_short(speed.rows_per_s)
        lines.append(
            f"warning: data limits the steps: they need {needed} rows/s in this process, and the source gives {given}, "
            f"so that a step takes {human_seconds(len(local) / speed.rows_per_s)}"
        )
    return "\n".join(lines)
