"""Which collectives XLA inserts for each shipped layout, counted in the compiled program as tensors moved."""

import dataclasses

import pytest

from benchmarks.collectives import count
from gspmd_lm.model import loss
from gspmd_lm.sharding import rules_file
from gspmd_lm.sharding.rules import Remat, Row
from tests.courses import trace_gradients

SHIPPED = ["dp8", "zero1_8", "fsdp8", "tp8", "dp2_tp4"]
# foresight/test_attribution.py has all collectives of fsdp2_tp4. Those that fill any number of devices have on eight
# the collectives of fsdp8, and of fsdp2_tp4 or tp8.
MORE = [("fsdp", None), ("fsdp_tp", None), ("fsdp2_tp4", None), ("fsdp2_tp4", "none"), ("fsdp2_tp4", "dots")]
B, T, D, L = 32, 16, 32, 3
RESHARDING = ("all-to-all", "ragged-all-to-all", "collective-permute")


@pytest.fixture(scope="module")
def moved(text):
    """A function that gives the collectives of a step, without its update, as it is compiled."""
    return lambda *given, **changes: count(text(*given, **changes))


@pytest.fixture(scope="module")
def text(small, built):
    """A function that gives the text of a compiled step without its update. Each is compiled only once."""
    texts = {}

    def compiled(rules, microbatches=1, remat=None, **model):
        config = small(**{"layers": L, **model})
        step = built(config, rules, microbatches=microbatches, **({"remat": Remat(remat)} if remat else {}))
        key = config, repr(step.rules.facts()), loss.CHUNK_TOKENS
        if key not in texts:
            texts[key] = trace_gradients(step).lower().compile().as_text()
        return texts[key]

    return compiled


def in_layers(collectives):
    return [c for c in collectives if c.in_loop]


def activations(collectives, rows):
    """Those that carry at least the residual stream of `rows` sequences."""
    return [c for c in collectives if c.elements >= rows * T * D]


@pytest.mark.parametrize(
    ("block", "reductions", "remat"),
    [("sequential", 2, None), ("parallel", 1, None), pytest.param("sequential", 2, "dots", marks=pytest.mark.slow)],
)
def test_tensor_parallelism_reduces_what_megatron_does(moved, block, reductions, remat):
    """Sums are kept where products are (remat: dots), so none is made twice."""
    found = moved("tp8", block=block, remat=remat)
    loop = in_layers(found)
    forward = [c for c in loop if "transpose" not in c.op_name]
    backward = [c for c in loop if "transpose" in c.op_name]
    assert [c.kind for c in activations(forward, B)] == ["all-reduce"] * reductions
    assert [c.kind for c in activations(backward, B)] == ["all-reduce"] * reductions
    assert {c.times for c in loop} == {L}
    assert [c for c in loop if c.elements < B * T * D] == []

    # Outside: the embedding's activation, the loss's one, and reductions of [B, T].
    outside = [c for c in found if not c.in_loop]
    assert [c.kind for c in activations(outside, B)] == ["all-reduce"] * 2
    assert {c.kind for c in outside} == {"all-reduce"}
    assert sorted(c.elements for c in outside if c.elements not in (B * T * D,))[-3:] == [B * T] * 3
    assert all(c.elements <= B * T for c in outside if c.elements != B * T * D)


def test_zero3_moves_no_activations(moved):
    found = moved("fsdp8")
    rows = B // 8
    weights = {c.kind for c in in_layers(found)}
    assert weights == {"all-gather", "reduce-scatter", "all-reduce"}  # the last for norms' gradients
    lookups = [c for c in found if c.kind == "all-to-all"]
    assert len(lookups) == 2 and not any(c.in_loop for c in lookups)
    assert all("gather" in c.op_name or "scatter" in c.op_name for c in lookups)
    matrices = {D * 64, D * 8 * 4, 64 * D}  # of the MLP and of attention
    gathered = [c for c in in_layers(found) if c.kind == "all-gather" and c.elements > D]
    assert {c.elements for c in gathered} == matrices and len(gathered) == 2 * 7  # once forward, once backward
    scattered = [c for c in in_layers(found) if c.kind == "reduce-scatter"]
    assert {8 * c.elements for c in scattered} == matrices and len(scattered) == 7
    assert all(c.elements <= D for c in in_layers(found) if c.kind == "all-reduce")
    assert rows * T * D not in {c.elements for c in in_layers(found)} - matrices


@pytest.mark.long
@pytest.mark.parametrize("microbatches", [1, 4])
def test_data_parallelism_reduces_each_gradient_once_per_step(moved, microbatches, small, built):
    found = moved("dp8", microbatches=microbatches)
    assert {c.kind for c in found} == {"all-reduce"}
    parameters = built(small(layers=L), "dp8").arrays.parameter_count
    assert parameters <= sum(c.elements * c.times for c in found) <= parameters + 64  # 64: sums of the loss


@pytest.mark.long
def test_split_gradients_are_reduced_in_each_microbatch(moved):
    """What zero1_8 holds is an eighth of each gradient: no device ever holds the whole of one."""
    once, four = moved("zero1_8"), moved("zero1_8", microbatches=4)
    scattered = [[c for c in found if c.kind == "reduce-scatter"] for found in (once, four)]
    assert sum(c.elements * c.times for c in scattered[1]) == 4 * sum(c.elements * c.times for c in scattered[0]) > 0


@pytest.mark.parametrize(
    ("layout", "remat"),
    [*((layout, None) for layout in SHIPPED), *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)],
)  # fmt: skip
def test_no_shipped_layout_reshards_in_the_layers(moved, layout, remat):
    loop = in_layers(moved(layout, remat=remat))
    assert [c for c in loop if c.kind in RESHARDING] == []


@pytest.mark.long
def test_chunks_of_the_loss_move_no_tokens_of_a_split_sequence(moved, monkeypatch):
    monkeypatch.setattr(loss, "CHUNK_TOKENS", 32)
    rules = rules_file.from_dict({"mesh": {"context": 8}, "rules": {"seq": "context"}}, "here.yaml")
    chunks = [c for c in in_layers(moved(rules)) if c.times == 2 != L]  # 64 tokens on a device
    assert chunks and {c.kind for c in chunks} == {"all-reduce"}
    assert {c.elements for c in chunks} <= {1, 64 * D}  # sums, and the gradient of the table


@pytest.mark.slow
def test_a_layout_made_to_reshard_is_caught(moved):
    """Attention works on its own heads; a rule that splits its output over the sequence instead costs all-to-alls."""
    loaded = rules_file.load("tp8")
    rows = [Row("here", "rules", "attention_out", axis, names) for axis, names in (("seq", ("tensor",)), ("heads", ()))]
    loop = in_layers(moved(dataclasses.replace(loaded, rows=(*loaded.rows, *rows))))
    assert [c for c in loop if c.kind in RESHARDING] != []


@pytest.mark.long
def test_the_program_does_not_grow_with_depth_or_width_of_the_mesh(text):
    lines = {
        (layers, tensor): len(
            text(rules_file.load("dp2_tp4", f"data={8 // tensor},tensor={tensor}"), layers=layers).splitlines()
        )
        for layers, tensor in ((L, 2), (L, 4), (2 * L, 4))
    }
    assert lines[L, 4] == pytest.approx(lines[2 * L, 4], rel=0.01)
    assert lines[L, 4] == pytest.approx(lines[L, 2], rel=0.05)
