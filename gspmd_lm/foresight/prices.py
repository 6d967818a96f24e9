"""How long one instruction of a compiled program computes on a chip."""

import dataclasses
import re

from gspmd_lm.foresight import flops, kernels, traffic
from gspmd_lm.foresight.hardware import Chip
from gspmd_lm.foresight.hlo import Instruction, Module
from gspmd_lm.foresight.instruction import bits

# What is no public fact of the hardware stands here.
#
# Share of HBM bandwidth that operations reach. TPU: fitted to published v6e steps. GPU: a device copy on one H200
# moved 4.3 of 4.8 TB/s.
HBM_SHARE = {"tpu": 0.86, "gpu": 0.90}
# Share of peak that matmuls without an estimate of the compiler reach. GPU: large bf16 matmuls on one H200, 790 of 989.
MATMUL_SHARE = {"tpu": 0.85, "gpu": 0.80}
# How many times the compiler's estimate matmuls take on a chip, where that is not once. Fitted to one published step,
# Llama3.1-8B on v6e:2x4. What it stands for is not known; a clock that sinks under load would look like this.
MATMUL_SLOWDOWN = {"v6e": 1.15}
# Seconds from one kernel of a GPU to the next.
LAUNCH_S = {"tpu": 0.0, "gpu": 3e-6}
# On-chip memory of a TPU is about 22 times as fast as HBM. Source: scaling-book, chapter on rooflines.
ON_CHIP_SPEED = 22

_FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id",
    "optimization-barrier", "add-dependency", "domain", "while", "call", "conditional",
}  # fmt: skip
_FREE_CALLS = {
    "AllocateBuffer", "ConcatBitcast", "SliceId", "AssumeGatherIndicesInBound", "Sharding", "MoveToHost",
    "MoveToDevice", "annotate_device_placement",
}  # fmt: skip
# What takes as long as its bytes, or less time than can be seen.
_BY_BYTES = {
    "abs", "add", "and", "atan2", "bitcast-convert", "broadcast", "ceil", "clamp", "compare", "concatenate", "convert",
    "copy", "cosine", "divide", "dynamic-slice", "dynamic-update-slice", "erf", "exponential", "exponential-minus-one",
    "floor", "fusion", "gather", "iota", "is-finite", "log", "log-plus-one", "logistic", "map", "maximum", "minimum",
    "multiply", "negate", "not", "or", "pad", "popcnt", "power", "reduce", "reduce-precision", "reduce-window",
    "remainder", "reshape", "reverse", "rng-bit-generator", "round-nearest-afz", "round-nearest-even", "rsqrt",
    "scatter", "select", "shift-left", "shift-right-arithmetic", "shift-right-logical", "sign", "sine", "slice",
    "sqrt", "stochastic-convert", "subtract", "tan", "tanh", "transpose", "xor", "cbrt", "real", "imag", "complex",
}  # fmt: skip
_SCORES = re.compile(r"BN?K?G?TS\b")  # an einsum of attention without a kernel


@dataclasses.dataclass(frozen=True)
class Price:
    """Seconds of one run, and what they are spent on: matmul, attention or other."""

    seconds: float
    kind: str = "other"


NOTHING = Price(0.0)


def price(module: Module, instruction: Instruction, chip: Chip) -> Price | None:
    """What an instruction computes, without what it exchanges; None where nothing is known of it."""
    if instruction.opcode in _FREE or instruction.custom_call_target in _FREE_CALLS:
        return NOTHING
    # A kernel may stand inside a fusion, beside the collective that goes on meanwhile.
    calls = (i for i in (instruction, *module.inside(instruction)) if i.opcode == "custom-call")
    if seconds := sum(kernels.price_s(module, call, chip) or 0.0 for call in calls):
        return Price(max(seconds, _memory_s(module, instruction, chip)) + LAUNCH_S[chip.platform], "attention")
    operations = flops.of(module, instruction)
    if operations:
        return _matmul(module, instruction, chip, operations)
    if instruction.opcode not in _BY_BYTES:
        return None
    if chip.platform == "tpu" and _only_scalars(module, instruction):
        return NOTHING  # the scalar unit works beside the others
    seconds = _memory_s(module, instruction, chip)
    if instruction.estimated_cycles is not None:  # off by several times where no matmul is inside
        seconds = min(seconds, instruction.estimated_cycles / chip.clock_hz)
    return Price(seconds + LAUNCH_S[chip.platform], "attention" if _SCORES.search(instruction.op_name) else "other")


def _matmul(module: Module, instruction: Instruction, chip: Chip, operations: float) -> Price:
    peak, slower = chip.peak_bf16_flops_per_s * _precision(module, instruction), MATMUL_SLOWDOWN.get(chip.name, 1.0)
    seconds = max(slower * operations / (MATMUL_SHARE[chip.platform] * peak), _memory_s(module, instruction, chip))
    if instruction.estimated_cycles is not None:
        estimated_s = instruction.estimated_cycles / chip.clock_hz
        if operations <= estimated_s * max(peak, chip.peak_bf16_flops_per_s):  # else faster than the chip can multiply
            seconds = slower * estimated_s
    kind = "attention" if _SCORES.search(instruction.op_name) else "matmul"
    return Price(seconds + LAUNCH_S[chip.platform], kind)


def _precision(module: Module, instruction: Instruction) -> float:
    """The rate for the dtype multiplied, relative to bf16. GPUs multiply float32 as TF32 by default, half as fast."""
    inside = instruction if instruction.opcode != "fusion" else next(
        i for i in module.inside(instruction) if i.opcode in ("dot", "convolution")
    )  # fmt: skip
    width = bits(module.operand(inside).shape.arrays[0].dtype)
    return 16 / max(width, 8) if width else 1.0


def _only_scalars(module: Module, instruction: Instruction) -> bool:
    shapes = [instruction.shape, *(module.operand(instruction, n).shape for n in range(len(instruction.operands)))]
    return not any(array.dimensions for shape in shapes for array in shape.arrays)


def _memory_s(module: Module, instruction: Instruction, chip: Chip) -> float:
    moved = traffic.of(module, instruction)
    return (moved.hbm_bytes + moved.chip_bytes / ON_CHIP_SPEED) / (HBM_SHARE[chip.platform] * chip.hbm_bytes_per_s)
