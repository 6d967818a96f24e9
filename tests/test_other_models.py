"""Models of others: what is said of them is true, whether they use the words of this package or not."""

import collections
import dataclasses
import functools
import pickle
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import gspmd_lm
from benchmarks.collectives import count
from gspmd_lm import InputError
from gspmd_lm.foresight import compile
from gspmd_lm.hardware import target as targets
from gspmd_lm.plan import search
from gspmd_lm.plan.estimate import Estimator
from gspmd_lm.plan.space import Space
from gspmd_lm.sharding import rules_file
from tests import own_models, plain_models
from tests.courses import begun
from tests.launched import compiled_here
from tests.quick import QUICK

FSDP = {"mesh": {"fsdp": 8}, "rules": {"batch": "fsdp"}, "weights": {"width": "fsdp"}}
SEQUENCE = {
    "mesh": {"data": 2, "tensor": 4},
    "rules": {"batch": "data", "wide": "tensor", "stream.position": "tensor"},
}


def rules(raw):
    quick = {**raw, "compiler_options": {"cpu": QUICK}}
    return rules_file.from_dict(quick, "layout.yaml", vocabulary=own_models.VOCABULARY)


@pytest.mark.slow
def test_a_model_that_reads_and_writes_a_stream_and_pools_it_is_priced_on_every_layout():
    target = targets.parse("v5e:2x4")
    space = Space(own_models.POOLED, target)
    found = search.estimate_layouts(space)
    assert len(found) > 100 and all(one.estimate.step_time_s > 0 for one in found)


def test_integers_of_three_dimensions_change_no_role():
    """What is split of a model whose batch also has integers that are neither of rows nor of tokens."""
    plain, shape = own_models.POOLED, (own_models.ROWS, own_models.POSITIONS, own_models.LABELS)

    def sums(params, batch, key):
        moved = batch["rows"] + batch["places"].sum(-1, keepdims=True)
        return plain.sums(params, {**batch, "rows": moved}, key)

    places = gspmd_lm.Input(shape, "int32", "rows: batch position label")
    task = dataclasses.replace(plain, inputs={**plain.inputs, "places": places}, sums=sums)
    target = targets.parse("cpu:8")
    assert Space(task, target).roles == Space(plain, target).roles


def test_what_a_stream_sends_is_priced_as_the_compiler_counts_it(monkeypatch):
    """What its blocks read is gathered and what they write reduced: once each, forward and backward."""
    monkeypatch.setattr(compile, "_run_compiler", compiled_here)
    layout = rules(SEQUENCE)
    estimator = Estimator(own_models.POOLED, targets.parse("cpu:8"))
    estimated = estimator.estimate(layout.fill(8)).sent_by_axis
    compiled = collections.Counter()
    for one in gspmd_lm.explain(own_models.POOLED, layout, "cpu:8").collectives:
        compiled["+".join(one.mesh_axes)] += one.bytes_per_device_per_step
    stream_bytes = 4 * own_models.ROWS // 2 * own_models.POSITIONS * own_models.WIDTH * 3 / 4
    # The input of the first block has no gradient. That of the mean is the same at all positions: a price does not
    # know it.
    assert estimated["tensor"] == pytest.approx((2 * 4 - 1) * stream_bytes, rel=0.01)
    assert compiled["tensor"] == pytest.approx((2 * 4 - 2) * stream_bytes, rel=0.03)
    assert estimated["data"] == pytest.approx(compiled["data"], rel=0.02)


def plain_rules(task, raw):
    quick = {**raw, "compiler_options": {"cpu": QUICK}}
    return rules_file.from_dict(quick, "layout.yaml", vocabulary=task.names)


