"""Runs: resuming, other layouts, evaluation, being asked to stop, ending early. test_divergence.py has the others."""

import dataclasses
import json
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from etils import epath

from gspmd_lm import config as configs
from gspmd_lm import files, versions
from gspmd_lm.config import with_values
from gspmd_lm.data.loader import Loader
from gspmd_lm.errors import InputError, RunFailed, StoreFailed
from gspmd_lm.foresight import hlo
from gspmd_lm.foresight.timing.traced import traced_step
from gspmd_lm.hardware.network import Network
from gspmd_lm.model.decoder import Decoder
from gspmd_lm.model.families import decode
from gspmd_lm.model.loss import logits
from gspmd_lm.runtime import compiler
from gspmd_lm.runtime.preemption import Agreement
from gspmd_lm.train import progress
from gspmd_lm.train.loop import Run
from gspmd_lm.train.programs import TrainPrograms
from gspmd_lm.train.saving import Clock, SkippedSteps
from gspmd_lm.workdir.checkpoint import Checkpoints
from gspmd_lm.workdir.log import Log
from gspmd_lm.workdir.wall_time import read_totals
from tests.train.runs import CPU, TRAIN, losses_of, rows_of, state_of


@pytest.fixture(scope="module")
def straight(run, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("straight")
    finished = run(workdir)
    finished.train(12)
    return workdir, state_of(finished)


def same(a, b):
    """Bitwise the same trees."""
    data = lambda x: np.asarray(jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x)  # noqa: E731
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(data(x), data(y)), a, b)


@pytest.mark.parametrize(
    ("layout", "bits"), [("tp8", False), *(pytest.param(one, True, marks=pytest.mark.slow) for one in ("none", "tp8"))]
)
def test_the_initial_state_is_traced_once_and_compiled_cheaply_to_the_same_bits(layout, bits, built, monkeypatch):
    config, traced, options = configs.load("tiny"), [], []
    few = {"feed_forward.kind": "plain", "embedding.tied": True, "init_std": 0.02 + len(layout) / 1e4}
    config = dataclasses.replace(config, model=with_values(config.model, few))
    trace, compile_ = Decoder.init, compiler.compile
    monkeypatch.setattr(Decoder, "init", lambda *given: traced.append(1) or trace(*given))
    monkeypatch.setattr(compiler, "compile", lambda *given: options.append(given[1]) or compile_(*given))
    step = built(config, layout)
    state = TrainPrograms(step, CPU, print).initial_state()()
    assert len(traced) == 1
    assert options == [{"xla_backend_optimization_level": 1}]
    if bits:
        same(state, step.lower_init().compile({"xla_backend_optimization_level": 3})())  # as users have it


def test_a_resumed_run_is_bitwise_the_straight_one(run, straight, tmp_path):
    workdir, (at, state) = straight
    run(tmp_path).train(5)
    assert state_of(run(tmp_path))[0] == 5
    run(tmp_path).train(12)
    resumed_at, resumed = state_of(run(tmp_path))
    assert resumed_at == at == 12
    same(resumed, state)
    assert losses_of(tmp_path) == losses_of(workdir)


MIXTURE = {"experts.count": 8, "experts.per_token": 2, "experts.mlp": 16, "experts.shared_mlp": 8, "init_std": 0.2}
ADAPTED = {"lora": configs.Lora(rank=4, alpha=8.0, targets=("wq", "w_gate", "w_down"))}


