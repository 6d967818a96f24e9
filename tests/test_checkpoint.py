"""Checkpoints: what is saved comes back bitwise under any sharding; what is damaged is never used."""

import dataclasses
import json
import logging
import logging.handlers
import os
import shutil
import signal
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from gspmd_lm import checkpoint, config, files
from gspmd_lm.checkpoint import Checkpoints
from gspmd_lm.errors import InputError, RunFailed

ARCHITECTURE = {"layers": 4, "embed": 8, "norm": "rmsnorm", "rope_scaling": None}
SIZES = {"data": 2, "tensor": 4}


class Counters(NamedTuple):
    skipped: jax.Array
    pairs: tuple[jax.Array, None]


@flax.struct.dataclass
class State:
    step: jax.Array
    weights: dict[str, Any]
    opt_state: optax.OptState
    key: jax.Array
    counters: Counters


def make_state(step: int, axes: tuple[str | None, ...] = ("data",), optimizer=None, embed: int = 8) -> State:
    """A state whose values depend on `step`; weights are sharded over `axes`, all else is replicated."""
    mesh = jax.make_mesh(tuple(SIZES.values()), tuple(SIZES), axis_types=(AxisType.Auto,) * 2)
    split, whole = (NamedSharding(mesh, PartitionSpec(*spec)) for spec in (axes, ()))
    table = np.random.default_rng(step).normal(size=(16, embed)).astype(np.float32)
    weights = {
        "table": jax.device_put(table, split),
        "block": {
            "w": jax.device_put(jnp.asarray(table, jnp.bfloat16), split),
            "scale": jax.device_put(table[0], whole),
        },
    }
    optimizer = optimizer or optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    others = jax.device_put(
        (jnp.int32(step), jax.random.key(step), Counters(jnp.int32(7), (jnp.arange(step, step + 3), None))), whole
    )
    opt_state = jax.tree.map(lambda x: x + step if x.ndim else jax.device_put(x + step, whole), optimizer.init(weights))
    return State(others[0], weights, opt_state, others[1], others[2])