PLAIN = {
    "none": {"mesh": {"data": 1}},
    "fsdp": {"mesh": {"fsdp": 8}, "rules": {"activation_batch": "fsdp"}, "weights": {"embed": "fsdp"}},
    "tensor": {
        "mesh": {"fsdp": 2, "tensor": 4},
        "rules": {"activation_batch": "fsdp", **dict.fromkeys(
            ("activation_heads", "activation_mlp", "activation_vocab", "heads", "mlp", "vocab"), "tensor")},
        "weights": {"embed": "fsdp"},
        "microbatches": 2,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def plain_steps():
    """Layout -> the compiled step of a decoder of flax that knows nothing of this package, and its initial state."""
    task = plain_models.decoder()
    steps = {name: gspmd_lm.build(task, plain_rules(task, raw)) for name, raw in PLAIN.items()}
    return {name: (step, step.compile(step.lower_train())) for name, step in steps.items()}


def losses_of(step, program, tokens, steps=3):
    state, values = begun(step), []
    for _ in range(steps):
        batch = jax.device_put({"tokens": tokens, "targets": np.roll(tokens, -1, 1)}, step.batch_shardings)
        state, metrics = program(state, batch)
        values.append(float(metrics["loss"]))
    return values


def test_a_plain_model_has_the_losses_of_one_device_under_every_layout(plain_steps):
    tokens = np.random.default_rng(0).integers(0, 128, (32, 16), dtype=np.int32)
    values = {name: losses_of(step, program, tokens) for name, (step, program) in plain_steps.items()}
    assert values["none"][0] > values["none"][-1] > 1
    np.testing.assert_allclose([values["fsdp"], values["tensor"]], [values["none"]] * 2, rtol=0, atol=1e-5)


def sent(program):
    """What each device sends in a step, in elements of eight devices' arrays."""
    return sum((2 if one.kind == "all-reduce" else 1) * one.elements * one.times for one in count(program.as_text()))


@pytest.mark.long
def test_a_plain_model_under_fsdp_sends_what_the_decoder_of_this_package_does(plain_steps):
    config = plain_models.same_decoder()
    layout = {"mesh": {"fsdp": 8}, "rules": {"batch": "fsdp"}, "weights": {"embed": "fsdp"}, "remat": "block"}
    step = gspmd_lm.build(config, rules_file.from_dict(layout, "layout.yaml"))
    plain, program = plain_steps["fsdp"]
    assert plain.arrays.parameter_count == step.arrays.parameter_count
    assert sent(program) <= 1.05 * sent(step.compile(step.lower_train()))


@pytest.mark.long
def test_weights_are_gathered_and_not_activations_also_without_constraints(monkeypatch):
    monkeypatch.setattr(nn, "with_logical_constraint", lambda x, axes: x)
    task = plain_models.decoder(rows=8, width=256, hidden=1024)  # few rows: the compiler would move them
    step = gspmd_lm.build(task, plain_rules(task, PLAIN["fsdp"]))
    moved = count(step.compile(step.lower_train()).as_text())
    assert {one.kind for one in moved if one.elements > 256} == {"all-gather", "all-to-all", "reduce-scatter"}


@pytest.mark.long
def test_a_layer_that_computes_in_bfloat16_gathers_bfloat16():
    program = gspmd_lm.build(task := plain_models.decoder(dtype="bfloat16"), plain_rules(task, PLAIN["fsdp"]))
    text = program.lower_train().as_text()
    gathered = re.findall(r"sharding_constraint .*\[\{\}, \{\}\].*tensor<64x256x(\w+)>", text)
    assert gathered and set(gathered) == {"bf16"}


class Scaled(nnx.Linear):
    """A layer of other people that calls the one of flax."""

    def __call__(self, x):
        return 2 * super().__call__(x)


class ScaledDense(nn.Dense):
    """The same of linen."""

    def __call__(self, x):
        return 2 * super().__call__(x)


class Centred(nnx.Linear):
    """A layer with a product of its own, which needs its kernel as it is."""

    def __call__(self, x):
        kernel = self.kernel[...]
        return x @ (kernel - kernel.mean(0)).astype(self.dtype)


class Wide(nnx.Module):
    """One layer of NNX that computes in bfloat16."""

    def __init__(self, layer, rngs, **how):
        kernel = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("width", "wide"))
        self.up = layer(128, 512, use_bias=False, kernel_init=kernel, dtype=jnp.bfloat16, rngs=rngs, **how)

    def __call__(self, x):
        return self.up(x).mean(1).astype(jnp.float32)


class WideOfLinen(nn.Module):
    """The same of linen."""

    @nn.compact
    def __call__(self, x):
        kernel = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("width", "wide"))
        scores = ScaledDense(512, use_bias=False, kernel_init=kernel, dtype=jnp.bfloat16)(x)  # pyright: ignore
        return scores.mean(1).astype(jnp.float32)


