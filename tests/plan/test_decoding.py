"""A plan for decoding chooses where the cache lies; its layouts are those of rules files, compiled as decode."""

import functools

import pytest

from gspmd_lm import config as configs
from gspmd_lm.errors import InputError
from gspmd_lm.hardware import target as targets
from gspmd_lm.plan import candidate, search
from gspmd_lm.show import plan as shown

PLACE = targets.parse("v5e:2x2")
SMALL = ("model.layers=4", "model.embed=1024", "model.heads=8", "model.head_dim=128", "model.mlp=4096",
         "model.vocab=32000", "model.context=32768", "data.batch=8", "data.seq=32768")  # fmt: skip


def planned(kv_heads, **how):
    return search.plan(configs.load("llama3_8b", [*SMALL, f"model.kv_heads={kv_heads}"]), PLACE, phase="decode", **how)


@functools.cache
def estimated(kv_heads):
    return planned(kv_heads, most=0)


@pytest.mark.long
def test_the_cache_of_one_key_head_lies_by_rows_and_that_of_many_by_heads():
    """The cache takes longer to read than the weights, so that no device may hold more of it than its share."""
    one, many = estimated(1), estimated(8)
    first = one.candidates[0]
    assert first.name == "tensor 4, cache by rows" and first.raw["rules"]["decode_q.batch"] == "tensor"
    assert many.candidates[0].name == "tensor 4, cache by heads"
    names = [each.name for each in one.candidates]
    assert {"tensor 4, cache in one piece", "tensor 4, cache by slots", "data 4, cache in one piece"} <= {*names}
    assert "tensor 2 x context 2, cache by rows and heads" in [each.name for each in many.candidates]
    by_name = dict(zip(names, one.candidates, strict=True))
    whole, rows = (by_name[f"tensor 4, cache {how}"].estimate for how in ("in one piece", "by rows"))
    assert whole.attention_s == pytest.approx(4 * rows.attention_s)
    cache_bytes = 2 * 4 * 8 * 32768 * 128 * 2
    assert rows.attention_s == pytest.approx(cache_bytes / 4 / (0.86 * 819e9))
    assert (one.tokens, one.unit, one.refused) == (8, "tokens", 0)
    assert one.error == search.UNKNOWN_ERROR  # no step of decode was compared with a measured one
    assert shown.estimate_error(one) == "too few were compiled to say how wrong estimates are"


@pytest.mark.long
def test_layouts_are_compiled_as_decode_and_the_best_one_becomes_a_rules_file(monkeypatch):
    asked, layouts = [], estimated(1).candidates
    monkeypatch.setattr(search, "estimate_layouts", lambda *_: layouts)

    def reports(task, layouts, target, say, phase):
        asked.append(phase)
        raise search.RunFailed("no compiler here")

    found = planned(1, most=1, reports=reports)
    assert set(asked) == {"decode"} and "no compiler here" in [one.failure for one in found.candidates]
    text = candidate.rules_file(found, layouts[0], "plan")
    assert "  decode_out.heads: null\n" in text and "mesh: {tensor: 4}\n" in text


def test_a_plan_for_decoding_needs_times_and_a_model_that_generates():
    config = configs.load("llama3_8b", SMALL)
    with pytest.raises(InputError, match="phase=prefill: a plan is for a step of train or decode"):
        search.plan(config, PLACE, phase="prefill")
    with pytest.raises(InputError, match="simulated devices have no speed"):
        search.plan(config, targets.parse("cpu:4"), phase="decode", rank_by="bytes")
    with pytest.raises(InputError, match="generating and scoring texts need a model that predicts"):
        search.plan(configs.load("vit_22b"), PLACE, phase="decode")
