"""Which mesh axes cross the slices of TPUs: what plans try, and what is chosen where a rules file leaves it open."""

import types

import pytest

from gspmd_lm.sharding import mesh as meshes
from gspmd_lm.sharding import rules_file
from gspmd_lm.sharding.slices import choose_crossing, find_crossings


@pytest.mark.parametrize(
    ("mesh", "slices", "ways"),
    [
        ({"data": 4, "fsdp": 4}, 4, [{"fsdp": 4}, {"data": 2, "fsdp": 2}, {"data": 4}]),
        ({"data": 2, "tensor": 8}, 4, []),
        ({"stage": 2, "data": 4, "fsdp": 4}, 4, [{"stage": 2, "data": 2}]),
        ({"stage": 4}, 8, []),
        ({"fsdp": 6}, 3, [{"fsdp": 3}]),
    ],
)
def test_slices_are_divided_over_stages_or_over_data_and_fsdp(mesh, slices, ways):
    assert find_crossings(mesh, slices) == ways


@pytest.mark.parametrize(
    ("mesh", "chosen"),
    [
        ({"data": 4, "fsdp": 4}, {"data": 4}),
        ({"data": 2, "fsdp": 4}, {"data": 2, "fsdp": 2}),
        ({"tensor": 8, "expert": 8}, {"expert": 4}),
        ({"tensor": 8}, {"tensor": 4}),
        ({"tensor": 2}, {}),
    ],
)
def test_tensor_crosses_slices_only_where_nothing_else_can(mesh, chosen):
    assert choose_crossing(mesh, 4) == chosen


def devices(slices, each):
    return [
        types.SimpleNamespace(slice_index=number // each, platform="cpu", id=number) for number in range(slices * each)
    ]


def filled(text, count):
    return rules_file.from_dict(text, "mine").fill(count)


@pytest.mark.parametrize("dcn", [{}, {"dcn": "auto"}])
def test_several_slices_are_crossed_without_a_word_in_the_rules_file(dcn):
    rules = filled({"mesh": {"data": 2, "fsdp": -1}, **dcn}, 8)
    assert not rules.problems and rules.dcn == {}
    said = []
    assert meshes.cross_slices(rules, meshes.count_slices(devices(2, 4)), said.append).dcn == {"data": 2}
    assert said == ["mine: data=2 crosses the 2 slices (dcn)"]
    assert meshes.cross_slices(rules, meshes.count_slices(devices(1, 8)), said.append) is rules and len(said) == 1


def test_what_a_rules_file_says_is_kept():
    rules = filled({"mesh": {"data": 2, "fsdp": 4}, "dcn": {"fsdp": 2}}, 8)
    assert meshes.cross_slices(rules, 2) is rules