KEPT = {"promote_dtype": lambda arrays, dtype: arrays}


@pytest.mark.parametrize(
    ("model", "dtype", "scattered"),
    [
        pytest.param(functools.partial(Wide, Scaled), "bf16", True, id="a subclass"),
        pytest.param(WideOfLinen(), "bf16", True, id="a subclass of linen"),
        pytest.param(functools.partial(Wide, Centred), "f32", False, id="a product of its own"),
        pytest.param(functools.partial(Wide, nnx.Linear, **KEPT), "f32", True, id="a promotion of its own"),
    ],
)
def test_what_flax_computes_of_a_subclass_is_treated_as_its_own_layer(model, dtype, scattered):
    def losses(params, batch, key):
        made = nnx.merge(nnx.graphdef(nnx.eval_shape(lambda: model(nnx.Rngs(0)))), params)
        return optax.softmax_cross_entropy_with_integer_labels(made(batch["rows"]), batch["labels"])

    task = own_models.task("wide", model)
    if not isinstance(model, nn.Module):
        task = dataclasses.replace(task, init=lambda key: nnx.state(model(nnx.Rngs(key)), nnx.Param), sums=losses)
    task = dataclasses.replace(task, vocabulary=None)
    text = gspmd_lm.build(task, plain_rules(task, FSDP)).lower_train().as_text()
    gathered = re.findall(r"sharding_constraint .*\[\{\}, \{\}\].*tensor<128x512x(\w+)>", text)
    assert gathered and set(gathered) == {dtype}
    assert ("tensor<8x128x512x" in text) == scattered  # a gradient for each device, before they are added up


def test_what_is_shown_of_a_plain_model_is_what_happens(plain_steps):
    task = plain_models.decoder()
    page = gspmd_lm.dry_run(task, plain_rules(task, PLAIN["fsdp"]))
    assert "warning" not in page
    assert re.search(r"layers.wi.kernel +layers embed mlp +2 x 64 x 256 +embed/fsdp +replicated ", page)
    assert re.search(r"constraint +activation_batch activation_length activation_mlp +32 x 16 x 256 +"
                     r"activation_batch/fsdp +65,536\n", page)  # fmt: skip
    assert "kinds of constraints on activations: 4, 0 of them without an axis that a row maps\n" in page
    text = plain_steps["tensor"][1].as_text()
    assert "f32[8,16,64]" in text and "f32[8,16,256]" not in text  # the hidden units of a microbatch


def test_constraints_that_no_row_speaks_of_are_counted():
    task = plain_models.decoder()
    raw = {"mesh": {"data": 8}, "rules": {"activation_batch": "data"}}
    of_inputs = {name: one._replace(spec="tokens: rows length") for name, one in task.inputs.items()}
    task = dataclasses.replace(task, inputs=of_inputs)
    page = gspmd_lm.dry_run(task, plain_rules(task, {**raw, "rules": {"rows": "data"}}))
    assert "task plain_decoder: sums: of 4 kinds of constraints, 4 name no axis that a row" in page
    assert "rule  layout.yaml: rules.rows: data\n  fix   rules.activation_batch: data" in page
    with pytest.raises(InputError, match=r"unknown axis activation_bach \(did you mean activation_batch\?\)"):
        gspmd_lm.dry_run(task, plain_rules(task, {**raw, "rules": {"activation_bach": "data"}}))


