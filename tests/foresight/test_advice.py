"""Each warning on a layout that has the fault and on one that has not."""

import dataclasses
from types import SimpleNamespace

import pytest
from sample import LLAMA, PREDICTION

from gspmd_lm import config as configs
from gspmd_lm.config import with_values
from gspmd_lm.foresight import advice, hlo
from gspmd_lm.foresight.bounds import LowerBounds
from gspmd_lm.foresight.collectives import Collective
from gspmd_lm.foresight.memory import Memory
from gspmd_lm.foresight.propagation.record import ArrayTransfers
from gspmd_lm.foresight.table import PlacedArray
from gspmd_lm.foresight.timing.predict import UNKNOWN_TRIP_COUNT
from gspmd_lm.hardware.chips import Processor
from gspmd_lm.sharding import rules_file
from gspmd_lm.sharding.problems import Problem
from gspmd_lm.train import state

GB = 10**9
CONFIG = configs.load("llama3_8b")
WQ = ArrayTransfers("layers.attention.wq", "forward", "fsdp", "all-gather", 32, 10 * GB)
FLOOR = LowerBounds(1.0, 0.1, 10 * GB, {"fsdp": 10 * GB}, 1e15, "bfloat16", 20 * GB, by_array=(WQ,))
MEMORY = Memory(
    weights_bytes=4 * GB, optimizer_bytes=8 * GB, batch_bytes=1000, temporaries_bytes=GB, peak_bytes=13 * GB,
    limit_bytes=16 * GB, host_bytes=0, fits=True, largest=(),
)  # fmt: skip
GATHER = Collective("all-gather", ("fsdp",), "bf16", 64, 10 * GB, "forward", "layers.attention.wq", "a.py:1",
                    ("weights.embed",), True, 8, 4096 * 4096, ("all-gather.1",), link="ici", in_loop=True)  # fmt: skip
WEIGHT = PlacedArray(
    "layers.mlp.w_up", ("layers", "embed", "mlp"), (32, 4096, 14336), ((), ("fsdp",), ()), ((), (), ()), GB
)

LOOKED_UP = ("embedding", "position_embedding")


def warned(rules="fsdp8", arrays=(WEIGHT,), problems=(), moved=(GATHER,), floor=FLOOR, memory=MEMORY, module=None,
          notes=(), config=CONFIG, mesh=None, microbatches=1, platform="tpu", attention_s=0.0, unpriced=None,
          missing=0.0, phase="train", chip=LLAMA.chip, capability=(), **changes):  # fmt: skip
    loaded = dataclasses.replace(rules_file.load(rules), **changes)
    predicted = dataclasses.replace(
        PREDICTION, attention_s=attention_s, step_time_s=1.0, unpriced=unpriced or {},
        unpriced_share=sum((unpriced or {}).values()), missing_flops_share=missing,
    )  # fmt: skip
    loaded = dataclasses.replace(loaded, mesh=mesh or loaded.mesh, microbatches=microbatches)
    report = dataclasses.replace(LLAMA, arrays=arrays, collectives=moved, floor=floor, memory=memory,
                                 prediction=predicted, phase=phase, warnings=(), chip=chip)  # fmt: skip
    on = Processor(platform, platform, capability)
    return advice.warnings(report, config, loaded, on, problems, LOOKED_UP, module, notes)


def only(warnings, code):
    (warning,) = warnings
    assert warning.code == code and warning.message and warning.fix
    return warning


def test_a_good_layout_has_none():
    assert warned() == ()


def test_memory_that_cudnn_takes_besides_may_not_be_there(monkeypatch):
    calls = SimpleNamespace(kernels=["forward", "backward"], instructions=())
    for most, many in ((3 * GB, 0), (4 * GB, 1)):
        monkeypatch.setattr(advice.attention, "workspace_bytes", {"forward": 0, "backward": most}.__getitem__)
        found = [warning.message for warning in warned(module=calls) if warning.code == "workspace"]
        assert (
            found == ["cuDNN takes up to 4.0 GB more while it computes gradients of attention: 3.0 GB are free"] * many
        )


