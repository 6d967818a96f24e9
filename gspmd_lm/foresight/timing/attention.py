"""The cost of fused attention kernels: operations, and on TPU the cycles of their compiled schedules.

Custom calls carry no estimate of the compiler. But its schedule of a kernel is static: libtpu writes it down without a
TPU, and `benchmarks/kernel_schedules.py` reads from it what `Chip.splash` holds.
"""

import dataclasses
import math
import re

import numpy as np

from gspmd_lm.foresight.hlo import Array, Instruction
from gspmd_lm.hardware.chips import SPLASH_BLOCKS, Chip, Cycles
from gspmd_lm.model.kernels.common import MOST_BLOCKS, splash_block

# TFLOP/s of cuDNN's attention on an H100 SXM for sequences of CUDNN_LENGTHS tokens, at head size 128: forward without a
# mask, forward with a causal one, backward without a mask. Source: FlashAttention-3, arXiv 2407.08608, figures 5 and 6.
# The backward pass is taken to lose as much by a mask as the forward pass does, and other GPUs to reach the same shares
# of their peaks.
CUDNN_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
CUDNN_FULL = (497, 574, 617, 609, 600, 595)
CUDNN_CAUSAL = (315, 410, 484, 518, 529, 539)
CUDNN_BACKWARD = (305, 408, 465, 499, 518, 516)
# The rate of other heads over that of heads of 128, forward and backward. 64: the same figures. 192: the attention of
# DeepSeek-V3 to 4,096 tokens on one H100 and one H200 (benchmarks/results/on_device.json).
CUDNN_HEADS = {64: (0.67, 0.85), 128: (1.0, 1.0), 192: (1.21, 0.69)}
CUDNN_MATMULS = (2, 5)  # of a forward and of a backward pass
CUDNN_TILE = 128  # queries and keys are computed in tiles of so many
_CUDNN_PEAK = 989  # H100's

# How often splash attention moves bytes through memory beside its kernels, forward and backward. Counted in compiled
# programs of Llama 3 8B with 128k tokens on v5p and 70B on tpu7x (libtpu 0.0.42).
#
# Of a device's queries, in each turn of a ring: the result is added up in float32, and each softmax sum is read from
# 128 equal numbers. Backward, gradients are added up in float32, and the result is multiplied with its gradient.
RING_PASSES = (7, 7)
# Of the keys and values that go round: halves are cut out. Backward, their gradients are padded and added up.
RING_KEY_PASSES = (2, 10)
# Of all keys and values, where each device gathers them: they are brought into the order of the text.
GATHERED_PASSES = (10, 10)
# Of a device's queries, for each piece of the keys that the backward kernel is called for: gradients are added up.
PIECE_PASSES = 5

_SPLASH = re.compile(r"splash_m[hq]a_(fwd|dkv|dq)")
# In what the kernel says of itself; a null is left out.
_BLOCK = re.compile(r"block_(q|kv)(?:_dkv|_dq)?\W+(\d+)")
_LAYOUT = re.compile(r"\b([qkv])_layout\W+(\d+)")
_SEQ_MINOR = "2"  # the length is the last dimension, and the size of a head the one before