def abstract(state: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def assert_equal(found: State, expected: State) -> None:
    """Same tree, values, dtypes and shardings, bit for bit."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim)
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


class Run:
    """Opens the checkpoints of one directory again and again, as restarts would; collects the reports."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.reports: list[str] = []
        self.opened: list[Checkpoints] = []

    def open(self, *, keep: int = 3, keep_every: int = 0, architecture=ARCHITECTURE) -> Checkpoints:
        checkpoints = Checkpoints(
            str(self.directory), keep=keep, keep_every=keep_every, architecture=architecture, report=self.reports.append
        )
        self.opened.append(checkpoints)
        return checkpoints

    def save(self, *steps: int) -> Checkpoints:
        checkpoints = self.open()
        for step in steps:
            checkpoints.save(step, make_state(step), {"data": {"step": step}})
        checkpoints.wait()
        return checkpoints

    def largest_file(self, step: int) -> Path:
        files = [path for path in (self.directory / str(step) / "state").rglob("*") if path.is_file()]
        return max((path for path in files if path.parent.name == "d"), key=lambda path: path.stat().st_size)


@pytest.fixture
def run(tmp_path):
    run = Run(tmp_path / "run" / "checkpoints")
    yield run
    for checkpoints in run.opened:
        checkpoints.close()


def flip_byte(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(bytes(data))


@pytest.mark.parametrize("axes", [("tensor", "data"), (None, ("data", "tensor")), ()])
def test_restores_bitwise_under_another_sharding(run, axes):
    run.save(5)
    wanted = make_state(5, axes)
    step, state, extra = run.open().restore(abstract(wanted))
    assert step == 5
    assert extra == {"data": {"step": 5}}
    assert_equal(state, wanted)
    assert not run.reports


def test_restores_on_fewer_devices(run):
    run.save(5)
    one = jax.sharding.SingleDeviceSharding(jax.devices()[3])
    wanted = jax.device_put(make_state(5), one)
    _, state, _ = run.open().restore(abstract(wanted))
    assert_equal(state, wanted)


def test_a_donated_state_is_saved_as_it_was(run):
    checkpoints = run.open()
    state, expected = make_state(5), make_state(5)
    overwrite = jax.jit(lambda s: jax.tree.map(lambda x: x if x.ndim == 0 else x * 0, s), donate_argnums=0)
    checkpoints.save(5, state.weights, {})
    overwrite(state.weights)
    _, found, _ = checkpoints.restore(abstract(expected).weights)
    assert np.array_equal(found["table"], expected.weights["table"])


def test_restored_random_keys_draw_the_same(run):
    run.save(5)
    _, state, _ = run.open().restore(abstract(make_state(5)))
    assert jax.random.normal(state.key) == jax.random.normal(jax.random.key(5))


def test_random_keys_of_another_kind_are_refused(run):
    run.save(5)
    key = jax.device_put(jax.random.key(5, impl="rbg"), make_state(5).key.sharding)
    with pytest.raises(InputError, match=r"different: key: uint32\[2\] in the checkpoint, uint32\[4\] wanted"):
        run.open().restore(abstract(dataclasses.replace(make_state(5), key=key)))


def test_no_checkpoint_gives_none_and_creates_nothing(run):
    assert run.open().restore(abstract(make_state(5))) is None
    assert run.open().steps() == []
    assert not run.directory.exists()


def test_keeps_the_newest_and_every_nth(run):
    checkpoints = run.open(keep=2, keep_every=4)
    for step in range(1, 9):
        checkpoints.save(step, make_state(step), {})
    checkpoints.close()
    assert run.open().steps() == [4, 7, 8]
    assert sorted(path.name for path in run.directory.iterdir()) == ["4", "7", "8"]
    assert run.open().restore(abstract(make_state(4)), step=4)[0] == 4


def test_the_newest_good_step_is_never_rotated_away(run):
    checkpoints = run.open(keep=1)
    for step in range(1, 7):
        if step <= 3:
            checkpoints.confirm(step)  # shows that the steps before it are good
        checkpoints.save(step, make_state(step), {})
    assert checkpoints.newest_good() == 2
    checkpoints.close()
    assert run.open().steps() == [2, 6] and run.open().newest_good() == 2
    later = run.open(keep=1)
    later.restore(abstract(make_state(6)))
    later.confirm(7)
    later.save(8, make_state(8), {})
    later.close()
    assert run.open().steps() == [6, 8]


def test_what_only_failed_steps_followed_is_not_chosen_unasked(run):
    checkpoints = run.open()
    checkpoints.save(1, make_state(1), {})
    checkpoints.confirm(2)
    checkpoints.save(2, make_state(2), {})
    checkpoints.save(3, make_state(3), {})
    assert checkpoints.give_up() == 1
    checkpoints.close()
    again = run.open()
    assert again.steps() == [1, 2, 3] and again.choose().step == 1
    assert run.reports == [f"checkpoint 2, 3 in {run.directory}: not used, because no finite step followed"]
    assert again.restore(abstract(make_state(3)), step=3)[0] == 3
    (run.directory / "1" / "verdict.json").write_bytes(b"{\xff")  # damaged: as if it were not known
    assert again.newest_good() is None and again.choose().step == 1
    for step in (2, 3):
        (run.directory / str(step) / "verdict.json").unlink()
    assert again.choose().step == 3


def test_where_no_step_is_good_none_is_chosen_and_none_is_replaced_unasked(run):
    checkpoints = run.open()
    checkpoints.save(1, make_state(1), {})
    assert checkpoints.give_up() is None
    for use in (Checkpoints.choose, lambda opened: opened.restore(abstract(make_state(1))), Checkpoints.candidates):
        with pytest.raises(InputError, match=r"no finite step followed any checkpoint \(1\)\n  fix   --step=1 uses it"):
            use(run.open())
    assert run.open().choose(1).step == 1


def test_another_architecture_is_told_before_the_arrays_are_summed(run, monkeypatch):
    with closing(run.open()) as checkpoints:
        checkpoints.save(1, make_state(1), {})
    summed = []
    sum_of = files.sum_of
    monkeypatch.setattr(files, "sum_of", lambda file: summed.append(str(file)) or sum_of(file))
    with pytest.raises(InputError, match="another architecture"):
        run.open(architecture=ARCHITECTURE | {"embed": 4}).choose()
    assert any(file.endswith("/run/metadata") for file in summed) and not any("/state/" in file for file in summed)


def test_branches_without_arrays_may_differ(run):
    """A part of the optimizer that holds no arrays may come or go, as weight decay does when it is set to 0."""
    mask = lambda params: jax.tree.map(lambda x: x.ndim > 1, params)  # noqa: E731
    saved, wanted = (
        make_state(1, optimizer=optax.chain(optax.scale_by_adam(), part))
        for part in (optax.masked(optax.identity(), mask), optax.identity())
    )
    checkpoints = run.open()
    checkpoints.save(1, saved, {})
    assert_equal(checkpoints.restore(abstract(wanted))[1], wanted)


@pytest.mark.parametrize("name", ["lr[1e-3]", "a*b", "a?b"])
def test_a_path_that_orbax_takes_for_a_pattern_is_refused(tmp_path, name):
    with pytest.raises(InputError, match=r"for a pattern .*\n  fix   rename the folder"):
        Checkpoints(str(tmp_path / name / "checkpoints"), keep=1, keep_every=0, architecture={})


def test_no_step_is_committed_whose_arrays_are_not_all_there(run, monkeypatch):
    """As Orbax left it in a folder that it took for a pattern: the parts of the processes are not put together."""
    checkpoints = run.open()
    checkpoints.save(1, make_state(1), {})
    checkpoints.wait()
    checkpoints.save(2, make_state(2), {})
    with monkeypatch.context() as patch:
        patch.setattr("orbax.checkpoint._src.serialization.ocdbt_utils.merge_ocdbt_per_process_files", unmerged)
        with pytest.raises(
            RunFailed, match=r"(?s)checkpoint 2 was not written .*checkpoint 1 is the newest and is intact"
        ):
            checkpoints.wait()
    assert run.open().steps() == [1]


async def unmerged(*args, **kwargs):
    """What Orbax does where its pattern matches nothing."""


def test_a_kill_while_deleting_leaves_no_half_step(run, monkeypatch):
    checkpoints = run.open(keep=1)
    monkeypatch.setattr(checkpoints, "_empty_trash", lambda: None)
    checkpoints.save(1, make_state(1), {})
    checkpoints.save(2, make_state(2), {})
    checkpoints.wait()
    (run.directory / "deleted" / "1" / "sha256.json").unlink()  # as far as the kill let it come
    restarted = run.open(keep=1)
    assert restarted.steps() == [2]
    restarted.save(3, make_state(3), {})
    restarted.close()
    assert [path.name for path in run.directory.iterdir()] == ["3"]


def test_an_explicit_step(run):
    run.save(1, 2)
    assert_equal(run.open().restore(abstract(make_state(1)), step=1)[1], make_state(1))
    with pytest.raises(InputError, match="there is no checkpoint 7\n  fix   use one of 1, 2"):
        run.open().restore(abstract(make_state(1)), step=7)


def test_an_explicit_step_without_any_checkpoint(run):
    with pytest.raises(InputError, match="there is no checkpoint 7"):
        run.open().restore(abstract(make_state(1)), step=7)


def flip(run: Run, step: int) -> None:
    flip_byte(run.largest_file(step))


def truncate(run: Run, step: int) -> None:
    os.truncate(run.largest_file(step), 5)


def remove(run: Run, step: int) -> None:
    run.largest_file(step).unlink()


def flip_structure(run: Run, step: int) -> None:
    flip_byte(run.directory / str(step) / "state" / "_METADATA")


def flip_extra(run: Run, step: int) -> None:
    flip_byte(run.directory / str(step) / "run" / "metadata")


def flip_manifest(run: Run, step: int) -> None:
    flip_byte(run.directory / str(step) / "sha256.json")


def remove_manifest(run: Run, step: int) -> None:
    (run.directory / str(step) / "sha256.json").unlink()


def list_as_manifest(run: Run, step: int) -> None:
    (run.directory / str(step) / "sha256.json").write_text("[1, 2]")


def rename_a_field(run: Run, step: int) -> None:
    file = run.directory / str(step) / "sha256.json"
    file.write_text(file.read_text().replace('"bytes"', '"bites"', 1))


def empty(run: Run, step: int) -> None:
    shutil.rmtree(run.directory / str(step))
    (run.directory / str(step)).mkdir()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (flip, "its sha256 has changed"),
        (truncate, "5 bytes instead of"),
        (remove, "missing"),
        (flip_structure, "_METADATA: its sha256 has changed"),
        (flip_extra, "run/metadata: its sha256 has changed"),
        (flip_manifest, ""),
        (remove_manifest, "sha256.json cannot be read"),
        (list_as_manifest, "sha256.json cannot be read"),
        (rename_a_field, "sha256.json cannot be read"),
        (empty, "sha256.json cannot be read"),
    ],
)
def test_a_damaged_step_is_reported_and_the_one_before_is_used(run, damage, words):
    run.save(1, 2)
    damage(run, 2)
    step, state, extra = run.open().restore(abstract(make_state(1)))
    assert (step, extra) == (1, {"data": {"step": 1}})
    assert_equal(state, make_state(1))
    (report,) = run.reports
    assert report.startswith(f"checkpoint 2 in {run.directory} is damaged (") and words in report


