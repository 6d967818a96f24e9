"""The report on a layout's costs, and its JSON form with a versioned schema. `show/report.py` puts it into words."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from gspmd_lm.foresight.bounds import LowerBounds
from gspmd_lm.foresight.collectives import Collective
from gspmd_lm.foresight.memory import Memory
from gspmd_lm.foresight.table import PlacedArray
from gspmd_lm.foresight.timing.predict import Prediction
from gspmd_lm.foresight.whole_job import WholeJob
from gspmd_lm.units import bits

SCHEMA = 1  # counted up when a key changes its meaning or goes away; new keys leave it


@dataclasses.dataclass(frozen=True)
class Finding:
    """One finding. `code` is stable, for scripts; `fix` says what to type."""

    code: str
    message: str
    fix: str


@dataclasses.dataclass(frozen=True)
class Report:
    """Everything said about one layout on one target."""

    target: str  # v5p:4x4x4
    chip: str  # TPU v5p; "" on cpu
    devices: int
    config: str  # or the name of a step of one's own
    rules: str  # path of the rules file; "" for a step of one's own
    phase: str  # train, prefill or decode; step for one of one's own
    mesh: Mapping[str, int]
    parameters: int | None  # None, like the two below it, for a step of one's own
    active_parameters: int | None  # that compute one token: fewer in a mixture of experts
    tokens: int | None  # per step, all devices
    memory: Memory
    collectives: tuple[Collective, ...]
    prediction: Prediction | None
    no_prediction: str  # the reason where there is none
    floor: LowerBounds
    warnings: tuple[Finding, ...]
    compile_s: float
    versions: Mapping[str, str]  # jax, jaxlib, libtpu, ... and the compiler options that were set
    arrays: tuple[PlacedArray, ...]
    rules_text: str = ""  # of the rules file
    attention: str = ""  # the kernel, and why it is not the fastest; "" where there is nothing to choose
    gather: str = ""  # when stages gather their weights, and why; "" where there is nothing to choose
    unit: str = "tokens"  # what `tokens` and speeds count; "rows" of a task that does not say how many tokens it has
    job: WholeJob | None = None  # of a train step whose time is predicted
    matmuls: str = ""  # of which dtype of 8 bits the operands of products are; "" where they are not of 8 bits

    @property
    def layout(self) -> str:
        """The name of the rules file, without its folder and ending; of a step of one's own, its name."""
        return (self.rules or self.config).rsplit("/", 1)[-1].removesuffix(".yaml")

    @property
    def sent_bytes(self) -> int:
        """The bytes that one device sends in one step."""
        return sum(collective.bytes_per_device_per_step for collective in self.collectives)

    @property
    def above_floor(self) -> float | None:
        """Communication over its lower bound; None if none is known, nothing must be sent or nothing was compiled.

        Where something is sent in another width than the bound counts, both are counted as float32.
        """
        floor, alike = self.floor, not self.other_width
        least_bytes = floor.communication_bytes if alike else floor.float32_bytes
        if not least_bytes or floor.estimated_because or self.memory.refusal:
            return None
        as_float32 = (
            collective.bytes_per_device_per_step * max(1.0, 32 / (bits(collective.dtype) or 32))
            for collective in self.collectives
        )
        return (self.sent_bytes if alike else sum(as_float32)) / least_bytes

    @property
    def memory_bound_share(self) -> float | None:
        """Of a step of decode, the time in which a device reads its weights and cache once, over the predicted time.

        It is None where no time is predicted, and for other steps.
        """
        if self.phase != "decode" or not self.prediction or self.floor.memory_s is None:
            return None
        return self.floor.memory_s / self.prediction.step_time_s

    @property
    def other_width(self) -> str:
        """The share that is sent in another width than the lower bound counts, as '52% in bf16'; '' if there is none.

        The TPU compiler narrows some float32 products that it gathers. XLA:CPU widens all bfloat16.
        """
        if self.floor.dtype == "float32":
            other = [collective for collective in self.collectives if collective.dtype in ("bf16", "f16")]
        else:
            other = [collective for collective in self.collectives if collective.dtype == "f32" and not self.chip]
        share = sum(collective.bytes_per_device_per_step for collective in other) / max(self.sent_bytes, 1)
        return f"{share:.0%} in {other[0].dtype}" if share >= 0.005 else ""


def to_json(reports: Sequence[Report]) -> dict[str, Any] | list[dict[str, Any]]:
    """The output of --json: an object for one report, a list for several. docs/explain_json.md has every key."""
    objects = [_object(report) for report in reports]
    return objects[0] if len(objects) == 1 else objects


def _object(report: Report) -> dict[str, Any]:
    json_object = {"schema": SCHEMA, **json.loads(json.dumps(dataclasses.asdict(report)))}
    json_object |= {"above_floor": report.above_floor, "other_width": report.other_width}
    json_object |= {"memory_bound_share": report.memory_bound_share}
    reason = json_object.pop("no_prediction")
    prediction = json_object["prediction"] or dict.fromkeys(field.name for field in dataclasses.fields(Prediction))
    json_object["timeline"] = prediction.pop("timeline") or []
    json_object["unpriced"] = prediction.pop("unpriced") or {}
    json_object["unpriced_share"] = prediction.pop("unpriced_share")
    if report.prediction is not None:
        reason = None
        prediction["fusions"] = [{"name": name, "seconds": seconds} for name, seconds in report.prediction.fusions]
    json_object["prediction"] = {"reason": reason, **prediction}
    return json_object
