"""The weights that generate, eval and `load` compute with: those of a run, or of a folder that transformers wrote."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from absl import flags

from gspmd_lm import files
from gspmd_lm.cli import given, session
from gspmd_lm.convert import architecture, pretrained
from gspmd_lm.convert.pretrained import Pretrained
from gspmd_lm.errors import InputError
from gspmd_lm.workdir import checkpoint

Read = Callable[[Any], Any]  # a tree of jax.ShapeDtypeStruct -> the weights, placed and cast as it says


def _holds_published(folder: str) -> bool:
    """Whether a folder has a config.json and is not that of a run."""
    if files.is_remote(folder):
        return False
    path = Path(folder).expanduser()
    return not (path / "config.yaml").is_file() and (path / architecture.CONFIG).is_file()


def published(folder: str, overrides: Sequence[str] = ()) -> Pretrained | None:
    """The model of a folder that transformers wrote, checked; None for a run's folder, and for any other.

    overrides: section.key=value. Raises InputError if the model is not supported or has no tokenizer.
    """
    if not _holds_published(folder):
        return None
    found = pretrained.read(
        Path(folder).expanduser(), overrides, fix=f"convert --from={folder} --workdir=W {{flags}}, then use W,"
    )
    if not found.reads_text:
        raise InputError(
            f"{folder}: there is no {architecture.TOKENIZER}, so the model cannot read text\n"
            f"  fix   with transformers, AutoTokenizer.from_pretrained('{folder}').save_pretrained('{folder}') writes "
            "one from what there is"
        )
    return found


def needed(values: flags.FlagValues, example: str) -> str:
    """--workdir, if it has checkpoints or is a published folder. Raises InputError if it is not."""
    folder = session.needs(values, "workdir", example)
    return folder if _holds_published(folder) else session.needs_weights(values, example)


def begin(values: flags.FlagValues, folder: str, stderr: bool) -> tuple[session.Session, Read]:
    """The session of a verb that needs the weights of a folder, and what reads them.

    Raises InputError if they are not of the config's model.
    """
    found = published(folder, given.config_sets(values))
    if found and values.config:
        raise InputError(f"--config={values.config}: {folder} has a {architecture.CONFIG} of its own\n  fix   drop it")
    here = session.begin(values, found.config if found else None, stderr)
    for note in found.notes if found else ():
        here.say(f"{folder}: {note}")
    return here, of(here, folder, values.step, found)


def of(here: session.Session, folder: str, step: int | None, found: Pretrained | None) -> Read:
    """A function that reads the weights of a folder, as often as it is called. None are read yet.

    found: what `published` says of the folder. Raises InputError if a run's folder has no weights of the config's
    model, or if `step` is asked of a published model.
    """
    if not found:
        _check(here, folder, step)
        return lambda wanted: _restored(here, folder, wanted, step)
    if step is not None:
        raise InputError(f"step {step}: {folder} is a published model, which has no steps\n  fix   drop it")
    return lambda wanted: found.load(
        jax.tree.map(lambda like: like.sharding, wanted), jax.tree.map(lambda like: like.dtype, wanted)
    )


def _check(here: session.Session, workdir: str, step: int | None) -> None:
    """Raises InputError if a workdir has no weights of the config's model. No weights are read."""
    with checkpoint.of_run(workdir, here.config) as checkpoints:
        if not checkpoints.candidates(step):
            raise session.no_checkpoint(workdir)


def _restored(here: session.Session, workdir: str, wanted: Any, step: int | None) -> Any:
    """The weights of a workdir that `_check` has seen, placed."""
    with checkpoint.of_run(workdir, here.config, here.say) as checkpoints:
        found = checkpoints.restore_weights(wanted, step)
    assert found is not None, "_check() has seen a checkpoint"
    return found[1]