def constrained(place):
    """A task whose loss goes through `place`."""

    def sums(params, batch, key):
        return place(params["up"]["kernel"].unbox().sum() + batch["rows"]).sum((1, 2))

    return dataclasses.replace(own_models.PLAIN, sums=sums)


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (lambda x: nn.with_logical_constraint(x, ("batch", "positoin")),
         "x, ('batch', 'positoin')): the model has no axis positoin (did you mean position?)\n  fix   use one of "),
        (lambda x: nn.with_logical_constraint(x, ("batch", None, None, None)), "x has 3 dimensions"),
        (lambda x: nn.with_logical_constraint(x, ("batch",), fallback=nn.spmd.RulesFallback.NO_CONSTRAINT),
         "without mesh= and fallback=: the rules file says both"),
        (lambda x: nn.with_logical_constraint(x, ("batch", "position")),
         "constraint,batch,position,_2: position=16 does not divide over tensor=5\n"
         "  rule  layout.yaml: rules.position: tensor"),
        (lambda x: jax.lax.with_sharding_constraint(x, jax.P("data")),
         "jax.lax.with_sharding_constraint(x, P('data',)): the model has no axis data\n  fix   use one of "),
        (lambda x: jax.lax.with_sharding_constraint(x=x, shardings=jax.P("data")),
         "jax.lax.with_sharding_constraint(x, P('data',)): the model has no axis data\n  fix   use one of "),
        (lambda x: jnp.einsum("bpw->bw", x, out_sharding=jax.P("batch", None, None))[:, None],
         "jnp.einsum(..., out_sharding=P('batch', None, None)): x has 2 dimensions"),
        (lambda x: jnp.broadcast_to(x, x.shape, out_sharding=jax.P("batch")),
         "the model gives a PartitionSpec to a function that needs a mesh of its own"),
    ],
)  # fmt: skip
def test_constraints_that_would_do_nothing_are_refused(place, message):
    with pytest.raises(InputError) as error:
        gspmd_lm.dry_run(constrained(place), rules({"mesh": {"tensor": 5}, "rules": {"position": "tensor"}}))
    assert message in str(error.value)


def test_a_task_that_another_module_has_configured_is_refused(monkeypatch):
    def compiled_with_the_module_as_it_is(request, folder):
        monkeypatch.undo()
        compile._compile(pickle.loads(pickle.dumps(request)), folder)

    monkeypatch.setattr(compile, "_run_compiler", compiled_with_the_module_as_it_is)
    monkeypatch.setattr(own_models, "WIDE", 2 * own_models.WIDE)
    with pytest.raises(InputError) as error:
        gspmd_lm.explain(own_models.task("configured", own_models.Plain()), rules(FSDP), "cpu:8")
    assert "task configured: its functions have other sizes in the process that compiles" in str(error.value)
    assert "head.kernel: [1024, 8] here, [512, 8] there" in str(error.value)


@pytest.mark.slow
def test_a_task_that_was_handed_its_sizes_has_them_in_the_other_process(monkeypatch):
    monkeypatch.setattr(own_models, "WIDE", 2 * own_models.WIDE)
    handed = own_models.task("handed", own_models.Plain(hidden_units=own_models.WIDE))
    assert gspmd_lm.explain(handed, rules(FSDP), "cpu:8").parameters == 1024 * (128 + 8)


@pytest.mark.long
def test_a_model_of_nnx_is_placed_as_one_of_linen(plain_steps):
    task = plain_models.NNX
    raw = {"mesh": {"fsdp": 8}, "rules": {"batch": "fsdp"}, "weights": {"embed": "fsdp"}}
    page = gspmd_lm.dry_run(task, plain_rules(task, raw))
    assert re.search(r"layers.1.wi.kernel +embed mlp +64 x 256 +embed/fsdp +replicated ", page)
    tokens, values = np.random.default_rng(0).integers(0, 128, (32, 16), dtype=np.int32), []
    for layout in (raw, {"mesh": {"data": 1}}):
        step = gspmd_lm.build(task, plain_rules(task, layout))
        program = step.compile(step.lower_train())
        values.append(losses_of(step, program, tokens))
        if layout is raw:
            gathered = {one.elements for one in count(program.as_text()) if one.kind == "all-gather"}
            moved = {one.elements for one in count(program.as_text()) if one.elements > 64 * 256}
            assert 64 * 256 in gathered and not moved  # each activation has more elements
            of_linen, linen_program = plain_steps["fsdp"]
            assert step.arrays.parameter_count == of_linen.arrays.parameter_count
            assert sent(program) <= sent(linen_program)
    assert values[1][0] > values[1][-1] > 1
    np.testing.assert_allclose(*values, rtol=0, atol=1e-5)


class Layers(nnx.Module):
    """A model of NNX, with a list, whose keys are numbers."""

    def __init__(self, rngs):
        kernel = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("width", "wide"))
        self.layers = nnx.List(nnx.Linear(128, 128, use_bias=False, kernel_init=kernel, rngs=rngs) for _ in range(2))

    def __call__(self, rows_BPW):
        for layer in self.layers:
            rows_BPW = layer(rows_BPW)
        return rows_BPW.mean(1)


