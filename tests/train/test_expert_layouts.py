"""Mixtures of experts under rules: losses and gradients against one device, what is sent, and what is refused."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.collectives import count
from gspmd_lm.config import LatentAttention, Lora
from gspmd_lm.foresight import hlo
from gspmd_lm.sharding import rules_file
from gspmd_lm.sharding.problems import ShardingError
from gspmd_lm.train import state
from tests.courses import begun

SIZES = {"experts.count": 8, "experts.per_token": 2, "experts.mlp": 16, "init_std": 0.3}
TENSOR = dict.fromkeys(("vocab", "heads", "kv_heads", "mlp"), "tensor")
ALL = {
    "experts.shared_mlp": 8,
    "experts.shared_gate": True,
    "feed_forward.bias": True,
    "experts.balance": "batch",
    "experts.z_loss": 0.1,
}
WITHOUT_MLP = {f"{name}.mlp": None for name in ("w_gate", "w_up", "w_down", "b_gate", "b_up")}

LORA = Lora(rank=4, alpha=8.0, targets=("w_gate", "w_up", "w_down"))

# Every pair of an axis of the experts (fsdp at rest, tensor in use, an axis of their own, an old axis) with the others.
LAYOUTS = {
    "expert, fsdp and tensor": {
        "mesh": {"fsdp": 2, "expert": 2, "tensor": 2}, "weights": {"embed": "fsdp"}, "remat": "block",
        "rules": {"batch": ["fsdp", "expert"], "expert": "expert", "residual.seq": "tensor", **TENSOR},
    },
    "fsdp": {"mesh": {"fsdp": 8}, "rules": {"batch": "fsdp"}, "weights": {"expert": "fsdp"}},
    "data, fsdp and tensor": {
        "mesh": {"data": 2, "fsdp": 2, "tensor": 2}, "weights": {"embed": "fsdp"},
        "optimizer": {"embed": ["fsdp", "data"]},
        "rules": {"batch": ["data", "fsdp"], "residual.seq": "tensor", **TENSOR},
    },
    "data and expert": {
        "mesh": {"data": 2, "expert": 4}, "rules": {"batch": ["data", "expert"], "expert": "expert"}, "remat": "dots",
    },
    "experts over data": {"mesh": {"data": 8}, "rules": {"batch": "data", "expert": "data"}},
    "experts over tensor": {
        "mesh": {"data": 2, "tensor": 4}, "rules": {"batch": "data", "expert": "tensor", **TENSOR, **WITHOUT_MLP},
    },
    "expert and context": {
        "mesh": {"expert": 4, "context": 2},
        "rules": {"batch": "expert", "seq": "context", "expert": ["expert", "context"]},
    },
    "four axes of 16 devices": {
        "mesh": {"fsdp": 2, "expert": 2, "context": 2, "tensor": 2}, "remat": "block",
        "weights": {"embed": ["fsdp", "context"]},
        "rules": {"batch": ["fsdp", "expert"], "seq": "context", "expert": "expert", **TENSOR},
    },
    "all axes but one of 16 devices": {
        "mesh": {"data": 2, "fsdp": 2, "expert": 2, "tensor": 2}, "optimizer": {"embed": ["fsdp", "data"]},
        "weights": {"embed": "fsdp"},
        "rules": {"batch": ["data", "fsdp", "expert"], "expert": "expert", "residual.seq": "tensor", **TENSOR},
    },
    "microbatches of replicas": {"mesh": {"data": 8}, "rules": {"batch": "data"}, "microbatches": 2},
}  # fmt: skip
ROUNDS = {
    "four devices": {"mesh": {"expert": 4}, "rules": {"batch": "expert", "expert": "expert"}, "expert_buffer": 1},
    "microbatches, computed again": {
        "mesh": {"expert": 4}, "rules": {"batch": "expert", "expert": "expert"}, "remat": "block", "microbatches": 2,
    },
    "eight devices": {"mesh": {"expert": 8}, "rules": {"batch": "expert", "expert": "expert"}, "expert_buffer": 1.3},
    "beside fsdp, computed again": {
        "mesh": {"fsdp": 2, "expert": 4}, "weights": {"embed": "fsdp"}, "remat": "block",
        "rules": {"batch": ["fsdp", "expert"], "expert": "expert"},
    },
    "beside tensor": {
        "mesh": {"expert": 4, "tensor": 2}, "remat": {"save": ["dispatched"]}, "expert_buffer": 1,
        "rules": {"batch": "expert", "expert": "expert", "residual.seq": "tensor", **TENSOR},
    },
    "stages": {
        "mesh": {"stage": 2, "expert": 4}, "weights": {"layers": "stage"}, "pipeline": {"microbatches": 2},
        "rules": {"batch": "expert", "expert": "expert"}, "expert_buffer": 1,
    },
    "stages, 1f1b": {
        "mesh": {"stage": 2, "expert": 4}, "weights": {"layers": "stage"},
        "pipeline": {"microbatches": 2, "schedule": "1f1b"},
        "rules": {"batch": "expert", "expert": "expert"}, "expert_buffer": 1,
    },
}  # fmt: skip
FIRST, *OTHERS = LAYOUTS
IN_ROUNDS, *IN_OTHER_ROUNDS = ROUNDS


def rules_of(name):
    return rules_file.from_dict(LAYOUTS[name], "here.yaml")


def copies_agree(x):
    """Fails unless all devices that hold the same piece of an array hold the same values."""
    seen = {}
    for shard in x.addressable_shards:
        first = seen.setdefault(str(shard.index), np.asarray(shard.data))
        np.testing.assert_allclose(shard.data, first, rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def computed(small, built, batch_of):
    """A function that gives the sums and the gradients of a batch under rules, and the program that computes them."""
    found, programs = {}, {}

    def under(name, rules, router=1.0, **model):
        """router: what the weights of routers are multiplied by. With 0, all tokens choose the same experts."""
        of_program = name, *sorted(model.items())
        key = router, *of_program
        if key not in found:
            step = built(small(**SIZES, **{**ALL, **model}), rules)

            def gradients(state, batch):
                with step.trace_under():
                    frozen, trained = step.task.partition(state.params)
                    (sums, _), gradients = step._gradients(state, frozen, trained, batch, step.task.divisor(batch))
                    return sums, gradients

            state, batch = begun(step), batch_of(step)
            params = jax.tree_util.tree_map_with_path(
                lambda path, w: w * router if path[-1].key == "router" else w, state.params
            )
            given = state._replace(params=params), batch
            if of_program not in programs:
                programs[of_program] = jax.jit(gradients).lower(*given).compile()
            program = programs[of_program]
            result = program(*given)
            jax.tree.map(copies_agree, result)
            found[key] = jax.device_get(result), program.as_text()
        return found[key]

    return under


@pytest.mark.long
@pytest.mark.parametrize("name", [FIRST, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_losses_and_gradients_do_not_depend_on_the_layout(computed, name):
    agree(computed, name, {"experts.balance": "row"} if "microbatches" in name else {})


@pytest.mark.slow
@pytest.mark.parametrize("name", [FIRST, "fsdp", "experts over tensor"])
def test_those_of_adapters_do_not_either(computed, name):
    """A row for a weight, such as `w_gate.mlp: null`, places its adapter too."""
    (_, gradients), _ = agree(computed, name, {"experts.balance": "row", "lora": LORA})
    assert len(jax.tree.leaves(gradients)) == 2 * 3 * 2  # two matrices; gate, up and down; experts and shared ones


@pytest.mark.slow
def test_the_shipped_rules_of_deepseek_v3_do_neither(computed):
    """Of 16 devices, 8 of which share the experts, with the three weights of latent attention that have no embed."""
    latent = {
        "attention.latent": LatentAttention(kv_rank=16, q_rank=16, v_head_dim=4),
        "head_dim": 6,
        "attention.rope.dim": 2,
    }
    model = latent | {
        "experts.dense_layers": 1,
        "experts.balance": "bias_row",
        "experts.routing": "sigmoid",
        "feed_forward.bias": False,
    }
    agree(computed, "fsdp_expert8", model, rules_file.load("fsdp_expert8").fill(16))


@pytest.mark.parametrize("name", [IN_ROUNDS, *(pytest.param(name, marks=pytest.mark.slow) for name in IN_OTHER_ROUNDS)])
@pytest.mark.parametrize("kind", ["plain", pytest.param("adapters and weighted inputs", marks=pytest.mark.slow)])
def test_tokens_travel_in_as_many_rounds_as_the_fullest_device_needs(computed, name, kind):
    """Losses and gradients are those of one device, with loads as they come and with all tokens at the same experts."""
    rules = rules_file.from_dict(ROUNDS[name], "here.yaml")
    model = {"experts.shared_mlp": 0, "experts.shared_gate": False, "experts.balance": "row"}
    model |= {"lora": LORA, "experts.weighted_input": True, "feed_forward.bias": False} if kind != "plain" else {}
    (drawn, _), text = agree(computed, name, model, rules)
    (sums, _), _ = agree(computed, name, model, rules, router=0.0)
    assert np.count_nonzero(sums.load_LC, axis=1).tolist() == [2, 2]
    # On one device, the sum of 1 for each target token.
    (one, _), _ = computed("single", None, **model)
    rounds = [found.expert_rounds / one.expert_rounds for found in (drawn, sums)]
    fullest = min(rules.mesh["expert"], 4)  # mean loads: the two experts are on one device, or on one each of eight
    assert 1 <= rounds[0] <= rounds[1] == pytest.approx(-(-fullest // rules.expert_buffer))
    # Predictions take loads as even: one round, and no turn of the loop over the others.
    inside = [one for one in hlo.parse(text).operations if one.collectives and one.name_in_model.trip_count]
    assert inside and {one.executions for one in inside} == {0}


def agree(computed, name, model, rules=None, router=1.0):
    """What was computed, after a comparison with one device."""
    found = (sums, gradients), _ = computed(name, rules or rules_of(name), router, **model)
    one = dataclasses.replace(rules_file.load("single"), unroll=1)
    (want, wanted), _ = computed("single", one, router, **model)
    assert abs(sums.loss / want.loss - 1) < 1e-5
    np.testing.assert_array_equal(sums.load_LC, want.load_LC)
    for path, one in jax.tree_util.tree_leaves_with_path(wanted):
        other = gradients
        for key in path:
            other = other[key.key]
        assert abs(one).max() > 0 and abs(other - one).max() <= 1e-5 * abs(one).max(), path
    return found


@pytest.mark.long
def test_what_an_expert_axis_sends(computed):
    """Tokens travel out and home in each direction, and out once more where a block is computed again. A device
    gathers its own experts alone, which are a half of a half of all; and no device has the logits of others."""
    found = [c for c in count(computed(FIRST, rules_of(FIRST))[1]) if c.in_loop]
    own, rows, D = 8 * 32 * 16 // 4, 32 // 4 * 16 * 2, 32
    for name in ("w_gate", "w_up", "w_down"):
        moved = [c for c in found if c.op_name.split("/")[-2].endswith(f"layers.mlp.{name}")]
        assert sorted((c.kind, c.elements) for c in moved) == [("all-gather", own)] * 2
    dispatched = [c.elements for c in found if "rules.dispatched" in c.op_name and c.elements >= rows * D]
    assert (
        sorted(dispatched) == [2 * rows * D] * 3 + [4 * rows * D] * 2
    )  # as XLA:CPU simulates it: every device gets all
    assert not [c for c in found if "_choose_experts" in c.op_name]


@pytest.mark.slow
def test_fsdp_alone_moves_no_token(computed):
    """Each matrix of the experts is gathered twice and its gradient reduce-scattered once; tokens stay."""
    found = [c for c in count(computed("fsdp", rules_of("fsdp"))[1]) if c.in_loop]
    matrix = 8 * 32 * 16
    assert [c.kind for c in found if c.kind == "all-gather" and c.elements == matrix] == ["all-gather"] * 6
    assert [c.elements * 8 for c in found if c.kind == "reduce-scatter"].count(matrix) == 3
    assert not [c for c in found if c.kind in ("all-to-all", "collective-permute")]
    assert all(c.elements < matrix for c in found if c.kind == "all-reduce")
    assert not [c for c in found if "_choose_experts" in c.op_name]


@pytest.mark.parametrize(
    ("rules", "model", "message", "fix"),
    [
        ({"mesh": {"expert": 8}, "rules": {"batch": "expert", "expert": "expert"}}, {"experts.count": 12},
         "layers.mlp.w_down: expert=12 does not divide over expert=8", "--set rules.rules.expert=null"),
        ({"mesh": {"tensor": 8}, "rules": {"expert": "tensor", "mlp": "tensor"}}, {},
         "layers.mlp.w_down: tensor would split both expert and mlp", "another mesh axis"),
        ({"mesh": {"data": 2, "tensor": 4}, "rules": {"batch": "data", "expert": ["data", "tensor"]}}, {},
         "experts: expert would be split over data, which splits tokens, and tensor, which does not",
         "--set rules.rules.expert=data, so that tokens travel"),
        ({"mesh": {"data": 8}, "rules": {"batch": "data"}, "microbatches": 2}, {"experts.balance": "batch"},
         "model.experts.balance: batch needs the loads of the whole batch", "--set rules.microbatches=1"),
        ({"mesh": {"context": 8}, "rules": {"seq": "context"}}, {"experts.capacity_factor": 1.0},
         "model.experts.capacity_factor: an expert computes the first tokens of a row",
         "--set model.experts.capacity_factor=0"),
    ],
)  # fmt: skip
def test_rules_that_do_not_fit_experts_are_refused(small, rules, model, message, fix):
    with pytest.raises(ShardingError) as error:
        state.arrays_and_warnings(small(**{**SIZES, **model}), rules_file.from_dict(rules, "here.yaml"), "cpu")
    assert message in str(error.value) and fix in str(error.value) and "here.yaml" in str(error.value)


def test_a_config_that_drops_tokens_is_warned_of(small):
    rules = rules_file.load("single")
    _, warnings = state.arrays_and_warnings(small(**SIZES, **{"experts.capacity_factor": 1.25}), rules, "cpu")
    assert "drops the tokens that an expert gets beyond 1.25 times the mean" in "\n".join(map(str, warnings))


def test_a_buffer_is_said_where_tokens_travel_in_rounds(small, built):
    said = built(small(**SIZES), rules_file.from_dict(ROUNDS[IN_ROUNDS], "here.yaml")).choices
    assert [line.partition("(")[0] for line in said] == [
        "experts: tokens travel over expert=4. A device has room for 1 times the mean number of rows "
    ]
    assert not built(small(**SIZES), rules_of(FIRST)).choices  # two devices have room for all rows
    unused = rules_file.from_dict({"mesh": {"data": 1}, "expert_buffer": 3}, "here.yaml")
    _, (warning,) = state.arrays_and_warnings(small(), unused, "cpu")
    assert str(warning).startswith("expert_buffer: the model does not use this key")


@pytest.mark.slow
@pytest.mark.parametrize("microbatches", [1, 2])
def test_the_bias_is_moved_and_not_trained(small, built, batch_of, microbatches):
    step = built(
        small(**SIZES, **{"experts.balance": "bias", "experts.balance_rate": 0.25}), "single", microbatches=microbatches
    )
    assert "balance_bias" not in str(jax.tree_util.tree_structure(step.abstract_state.optimizer))
    before = step.lower_init().compile()()
    weight = np.array(before.params["layers"]["mlp"]["router"])
    after, metrics = step.lower_train().compile()(before, batch_of(step))
    moved = np.array(after.params["layers"]["mlp"]["balance_bias"])
    assert set(np.unique(moved)) <= {-0.25, 0.0, 0.25} and len(np.unique(moved)) > 1
    assert (np.array(after.params["layers"]["mlp"]["router"]) != weight).any()
    assert metrics["expert_imbalance"] > 1


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["muon", "adafactor"])
def test_experts_are_matrices_of_their_own(small, built, batch_of, optimizer):
    """The update of an expert's matrix is that of the same matrix in a model with one expert less: it is the same
    whatever the other experts' gradients are."""
    step = built(small(**SIZES, optimizer={"name": optimizer, "clip_norm": 0.0}), "single")
    start = step.lower_init().compile()()
    gradients = jax.tree.map(lambda x: jax.random.normal(jax.random.key(x.size), x.shape), start.params)
    scaled = jax.tree.map(jnp.copy, gradients)
    scaled["layers"]["mlp"]["w_up"] = scaled["layers"]["mlp"]["w_up"].at[:, 1].multiply(7.0)
    updates = [
        jax.jit(step.arrays.transform.update)(given, start.optimizer, start.params)[0]["layers"]["mlp"]["w_up"]
        for given in (gradients, scaled)
    ]
    np.testing.assert_allclose(updates[0][:, 0], updates[1][:, 0], rtol=1e-5)