def test_more_communication_than_is_needed():
    third = dataclasses.replace(GATHER, phase="recomputation", bytes_per_device_per_step=GB)
    warning = only(warned(moved=[GATHER, third]), "above-floor")
    assert "1.10x the necessary communication" in warning.message and "1.0 GB too much over fsdp" in warning.message
    assert "(recomputation)" in warning.message and "weights.embed" in warning.fix
    assert "where" not in warning.fix  # the floor has nothing of it in this phase
    assert warned(moved=[GATHER, dataclasses.replace(third, bytes_per_device_per_step=GB // 3)]) == ()


def test_what_has_no_price():
    warning = only(
        warned(unpriced={UNKNOWN_TRIP_COUNT: 1e-9}), "unpriced"
    )  # priced as one turn, whatever its share then is
    assert UNKNOWN_TRIP_COUNT in warning.message
    warning = only(warned(unpriced={"custom-call mine at layers.mlp": 1e-6, "sort": 1e-6}), "unpriced")
    assert "custom-call mine at layers.mlp" in warning.message and "sort" not in warning.message
    assert "cost_estimate" in warning.fix
    assert "sort, while" in only(warned(unpriced={"sort": 0.02, "while": 0.01}), "unpriced").message
    assert warned(unpriced={"sort": 0.009}) == ()
    decode = warned(unpriced={"custom-call mine": 0.0}, attention_s=0.4, phase="decode")
    assert only(decode, "unpriced") and warned(attention_s=0.4, phase="decode") == ()


def test_products_that_are_missing_in_the_program():
    warning = only(warned(missing=0.25), "unpriced")
    assert "25.0% of what the model must multiply" in warning.message
    assert warned(missing=0.01) == ()


def test_attention_without_its_fused_kernel():
    warning = only(warned(attention_s=0.4), "unfused-attention")
    assert "40% of the step" in warning.message and warning.fix == "--set rules.attention.tpu=splash"
    assert only(warned(attention_s=0.4, platform="gpu"), "unfused-attention").fix == "--set rules.attention.gpu=cudnn"
    assert warned(attention_s=0.05) == warned(attention_s=0.4, platform="cpu") == ()
    assert warned(attention_s=0.4, attention={"cpu": "xla", "gpu": "xla", "tpu": "splash"}) == ()
    packed = dataclasses.replace(CONFIG, data=dataclasses.replace(CONFIG.data, packing="documents"))
    assert only(warned(attention_s=0.4, config=packed), "unfused-attention").fix == warning.fix
    flags = "--set rules.attention.gpu=cudnn"
    for capability, more in (((9, 0), ""), ((8, 0), " --set data.packing=stream")):  # documents need Hopper
        warning = only(
            warned(attention_s=0.4, config=packed, platform="gpu", capability=capability), "unfused-attention"
        )
        assert warning.fix == flags + more
    capped = dataclasses.replace(packed, model=with_values(packed.model, {"attention.softcap": 50.0}))
    assert warned(attention_s=0.4, config=capped, platform="gpu") == ()  # nothing that could be typed would help


def test_what_does_not_fit():
    memory = dataclasses.replace(MEMORY, peak_bytes=20 * GB, fits=False)
    warning = only(warned("tp8", arrays=(), memory=memory), "does-not-fit")
    assert "a smaller data.batch" in warning.fix and "20.0 GB" in warning.message and "16.0 GB" in warning.message


@pytest.mark.parametrize("kind", ["all-to-all", "collective-permute", "all-gather"])
def test_a_resharding_that_no_rule_asked_for(kind):
    small = dataclasses.replace(GATHER, bytes_per_device_per_step=GB // 10, rules=(), kind=kind, op="layers.attention")
    floor = dataclasses.replace(FLOOR, communication_bytes=11 * GB)
    assert "layers.attention" in only(warned(moved=[GATHER, small], floor=floor), "unasked-reshard").message
    large = dataclasses.replace(small, in_loop=False, bytes_per_device_per_step=GB // 2)
    assert warned(moved=[GATHER, large], floor=floor)
    for op in ("embedding", "embedding+position_embedding"):
        assert warned(moved=[GATHER, dataclasses.replace(large, op=op)], floor=floor) == ()
    assert warned(moved=[GATHER, dataclasses.replace(large, op="embedding_norm")], floor=floor)
    trifle = dataclasses.replace(small, bytes_per_device_per_step=1000, in_loop=False)
    assert warned(moved=[GATHER, trifle], floor=floor) == ()


def test_a_gather_of_an_activation_where_only_weights_are_split():
    stray = dataclasses.replace(GATHER, op="layers.attention_norm", bytes_per_device_per_step=GB // 10)
    floor = dataclasses.replace(FLOOR, communication_bytes=11 * GB)
    assert "layers.attention_norm" in only(warned(moved=[GATHER, stray], floor=floor), "unasked-reshard").message
    asked = dataclasses.replace(stray, rules=("rules.residual.seq",))
    assert warned(moved=[GATHER, asked], floor=floor) == ()


def test_a_permute_that_completes_a_reduction_is_none():
    reduction = dataclasses.replace(GATHER, kind="reduce-scatter", phase="backward")
    permute = dataclasses.replace(reduction, kind="collective-permute", bytes_per_device_per_step=GB // 100)
    floor = dataclasses.replace(FLOOR, communication_bytes=11 * GB)
    assert warned(moved=[reduction, permute], floor=floor) == ()
    only(
        warned(moved=[reduction, dataclasses.replace(permute, op="layers.attention.wk")], floor=floor),
        "unasked-reshard",
    )


def test_what_simulated_devices_widen_is_compared_with_a_floor_of_the_same_width():
    double = dataclasses.replace(GATHER, bytes_per_device_per_step=20 * GB, dtype="f32")
    assert warned(moved=[double], chip="") == ()
    more = dataclasses.replace(double, bytes_per_device_per_step=24 * GB)
    warning = only(warned(moved=[more], chip=""), "above-floor")
    assert "1.20x the necessary communication" in warning.message and "4.0 GB too much over fsdp" in warning.message
    assert "64 times in a step, where 32 would do" in only(warned(moved=[double]), "above-floor").fix


def test_what_a_tpu_narrows_is_compared_with_a_floor_of_the_same_width():
    floor = dataclasses.replace(
        FLOOR, dtype="float32", communication_bytes=20 * GB, communication_by_axis={"fsdp": 20 * GB},
        by_array=(dataclasses.replace(WQ, bytes_per_device_per_step=20 * GB),),
    )  # fmt: skip
    assert warned(floor=floor) == ()
    twice = dataclasses.replace(GATHER, bytes_per_device_per_step=20 * GB)
    warning = only(warned(moved=[twice], floor=floor), "above-floor")
    assert "2.00x the necessary communication" in warning.message and "10.0 GB too much over fsdp" in warning.message


@pytest.mark.parametrize(("link", "where"), [("dcn", "between slices"), ("network", "between hosts")])
def test_a_slow_link_in_every_layer(link, where):
    assert where in only(warned(moved=[dataclasses.replace(GATHER, link=link)]), "slow-link").message
    nameless = warned(moved=[dataclasses.replace(GATHER, link=link, rules=())])
    assert [one.message.endswith(f"{where}, in every layer") for one in nameless if one.code == "slow-link"] == [True]
    once = dataclasses.replace(GATHER, link=link, times_per_step=1)
    assert warned(moved=[once]) == ()
    gradient = dataclasses.replace(GATHER, link=link, kind="all-reduce", phase="backward", rules=("rules.batch",))
    assert warned(moved=[gradient]) == ()
    assert where in only(warned(moved=[gradient], microbatches=4), "slow-link").message


def test_what_a_branch_may_have_to_send_is_not_too_much():
    none = dataclasses.replace(FLOOR, communication_bytes=0, communication_by_axis={}, by_array=(), float32_bytes=0)
    assert "nothing makes necessary" in only(warned(floor=none), "above-floor").message
    assert warned(floor=dataclasses.replace(none, branch_bytes=10 * GB)) == ()


def test_what_no_layer_sends_over_a_slow_link_is_no_warning():
    gather = dataclasses.replace(GATHER, link="network", in_loop=False, rules=("optimizer.embed",))
    assert warned(moved=[dataclasses.replace(gather, phase="optimizer", op="embedding")]) == ()  # of ZeRO-1
    assert warned(moved=[dataclasses.replace(gather, op="loss", bytes_per_device_per_step=28)]) == ()
    only(warned(moved=[gather]), "slow-link")


def test_what_the_partitioner_complains_of():
    assert "cannot go from" in only(warned(notes=["cannot go from a to b", "again"]), "involuntary-remat").message


def test_a_large_array_left_whole():
    whole = dataclasses.replace(WEIGHT, at_rest=((), (), ()))
    warning = only(warned(arrays=[whole]), "replicated-array")
    assert "all 8 devices along fsdp" in warning.message and warning.fix.startswith("--set rules.weights.embed=fsdp ")
    assert warned(arrays=[dataclasses.replace(whole, bytes_per_device=1000)]) == ()
    odd = dataclasses.replace(whole, shape=(32, 4095, 14337))
    assert warned(arrays=[odd]) == ()  # nothing to be done


def test_devices_that_compute_the_same():
    residual = PlacedArray("residual", ("batch", "seq", "embed"), (8, 8192, 4096), None, ((), (), ()), 1000)
    warning = only(warned(arrays=[residual]), "replicated-array")
    assert "compute the same" in warning.message and warning.fix.startswith("--set rules.rules.batch=fsdp ")
    assert warned(arrays=[dataclasses.replace(residual, in_use=(("fsdp",), (), ()))]) == ()


def test_a_residual_that_could_be_split_over_the_sequence():
    residual = PlacedArray("residual", ("batch", "seq", "embed"), (8, 8192, 4096), None, ((), (), ()), GB)
    hidden = PlacedArray("hidden", ("batch", "seq", "mlp"), (8, 8192, 14336), None, ((), (), ("tensor",)), GB)
    warning = only(warned("tp8", arrays=[residual, hidden]), "replicated-array")
    assert warning.fix.startswith("--set rules.rules.residual.seq=tensor ")
    split = dataclasses.replace(residual, in_use=((), ("tensor",), ()))
    assert warned("tp8", arrays=[split]) == ()


PROGRAM = """HloModule m, num_partitions=8

ENTRY %main (p: f32[8,64]) -> f32[8,64] {
  %p = f32[8,64]{1,0} parameter(0)
  ROOT %q = f32[SIZE]{1,0} tanh(%p), metadata={op_name="jit(_train)/layers/rules.hidden/sharding_constraint"}
}
"""


def test_a_constraint_without_effect():
    hidden = PlacedArray("hidden", ("batch", "mlp"), (8, 64), None, (("fsdp",), ()), 100)
    whole, split = (hlo.parse(PROGRAM.replace("SIZE", size)) for size in ("8,64", "1,64"))
    assert "hidden" in only(warned(arrays=[hidden], module=whole), "constraint-not-effective").message
    assert warned(arrays=[hidden], module=split) == ()


def test_padding():
    padded = dataclasses.replace(MEMORY, padding_bytes=GB)
    assert "8%" in only(warned(memory=padded), "padding").message
    assert warned(memory=dataclasses.replace(MEMORY, padding_bytes=GB // 10)) == ()
    model = dataclasses.replace(CONFIG.model, padded_vocab=2 * CONFIG.model.vocab)
    assert "100%" in only(warned(config=dataclasses.replace(CONFIG, model=model)), "padding").message


def test_mesh_axes_of_size_1():
    assert "tensor=1" in only(warned(mesh={"fsdp": 8, "tensor": 1}), "mesh-axis-of-size-1").message
    assert warned("single", mesh={"data": 1}) == ()


def test_rows_that_match_nothing():
    problem = Problem(
        "rules.expert: this config has no expert, so the row does nothing", "x", "drop the row", warning=True,
        code="rule-matched-nothing",
    )  # fmt: skip
    assert only(warned(problems=[problem]), "rule-matched-nothing").fix == "drop the row"


@pytest.mark.parametrize(
    ("changed", "code", "message"),
    [
        ({"rules": {"expert": "data", "batch": "data"}}, "rule-matched-nothing", "this config has no expert"),
        ({"rules": {"batch": "data"}, "microbatches": 1, "unroll": 2}, "", ""),
        ({"mesh": {"data": 2, "tensor": 4}, "rules": {"batch": "data"}}, "work-repeated", "tensor=4 splits nothing"),
        ({"mesh": {"stage": 2, "data": 4}, "rules": {"batch": "data"}, "weights": {"layers": "stage"},
          "pipeline": {"microbatches": 4}}, "work-repeated", "the batch is not split over stage"),
    ],
)  # fmt: skip
def test_a_warning_of_the_check_has_the_code_of_what_it_says(changed, code, message):
    """That the batch is not split over the stages was said under the name of a row that matches nothing."""
    rules = rules_file.from_dict({"mesh": {"data": 8}, **changed}, "here.yaml")
    _, problems = state.arrays_and_warnings(configs.load("tiny"), rules, "cpu")
    found = [(one.code, one.message) for one in warned(problems=problems)]
    assert [name for name, _ in found] == [code] * bool(code) and all(message in said for _, said in found)
