"""Stored programs are predicted to take what they took before, to a millionth.

A line of golden/predictions.txt changes where a price, a rule of the walk or a figure of the hardware does. Record it
anew with GSPMD_LM_RECORD=1 pytest, and read the difference: each changed line is a changed prediction.

Programs are train steps of 4 layers, compiled by libtpu 0.0.42.1 and the CUDA 12 plugin of jax 0.10.2, without paths
and the bodies of kernels: llama3_8b with 32,000 tokens (tpu_v5p and gpu_h100_2hosts), half as wide (tpu_v5e_2slices and
tpu_v6e, which offloads), and small ones.
"""

import dataclasses
import math

import pytest
import sample
from recorded import same_figures_as_recorded
from saved_programs import saved

from gspmd_lm.config import value_at
from gspmd_lm.foresight.timing import predict
from gspmd_lm.hardware.chips import CHIPS

PARTS = ("matmul_s", "attention_s", "other_s", "exposed_communication_s", "exposed_host_copy_s")


@dataclasses.dataclass(frozen=True)
class Stored:
    """Where a program runs: entry k of coords, slices and hosts belongs to partition k."""

    chip: str
    mesh: dict[str, int]
    coords: list[tuple[int, ...]] | None = None  # of no interest on GPU
    slices: list[int] | None = None
    hosts: list[int] | None = None

    def network(self):
        nowhere = [0] * math.prod(self.mesh.values())
        coords = self.coords or [(place,) for place in nowhere]
        sizes = self.mesh.values()
        return sample.network(CHIPS[self.chip], coords, self.slices or nowhere, self.hosts or nowhere, sizes, self.mesh)


RING = [(0, 0, 0), (1, 0, 0), (1, 1, 0), (0, 1, 0)]
CUBE = [(x, y, z) for z in (0, 1) for x in (0, 1) for y in (0, 1)]
STORED = {
    "tpu_v5e": Stored("v5e", {"fsdp": 2, "tensor": 4}, [(k % 2, k // 2, 0) for k in range(8)]),
    "tpu_v5e_2slices": Stored("v5e", {"data": 2, "fsdp": 4}, 2 * RING, 4 * [0] + 4 * [1], 4 * [0] + 4 * [1]),
    "tpu_v5p": Stored("v5p", {"fsdp": 2, "tensor": 4}, CUBE),
    "tpu_v6e": Stored("v6e", {"fsdp": 4}, RING),
    "tpu7x": Stored("tpu7x", {"fsdp": 8}, [(k // 2 % 2, k // 4, 0) for k in range(8)]),
    "gpu_h100": Stored("h100", {"fsdp": 8}),
    "gpu_h100_2hosts": Stored("h100", {"fsdp": 2, "tensor": 8}, hosts=8 * [0] + 8 * [1]),
}


@pytest.mark.parametrize("name", STORED)
def test_a_stored_program_takes_what_it_took(name):
    chip = CHIPS[STORED[name].chip]
    module = saved(name, STORED[name].slices or ())
    found = predict.predict(module, chip, STORED[name].network(), 1e12, 1e3)
    figures = {"step, ms": found.step_time_s} | {
        f"{part.removesuffix('_s').replace('_', ' ')}, ms": value_at(found, part) for part in PARTS
    }
    figures |= {f"exposed over {axes}, ms": seconds for axes, seconds in sorted(found.exposed_by_axis.items())}
    figures["communication, exposed or not, ms"] = found.communication_s
    same_figures_as_recorded("predictions.txt", name, {what: 1e3 * seconds for what, seconds in figures.items()})
    assert found.unpriced_share < 1e-3
