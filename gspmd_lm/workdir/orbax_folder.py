"""Folders in which Orbax keeps arrays: whether one can be used, what it holds, its arrays, and their manager."""

import contextlib
import copy
import dataclasses
import glob
import logging
import time
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from typing import Any
from urllib.parse import quote

import jax
import orbax.checkpoint as ocp
import tensorstore
from etils import epath
from orbax.checkpoint._src.futures import future, signaling_client

from gspmd_lm import files
from gspmd_lm.errors import InputError
from gspmd_lm.workdir import compatible, layout

TRASH = "deleted"  # a step is moved here in one rename, so that a kill cannot leave half a step behind
_PART = "ocdbt.process_"  # and its number: the folder of what one process writes
_LEAST_SLICE_BYTES = 2**20  # that a device writes of an array that others hold as well


def resolve(directory: str) -> epath.Path:
    """The absolute path of `directory`, which is looked up once, so that a wrong path stops a run before it starts."""
    layout.check_store(directory)
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # it logs what it raises
    path, is_remote = files.open_path(directory), files.is_remote(directory)
    path = path if is_remote else path.absolute()
    if path.exists() and not path.is_dir():
        raise InputError(f"{directory}: not a directory\n  fix   give another path for checkpoints")
    if not is_remote and glob.has_magic(str(path)):
        raise InputError(
            f"{path}: Orbax takes a path with [, * or ? for a pattern and would find other files, or none\n"
            "  fix   rename the folder, or give another --workdir"
        )
    return path


@contextlib.contextmanager
def _legible(folder: epath.Path) -> Iterator[None]:
    """A context in which whatever Orbax makes of files that somebody has changed is an InputError about the folder."""
    try:
        yield
    except (InputError, OSError, jax.errors.JaxRuntimeError):  # the last of memory
        raise
    except Exception as error:  # it has no class for them
        text = " ".join(str(error).split())[:300]
        raise InputError(
            f"{folder}: cannot be read ({type(error).__name__}: {text})\n"
            "  fix   restore another step, or start in another --workdir"
        ) from error


def tree(folder: epath.Path) -> Any:
    """The tree of a folder's array metadata: shapes and dtypes. Raises InputError if it cannot be read."""
    with _legible(folder), closing(ocp.PyTreeCheckpointHandler()) as reader:
        found = reader.metadata(folder).tree
        if not isinstance(found, dict):
            raise TypeError(f"a {type(found).__name__} of arrays")
        dict(compatible.describe_arrays(found))
        return found


def names(folder: epath.Path) -> set[str]:
    """The names of the arrays of a folder. `tree` would keep 200 kB of memory for each call."""
    place = f"{folder}/" if files.is_remote(folder) else f"file://{quote(str(folder))}/"
    stored = tensorstore.KvStore.open(f"{place}|ocdbt:").result().list().result()
    return {name for name, _, kind in (key.decode().rpartition("/") for key in stored) if kind == ".zarray"}


def read_arrays(folder: epath.Path, wanted: Any) -> Any:
    """The arrays of a folder that have a place in `wanted`, which fits what the folder holds.

    They are requested in the tree that was saved, because Orbax compares the two trees with their empty branches.
    Otherwise it would refuse an optimizer whose tree lacks an empty part.
    """
    saved, arrays = tree(folder), dict(compatible.name_leaves(wanted))
    limit = _in_flight_gb(arrays.values())
    with _legible(folder), closing(ocp.PyTreeCheckpointHandler(restore_concurrent_gb=limit)) as reader:
        parts = {name.partition(".")[0] for name in arrays}
        asked: Any = {name: part for name, part in saved.items() if name in parts}
        asked = jax.tree_util.tree_map_with_path(
            lambda path, _: arrays.get(compatible.name_of(path), ocp.PLACEHOLDER), asked
        )
        restore_args = ocp.checkpoint_utils.construct_restore_args(asked)
        args = ocp.args.PyTreeRestore(asked, restore_args, partial_restore=True)
        restored = dict(compatible.name_leaves(reader.restore(folder, args=args)))
        other = [name for name, like in arrays.items() if restored[name].dtype != like.dtype]
        if other:  # the metadata no longer says that it is a random key
            raise TypeError(f"{other[0]}: {restored[other[0]].dtype}, not {arrays[other[0]].dtype}")
    return jax.tree_util.tree_map_with_path(lambda path, _: restored[compatible.name_of(path)], wanted)


class Steps:
    """A preservation policy for Orbax that keeps given steps."""

    def __init__(self) -> None:
        self.steps: set[int | None] = set()

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        return [checkpoint.step in self.steps for checkpoint in checkpoints]