def test_damage_that_restoring_does_not_read_is_no_damage(run):
    run.save(1, 2)
    for step in (1, 2):
        (run.directory / str(step) / "_CHECKPOINT_METADATA").write_text("{")
    restarted = run.open()
    assert restarted.restore(abstract(make_state(1)))[0] == 2
    restarted.save(3, make_state(3), {})
    restarted.wait()
    assert restarted.steps() == [1, 2, 3]


def test_all_damaged(run):
    run.save(1, 2)
    flip(run, 1)
    remove(run, 2)
    with pytest.raises(
        InputError, match=r"(?s)no other checkpoint.*\n  2: .*missing\n  1: .*sha256 has changed\n  fix"
    ):
        run.open().restore(abstract(make_state(1)))
    assert len(run.reports) == 2


def test_a_damaged_explicit_step_is_refused(run):
    run.save(1, 2)
    flip(run, 2)
    with pytest.raises(InputError, match=r"2: state/.*sha256 has changed"):
        run.open().restore(abstract(make_state(1)), step=2)


def test_saving_after_a_damaged_step_replaces_it(run):
    run.save(1, 2, 4)
    flip(run, 2)
    flip(run, 4)
    restarted = run.open()
    assert restarted.restore(abstract(make_state(1)))[0] == 1
    restarted.save(2, make_state(22), {})
    restarted.wait()
    assert run.reports[-1].startswith("checkpoint 2 replaces 2, 4 in")
    assert run.open().steps() == [1, 2]
    assert_equal(run.open().restore(abstract(make_state(1)))[1], make_state(22))


