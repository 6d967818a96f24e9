"""A layout's costs, gathered for people and scripts: `Report`, and the JSON form with its versioned schema.

`terminal.py` prints a report, `page.py` makes an HTML page of it, `figures.py` has the words and numbers of both.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from gspmd_lm.foresight.collectives import Collective
from gspmd_lm.foresight.cost.schedule import Prediction
from gspmd_lm.foresight.floor import Floor
from gspmd_lm.foresight.memory import Memory
from gspmd_lm.train.table import Row

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
    config: str
    rules: str  # path of the rules file
    phase: str  # train, prefill or decode
    mesh: Mapping[str, int]
    parameters: int
    tokens: int  # per step, all devices
    memory: Memory
    collectives: tuple[Collective, ...]
    prediction: Prediction | None
    no_prediction: str  # the reason where there is none
    floor: Floor
    warnings: tuple[Finding, ...]
    compile_s: float
    versions: Mapping[str, str]  # jax, jaxlib, libtpu, ... and the compiler options that were set
    arrays: tuple[Row, ...]


# What the JSON holds. `x[].y` is y of each entry of a list, `x.*` any key of an object. Bytes and seconds are of one
# device and one step. [compiled] comes from the compiler's output for the target, [predicted] from a model of it,
# [counted] from shapes alone.
KEYS = {
    "schema": f"version of this table: {SCHEMA}",
    "target": "as asked for: v5p:4x4x4",
    "chip": "TPU v5p; empty on cpu",
    "devices": "how many devices the mesh has",
    "config": "name of the config",
    "rules": "path of the rules file",
    "phase": "what the program does: train, prefill or decode",
    "mesh.*": "mesh axis -> its size; the order of the keys is the order of devices, the last one fastest",
    "parameters": "of the model [counted]",
    "tokens": "per step, of all devices [counted]; of a decode step one per row",
    "memory.weights_bytes": "parameters [compiled]",
    "memory.optimizer_bytes": "optimizer state [compiled]",
    "memory.batch_bytes": "input tokens and what comes with them [compiled]",
    "memory.cache_bytes": "keys and values of all slots, in generation [compiled]",
    "memory.temporaries_bytes": "activations, gradients and scratch space [compiled]",
    "memory.peak_bytes": "the most that is alive at once [compiled]",
    "memory.limit_bytes": "what a program may use of the device; null on cpu",
    "memory.host_bytes": "offloaded to the host [compiled]",
    "memory.fits": "whether the peak is within the limit",
    "memory.refusal": "what the compiler said when it refused the program for memory, else empty",
    "memory.padding_bytes": "of the temporaries: what tiles add to weights, optimizer state and batch [compiled]",
    "memory.largest[].bytes": "a large temporary, the largest first [compiled]",
    "memory.largest[].shape": "as the program writes it: bf16[4,8192,14336]",
    "memory.largest[].axes[]": "logical axis of each dimension, empty where the source does not tell",
    "memory.largest[].source": "file:line",
    "memory.largest[].op": "module path and primitive",
    "collectives[].kind": "all-gather, all-reduce, reduce-scatter, all-to-all, windowed all-gather, ... [compiled]",
    "collectives[].mesh_axes[]": "the mesh axes it runs over; data:dcn is the part of data between slices or hosts",
    "collectives[].dtype": "bf16, f32, ...",
    "collectives[].times_per_step": "executions, loops multiplied [compiled]",
    "collectives[].bytes_per_device_per_step": "what one device sends in all of them [compiled]",
    "collectives[].phase": "forward, backward, recomputation or optimizer",
    "collectives[].op": "where in the model: layers.attention.wq",
    "collectives[].einsum": "the product that the tensor comes from or goes to, else empty",
    "collectives[].source": "file:line",
    "collectives[].rules[]": "keys of the rows of the rules file that cause it: weights.embed",
    "collectives[].overlapped": "whether compute runs meanwhile [compiled]",
    "collectives[].link": "the slowest in use: ici, die, dcn, nvlink or network; empty on cpu",
    "collectives[].in_loop": "whether it happens in every layer, chunk of the loss or microbatch",
    "collectives[].group_size": "devices that take part in one",
    "collectives[].elements": "of the largest tensor moved, whole",
    "collectives[].instructions[]": "names in the compiled program",
    "prediction.reason": "why the values below are null; null where they are not",
    "prediction.step_time_s": "one step [predicted]",
    "prediction.matmul_s": "of it in matrix multiplications [predicted]",
    "prediction.attention_s": "of it in attention kernels [predicted]",
    "prediction.other_s": "of it in other compute [predicted]",
    "prediction.exposed_communication_s": "of it waiting for collectives [predicted]",
    "prediction.exposed_by_axis.*": "mesh axis -> the part of that wait [predicted]",
    "prediction.exposed_host_copy_s": "of it waiting for copies from and to the host [predicted]",
    "prediction.communication_s": "collectives in all, exposed or not [predicted]",
    "prediction.mfu": "model FLOPs per second over the chip's peak, 0 to 1 [predicted]",
    "prediction.tokens_per_s_per_device": "[predicted]",
    "prediction.missing_flops_share": "of what the model must multiply, the part that no operation does [compiled]",
    "prediction.basis": "what the prices rest on",
    "prediction.error": "how wrong they were where they could be compared",
    "prediction.fusions[].name": "a costly operation, the costliest first",
    "prediction.fusions[].seconds": "of it in one step [predicted]",
    "floor.compute_s": "model FLOPs over the chip's peak; null on cpu [counted]",
    "floor.memory_s": "bytes that must be read and written once over memory bandwidth; null on cpu [counted]",
    "floor.communication_bytes": "what a device must send under this way of splitting the model [counted]",
    "floor.communication_by_axis.*": "mesh axis -> the part of it [counted]",
    "floor.flops": "of the model on one device, without recomputation [counted]",
    "floor.dtype": "in which activations, and weights in use, are counted to be sent: bfloat16 or float32",
    "floor.float32_bytes": "what a device must send if all of it is as wide as float32 [counted]",
    "warnings[].code": "stable name of a finding",
    "warnings[].message": "what was found",
    "warnings[].fix": "what to do about it",
    "unpriced_share": "of the program's bytes, in operations the prediction could not price; null without one",
    "unpriced.*": "opcode or call target, and where in the model -> its share",
    "timeline[].start_s": "seconds from the start of one turn of the loop over layers [predicted]",
    "timeline[].end_s": "the same for the end [predicted]",
    "timeline[].lane": "compute, a link (ici fsdp, dcn data, nvlink tensor), or host",
    "timeline[].kind": "matmul, attention, other, all-gather, ..., copy to host, copy from host",
    "timeline[].name": "the operation",
    "timeline[].part": "forward or backward",
    "arrays[].path": "weights by their path, activations by their name",
    "arrays[].axes[]": "logical axis of each dimension",
    "arrays[].shape[]": "whole, not per device [counted]",
    "arrays[].at_rest[][]": "mesh axes that split each dimension between steps; null for an activation",
    "arrays[].in_use[][]": "mesh axes that split each dimension while a layer computes",
    "arrays[].bytes_per_device": "at rest for a weight, in use for an activation [counted]",
    "compile_s": "seconds the compiler took",
    "versions.*": "jax, jaxlib, the compiler's package, and compiler options that were set",
}


def to_json(reports: Sequence[Report]) -> dict[str, Any] | list[dict[str, Any]]:
    """What --json writes: an object for one report, a list for several. `KEYS` documents every key."""
    objects = [_object(report) for report in reports]
    return objects[0] if len(objects) == 1 else objects


def _object(report: Report) -> dict[str, Any]:
    found = {"schema": SCHEMA, **_plain(report)}
    reason = found.pop("no_prediction") if report.prediction is None else None
    found.pop("no_prediction", None)
    prediction = found["prediction"] or dict.fromkeys(field.name for field in dataclasses.fields(Prediction))
    found["timeline"] = prediction.pop("timeline") or []
    found["unpriced"] = prediction.pop("unpriced") or {}
    found["unpriced_share"] = prediction.pop("unpriced_share")
    if report.prediction is not None:
        prediction["fusions"] = [{"name": name, "seconds": seconds} for name, seconds in report.prediction.fusions]
    found["prediction"] = {"reason": reason, **prediction}
    return found


def _plain(value: Any) -> Any:
    """`value` as `json.loads` would give it back."""
    if dataclasses.is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return value