class Normed(nnx.Module):
    """A layer of NNX that keeps running averages of its inputs."""

    def __init__(self, rngs):
        kernel = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("width", "label"))
        self.norm = nnx.BatchNorm(128, momentum=0.5, use_bias=False, use_scale=False, rngs=rngs)
        self.head = nnx.Linear(128, own_models.LABELS, use_bias=False, kernel_init=kernel, rngs=rngs)

    def __call__(self, rows_BPW):
        return self.head(self.norm(rows_BPW)).mean(1)


def normed_losses(variables, batch, train):
    model = nnx.merge(nnx.graphdef(nnx.eval_shape(lambda: Normed(nnx.Rngs(0)))), variables)
    model.train() if train else model.eval()
    losses_B = optax.softmax_cross_entropy_with_integer_labels(model(batch["rows"]), batch["labels"])
    return losses_B, nnx.state(model, nnx.BatchStat)


def normed_totals(variables, batch):
    return {"loss": normed_losses(variables, batch, False)[0].sum(), "count": jnp.float32(len(batch["rows"]))}


@pytest.mark.long
def test_running_averages_of_nnx_are_those_of_one_device_and_evaluated_with():
    task = dataclasses.replace(
        own_models.PLAIN, name="normed", vocabulary=None, init=lambda key: nnx.state(Normed(nnx.Rngs(key))),
        sums=lambda variables, batch, key: normed_losses(variables, batch, True), evaluate=normed_totals,
    )  # fmt: skip
    rng, found = np.random.default_rng(0), []
    rows = rng.normal(3, 2, (own_models.ROWS, own_models.POSITIONS, own_models.WIDTH)).astype(np.float32)
    batch = {"rows": rows, "labels": rng.integers(0, own_models.LABELS, own_models.ROWS, dtype=np.int32)}
    for raw in ({"mesh": {"data": 1}}, FSDP):
        step = gspmd_lm.build(task, plain_rules(task, raw))
        placed = jax.device_put(batch, step.batch_shardings)
        state, metrics = step.compile(step.lower_train())(step.compile(step.lower_init())(), placed)
        totals = step.compile(step.lower_evaluate())(state.params, placed)
        found.append(jax.device_get((state.params, metrics["loss"], totals["loss"] / own_models.ROWS)))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-5), *found)
    params, loss, score = found[0]
    stats, mean = params["batch_stats"]["norm"], rows.mean((0, 1))
    np.testing.assert_allclose(stats["mean"], 0.5 * mean, rtol=0, atol=1e-5)
    x = (rows - stats["mean"]) / np.sqrt(stats["var"] + 1e-5)
    scores = (x @ params["params"]["head"]["kernel"]).mean(1)
    wanted = np.log(np.exp(scores).sum(-1)) - scores[np.arange(own_models.ROWS), batch["labels"]]
    assert score == pytest.approx(wanted.mean(), abs=1e-5) and abs(score - loss) > 0.1


def test_what_is_no_parameter_of_nnx_is_refused_and_a_bridge_works():
    task = own_models.task("nnx", nnx.bridge.to_linen(Layers))
    draws = dataclasses.replace(task, init=lambda key: nnx.state(nnx.Dropout(0.5, rngs=nnx.Rngs(key))))
    with pytest.raises(InputError, match=r"rngs.count draws random numbers, and no step has those of"):
        gspmd_lm.dry_run(draws, rules(FSDP))
    unnamed = nnx.state(nnx.Dict(kernel=nnx.Cache(jnp.ones(8)), mean=nnx.BatchStat(jnp.ones(8))))
    with pytest.raises(InputError, match=r"of several kinds, and no nnx.Param: BatchStat, Cache"):
        gspmd_lm.dry_run(dataclasses.replace(task, init=lambda key: unnamed), rules(FSDP))
    with pytest.raises(InputError, match=r"are not nested dicts of arrays: \[0\] in \[0\]"):
        gspmd_lm.dry_run(dataclasses.replace(task, init=lambda key: [jax.random.normal(key, (8, 8))]), rules(FSDP))
    page = gspmd_lm.dry_run(task, rules(FSDP))
    assert re.search(r"layers.0.kernel +width wide +128 x 128 +width/fsdp +replicated ", page)
