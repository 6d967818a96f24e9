"""The rates that `calibrate` measured of a chip, for sizes between those that it measured."""

import math
from collections.abc import Collection

import numpy as np

from gspmd_lm.hardware.chips import Chip

BATCH_WEIGHT = 0.5  # of the number of matrices beside the sides of one, in the distance between two products


def matmul_flops_per_s(
    chip: Chip, dtypes: Collection[str], batch: float, rows: float, contracted: float, columns: float
) -> float:
    """The rate of a product of `batch` pairs of matrices; 0 if none of these dtypes was measured.

    It is the mean of the logarithms of the rates that were measured, weighted by how near their sides are.
    """
    known = [one for one in chip.matmul_rates if one.dtype in dtypes]
    if not known:
        return 0.0
    total, weights = 0.0, 0.0
    for one in known:
        sides = ((rows, one.rows), (contracted, one.contracted), (columns, one.columns))
        far = sum(math.log2(max(side, 1) / near) ** 2 for side, near in sides)
        far += (BATCH_WEIGHT * math.log2(max(batch, 1) / one.batch)) ** 2
        weight = 1 / (far + 0.1) ** 2
        total, weights = total + weight * math.log(one.flops_per_s), weights + weight
    return math.exp(total / weights)


def bytes_per_s(chip: Chip, moved_bytes: float) -> float:
    """The bandwidth of an operation that moves so many bytes, between the two sizes next to it that were measured.

    Some bandwidth of the chip was measured.
    """
    sizes, rates = zip(
        *((math.log(one.moved_bytes), math.log(one.bytes_per_s)) for one in chip.bandwidths), strict=True
    )
    return math.exp(np.interp(math.log(max(moved_bytes, 1)), sizes, rates))


def collective_s(chip: Chip, kind: str, size_bytes: float, devices: int, processes: int) -> float:
    """The seconds of a collective, from those of groups that are most like its own; 0 if its kind was not measured.

    Between two sizes that were measured, the time is on the line between them. Beyond the largest, each byte takes as
    long as there. A group of more devices than were measured sends a larger part of what each holds.
    """
    alike = [
        one
        for one in chip.collective_times
        if one.kind == kind and one.devices > 1 and (one.processes > 1) == (processes > 1)
    ]
    if not alike:
        return 0.0
    group = min(sorted({one.devices for one in alike}), key=lambda known: abs(math.log(known / devices)))
    sizes, times = zip(*sorted((one.size_bytes, one.seconds) for one in alike if one.devices == group), strict=True)
    seconds = float(np.interp(size_bytes, sizes, times)) * max(1.0, size_bytes / sizes[-1])
    return seconds * (1 - 1 / devices) / (1 - 1 / group)
