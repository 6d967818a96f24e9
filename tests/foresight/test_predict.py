"""The predicted parts of programs that were compiled and saved add up to their steps."""

import pytest
import sample
from saved_programs import saved

from gspmd_lm.foresight.timing import attention, predict
from gspmd_lm.hardware.chips import CHIPS

WHERE = {"tpu_v5e": ("v5e", (2, 4)), "tpu7x": ("tpu7x", None), "gpu_h100": ("h100", None)}


@pytest.mark.parametrize("name", WHERE)
def test_saved_programs_add_up(name):
    chip = CHIPS[WHERE[name][0]]
    mesh = {"fsdp": 2, "tensor": 4} if name == "tpu_v5e" else {"fsdp": 8}
    places = [(k % 2, k // 2, 0) for k in range(8)]
    if name == "tpu7x":
        places = [(k // 2 % 2, k // 4, 0) for k in range(8)]
    links = sample.network(chip, places, [0] * 8, [0] * 8, mesh.values(), mesh)
    found = predict.predict(saved(name), chip, links, 1e9, 1e3)
    parts = (found.matmul_s, found.attention_s, found.other_s, found.exposed_communication_s, found.exposed_host_copy_s)
    assert sum(parts) == pytest.approx(found.step_time_s) and all(part >= 0 for part in parts)
    assert found.exposed_communication_s == pytest.approx(sum(found.exposed_by_axis.values()))
    assert found.exposed_communication_s <= found.communication_s
    assert found.matmul_s > 0 and found.unpriced_share < 0.01, found.unpriced
    assert {span.part for span in found.timeline} == {"forward", "backward"}
    assert {span.kind for span in found.timeline} >= {"matmul", "all-gather"}
    if name == "tpu_v5e":
        kernel = next(i for i in saved(name).operations if i.custom_call_target == "tpu_custom_call")
        batch, heads, seq, size = 8, 1, 128, 128
        assert attention.flops(kernel) == 4 * batch * heads * seq * seq * size