@pytest.mark.parametrize(
    ("layouts", "model"),
    [
        # By default, a model of one's own goes on under other rules in test_your_own_model.py.
        pytest.param(("tp8", "fsdp2"), {}, marks=pytest.mark.slow),
        pytest.param(("fsdp8", "tp8", "dp2_tp4"), {}, marks=pytest.mark.slow),
        pytest.param(("pp2_fsdp2_tp2", "fsdp8", "pp2_fsdp2_tp2"), {"layers": 2}, marks=pytest.mark.slow),
        *(
            pytest.param(("expert4", "fsdp8", "dp2_tp4"), {**MIXTURE, **more}, marks=pytest.mark.slow)
            for more in (
                {"experts.balance": "batch"},
                {"experts.balance": "bias", "experts.balance_rate": 0.02},
                ADAPTED,
            )
        ),
    ],
    ids=["dense", "dense, three layouts", "pipeline", "mixture", "mixture balanced by a bias", "mixture with adapters"],
)
def test_a_checkpoint_restores_under_another_layout(run, straight, small, tmp_path, layouts, model):
    config, workdir = None, straight[0]
    if model:
        data = {"batch": 8, "source": "random:60", "seed": 1}  # with which no rounding decides where a token goes
        config = small(**{"layers": 1, **model}, data=data, train=dict(TRAIN))
        workdir = tmp_path / "straight"
        run(workdir, config=config).train(12)
    for layout, stop in zip(layouts, (5, 9, 12)[-len(layouts) :], strict=True):
        run(tmp_path / "resumed", layout, config).train(stop)
    want, got = losses_of(workdir), losses_of(tmp_path / "resumed")
    assert got.keys() == want.keys() and min(want.values()) < want[1]
    assert max(abs(got[step] - want[step]) for step in want) < 1e-5


def test_what_a_workdir_holds(straight):
    workdir, _ = straight
    assert sorted(path.name for path in (workdir / "checkpoints").iterdir() if path.name.isdigit()) == ["12", "8"]
    assert {"config.yaml", "rules.yaml", "versions.json", "metrics.jsonl"} <= {path.name for path in workdir.iterdir()}
    rows = rows_of(workdir)
    logged = [row for row in rows if "loss" in row]
    assert [row["step"] for row in logged] == list(range(1, 13))
    assert {"accuracy", "perplexity", "gradient_norm", "weight_norm", "learning_rate", "skipped_steps"} <= set(
        logged[0]
    )
    speeds = {"step_time_s", "tokens_per_s", "data_wait_s"}
    assert [speeds & set(row) for row in logged] == [set(), *[speeds] * 11]  # the first step does more than a step
    assert [(row["tokens"], row["epoch"]) for row in logged] == [(8 * 16 * n, 8 * n / 60) for n in range(1, 13)]
    assert [row["step"] for row in rows if "eval_loss" in row] == [6, 12]
    about = json.loads((workdir / "versions.json").read_text())
    assert about["versions"]["jax"] == jax.__version__ and about["host"] == platform.node()
    assert about["command"] == shlex.join(["python", *sys.argv]) and about["commit"] == versions.commit()


def test_the_commit_of_a_checkout(tmp_path):
    git = lambda *words: subprocess.run(["git", "-C", tmp_path, *words], check=True, capture_output=True, text=True)  # noqa: E731
    assert versions.commit(tmp_path) is None
    git("init")
    assert versions.commit(tmp_path) is None  # it has no commit
    (tmp_path / "a.py").write_text("1")
    git("add", "a.py")
    git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-m", "first")
    head = git("rev-parse", "HEAD").stdout.strip()
    assert versions.commit(tmp_path) == head
    (tmp_path / "a.py").write_text("2")
    assert versions.commit(tmp_path) == f"{head}, with changes"
    (tmp_path / "inner").mkdir()
    assert versions.commit(tmp_path / "inner") is None


