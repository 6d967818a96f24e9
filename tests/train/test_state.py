"""What is checked before anything is compiled: a layout that is accepted also becomes a program, and no other does."""

import dataclasses

import jax
import numpy as np
import pytest

from gspmd_lm.errors import InputError
from gspmd_lm.model import loss
from gspmd_lm.sharding import placement, rules_file
from gspmd_lm.train import decoder, state, step
from tests import courses

MESHES = [{"tensor": 8}, {"fsdp": 2, "tensor": 4}, {"context": 4, "data": 2}, {"fsdp": 2, "tensor": 2, "context": 2}]
ROWS = [
    "batch", "seq", "kv_seq", "heads", "kv_heads", "mlp", "vocab", "head_dim", "embed", "residual.seq",
    "residual.embed", "block_input.seq", "block_input.batch", "tokens.seq", "q.seq", "q.heads", "k.kv_seq",
    "attention_out.seq", "hidden.seq", "hidden.mlp", "logits.seq", "logits.batch", "logits.vocab", "unembedding.vocab",
]  # fmt: skip
AT_REST = ["embed", "mlp", "heads", "vocab", "head_dim", "wq.embed", "scale.embed"]


def drawn(rng):
    """A random rules file; its rows name what every model has, but need not fit it or each other."""
    mesh = MESHES[rng.integers(len(MESHES))]
    targets = [None, [*mesh][::-1], *mesh, *mesh]

    def table(keys, most):
        chosen = rng.choice(keys, rng.integers(1, most), replace=False).tolist()
        return {key: targets[rng.integers(len(targets))] for key in chosen}

    return {
        "mesh": mesh, "rules": table(ROWS, 6), "weights": table(AT_REST, 3),
        "remat": str(rng.choice(["none", "block"])), "microbatches": int(rng.choice([1, 1, 2, 3])),
    }  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize(
    ("part", "draws"), [(0, 6), *(pytest.param(part, 10, marks=pytest.mark.slow) for part in range(4))]
)
def test_what_is_accepted_can_be_built_and_what_is_refused_cannot(part, draws, small, monkeypatch):
    monkeypatch.setattr(loss, "CHUNK_TOKENS", 16)
    accepted = 0
    for at in range(draws):
        rng = np.random.default_rng([part, at])
        raw, sizes = drawn(rng), {"batch": int(rng.choice([4, 12, 32])), "seq": int(rng.choice([4, 8, 12, 20, 24]))}
        options = {"kv_heads": int(rng.choice([4, 8])), "block": str(rng.choice(["sequential", "parallel"]))}
        config, rules = small(layers=1, data=sizes, **options), rules_file.from_dict(raw, "here.yaml").fill(8)
        refused = built = ""
        try:
            state.arrays_and_warnings(config, rules, "cpu")
        except InputError as error:
            refused = str(error)
        try:
            step.build_step(config, rules, state.arrays(config), jax.devices()).lower_train()
        except Exception as error:  # whatever it is that goes wrong
            built = str(error)
        assert bool(refused) == bool(built), (raw, sizes, options, refused, built)
        accepted += not refused
    assert 0 < accepted < draws


@pytest.mark.long
@pytest.mark.parametrize(
    "layouts",
    [(({}, 8), ({"logits.seq": "data"}, 4)), pytest.param([({"logits.seq": None}, 4)], marks=pytest.mark.slow)],
    ids=["split", "whole"],
)
def test_a_chunk_of_the_loss_has_an_equal_part_of_every_piece_of_a_sequence(
    small, built, batch_of, monkeypatch, layouts
):
    """Many short rows on each device, so that a chunk has fewer tokens of a row than devices would have without it."""
    monkeypatch.setattr(loss, "CHUNK_TOKENS", 64)
    course = courses.once(built, batch_of)  # other tests have other chunks
    config = small(layers=1, optimizer={"clip_norm": 0.0, "warmup_steps": 0})
    split = {"mesh": {"context": 4, "data": 2}, "rules": {"seq": "context"}}

    def result(layout, tokens):
        """The loss and the gradients. A chunk has `tokens` of each row."""
        one = built(config, layout)
        assert state.record_arrays(config, one.arrays, 1, one.rules).arrays["logits"][1] == (32, tokens, 64)
        return course(config, layout)

    wanted = result("single", 2)
    for rows, tokens in layouts:
        rules = rules_file.from_dict({**split, "rules": split["rules"] | rows}, "here.yaml")
        courses.agree(result(rules, tokens), wanted)


# One mesh axis splits what two do in dp2_tp4, into as many pieces.
ONE_AXIS = {"mesh": {"data": 2, "tensor": 4}, "rules": {"batch": "data"}}
ONE_AXIS["rules"] |= dict.fromkeys(("heads", "kv_heads", "mlp", "vocab"), "data")


@pytest.mark.parametrize(
    ("traced", "asked", "microbatches", "count"),
    [("dp8", "fsdp8", 1, 1), ("fsdp2_tp4", "dp2_tp4", 1, 1), ("dp8", "dp8", 2, 2), ("fsdp8", "tp8", 1, 2),
     ("dp8", "cp8", 1, 2), ("cp8", "cp8_ring", 1, 2), ("dp2_tp4", ONE_AXIS, 1, 2)],
)  # fmt: skip
def test_rules_that_a_model_cannot_tell_apart_share_a_trace_and_nothing_else(
    small, traced, asked, microbatches, count, monkeypatch
):
    """What is recorded under other rules is what a trace under them would have."""
    config, traces = small(layers=2, kv_heads=2, **{"embedding.tied": True}), []
    monkeypatch.setattr(state, "record", lambda *given: traces.append(1) or placement.record(*given))

    def recorded(layout, task, microbatches=1):
        rules = rules_file.load(layout) if isinstance(layout, str) else rules_file.from_dict(layout, "here.yaml")
        rules = rules.fill(8)
        found = vars(state.record_arrays(task, state.arrays(config), microbatches, rules))
        named = {name: value for name, value in found.items() if not name.startswith("_own_answers")}
        return named | {"rules": rules.path, "program": str(found["program"])}

    shared, alone = (dataclasses.replace(decoder.task(config), name=name) for name in ("shared", "alone"))
    recorded(traced, shared)
    found = recorded(asked, shared, microbatches)
    assert len(traces) == count
    assert found == recorded(asked, alone, microbatches)
    assert bool(found["problems"]) == (asked in ("dp2_tp4", "tp8", ONE_AXIS))  # two heads of keys


def test_a_changed_task_of_the_decoder_is_a_model_of_ones_own(small):
    """Nothing takes the config for what the other functions compute."""
    config, rules = small(layers=1), rules_file.load("single").fill(1)
    task = decoder.task(config)
    changed = dataclasses.replace(task, name="changed")
    for one, expected in ((task, config), (changed, None)):
        built = step.build_step(one, rules, state.arrays(one), jax.devices()[:1])
        assert (one.config, built.config) == (expected, expected)
