"""The layouts that a plan chooses from are valid rules files of which none comes twice."""

import dataclasses
import itertools
import json

import pytest

from gspmd_lm import config as configs
from gspmd_lm.config import LatentAttention, core_yaml
from gspmd_lm.plan import space
from gspmd_lm.plan.space import describe
from gspmd_lm.sharding import rules_file
from gspmd_lm.sharding.rules import Remat, divisors
from gspmd_lm.train import state

# What a rules file may say and a plan may choose. Options of a compiler are left alone.
CHOSEN = {"mesh", "dcn", "rules", "weights", "optimizer", "remat", "microbatches", "attention", "context"}


@pytest.fixture(scope="module")
def config(small):
    return small(compute_dtype="bfloat16", kv_heads=4, data={"batch": 12})


@pytest.fixture(scope="module")
def found(config, space_of):
    return list(space_of(config, "cpu:8"))


def test_no_layout_comes_twice(found):
    assert len(found) > 100
    assert len({json.dumps(raw, sort_keys=True) for raw in found}) == len(found)
    assert len(set(map(describe, found))) == len(found)


def test_zero_1_splits_the_state_over_data_beside_what_splits_the_weights(found):
    over = {("fsdp" in raw["mesh"], str(raw["optimizer"]["embed"])) for raw in found if "optimizer" in raw}
    assert over == {(False, "data"), (True, "['fsdp', 'data']")}


def test_each_passes_the_check_of_a_file_that_was_written(config, found, tmp_path):
    for raw in found[::9]:
        path = tmp_path / "layout.yaml"
        path.write_text(core_yaml.dump(raw))
        rules = rules_file.load(str(path)).fill(8)
        state.arrays_and_warnings(config, rules, "cpu")
        assert set(raw) <= CHOSEN


@pytest.mark.long
def test_each_of_a_model_of_ones_own_passes_the_check(mixer, space_of):
    found = list(space_of(mixer, "cpu:8"))
    assert {"width": "fsdp", "patch": "fsdp"} in [raw.get("weights") for raw in found]
    assert any(raw["rules"].get("mixed") == "tensor" for raw in found)
    for raw in found[::3]:
        state.arrays_and_warnings(mixer, rules_file.from_dict(raw, "plan", vocabulary=mixer.vocabulary).fill(8), "cpu")


def test_what_is_split_is_asked_of_the_model(space_of, llama):
    roles = space_of(llama, "h100:8").roles
    assert (roles.rows, roles.width, roles.between) == ("batch", ("embed",), ("residual.seq",))
    assert set(roles.hidden) == {"mlp", "heads", "kv_heads", "vocab"}


def test_what_is_made_from_a_shorter_vector_is_split_as_what_the_residual_is_made_of(small, space_of):
    latent = LatentAttention(kv_rank=16, q_rank=24, v_head_dim=4)
    found = space_of(
        small(**{"attention.latent": latent, "attention.rope.dim": 2}, head_dim=6, data={"batch": 2}), "cpu:2"
    )
    assert {*found.roles.hidden} == {"mlp", "heads", "vocab"}
    assert found.roles.width == ("embed", "wq_up.q_rank", "wk_up.kv_rank", "wv_up.kv_rank")
    layouts = list(found)
    assert {"embed": "fsdp", "wq_up.q_rank": "fsdp", "wk_up.kv_rank": "fsdp", "wv_up.kv_rank": "fsdp"} in [
        raw.get("weights") for raw in layouts
    ]
    assert not found.refused


@pytest.mark.long
def test_experts_and_long_sequences_have_axes_of_their_own(small, space_of, monkeypatch):
    monkeypatch.setattr(space, "LONG", 16)
    monkeypatch.setattr(space, "LEAST_POSITIONS", 8)
    monkeypatch.setattr(space, "MOST_TENSOR", 1)
    config = small(
        compute_dtype="bfloat16", **{"experts.count": 4, "experts.per_token": 2, "experts.balance": "batch"}, kv_heads=2
    )
    of = space_of(config, "cpu:4")
    assert (of.roles.groups, of.roles.sequence) == (("expert",), ("seq",))
    assert "scores" not in of.roles.hidden and "expert" not in of.roles.hidden
    found = list(of)
    assert len(set(map(describe, found))) == len(found)
    split = [raw for raw in found if "expert" in raw["mesh"]]
    assert {raw["mesh"]["expert"] for raw in split} == {2, 4}
    for raw in split:
        assert raw["rules"]["expert"] == "expert" and "expert" in raw["rules"]["batch"]
    forms = {(raw["mesh"]["context"], raw["context"]) for raw in found if "context" in raw}
    assert forms == {(2, "gather"), (2, "ring"), (2, "ulysses")}
    assert all(raw["rules"]["seq"] == "context" for raw in found if "context" in raw)
    assert any("expert" in raw["mesh"] and "context" in raw["mesh"] for raw in found)
    assert not any(raw.get("microbatches", 1) > 1 for raw in found)  # experts are balanced over the whole batch
    for raw in found[::97]:
        state.arrays_and_warnings(config, rules_file.from_dict(raw, "plan").fill(4), "cpu")