def manager(
    directory: epath.Path, keep: int, keep_every: int, kept_too: Steps, before_commit: Callable[[], None]
) -> ocp.CheckpointManager:
    """Orbax's manager of the folders of steps. keep, keep_every: see `Checkpoints`; `kept_too` stay as well.

    `before_commit` is called on the first process, in the background thread, before the folder of a step counts.
    """
    _wait_by_a_clock_that_does_not_jump()
    policies = ocp.checkpoint_managers
    kept: list[Any] = [policies.LatestN(keep), kept_too]
    if keep_every:
        kept.append(policies.EveryNSteps(keep_every))
    options = ocp.CheckpointManagerOptions(
        preservation_policy=policies.AnyPreservationPolicy(kept),
        todelete_subdir=TRASH,
        cleanup_tmp_directories=True,  # a killed run leaves half-written steps
        lightweight_initialize=True,  # a damaged old step must not prevent new ones
        async_options=ocp.AsyncOptions(
            post_finalization_callback=before_commit,
            create_directories_asynchronously=False,  # a failure there would block the exit for 20 minutes
        ),
    )
    handlers = {"state": _writer(), "run": ocp.JsonCheckpointHandler()}
    return ocp.CheckpointManager(directory, options=options, item_handlers=handlers)


def _wait_by_a_clock_that_does_not_jump() -> None:
    """Makes Orbax measure how long a save takes by a clock that nobody sets.

    Orbax 0.12.8 measures it by the time of day. Where that was set forward during a save, as after a laptop's sleep,
    the save had taken too long, and the run ended.
    """
    for module in (future, signaling_client):
        vars(module)["time"] = types.SimpleNamespace(time=time.monotonic)  # all that they use of it


def parts(folder: epath.Path) -> list[epath.Path]:
    """The folders, in a folder of arrays, that the processes wrote and sealed, one each."""
    return [path for path in folder.iterdir() if path.name.startswith(_PART)]


@dataclasses.dataclass(frozen=True)  # not a tuple, which Orbax would take apart
class _Seal:
    """What Orbax waits for in its background thread, after the writes of this process: the sums of their files."""

    folder: epath.Path
    writes: Sequence[Any]

    def result(self, timeout: float | None = None) -> None:
        for write in self.writes:
            write.result(timeout)
        if self.folder.exists():
            files.seal(self.folder, sorted(path.name for path in self.folder.iterdir()))


def _writer() -> ocp.PyTreeCheckpointHandler:
    """Orbax's writer of arrays, without compression. One device writes an array that several devices hold and is small.

    Each process seals the folder that it has written, so that none reads for its checksums what others wrote.

    Compressing random mantissas takes as much CPU time as all other parts of saving, and holds every array twice. It
    would make a file of bfloat16 weights a fifth smaller, and one of float32 weights a fifteenth.

    Orbax cuts an array for all devices that hold it, with a program for each size and device, which is compiled while
    the run waits for its first checkpoint. A small model needs a hundred of them.
    """
    handlers = ocp.type_handlers
    arrays = copy.copy(handlers.get_type_handler(jax.Array))  # a new one would not know the kinds of random keys
    vars(arrays)["_min_slice_bytes_for_replica_parallel"] = _LEAST_SLICE_BYTES  # Orbax 0.12.8 has no setter
    others = [(kind, handlers.get_type_handler(kind)) for kind in handlers.supported_types() if kind is not jax.Array]
    registry = handlers.create_type_handler_registry((jax.Array, arrays), *others)
    writer = ocp.PyTreeCheckpointHandler(use_compression=False, type_handler_registry=registry)
    write = writer.async_save

    async def write_and_seal(folder: epath.Path, *args: Any, **kwargs: Any) -> list[Any]:
        writes = await write(folder, *args, **kwargs) or []
        return [*writes, _Seal(folder / f"{_PART}{jax.process_index()}", writes)]

    vars(writer)["async_save"] = write_and_seal  # Orbax has one class of handlers for each class of what is saved
    return writer


def _in_flight_gb(arrays: Iterable[Any]) -> Any:
    """How much is read at a time: an eighth of everything, but at least the largest array.

    An array that is being read is in memory twice.
    """
    sizes = [array.size * array.dtype.itemsize for array in arrays]
    return (1.01 * max(max(sizes), sum(sizes) / 8) + 1e6) / 1e9  # Orbax wants whole GB and works with parts of them


def is_worth_reading(record: logging.LogRecord) -> bool:
    """Whether a log record is shown: not Orbax's progress notes, nor its tracebacks of errors that `wait` raises."""
    return "orbax" not in record.pathname or (record.levelno >= logging.WARNING and not record.exc_info)
