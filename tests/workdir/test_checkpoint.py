"""Checkpoints: what is saved comes back bitwise under any sharding; what is damaged is never used."""

import dataclasses
import json
import logging
import logging.handlers
from contextlib import closing
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tensorstore

from gspmd_lm import files
from gspmd_lm.errors import InputError, RunFailed
from gspmd_lm.workdir.checkpoint import Checkpoints
from tests.workdir.saved import (
    ARCHITECTURE,
    abstract,
    assert_equal,
    make_state,
)


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


def test_the_newest_healthy_step_is_never_rotated_away(run):
    checkpoints = run.open(keep=1)
    for step in range(1, 7):
        if step <= 3:
            checkpoints.confirm(step)  # shows that the steps before it are healthy
        checkpoints.save(step, make_state(step), {})
    assert checkpoints.newest_healthy() == 2
    checkpoints.close()
    assert run.open().steps() == [2, 6] and run.open().newest_healthy() == 2
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
    checkpoints.confirm(2)  # the step itself was finite, which says nothing of the steps that follow
    checkpoints.save(3, make_state(3), {})
    assert checkpoints.give_up() == 1
    checkpoints.close()
    again = run.open()
    assert again.steps() == [1, 2, 3] and again.choose().step == 1
    assert run.reports == [f"checkpoint 2, 3 in {run.directory}: not used, because no finite step followed"]
    assert again.restore(abstract(make_state(3)), step=3)[0] == 3
    (run.directory / "1" / "verdict.json").write_bytes(b"{\xff")  # damaged: as if it were not known
    assert again.newest_healthy() is None and again.choose().step == 1
    for step in (2, 3):
        (run.directory / str(step) / "verdict.json").unlink()
    assert again.choose().step == 3


def test_where_no_step_is_healthy_none_is_chosen_and_none_is_replaced_unasked(run):
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
            RunFailed, match=r"(?s)checkpoint 2 was not written .*it begins from checkpoint 1 if that is intact"
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
    other = {**ARCHITECTURE, "layers": 6, "norm.kind": "layernorm", "attention.qk_norm": True}
    with pytest.raises(InputError) as error:
        run.open(architecture=other).restore(abstract(make_state(1, embed=4)))
    assert str(error.value).splitlines() == [
        f"{run.directory / '1'}: a checkpoint of another architecture",
        "  attention.qk_norm: absent in the checkpoint, True in the config",
        "  layers: 4 in the checkpoint, 6 in the config",
        "  norm.kind: rmsnorm in the checkpoint, layernorm in the config",
        "  fix   use the config it was saved with, or another workdir",
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
    of_process = json.loads((folder / "state/ocdbt.process_0/sha256.json").read_text())
    assert of_process and {f"state/ocdbt.process_0/{name}": entry for name, entry in of_process.items()}.items() <= (
        listed.items()
    )


def test_arrays_are_not_compressed(run):
    run.save(1)
    store = tensorstore.KvStore.open(f"file://{run.directory}/1/state/|ocdbt:").result()
    names = [key for key in store.list().result() if key.endswith(b".zarray")]
    assert names and all(json.loads(store.read(name).result().value)["compressor"] is None for name in names)


def test_no_program_cuts_small_arrays(run, monkeypatch):
    """Orbax would compile one for each size and device, before the first checkpoint."""
    monkeypatch.setattr(jax.lax, "slice_in_dim", lambda *_, **__: pytest.fail("an array is cut"))
    run.save(1)


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