def test_the_step_just_restored_or_saved_is_not_written_again(run):
    run.save(1, 2)
    restarted = run.open()
    restarted.restore(abstract(make_state(1)))
    restarted.save(2, make_state(99), {})
    restarted.save(3, make_state(3), {})
    restarted.save(3, make_state(99), {})
    restarted.wait()
    for step in (2, 3):
        assert_equal(run.open().restore(abstract(make_state(1)), step=step)[1], make_state(step))
    assert not run.reports


def test_another_architecture_is_refused_with_its_fields(run):
    run.save(1)
    other = {**ARCHITECTURE, "layers": 6, "norm": "layernorm", "qk_norm": True}
    with pytest.raises(InputError) as error:
        run.open(architecture=other).restore(abstract(make_state(1, embed=4)))
    assert str(error.value).splitlines() == [
        f"{run.directory / '1'}: a checkpoint of another architecture",
        "  layers: 4 in the checkpoint, 6 in the config",
        "  norm: rmsnorm in the checkpoint, layernorm in the config",
        "  qk_norm: absent in the checkpoint, True in the config",
        "  fix   use the config it was saved with, or another --workdir",
    ]


def test_an_architecture_with_tuples_equals_itself(run):
    architecture = {"sizes": (1, 2), "scaling": {"factor": 8.0}}
    run.open(architecture=architecture).save(1, make_state(1), {})
    run.opened[-1].wait()
    assert run.open(architecture=architecture).restore(abstract(make_state(1)))[0] == 1