def test_a_sequence_is_split_only_where_its_pieces_can_be_dealt(small, space_of, monkeypatch):
    """Each device gets two pieces, an early and a late one, so that all see as many keys."""
    monkeypatch.setattr(space, "LONG", 16)
    monkeypatch.setattr(space, "LEAST_POSITIONS", 1)
    of = space_of(small(compute_dtype="bfloat16", data={"seq": 24, "batch": 1}), "cpu:8")
    assert {raw["mesh"].get("context", 1) for raw in of} == {1, 2, 4}  # 24 is no multiple of 2 * 8


def test_the_batch_is_divided_and_so_are_its_microbatches(found):
    for raw in found:
        rows = raw.get("microbatches", 1)
        for name in ("data", "fsdp"):
            rows *= raw["mesh"].get(name, 1)
        assert 12 % rows == 0
    assert any(raw["mesh"] == {"fsdp": 4, "tensor": 2} for raw in found)
    assert not any(raw["mesh"].get("fsdp") == 8 for raw in found)


def test_axes_that_do_not_divide_stay_whole(found):
    eight = [raw for raw in found if raw["mesh"].get("tensor") == 8]
    assert eight
    assert all("kv_heads" not in raw["rules"] and raw["rules"]["heads"] == "tensor" for raw in eight)


@pytest.mark.long
def test_slices_are_crossed_by_stages_data_or_fsdp_and_never_by_tensor(small, space_of):
    config = small(compute_dtype="bfloat16", data={"batch": 4})
    found = list(space_of(config, "2@v5e:1x1"))
    assert {name for raw in found for name in raw["dcn"]} == {"stage", "data", "fsdp"}
    hosts = list(space_of(config, "h100:2x2"))
    assert not any(raw["mesh"].get("tensor") == 4 for raw in hosts)
    assert {"fsdp": 2} in [raw.get("dcn") for raw in hosts if raw["mesh"] == {"data": 2, "fsdp": 2}]


def test_a_kernel_is_chosen_where_it_can_do_what_the_config_asks(llama, space_of):
    layout = {"mesh": {"fsdp": 8}, "rules": {"batch": "fsdp"}, "weights": {"embed": "fsdp"}}
    space = space_of(llama, "v5e:2x4")
    assert (
        space.has_fused_attention
        and space.rules(layout).attention == {"tpu": "splash"}
        and space.notes == ["attention: splash"]
    )
    short = configs.load("llama3_8b", ["data.batch=8", "data.seq=100"])
    space = space_of(short, "v5e:2x4")
    assert not space.has_fused_attention and space.rules(layout).attention == {"tpu": "xla"}
    assert space.notes == ["attention: xla, since splash on v5e does not support data.seq: 100 (only multiples of 128)"]
    assert space_of(llama, "h100:8").rules(layout).attention == {"gpu": "cudnn"}  # no library of CUDA is asked
    assert not any("attention" in raw for raw in itertools.islice(space, 20))


def test_names_to_keep_are_those_of_the_model(llama, small, space_of, mixer):
    names = space_of(llama, "v5e:2x4").names
    assert names == (("attention_out", "q", "k", "v", "residual", "hidden"), ("layer_input",))
    experts = small(**{"experts.count": 4, "experts.per_token": 2, "experts.balance": "batch"})
    assert {"dispatched", "hidden"} <= {*space_of(experts, "cpu:4").names.outputs}
    assert not any("remat" in raw for raw in space_of(mixer, "cpu:8"))


def test_numbers_are_divided_whatever_their_size():
    assert divisors(360) == [n for n in range(1, 361) if 360 % n == 0]
    assert divisors(49) == [1, 7, 49]
    assert len(divisors(10**12)) == 169  # at once: only up to the root


def test_what_there_is_no_time_for_is_counted(config, space_of, found):
    of = space_of(config, "cpu:8")
    first = [raw for raw, _ in of.fill_layouts(0.0)]
    assert first == found[: len(first)]
    assert len({json.dumps([raw["mesh"], raw["rules"], raw.get("optimizer")]) for raw in first}) == 1
    assert of.left_out == len(list(of._layouts())) - 1 > 10
    assert [len(raw["mesh"]) for raw in found] == sorted(len(raw["mesh"]) for raw in found)


def test_a_trace_is_shared_by_rules_that_the_model_cannot_tell_apart(llama, space_of):
    space = space_of(llama, "cpu:8")
    split = {"heads": "tensor", "mlp": "tensor", "vocab": "tensor"}
    keys, whole = (space.rules({"mesh": {"tensor": 8}, "rules": split | more}) for more in ({"kv_heads": "tensor"}, {}))
    fsdp = space.rules({"mesh": {"fsdp": 8}, "rules": {"batch": "fsdp"}, "weights": {"embed": "fsdp"}})
    trace = space.traces.trace
    assert trace(fsdp) is trace(dataclasses.replace(fsdp, remat=Remat("block")))
    assert trace(fsdp) is not trace(dataclasses.replace(fsdp, microbatches=2))
    # Queries are split finer than keys, which are therefore repeated: the model computes something else.
    assert trace(whole) is not trace(keys)
    assert "heads" in trace(whole).recorder.axes["k"]
    assert "heads" not in trace(keys).recorder.axes["k"]
