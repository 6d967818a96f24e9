"""The remat policies that a layout is tried with fill the memory that there is, on the device and on the host."""

import itertools

import pytest

from gspmd_lm.hardware import target as targets
from gspmd_lm.hardware.chips import CHIPS
from gspmd_lm.plan import variants
from gspmd_lm.plan.space import Space
from gspmd_lm.plan.traces import TraceCache
from gspmd_lm.plan.variants import Names, policies
from gspmd_lm.sharding.rules import Remat

FSDP = {"mesh": {"fsdp": 8}, "rules": {"batch": "fsdp"}, "weights": {"embed": "fsdp"}}
NAMES = ("attention_out", "q", "k", "v", "residual", "hidden")


@pytest.fixture(scope="module")
def space(llama):
    """Of Llama 3 8B with three rows of 8192 tokens for each v6e, which a published recipe trains."""
    import dataclasses

    config = dataclasses.replace(llama, data=dataclasses.replace(llama.data, batch=24))
    return Space(config, targets.parse("v6e:2x4"), TraceCache(config))


@pytest.fixture(scope="module")
def rules(space):
    return space.rules({**FSDP, "attention": {"tpu": "splash"}})


def test_the_published_layout_of_offloaded_names_is_found_or_beaten(space, rules):
    published = Remat("names", (), ("layer_input", "q", "k", "v", "residual"))
    told = space.estimator.estimate_remat(rules, published)
    limit = CHIPS["v6e"].usable_hbm_bytes
    assert told.peak_bytes < limit < space.estimator.estimate_remat(rules, Remat("dots")).peak_bytes
    found = [space.estimator.estimate_remat(rules, remat) for remat in policies(space.estimator, rules, space.names)]
    assert any(one.peak_bytes <= limit and one.seconds <= told.seconds for one in found)


@pytest.mark.parametrize("share", [1.0, 1.3, 1.6])
def test_one_of_them_is_near_the_best_that_fits(space, rules, share, monkeypatch):
    """Against all of 3^6 policies with the layers' inputs on the host, and 2^6 with them on the device."""
    limit = share * CHIPS["v6e"].usable_hbm_bytes
    monkeypatch.setattr(variants, "FILLED", (share,))
    every = []
    for homes in itertools.product((None, "save", "offload"), repeat=len(NAMES)):
        own = {name: home for name, home in zip(NAMES, homes, strict=True) if home}
        every.append(space.names.remat({**own, "layer_input": "offload"}))
        every.append(space.names.remat(own))
    told = [space.estimator.estimate_remat(rules, remat) for remat in every]
    best = min(one.seconds for one in told if one.peak_bytes <= limit)
    found = [space.estimator.estimate_remat(rules, remat) for remat in policies(space.estimator, rules, space.names)]
    assert min(one.seconds for one in found if one.peak_bytes <= limit) <= 1.01 * best


def test_the_host_holds_what_its_memory_allows(space, rules, monkeypatch):
    per_chip = space.estimator.estimate_remat(rules, Remat("names", (), ("layer_input",))).host_bytes
    small = CHIPS["v6e"].host_bytes / per_chip
    monkeypatch.setattr(variants, "HOST_SHARE", 1.5 / small)
    for remat in policies(space.estimator, rules, space.names):
        assert space.estimator.estimate_remat(rules, remat).host_bytes <= 1.5 * per_chip


def test_each_comes_once_and_what_needs_least_is_among_them(space, rules):
    found = list(policies(space.estimator, rules, space.names))
    assert len(found) == len(set(found)) < 14
    assert Remat("names", (), ("layer_input",)) in found


def test_where_all_fits_nothing_is_offloaded(llama, space_of):
    space = space_of(llama, "h200:8")
    found = list(policies(space.estimator, space.rules(FSDP), Names(NAMES, ("layer_input",))))
    assert not any(remat.offload for remat in found)
    assert Remat("names", NAMES) in found or Remat("names", ("attention_out", "k", "v", "q", "residual")) in found


def test_without_times_what_is_computed_again_decides(llama, space_of):
    space = space_of(llama, "cpu:8")
    *_, last = policies(space.estimator, space.rules(FSDP), space.names)
    assert last.policy == "names" and {"q", "k", "v", "residual", "hidden"} <= {*last.save}
