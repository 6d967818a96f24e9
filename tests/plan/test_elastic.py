"""The layout of a run that goes on with another number of devices: chosen from shapes alone, for many numbers."""

import dataclasses
import math
import types

import pytest

from gspmd_lm import config as configs
from gspmd_lm.errors import InputError
from gspmd_lm.foresight.explain import settle_layout
from gspmd_lm.hardware import target as targets
from gspmd_lm.plan import elastic, search
from gspmd_lm.plan.estimate import Estimator
from gspmd_lm.sharding import rules_file
from gspmd_lm.sharding.slices import choose_crossing
from gspmd_lm.train import state

LAYOUTS = ("fsdp", "fsdp8", "dp8", "tp8", "fsdp2_tp4", "fsdp_tp", "zero1_8", "dp2_tp4", "pp2_fsdp2_tp2")


@pytest.fixture(scope="module")
def config():
    """Sixteen rows of a model with eight heads and a width of 128."""
    return configs.load("tiny", ["data.source=random:64", "model.layers=2"])


def adapt(config, rules, devices, began_on=8, slices=1, said=None):
    rules = rules_file.load(rules) if isinstance(rules, str) else rules
    target = targets.parse(f"cpu:{devices}") if isinstance(devices, int) else targets.parse(devices)
    if slices > 1:
        target = dataclasses.replace(target, topology=(devices // slices,), slices=slices)
    return elastic.adapt(config, rules, began_on, target, [].append if said is None else said.append)


def chosen(found):
    """The mesh, the microbatches and the rows of a batch."""
    mesh = " x ".join(f"{name}={size}" for name, size in found.rules.mesh.items())
    return mesh, found.rules.microbatches, found.config.data.rows


@pytest.mark.parametrize(
    ("rules", "devices", "wanted"),
    [
        ("fsdp", 4, ("fsdp=4", 2, 16)),  # as many rows at a time as on eight
        ("fsdp", 16, ("fsdp=16", 1, 16)),
        ("fsdp", 6, ("data=3 x fsdp=2", 3, 18)),  # the width divides over 2, and the rows over 6 with 2 more
        ("fsdp8", 1, ("fsdp=1", 8, 16)),
        ("fsdp8", 16, ("data=2 x fsdp=8", 1, 16)),
        ("dp8", 3, ("data=3", 3, 18)),
        ("tp8", 6, ("data=3 x tensor=2", 1, 18)),  # what heads do not divide over goes to replicas
        ("tp8", 4, ("tensor=4", 1, 16)),
        ("fsdp2_tp4", 4, ("tensor=4", 2, 16)),
        ("fsdp2_tp4", 12, ("data=3 x tensor=4", 1, 18)),
        ("zero1_8", 6, ("data=3 x fsdp=2", 3, 18)),  # the optimizer is split over 2, and not over replicas
        ("pp2_fsdp2_tp2", 4, ("stage=2 x tensor=2", 2, 16)),
        ("pp2_fsdp2_tp2", 1, ("fsdp=1 x tensor=1", 8, 16)),  # one stage is no pipeline
    ],
)
def test_what_a_run_of_eight_devices_goes_on_with(config, rules, devices, wanted):
    found = adapt(config, rules, devices)
    assert chosen(found) == wanted
    assert f"{devices} device" in found.change and "the same 16 rows" in found.change


@pytest.mark.parametrize("rules", LAYOUTS)
@pytest.mark.parametrize("devices", [3, 7, 12])
def test_it_passes_the_check_of_every_rules_file(config, rules, devices):
    begun, found = rules_file.load(rules).fill(8), adapt(config, rules, devices)
    filled = found.rules.fill(devices)
    assert filled.devices == devices and found.config.data.batch == config.data.batch
    state.arrays_and_warnings(found.config, filled, "cpu")  # raises what does not fit
    each, each_before = (
        math.ceil(config.data.batch / elastic._pieces(one) / one.microbatches) for one in (filled, begun)
    )
    assert each <= each_before
    assert found.config.data.rows - config.data.batch < elastic._pieces(filled) * filled.microbatches
    assert rules_file.to_dict(rules_file.from_text(found.rules.text, "again")) == rules_file.to_dict(found.rules)


@pytest.mark.parametrize("rules", LAYOUTS)
def test_the_layouts_of_any_number_of_devices(rules):
    begun = rules_file.load(rules).fill(8)
    most = math.ceil(48 / (elastic._pieces(begun) * begun.microbatches))
    for devices in range(1, 65):
        layouts = [*elastic.find_layouts(rules_file.load(rules), 8, 48, devices)]
        assert layouts and [rows for _, rows in layouts] == sorted(rows for _, rows in layouts)
        for filled, rows in layouts:
            pieces = elastic._pieces(filled) * filled.microbatches
            assert filled.devices == devices and 48 <= rows < 48 + pieces and rows % pieces == 0
            assert rows // pieces <= most
            assert all(n <= begun.mesh[name] for name, n in filled.mesh.items() if name not in elastic.OUTER)


@pytest.mark.parametrize("rules", LAYOUTS)
def test_what_fits_stays(config, rules):
    given = rules_file.load(rules)
    found = adapt(config, given, 8)
    assert found.rules is given and found.config is config and not found.change
    assert adapt(config, "fsdp", 6, began_on=6).change  # and what has never fitted does not


@pytest.mark.long
def test_one_of_four_slices_is_lost_and_no_other():
    """The width of 4096 does not divide over three slices, so these hold replicas, as four slices held one."""
    llama = configs.load("llama3_8b", ["data.batch=1024"])
    for rules, mesh in (("fsdp", {"data": 3, "fsdp": 64}), ("fsdp_tp", {"data": 3, "fsdp": 16, "tensor": 4})):
        found = adapt(llama, rules, "3@v5e:8x8", began_on=256)
        assert dict(found.rules.mesh) == mesh and choose_crossing(mesh, 3) == {"data": 3}
        assert found.config.data.rows % (192 // mesh.get("tensor", 1)) == 0


def test_a_mesh_that_cannot_cross_the_slices_is_left_out(config):
    assert chosen(adapt(config, "tp8", 8, slices=4))[0] == "tensor=8"  # it can
    found = [filled.mesh for filled, _ in elastic.find_layouts(rules_file.load("tp8"), 8, 16, 6, slices=3)]
    assert found and all(choose_crossing(mesh, 3) for mesh in found)
    assert {"data": 2, "tensor": 3} in found and {"data": 1, "tensor": 4} not in found


def test_replicas_are_added_to_each_row_that_splits_the_batch(config):
    rules = rules_file.from_dict(
        {"mesh": {"fsdp": 8}, "rules": {"batch": "fsdp", "logits.batch": "fsdp"}, "weights": {"embed": "fsdp"}}, "mine"
    )
    found = adapt(config, rules, 6)
    plain = rules_file.to_dict(found.rules)
    assert plain["rules"] == {"batch": ["data", "fsdp"], "logits.batch": ["data", "fsdp"]}
    assert plain["weights"] == {"embed": "fsdp"} and found.rules.path == "mine on 6 devices"


def test_slices_that_a_rules_file_names_are_chosen_anew(config):
    rules = rules_file.from_dict({"mesh": {"data": 4, "fsdp": 2}, "rules": {"batch": ["data", "fsdp"]},
                                  "weights": {"embed": "fsdp"}, "dcn": {"data": 4}}, "mine")  # fmt: skip
    found = adapt(config, rules, 6, slices=3)
    assert chosen(found)[0] == "data=3 x fsdp=2" and not found.rules.dcn


def test_more_microbatches_where_memory_is_short(monkeypatch):
    """A device of H100 has half of the weights of another one now: what it has no room for is computed later."""
    llama = configs.load("llama3_8b", ["data.batch=64"])
    plain = adapt(llama, "fsdp", "h100:8", began_on=16)
    assert chosen(plain) == ("fsdp=8", 2, 64)
    estimator = Estimator(plain.config, targets.parse("h100:8"))
    settled = settle_layout(estimator.traces.task, plain.rules, estimator.target)
    needed = estimator.estimate(settled).peak_bytes
    parse = targets.parse

    def smaller(text):
        target = parse(text)
        assert target.chip
        return dataclasses.replace(target, chip=dataclasses.replace(target.chip, usable_hbm_bytes=needed - 2**20))

    monkeypatch.setattr(targets, "parse", smaller)
    assert chosen(adapt(llama, "fsdp", "h100:8", began_on=16)) == ("fsdp=8", 4, 64)


def test_a_search_where_no_layout_like_it_fits(config, monkeypatch):
    """It is given a batch that it can split, and the error says why neither it nor the rules fit."""
    asked = []

    def plan(searched, target, **how):
        asked.append((searched.data.rows, target.text, how["rank_by"]))
        return types.SimpleNamespace(best=best)

    monkeypatch.setattr(search, "plan", plan)
    monkeypatch.setattr(elastic, "find_layouts", lambda *_: [])
    rules = rules_file.from_dict({"mesh": {"data": 6}, "rules": {"batch": "data"}}, "plan").fill(6)
    best, said = types.SimpleNamespace(rules=rules), []
    found = adapt(config, "fsdp8", 6, said=said)
    assert chosen(found) == ("data=6", 1, 18) and asked == [(18, "cpu:6", "bytes")]
    assert said == ["no layout like fsdp8 fits on cpu:6, so another one is searched for"]
    best = None
    with pytest.raises(InputError, match=r"no layout of tiny fits on cpu:6, where fsdp8 does not.*\n  fix   give"):
        adapt(config, "fsdp8", 6)


def test_the_error_where_nothing_has_room(monkeypatch):
    monkeypatch.setattr(search, "plan", lambda *_, **__: types.SimpleNamespace(best=None))
    llama = configs.load("llama3_405b", ["data.batch=64"])
    with pytest.raises(InputError) as error:
        adapt(llama, "fsdp", "v5e:2x2", began_on=512)
    message = str(error.value)
    assert "fsdp=4 with" in message and "a device, and v5e has" in message and "nothing was changed" in message


def test_experts_whose_loads_padding_would_change_get_none():
    experts = configs.load("tiny_experts", ["data.source=random:64", "model.experts.balance=bias", "data.batch=16"])
    assert experts.data.batch == 16
    found = adapt(experts, "fsdp8", 4)
    assert chosen(found) == ("fsdp=4", 2, 16)
    with pytest.raises(InputError, match=r"(?s)data\.padded_batch adds rows .* loads of experts.*\n  fix   "):
        adapt(experts, "dp8", 6)