def test_another_optimizer_is_refused_with_its_arrays(run):
    run.save(1)
    wanted = abstract(make_state(1, optimizer=optax.chain(optax.clip_by_global_norm(1.0), optax.lion(1e-3))))
    with pytest.raises(InputError) as error:
        run.open().restore(wanted)
    message = str(error.value)
    assert "  unexpected: opt_state.1.0.nu.table: float32[16, 8]" in message
    assert "missing" not in message and "different" not in message
    plain = abstract(make_state(1, optimizer=optax.sgd(1e-3, momentum=0.9)))
    with pytest.raises(InputError, match=r"  missing: opt_state\.0\.trace\.block\.scale: float32\[8\]"):
        run.open().restore(plain)


def test_another_shape_or_dtype_is_refused(run):
    run.save(1)
    with pytest.raises(
        InputError, match=r"weights\.table: float32\[16, 8\] in the checkpoint, float32\[16, 4\] wanted"
    ):
        run.open().restore(abstract(make_state(1, embed=4)))
    wanted = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float16, sharding=x.sharding) if x.dtype == jnp.bfloat16 else x,
        abstract(make_state(1)),
    )
    with pytest.raises(InputError, match=r"block\.w: bfloat16\[16, 8\] in the checkpoint, float16\[16, 8\] wanted"):
        run.open().restore(wanted)