def test_metrics_are_cut_back_to_the_restored_step(run, tmp_path):
    run(tmp_path).train(8)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "loss": 1}\n{"step": 10, "lo')  # the run went on and was killed before it saved
    run(tmp_path).train(12)
    assert list(losses_of(tmp_path)) == list(range(1, 13))


@pytest.mark.long
def test_evaluation_of_the_newest_checkpoint(run, straight, tmp_path):
    workdir, (_, state) = straight
    last = [row for row in rows_of(workdir) if "eval_loss" in row][-1]
    found = run(workdir).evaluate()
    assert found["eval_loss"] == pytest.approx(last["eval_loss"], abs=1e-6)

    # By hand, from all logits at once. The last of the eight batches has four rows of padding.
    made = run(workdir)
    model, rows = made.config.model, [made.rows[1].rows_at(at, slice(None)) for at in range(8)]
    batch = {name: np.concatenate([part[name] for part in rows]) for name in rows[0]}
    with jax.default_matmul_precision("highest"):
        found_logits = jax.jit(lambda params: logits(*decode(model, params, batch), model))
        logs = np.asarray(jax.nn.log_softmax(found_logits(jax.device_get(state.params))))
    counted = batch["targets"] >= 0
    each = np.take_along_axis(logs, np.maximum(batch["targets"], 0)[..., None], -1)[..., 0][counted]
    assert found["eval_tokens"] == counted.sum() == 60 * 16
    assert found["eval_loss"] == pytest.approx(-each.mean(), rel=1e-5)
    assert found["eval_perplexity"] == pytest.approx(np.exp(-each.mean()), rel=1e-4)
    assert found["eval_accuracy"] == pytest.approx((logs.argmax(-1) == batch["targets"])[counted].mean())
    assert run(workdir, "tp8").evaluate(8)["eval_loss"] != pytest.approx(found["eval_loss"], abs=1e-6)
    with pytest.raises(InputError, match="no checkpoint"):
        run(tmp_path).evaluate()


def test_a_checkpoint_of_another_architecture_is_refused(run, straight, small):
    workdir, _ = straight
    wider = small(layers=1, mlp=128, data={"batch": 8}, train=dict(TRAIN))
    with pytest.raises(InputError, match=r"(?s)mlp.*64.*128"):
        run(workdir, "dp8", wider).train(13)


def test_weights_of_another_architecture_are_refused_before_the_data_is_read(run, straight, small, tmp_path):
    workdir, _ = straight
    wider = small(layers=1, mlp=128, data={"batch": 8}, train=TRAIN | {"init_from": str(workdir)})
    begun = run(tmp_path, "dp8", wider)
    begun.open_rows = lambda: pytest.fail("the data was read")
    with pytest.raises(InputError, match=r"(?s)mlp.*64.*128"):
        begun.train(13)
    assert not begun.programs.compiled


@pytest.mark.long
def test_a_run_that_diverges_at_once_loses_nothing(run, straight, tmp_path):
    """No finite step has followed the last checkpoint of a run that ended, and none will."""
    workdir, _ = straight
    shutil.copytree(workdir, tmp_path, dirs_exist_ok=True)
    config = run(workdir).config
    at = state_of(run(workdir))[0]
    for step in (tmp_path / "checkpoints").iterdir():
        if int(step.name) != at:
            shutil.rmtree(step)
    nan = dataclasses.replace(
        config,
        model=with_values(config.model, {"logits.z_loss": 1.0e38}),
        train=dataclasses.replace(config.train, steps=at + 20, max_skipped=3),
    )
    with pytest.raises(RunFailed, match=f"the same command with --step={at} goes on from that checkpoint, which no"):
        run(tmp_path, config=nan).train(at + 20)
    before = rows_of(tmp_path)
    with pytest.raises(InputError, match=rf"no finite step followed any checkpoint \({at}\)\n  fix   --step={at} uses"):
        run(tmp_path, config=config).train(at + 20)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [str(at)] and rows_of(tmp_path) == before
    again = run(tmp_path, config=config)
    again.train(at + 1, step=at)
    assert state_of(again)[0] == at + 1


@pytest.mark.long
def test_a_row_that_cannot_be_read_loses_no_steps(run, straight, tmp_path, monkeypatch):
    """Be it damaged, or be its store silent."""
    read = Loader.rows_at
    for broken_step, error, then in (
        (5, StoreFailed("gs://a: does not answer"), "when the store answers"),
        (7, InputError("a.jpg: cannot be read as an image"), "once that row is mended"),
    ):

        def broken(self, step, rows, at=broken_step, error=error):
            if step == at and self.repeat:
                raise error
            return read(self, step, rows)

        with monkeypatch.context() as patch, pytest.raises(type(error), match=f"^{error}"):
            patch.setattr(Loader, "rows_at", broken)
            stopped = run(tmp_path)
            stopped.train(12)
        said = stopped.console.file.getvalue()
        assert f"saved step {broken_step}; {then}, the same command goes on from there" in said
        assert f"source   not measured: {error}" in said
    again = run(tmp_path)
    again.train(12)
    assert "restored step 7 of" in again.console.file.getvalue()
    same(state_of(again)[1], straight[1][1])


def test_nothing_to_do_changes_nothing(run, straight, tmp_path, monkeypatch):
    workdir, _ = straight
    contents = {path: path.read_bytes() for path in workdir.rglob("*") if path.is_file()}
    for owner, name in ((TrainPrograms, "_program"), (Run, "_write_description")):
        monkeypatch.setattr(owner, name, lambda *_: pytest.fail("nothing is to be compiled or written"))
    idle = run(workdir)
    idle.open_rows = lambda: pytest.fail("nothing is to be read")
    assert idle.train(12) == {} and idle.train(3) == {}
    assert {path: path.read_bytes() for path in workdir.rglob("*") if path.is_file()} == contents


def test_a_damaged_row_of_metrics_is_left_out_and_said(run, straight, tmp_path):
    workdir, _ = straight
    shutil.copytree(workdir, tmp_path, dirs_exist_ok=True)
    rows = (tmp_path / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    damaged = b"".join([*rows[:2], b'{"step": \xff3}\n', *rows[3:], b'{"step": 99, "lo'])
    (tmp_path / "metrics.jsonl").write_bytes(damaged)
    again = run(tmp_path)
    again.train(13)
    said = f"2 lines cannot be read and are left out, among them 3, {len(rows) + 1}; metrics.jsonl.damaged is the file"
    assert f"metrics.jsonl: {said} as it was" in again.console.file.getvalue()
    assert list(losses_of(tmp_path)) == [1, 2, *range(4, 14)]
    assert (tmp_path / "metrics.jsonl.damaged").read_bytes() == damaged
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(InputError, match=r"metrics\.jsonl: is a folder, but must be a file"):
        run(tmp_path).train(14)


def test_being_asked_to_stop_saves_and_a_second_run_goes_on(run, straight, tmp_path, monkeypatch):
    """A launcher asks again before the checkpoint is whole. It must not end the run, which has promised nothing yet."""
    first, due, wait = run(tmp_path), Agreement.due, Checkpoints.wait
    said, lost = [], []
    before = signal.signal(signal.SIGTERM, lambda *_: lost.append("the run's handler is gone"))

    def asked(self, step):
        if step == 3:
            signal.raise_signal(signal.SIGTERM)
        return due(self, step)

    def impatient(self):
        if self._at == 3 and not said:
            said.append(first.console.file.getvalue())
            signal.raise_signal(signal.SIGTERM)
        wait(self)

    monkeypatch.setattr(Agreement, "due", asked)
    monkeypatch.setattr(Checkpoints, "wait", impatient)
    first.train(12)
    monkeypatch.undo()
    signal.signal(signal.SIGTERM, before)
    assert first.has_work_left
    promise = "stopped at step 3 on request; the same command goes on from there"
    assert lost == [] and promise not in said[0] and promise in first.console.file.getvalue()
    assert state_of(first)[0] == 3
    second = run(tmp_path)
    monkeypatch.setattr(Agreement, "due", lambda self, step: {"stop"} if step == 12 else set())
    second.train(12)
    assert not second.has_work_left
    assert "stopped at step 12 on request; it is the last, and not evaluated" in second.console.file.getvalue()
    same(state_of(run(tmp_path))[1], straight[1][1])


def test_a_run_is_saved_when_its_clock_says_so(run, small, straight, tmp_path, monkeypatch):
    often = dict(TRAIN, checkpoint_every=0, eval_every=0, keep_checkpoints=9)
    config = small(layers=1, data={"batch": 8, "source": "random:60"}, train=often)
    assert config.train.checkpoint_minutes == 10
    events, save, flush = [], Checkpoints.save, Log.flush
    monkeypatch.setattr(Clock, "due", lambda self, writing: len(events) < 4 and not writing)
    monkeypatch.setattr(Checkpoints, "save", lambda self, step, *given, **more: (
        events.append(step), save(self, step, *given, **more), self.wait()))  # fmt: skip
    monkeypatch.setattr(Log, "flush", lambda self: (events.append("rows"), flush(self)))
    timed = run(tmp_path, config=config)
    timed.train(5)
    assert events == ["rows", 1, "rows", 2, "rows", 5]
    assert "saves every 10 minutes and at the end; " in timed.console.file.getvalue()
    assert losses_of(tmp_path) == {step: loss for step, loss in losses_of(straight[0]).items() if step <= 5}


def test_the_time_of_all_starts_is_counted(run, tmp_path):
    run(tmp_path).train(6)
    assert read_totals(rows_of(tmp_path))["lost"] == 0
    shutil.rmtree(tmp_path / "checkpoints" / "6")  # as if the run had been killed before
    before = time.monotonic()
    run(tmp_path).train(8)
    took_s, totals = time.monotonic() - before, read_totals(rows_of(tmp_path))
    assert totals["lost"] > 0 and totals["steps"] > 0 and totals["saves"] > 0 and totals["restore"] > 0
    assert rows_of(tmp_path)[-1]["step"] == 8 and sum(totals.values()) > took_s / 2


@pytest.mark.long
def test_a_trace_is_written(run, tmp_path):
    traced = run(tmp_path, profile=(1, 3))
    traced.train(4)
    (file,) = (tmp_path / "profile").rglob("*.xplane.pb")
    program = hlo.parse(traced.programs.compiled["train step"].as_text())
    network = Network(None, ((0,), (0,)), (0, 0), (0, 0), traced.step.rules.mesh)
    found = traced_step(file.read_bytes(), 2, program, network)  # of steps 1 and 2, on both devices
    assert sum(found.parts_s.values()) == pytest.approx(found.step_time_s)
    assert {"matmuls", "attention", "other compute", "waiting for fsdp"} <= {p for p, s in found.parts_s.items() if s}
    assert "traces nothing" not in traced.console.file.getvalue()
    late = run(tmp_path, profile=(1, 3))
    late.train(5)
    assert "--profile=1:3 traces nothing, because the run goes from step 4 to 5" in late.console.file.getvalue()


def test_a_trace_that_cannot_be_written_ends_no_run(run, tmp_path):
    (tmp_path / "profile").write_text("in the way")
    traced = run(tmp_path, profile=(1, 3))
    traced.train(4)
    said = traced.console.file.getvalue()
    assert f"warning: the trace of steps 1 to 3 cannot be written to {tmp_path / 'profile'} (" in said
    assert set(losses_of(tmp_path)) == {1, 2, 3, 4}


def test_a_trace_of_a_remote_workdir_is_copied_there(tmp_path, monkeypatch):
    """Files of an object store are written whole, as those of this folder are."""
    folder, said, begin = epath.Path(tmp_path) / "run" / "profile", [], jax.profiler.start_trace
    monkeypatch.setattr(files, "is_remote", lambda _: True)
    monkeypatch.setattr(jax.profiler, "start_trace", lambda place: said.append(place) or begin(place))
    with progress.profile_steps((1, 2), 0, 3, folder, said.append) as at:
        for step in range(3):
            at(step)
    local, line = said
    assert line == f"trace of steps 1 to 2: {folder}"
    assert not local.startswith(str(folder)) and not os.path.exists(local)
    (trace,) = folder.glob("plugins/profile/*/*.xplane.pb")
    assert trace.stat().length


class Writer:
    """It writes which weights it was given."""

    def __init__(self):
        self.compiled = 0

    def compile(self):
        self.compiled += 1

    def __call__(self, params):
        return [("prompt", f"{sum(float(x.sum()) for x in jax.tree.leaves(params)):.6f}")]


@pytest.mark.long
def test_samples_are_written_at_each_evaluation_and_change_nothing(run, straight, tmp_path):
    workdir, (_, state) = straight
    first, then = run(tmp_path), run(tmp_path)
    first.writer, then.writer = Writer(), Writer()
    first.train(7)
    then.train(12)
    assert losses_of(tmp_path) == losses_of(workdir)
    same(state_of(then)[1], state)
    rows = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [6, 7, 12] and rows[-1]["text"] == Writer()(state.params)[0][1]
    assert (first.writer.compiled, then.writer.compiled) == (1, 1)
    assert f"sample: prompt{rows[-1]['text']}\n" in then.console.file.getvalue()


@pytest.fixture(scope="module")
def worsening(small):
    """A config whose held-out loss soon grows: the rows are random, so that there is nothing to learn but them."""
    changes = {"eval_every": 2, "checkpoint_every": 0, "keep_checkpoints": 1, "patience": 2, "steps": 30}
    wild = {"learning_rate": 3.0e-2, "schedule": "constant", "warmup_steps": 0}
    return small(layers=1, data={"batch": 8, "source": "random:60"}, train=TRAIN | changes, optimizer=wild)


def ending_of(workdir):
    """The steps that were evaluated and their losses, the checkpoints, and the last step."""
    rows = rows_of(workdir)
    evaluated = {row["step"]: row["eval_loss"] for row in rows if "eval_loss" in row}
    checkpoints = sorted(int(path.name) for path in (workdir / "checkpoints").iterdir() if path.name.isdigit())
    return evaluated, checkpoints, rows[-1]["step"]


@pytest.fixture(scope="module")
def early(run, worsening, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("early")
    ended = run(workdir, config=worsening)
    ended.train(30)
    return workdir, ended.console.file.getvalue()


@pytest.mark.long
def test_a_run_ends_early_and_keeps_its_best_checkpoint(run, worsening, early):
    workdir, said = early
    evaluated, checkpoints, last = ending_of(workdir)
    best = min(evaluated, key=evaluated.get)
    assert last == best + 4 < 30 and checkpoints == [best, last]
    assert f"stopped early at step {last}: the last 2 evaluations were not better" in said
    assert f"best evaluation every 2 steps: {evaluated[best]:.4f} at {best}, kept for --step={best}" in said
    assert run(workdir, config=worsening).evaluate(best)["eval_loss"] == pytest.approx(evaluated[best], abs=1e-6)

    before = {path: path.read_bytes() for path in workdir.rglob("*") if path.is_file()}
    again = run(workdir, config=worsening)
    again.open_rows = lambda: pytest.fail("nothing is to be read")
    assert again.train(30) == {}
    assert f"the run ended early at step {last}" in again.console.file.getvalue()
    assert {path: path.read_bytes() for path in workdir.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("layout", ["fsdp2", pytest.param("tp8", marks=pytest.mark.slow)])
def test_a_resumed_run_ends_early_where_the_straight_one_does(run, worsening, early, tmp_path, monkeypatch, layout):
    """Also one that goes on elsewhere, and one that was asked to stop just when it would have evaluated."""
    evaluated, checkpoints, last = ending_of(early[0])
    monkeypatch.setattr(Agreement, "due", lambda self, step: {"stop"} if step == last - 4 else set())
    run(tmp_path, config=worsening).train(30)
    monkeypatch.undo()
    assert ending_of(tmp_path)[2] == last - 4 and last - 4 not in ending_of(tmp_path)[0]
    run(tmp_path, layout, worsening).train(last - 1)
    run(tmp_path, config=worsening).train(30)
    again, kept, at = ending_of(tmp_path)
    assert at == last and again.keys() - {last - 1} == evaluated.keys()  # --steps ended there
    assert set(kept) - {last - 1} == set(checkpoints)  # it is known to be healthy
    assert max(abs(again[step] - evaluated[step]) for step in evaluated) < 1e-4


def test_the_best_evaluation_is_of_a_step_that_was_saved(run, worsening, early, tmp_path, monkeypatch):
    evaluated, (best, _), _ = ending_of(early[0])
    earlier = min((step for step in evaluated if step < best), key=evaluated.get, default=None)
    monkeypatch.setattr(SkippedSteps, "skipped_before", lambda self, step: int(step == best))
    resumed = run(tmp_path, config=worsening)
    resumed.train(best + 1)
    assert f"checkpoint {best} is not saved: the last 1 steps changed nothing" in resumed.console.file.getvalue()
    with resumed.checkpoints() as checkpoints:
        assert checkpoints.choose().extra["best"]["step"] == earlier