@dataclasses.dataclass(frozen=True)
class Splash:
    """One call of splash attention: the heads of all rows, queries x keys, in blocks.

    They are parts of a square of all queries and all keys, of which all parts are taken to be visited alike: a split
    sequence is dealt so, and a loop over pieces of the keys visits as many on average.
    """

    part: str  # fwd, dkv (which includes dq if they are fused) or dq
    heads: float
    size: int  # the size of a key of a head
    blocks: tuple[int, int]  # how many blocks of queries and of keys
    rows: int  # the rows of a block: queries
    columns: int  # the columns of a block: keys
    fused: bool
    mask_window: str = ""  # see Name.sees
    steps: int = 0  # of the grid; 0: one for each pair of blocks
    length: int = 0  # all keys; 0: those of this call
    value_size: int = 0  # the size of a value; 0: that of a key

    @property
    def visited_blocks(self) -> float:
        """How many blocks the mask does not skip."""
        queries, keys = self.blocks
        if self.mask_window == "all":
            return queries * keys
        length, window, seen = self.length or keys * self.columns, int(self.mask_window or 0), 0
        for first in range(0, length, self.rows):
            before = max(0, first + 1 - window) // self.columns if window else 0
            seen += min(length // self.columns, -(-(first + self.rows) // self.columns)) - before
        return seen * queries * keys / (length // self.rows * (length // self.columns))

    @property
    def matmuls(self) -> int:
        """How many matmuls a block takes: scores and values; backward: scores, dP, dV, dK, and dQ if it is fused."""
        return {"fwd": 2, "dkv": 5 if self.fused else 4, "dq": 3}[self.part]

    @property
    def shares(self) -> tuple[tuple[int, float], ...]:
        """The sizes of a key and a value, each with the share of the matmuls that have it: not dP and dV, of values."""
        of_keys = {"fwd": 1, "dkv": 3 if self.fused else 2, "dq": 2}[self.part] / self.matmuls
        return (self.size, of_keys), (self.value_size or self.size, 1 - of_keys)


@dataclasses.dataclass(frozen=True)
class Cudnn:
    """One pass of cuDNN's attention."""

    backward: bool
    heads: float  # of all rows; a part of the tokens of a head is a fraction
    queries: int  # of a row
    keys: int
    size: int  # of a head
    causal: bool
    window: int = 0  # the keys that a query sees; 0: all before it

    @property
    def flops(self) -> float:
        """2 for each multiply-add of the scores that the mask leaves."""
        scores = masked_scores(self.queries, self.window) if self.causal else self.queries * self.keys
        return 2.0 * CUDNN_MATMULS[self.backward] * self.heads * scores * self.size


def kernel_s(call: Instruction, chip: Chip) -> float | None:
    """The seconds of a fused attention kernel; None for another call, or if the chip's cycles are not known."""
    if cudnn := _cudnn(call):
        return cudnn_s(cudnn, chip)
    splash = _splash(call)
    return splash_s(splash, chip) if splash else None


def summed_bytes(call: Instruction) -> float:
    """The bytes that a backward pass of cuDNN moves after its kernel, where query heads share keys and values.

    The kernel writes gradients of keys and values for each query head, and two others add these up.
    """
    if call.custom_call_target != "__cudnn$fmhaSoftmaxBackward":
        return 0.0
    queries, keys = (operand.shape.arrays[0].bytes for operand in call.operands[:2])
    return 2.0 * (queries + keys) if keys < queries else 0.0


def workspace_bytes(call: Instruction) -> int:
    """The memory in which a backward pass of cuDNN works, where the compiler did not ask cuDNN; else 0.

    It holds float32 gradients and sums of all queries for each document, and gradients of keys and values for each
    query head that shares them. So much did cuDNN 9.19 ask for in the programs of benchmarks/results/on_device.json.
    """
    if call.custom_call_target != "__cudnn$fmhaSoftmaxBackward" or call.shape.arrays[-1].bytes:
        return 0
    config, (q, k) = call.config["cudnn_fmha_backend_config"], (one.shape.arrays[0] for one in call.operands[:2])
    rows, heads, queries, _ = (int(n) for n in config["intermediate_tensor_shape"]["dimensions"])
    of_query = q.dimensions[-1] * (2 if k.bytes < q.bytes else 1) + 1
    return 4 * rows * int(config.get("max_seg_per_batch", 1)) * heads * queries * of_query


def cudnn_s(cudnn: Cudnn, chip: Chip) -> float:
    """The seconds of a pass of cuDNN's attention.

    With a window it is as fast as over rows of its length, for both compute as much of what is masked in vain.
    """
    length, backward = cudnn.keys, cudnn.backward
    # Between two lengths of the table along the logarithm of the length, and beyond it as at its ends.
    at, lengths = np.log2(min(cudnn.window or length, length)), np.log2(CUDNN_LENGTHS)
    full, masked, back = (float(np.interp(at, lengths, row)) for row in (CUDNN_FULL, CUDNN_CAUSAL, CUDNN_BACKWARD))
    rate = (back if backward else full) * (masked / full if cudnn.causal else 1.0)
    rate *= CUDNN_HEADS[next((known for known in CUDNN_HEADS if cudnn.size <= known), max(CUDNN_HEADS))][backward]
    operations = cudnn.flops * (math.ceil(length / CUDNN_TILE) * CUDNN_TILE / length) ** 2
    return chip.matmul_slowdown * operations / (rate / _CUDNN_PEAK * chip.peak_bf16_flops_per_s)


def splash_s(splash: Splash, chip: Chip) -> float | None:
    """The seconds of a call of splash attention; None if the chip's cycles are not known."""
    if not (sizes := chip.splash):
        return None

    def cycles_of(size: int) -> Cycles:
        forward, backward = sizes[min((known for known in sizes if known >= size), default=max(sizes))]
        return forward if splash.part == "fwd" else backward

    cycles, area = cycles_of(splash.size), splash.rows * splash.columns
    near = min(range(len(cycles.visited)), key=lambda n: abs(math.log(area / SPLASH_BLOCKS[n] ** 2)))
    # Heads that are wider than the table's, and passes that are not fused, are scaled by their multiply-adds.
    visited = sum(share * cycles_of(size).visited[near] * max(1.0, size / max(sizes)) for size, share in splash.shares)
    block = visited * area / SPLASH_BLOCKS[near] ** 2 * splash.matmuls / (2 if splash.part == "fwd" else 5)
    steps = splash.steps or splash.blocks[0] * splash.blocks[1]
    rows = splash.blocks[0] * splash.rows / 512
    total = splash.heads * (splash.visited_blocks * block + steps * cycles.step + rows * cycles.row)
    return total / chip.tensor_cores / chip.clock_hz  # the cores of a device share the heads


def splash_passes_s(
    heads: float, sizes: tuple[int, int], lengths: tuple[int, int], itemsize: int, window: str, ring: int, chip: Chip
) -> list[float]:
    """The seconds of all kernels of a layer on a device, forward and backward; 0 if the chip's cycles are not known.

    heads: query heads times rows on the device; a device with a part of a sequence counts a fraction. sizes: the head
    dimensions of keys and of values. lengths: the numbers of queries and of keys in a row, over all devices. ring: the
    devices that keys and values go round; a ring of one device has no turns.
    """
    local_lengths = [length // ring for length in lengths]
    rows, columns = (  # a turn leaves out half of the keys
        min(splash_block(whole, sizes[0], itemsize), length // min(ring, 2))
        for whole, length in zip(lengths, local_lengths, strict=True)
    )
    blocks = local_lengths[0] // rows, local_lengths[1] // columns
    passes_s = []
    for part in ("fwd", "dkv"):
        local = Splash(part, heads * ring, sizes[0], blocks, rows, columns, True, window, value_size=sizes[1])
        turn = dataclasses.replace(local, blocks=(blocks[0], blocks[1] // 2), mask_window="all")
        passes_s.append((splash_s(local, chip) or 0.0) + (ring - 1) * (splash_s(turn, chip) or 0.0))
    return passes_s


def splash_moved_bytes(
    blocks: int, query_bytes: float, key_bytes: float, form: str, devices: int
) -> tuple[float, float]:
    """What a device moves through memory beside the kernels of a layer, forward and backward.

    `blocks` are those of all keys, and `key_bytes` all keys and values. `devices` split the sequence, in one of the
    forms of model/kernels/context.py, and `query_bytes` are the queries of one.
    """
    forward = backward = 0.0
    if devices > 1 and form == "ring":
        forward, backward = (
            (devices - 1) * (of_turn * query_bytes + of_keys * key_bytes / devices)
            for of_turn, of_keys in zip(RING_PASSES, RING_KEY_PASSES, strict=True)
        )
        local, turn = _gradient_passes(blocks / devices), _gradient_passes(blocks / devices / 2)
        return forward, backward + (local + (devices - 1) * turn) * query_bytes
    if devices > 1 and form == "gather":
        forward, backward = (passes * key_bytes for passes in GATHERED_PASSES)
    if blocks > MOST_BLOCKS:  # what short rows move is in the times that other operations were given
        backward += _gradient_passes(blocks) * query_bytes
    return forward, backward


def _gradient_passes(blocks: float) -> float:
    """How often the gradients of queries go through memory, which the kernel writes once for each block of keys."""
    pieces = max(1.0, blocks / MOST_BLOCKS)
    return blocks + pieces + (PIECE_PASSES * pieces if pieces > 1 else 0.0)


def flops(call: Instruction) -> float:
    """The FLOPs of an attention kernel, 2 x multiply-adds of the visited blocks; 0 for other calls."""
    if cudnn := _cudnn(call):
        return cudnn.flops
    splash = _splash(call)
    if splash is None:
        return 0.0
    width = sum(share * size for size, share in splash.shares)
    return 2.0 * splash.matmuls * splash.heads * splash.visited_blocks * splash.rows * splash.columns * width


def masked_scores(length: int, window: int) -> float:
    """The scores of a head in a causal row: half of all, or those of the last `window` keys of each query.

    Packed documents count as one row. How many scores they have depends on the data.
    """
    width = min(window or length, length)
    return width * length - width**2 / 2


def has_documents(call: Instruction) -> bool:
    """Whether a call of cuDNN's attention is given the documents of its rows."""
    return call.config.get("cudnn_fmha_backend_config", {}).get("max_seg_per_batch", 1) > 1


def _cudnn(call: Instruction) -> Cudnn | None:
    """The attention of a call of cuDNN; None for another call."""
    if not call.custom_call_target.startswith("__cudnn$fmha"):
        return None
    config = call.config["cudnn_fmha_backend_config"]
    rows, heads, queries, keys = (int(n) for n in config["intermediate_tensor_shape"]["dimensions"])
    return Cudnn(
        backward="Backward" in call.custom_call_target,
        heads=rows * heads,
        queries=queries,
        keys=keys,
        size=call.operands[0].shape.arrays[0].dimensions[-1],
        causal="CAUSAL" in config.get("mask_type", ""),
        window=int(config.get("sliding_window_length", 0)),
    )


def _splash(call: Instruction) -> Splash | None:
    """The splash attention of a Pallas call; None for another call. Its mask is what its name says."""
    if not (name := _splash_name(call)):
        return None
    integers, (queries, keys, values) = _operand_shapes(call)
    # The next block: heads, or 1, x blocks of queries x blocks of keys, or as many as any block of queries visits.
    # Tokamax has one list of the steps of its grid.
    count = next(array.dimensions for array in integers if array.dimensions)[-2:]
    *heads, rows, size = queries
    # The first sizes are those of this pass.
    block_sizes = {
        side: int(length) for side, length in reversed(_BLOCK.findall(call.frontend.get("kernel_metadata", "")))
    }
    if len(count) == 2:
        block_sizes = {"q": rows // count[0], "kv": keys[-2] // count[1]} | block_sizes
    block, columns = block_sizes["q"], block_sizes["kv"]
    return Splash(
        part=name.group(1),
        heads=math.prod(heads),
        size=size,
        value_size=values[-1],
        blocks=(rows // block, keys[-2] // columns),
        rows=block,
        columns=columns,
        fused=len(call.shape.arrays) != 4,
        mask_window=call.name_in_model.mask_window,
        steps=math.prod(count),
        # Those of the longest one: backward passes may go through them piece by piece.
        length=max(_operand_shapes(other)[1][1][-2] for other in call.module.kernels if _splash_name(other)),
    )


def _splash_name(call: Instruction) -> re.Match[str] | None:
    return _SPLASH.search(call.op_name) if call.custom_call_target == "tpu_custom_call" else None


def _operand_shapes(call: Instruction) -> tuple[list[Array], list[tuple[int, ...]]]:
    """The integers that a kernel is given, and the dimensions of its queries, keys and values: heads, length, size."""
    arrays = [operand.shape.arrays[0] for operand in call.operands]
    integers = [array for array in arrays if array.dtype.startswith("s")]
    floats = (array.dimensions for array in arrays if array not in integers)
    layouts = dict(_LAYOUT.findall(call.frontend.get("kernel_metadata", "")))
    return integers, [
        (*shape[:-2], shape[-1], shape[-2]) if layouts.get(name) == _SEQ_MINOR else shape
        for name, shape in zip("qkv", floats, strict=False)
    ]