def fail_while_writing(run: Run, checkpoints: Checkpoints, monkeypatch) -> None:
    """Lets checkpoint 2 fail: the disk is full when its manifest is written."""

    def full(*args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("gspmd_lm.files.sum_of", full)
        checkpoints.save(2, make_state(2), {})
        thread = next(thread for thread in threading.enumerate() if thread.name == "save_finalize")
        threading.Thread.join(thread)  # Orbax's own join would already raise


@pytest.mark.parametrize("call", ["wait", "save", "close", "restore"])
def test_a_failed_write_is_raised_by_the_next_call(run, monkeypatch, call):
    checkpoints = run.open(keep=1)
    checkpoints.save(1, make_state(1), {})
    checkpoints.wait()
    fail_while_writing(run, checkpoints, monkeypatch)
    arguments = {"save": (3, make_state(3), {}), "restore": (abstract(make_state(1)),)}.get(call, ())
    with pytest.raises(RuntimeError, match=r"checkpoint 2 was not written to .*No space left on device"):
        getattr(checkpoints, call)(*arguments)
    assert checkpoints.steps() == [1]
    if call != "close":
        checkpoints.save(4, make_state(4), {})
        checkpoints.wait()
        assert run.open().steps() == [4]


VANISHED = """
import shutil, sys
import jax
from gspmd_lm.checkpoint import Checkpoints
checkpoints = Checkpoints(sys.argv[1], keep=3, keep_every=0, architecture={})
state = {"w": jax.numpy.arange(1000)}
checkpoints.save(1, state, {})
checkpoints.wait()
shutil.rmtree(sys.argv[1])
open(sys.argv[1], "w").close()
checkpoints.save(2, state, {})
checkpoints.close()
"""


def test_a_directory_that_vanished_is_an_error_and_the_process_ends(run):
    command = [sys.executable, "-c", VANISHED, str(run.directory)]
    process = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert process.returncode == 1
    assert f"RunFailed: checkpoint 2 was not written to {run.directory}: [Errno 20] Not a dir" in process.stderr


def test_a_file_as_directory_is_refused(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(InputError, match="not a directory"):
        Checkpoints(str(file), keep=1, keep_every=0, architecture={})


def test_a_store_that_orbax_cannot_write_to_is_refused():
    with pytest.raises(InputError, match="not to s3://\n  fix   mount the bucket"):
        Checkpoints("s3://bucket/run", keep=1, keep_every=0, architecture={})


def test_values_that_json_cannot_hold_are_refused_at_once(run):
    with pytest.raises(TypeError, match="not JSON serializable"):
        run.open().save(1, make_state(1), {"array": np.zeros(3)})
    assert run.open().steps() == []


KILLED = """
import os, signal, sys
import jax, numpy as np
import gspmd_lm.checkpoint as checkpoint
from gspmd_lm import files
checkpoints = checkpoint.Checkpoints(sys.argv[1], keep=3, keep_every=0, architecture={})
state = {"w": jax.numpy.arange(1000)}
checkpoints.save(1, state, {})
checkpoints.wait()
if sys.argv[2] == "before the manifest":
    files.sum_of = lambda file: os.kill(os.getpid(), signal.SIGKILL)
else:
    checkpoints._manager._checkpoint_deleter.delete_steps = lambda steps: os.kill(os.getpid(), signal.SIGKILL)
checkpoints.save(2, state, {})
checkpoints.wait()
"""


@pytest.mark.parametrize(("moment", "newest"), [("before the manifest", 1), ("after the commit", 2)])
def test_a_kill_while_saving_leaves_a_usable_step(run, moment, newest):
    command = [sys.executable, "-c", KILLED, str(run.directory), moment]
    assert subprocess.run(command, capture_output=True, timeout=300).returncode == -signal.SIGKILL
    state = {"w": jnp.arange(1000)}
    restarted = run.open(architecture={})
    assert restarted.steps() == list(range(1, newest + 1))
    step, found, _ = restarted.restore(abstract(state))
    assert step == newest and np.array_equal(found["w"], state["w"])
    restarted.save(3, state, {})
    restarted.close()
    assert sorted(path.name for path in run.directory.iterdir()) == [*map(str, range(1, newest + 1)), "3"]
    assert not run.reports


def test_orbax_is_quiet_and_other_messages_are_not(run):
    handler = logging.handlers.BufferingHandler(capacity=1000)
    absl = logging.getLogger("absl")
    level = absl.level
    absl.addHandler(handler)
    absl.setLevel(logging.INFO)
    try:
        run.save(1).restore(abstract(make_state(1)))
        from absl import logging as absl_logging

        absl_logging.info("ours")
    finally:
        absl.removeHandler(handler)
        absl.setLevel(level)
    assert [record.getMessage() for record in handler.buffer] == ["ours"]


def test_the_manifest_lists_every_file_that_restoring_reads(run):
    run.save(1)
    folder = run.directory / "1"
    listed = json.loads((folder / "sha256.json").read_text())
    present = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert present - set(listed) == {"sha256.json", "_CHECKPOINT_METADATA", "commit_success.txt"}
    assert all(len(entry["sha256"]) == 64 and entry["bytes"] > 0 for entry in listed.values())


# Another value of every setting of a model: those that make another one of it, and those that do not.
OTHER = {
    "layers": 3, "embed": 64, "heads": 16, "kv_heads": 4, "head_dim": 8, "mlp": 128, "vocab": 60, "padded_vocab": 128,
    "padded_heads": 16, "block": "parallel", "shared_norm": False, "post_norms": True, "norm": "layernorm",
    "norm_scale": False, "norm_bias": True, "norm_eps": 1e-5, "norm_offset": 1.0, "embedding_norm": True,
    "embedding_scale": 2.0, "qk_norm": True, "mlp_kind": "plain", "activation": "relu", "positions": "none",
    "position_offset": 2, "rope_theta": 5e5, "rope_dim": 2, "rope_scaling": config.RopeScaling(), "sliding_window": 4,
    "sliding_rope_theta": 100.0, "layer_pattern": ("full", "full"), "query_scale": 0.5, "qkv_bias": True,
    "attention_out_bias": True, "mlp_bias": True, "unembedding_bias": True, "tied_embeddings": True,
    "sum_norms": True, "final_norm": False, "embedding_width": 16, "pre_norms": False, "residual_scale": 0.5,
    "qk_norm_kind": "per_head", "logit_scale": 0.5,
    "attention_softcap": 5.0, "logit_softcap": 3.0, "lora": config.Lora(targets=("wq",)), "attention_sinks": True,
    "activation_slope": 1.7, "mlp_limit": 7.0, "mlp_up_offset": 1.0, "experts": 16, "experts_per_token": 3,
    "expert_mlp": 48, "shared_mlp": 32, "shared_gate": True, "dense_layers": 1, "routing": "sigmoid",
    "normalized_weights": False, "expert_scale": 2.0, "expert_groups": 4, "groups_per_token": 2, "router_bias": True,
    "balance": "bias",
}  # fmt: skip
SAME = {
    "context": 64, "dropout": 0.1, "z_loss": 1e-3, "init_std": 0.5, "compute_dtype": "bfloat16",
    "weight_dtype": "bfloat16", "matmul_precision": "default", "balance_weight": 0.1, "balance_rate": 0.1,
    "router_z_loss": 0.1, "capacity_factor": 2.0,
}  # fmt: skip
OF_EXPERTS = ("expert", "shared_m", "shared_g", "rout", "balance", "groups", "dense_", "capacity", "normalized")
MIXTURE = {"experts": 8, "experts_per_token": 2, "shared_mlp": 16, "expert_groups": 2}


def test_every_setting_that_makes_another_model_is_refused(small, tmp_path):
    assert sorted([*OTHER, *SAME]) == sorted(field.name for field in dataclasses.fields(config.Model))
    weights = {"params": {"w": jnp.ones(3)}}
    dense, mixture = small(), small(**MIXTURE)
    for folder, base in (("dense", dense), ("mixture", mixture)):
        with checkpoint.of_run(tmp_path / folder, base) as checkpoints:
            checkpoints.save(1, weights, {})
    every = [*(OTHER | SAME).items(), ("balance", "batch")]
    for name, value in every:
        of_experts = any(word in name for word in OF_EXPERTS)
        folder, base = (tmp_path / "mixture", mixture) if of_experts else (tmp_path / "dense", dense)
        assert getattr(base.model, name) != value
        model = config.Model(**{**vars(base.model), name: value})
        with checkpoint.of_run(folder, dataclasses.replace(base, model=model)) as checkpoints:
            if name in SAME or value == "batch":
                checkpoints.restore_weights(abstract(weights["params"]))
                continue
            with pytest.raises(InputError, match=f"another architecture\n  {name}: "):
                checkpoints.restore_weights(abstract(weights["params"]))


def test_a_checkpoint_that_is_older_than_a_key_of_a_mapping_is_taken(small, tmp_path):
    """It was saved when rope_scaling had fewer keys, which had one meaning: that of their defaults."""
    base, weights = small(), {"params": {"w": jnp.ones(3)}}
    scaled = dataclasses.replace(base, model=dataclasses.replace(base.model, rope_scaling=config.RopeScaling()))
    with checkpoint.of_run(tmp_path, scaled) as checkpoints:
        checkpoints.save(1, weights, {})
    kept = tmp_path / "checkpoints/1/run/metadata"
    run = json.loads(kept.read_text())
    for key in ("truncate", "attention_factor", "short_factors", "long_factors"):
        del run["architecture"]["rope_scaling"][key]
    kept.write_text(json.dumps(run))
    with checkpoint.of_run(tmp_path, scaled) as checkpoints:
        checkpoints._described(1)
    doubled = dataclasses.replace(scaled.model, rope_scaling=config.RopeScaling(attention_factor=2.0))
    with (
        checkpoint.of_run(tmp_path, dataclasses.replace(scaled, model=doubled)) as checkpoints,
        pytest.raises(InputError, match="rope_scaling"),
    ):
        checkpoints._described(1)


class Trained(NamedTuple):
    step: jax.Array
    params: dict[str, Any]
    optimizer: dict[str, Any]


@pytest.mark.parametrize("whole", [True, False])
def test_weights_alone_are_restored_under_another_sharding(tmp_path, whole):
    params = make_state(3).weights
    wanted = jax.tree.map(as_wanted, make_state(0, ("tensor",)).weights)
    with closing(Checkpoints(str(tmp_path / "c"), keep=1, keep_every=0, architecture=ARCHITECTURE)) as checkpoints:
        checkpoints.save(3, Trained(jnp.int32(3), params, {"m": params}) if whole else {"params": params}, {})
        checkpoints.wait()
        step, restored = checkpoints.restore_weights(wanted)
        assert step == 3
        for got, want, like in zip(*map(jax.tree.leaves, (restored, params, wanted)), strict=True):
            np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))
            assert got.dtype == like.dtype and got.sharding == like.sharding
        if not whole:
            with pytest.raises(InputError, match=f"weights without the state(.|\n)*init_from={tmp_path}"):
                checkpoints.restore(jax.tree.map(as_wanted, make_state(0)))
        wanted["table"] = jax.ShapeDtypeStruct((16, 9), jnp.float32, sharding=wanted["table"].sharding)
        with pytest.raises(InputError, match=r"params.table: float32\[16, 8\] in the checkpoint, float32\[16, 9\]"):
            checkpoints.restore_weights(wanted)


def as_wanted(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
