"""The report on a layout's costs, and its JSON form with a versioned schema.

`terminal.py` prints a report, `page.py` makes an HTML page of it, and `figures.py` has the words and numbers of both.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from gspmd_lm.foresight.collectives import Collective
from gspmd_lm.foresight.cost.schedule import Prediction
from gspmd_lm.foresight.floor import Floor
from gspmd_lm.foresight.memory import Memory
from gspmd_lm.train.table import PlacedArray

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
    active_parameters: int  # that compute one token: fewer in a mixture of experts
    tokens: int  # per step, all devices
    memory: Memory
    collectives: tuple[Collective, ...]
    prediction: Prediction | None
    no_prediction: str  # the reason where there is none
    floor: Floor
    warnings: tuple[Finding, ...]
    compile_s: float
    versions: Mapping[str, str]  # jax, jaxlib, libtpu, ... and the compiler options that were set
    arrays: tuple[PlacedArray, ...]
    rules_text: str = ""  # of the rules file


# What the JSON holds. `x[].y` is y of each entry of a list, `x.*` any key of an object. Bytes and seconds are of one
# device and one step. [compiled] comes from the compiler's output for the target, [predicted] from a model of it,
# [counted] from shapes alone.
KEYS = {
    "schema": f"version of this table: {SCHEMA}",
    "target": "the target as the user wrote it: v5p:4x4x4",
    "chip": "the name of the chip: TPU v5p; empty on cpu",
    "devices": "how many devices the mesh has",
    "config": "the name of the config",
    "rules": "the path of the rules file",
    "rules_text": "the text of the rules file; empty where the rules are values of a program",
    "phase": "the program: train, prefill or decode",
    "mesh.*": "mesh axis -> its size. The keys are in the order of devices, and the last axis varies fastest",
    "parameters": "how many parameters the model has [counted]",
    "active_parameters": "how many of them compute one token; in a mixture of experts only some do [counted]",
    "tokens": "how many tokens one step has on all devices; a decode step has one per row [counted]",
    "memory.weights_bytes": "parameters [compiled]",
    "memory.optimizer_bytes": "optimizer state [compiled]",
    "memory.batch_bytes": "input tokens, and arrays that belong to them [compiled]",
    "memory.cache_bytes": "keys and values of all slots, for generation [compiled]",
    "memory.temporaries_bytes": "activations, gradients and scratch space [compiled]",
    "memory.peak_bytes": "the most memory that is in use at once [compiled]",
    "memory.limit_bytes": "the memory that a program may use on the device; null on cpu",
    "memory.host_bytes": "arrays that are offloaded to the host [compiled]",
    "memory.fits": "whether the peak is within the limit",
    "memory.refusal": "the compiler's message if it refused the program for memory, else empty",
    "memory.padding_bytes": "the temporaries that tiles add to weights, optimizer state and batch [compiled]",
    "memory.largest[].bytes": "the size of a large temporary; the largest comes first [compiled]",
    "memory.largest[].shape": "its shape as the program writes it: bf16[4,8192,14336]",
    "memory.largest[].axes[]": "the logical axis of each dimension, empty if it is not known",
    "memory.largest[].source": "its source line, file:line",
    "memory.largest[].op": "its module path and primitive",
    "collectives[].kind": "all-gather, all-reduce, reduce-scatter, all-to-all, windowed all-gather, ... [compiled]",
    "collectives[].mesh_axes[]": "the mesh axes it runs over; data:dcn is the part of data between slices or hosts",
    "collectives[].dtype": "the dtype that is sent: bf16, f32, ...",
    "collectives[].times_per_step": "how often it runs in one step; loops are multiplied out [compiled]",
    "collectives[].bytes_per_device_per_step": "the bytes that one device sends in all runs of one step [compiled]",
    "collectives[].phase": "forward, backward, recomputation or optimizer",
    "collectives[].op": "its place in the model: layers.attention.wq",
    "collectives[].einsum": "the product that the tensor comes from or goes to, else empty",
    "collectives[].source": "its source line, file:line",
    "collectives[].rules[]": "the keys of the rows of the rules file that cause it: weights.embed",
    "collectives[].overlapped": "whether compute runs at the same time [compiled]",
    "collectives[].link": "the slowest link in use: ici, die, dcn, nvlink or network; empty on cpu",
    "collectives[].in_loop": "whether it runs in every layer, chunk of the loss or microbatch",
    "collectives[].group_size": "how many devices take part in one run",
    "collectives[].elements": "how many elements the largest moved tensor has, all pieces together",
    "collectives[].instructions[]": "its names in the compiled program",
    "prediction.reason": "why the values below are null; null if they are not",
    "prediction.step_time_s": "the time of one step [predicted]",
    "prediction.matmul_s": "the part of it in matrix multiplications [predicted]",
    "prediction.attention_s": "the part of it in attention kernels [predicted]",
    "prediction.other_s": "the part of it in other compute [predicted]",
    "prediction.exposed_communication_s": "the part of it in which compute waits for collectives [predicted]",
    "prediction.exposed_by_axis.*": "mesh axis -> the part of this wait [predicted]",
    "prediction.exposed_host_copy_s": "the part of it in which compute waits for host copies [predicted]",
    "prediction.communication_s": "the time of all collectives, exposed or not [predicted]",
    "prediction.mfu": "model FLOPs per second over the chip's peak, 0 to 1 [predicted]",
    "prediction.tokens_per_s_per_device": "tokens per second and device [predicted]",
    "prediction.missing_flops_share": "the share of the model's necessary FLOPs that no operation does [compiled]",
    "prediction.basis": "the basis of the prices",
    "prediction.error": "the known error of such predictions",
    "prediction.fusions[].name": "a costly operation; the costliest comes first",
    "prediction.fusions[].seconds": "its time in one step [predicted]",
    "floor.compute_s": "model FLOPs over the chip's peak; null on cpu [counted]",
    "floor.memory_s": "bytes that must be read and written once over memory bandwidth; null on cpu [counted]",
    "floor.communication_bytes": "what a device must send under this way of splitting the model [counted]; null for a "
    "model of one's own",
    "floor.communication_by_axis.*": "mesh axis -> the part of it [counted]",
    "floor.flops": "the FLOPs of the model on one device, without recomputation [counted]",
    "floor.dtype": "the dtype in which activations, and weights in use, are counted: bfloat16 or float32",
    "floor.float32_bytes": "what a device must send if all of it is as wide as float32 [counted]",
    "warnings[].code": "the stable name of a finding",
    "warnings[].message": "the finding",
    "warnings[].fix": "how to mend it",
    "unpriced_share": "the share of the bytes in operations whose time is not known; null without a prediction",
    "unpriced.*": "such an operation (opcode or call target, and place in the model) -> its share",
    "timeline[].start_s": "seconds from the start of one turn of the loop over layers [predicted]",
    "timeline[].end_s": "seconds until its end [predicted]",
    "timeline[].lane": "the lane of a span: compute, a link (ici fsdp, dcn data, nvlink tensor), or host",
    "timeline[].kind": "the kind of a span: matmul, attention, other, all-gather, ..., copy to host, copy from host",
    "timeline[].name": "the operation of a span",
    "timeline[].part": "the pass of a span: forward or backward",
    "arrays[].path": "the path of a weight, or the name of an activation",
    "arrays[].axes[]": "the logical axis of each dimension",
    "arrays[].shape[]": "the shape of the whole array [counted]",
    "arrays[].at_rest[][]": "the mesh axes that split each dimension between steps; null for an activation",
    "arrays[].in_use[][]": "the mesh axes that split each dimension while a layer computes",
    "arrays[].bytes_per_device": "the bytes of a weight at rest, or of an activation in use [counted]",
    "compile_s": "how many seconds the compiler took",
    "versions.*": "versions of jax, jaxlib and the compiler's package, and the compiler options that were set",
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
