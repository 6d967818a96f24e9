"""The checkpoints of a run: written in the background with their sha256 sums, restored under any sharding."""

import dataclasses
import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils

from gspmd_lm.config import Config, InputError, Model

_MANIFEST = "sha256.json"
_TRASH = "deleted"  # Orbax moves a step here in one rename, so that a kill cannot leave half of it in the list
_ITEMS = ("state", "run")  # the folders of a step: Orbax's arrays; one JSON file with architecture and extra
_SHOWN = 6  # lines of each kind in a message

_NAMES = ocp.path.step.standard_name_format()  # CheckpointManager's own: a committed folder, named by its number

_log = logging.getLogger(__name__)


# Fields of Config.model that change neither the parameters' tree nor what they mean.
_FREE = {"compute_dtype", "weight_dtype", "matmul_precision", "dropout", "z_loss", "init_std", "context"}


def of_run(
    workdir: epath.Path | str, config: Config, report: Callable[[str], None] = lambda _: None
) -> "closing[Checkpoints]":
    """A context of the checkpoints of a run's workdir, which closes them."""
    model = dataclasses.asdict(config.model)
    return closing(
        Checkpoints(
            str(epath.Path(workdir) / "checkpoints"),
            keep=config.train.keep_checkpoints,
            keep_every=config.train.keep_every,
            architecture={name: value for name, value in model.items() if name not in _FREE},
            report=report,
        )
    )


class Checkpoints:
    """The checkpoints of one run: numbered folders of an Orbax CheckpointManager, each with a sha256 manifest.

    Every process of a run calls every method, in the same order. Nothing is created, cleaned up or deleted before the
    first save, so another program may read the checkpoints of a run in progress.
    """

    def __init__(
        self,
        directory: str,
        *,
        keep: int,
        keep_every: int,
        architecture: Mapping[str, Any],
        report: Callable[[str], None] = _log.warning,
    ):
        """Opens `directory`, a local path or a gs:// URL, which need not exist.

        keep: how many of the newest steps stay; keep_every: besides them, every multiple of it stays (0: none).
        architecture: plain values saved with each step; `restore` refuses a step saved with others.
        report: is told, on the first process, about damaged steps and about steps that a rewind replaces.

        Raises:
            InputError: `directory` is something else than a directory, or its kind of URL cannot be opened.
        """
        self.directory = _open_directory(directory)
        self._keep = keep
        self._keep_every = keep_every
        self._architecture = _as_json(architecture)
        self._report = report if jax.process_index() == 0 else lambda message: None
        self._at = -1  # the step last saved (perhaps still being written) or restored
        self._opened_for_saving = False
        logging.getLogger("absl").addFilter(_is_worth_reading)

    def steps(self) -> list[int]:
        """The steps whose writing has finished, oldest first."""
        return _from_first_process(sorted(found.step for found in _NAMES.find_all(self.directory)))

    def save(self, step: int, state: Any, extra: Mapping[str, Any]) -> None:
        """Copies `state` (a pytree of arrays) to the host, then writes it in the background, with `extra` (small JSON).

        Waits for an earlier save. Nothing is written for the step just saved or restored. Other steps from `step` on
        belong to a course that the run left (it was rewound, or they were damaged): they are reported and deleted
        first, so that the step saved last is always the newest.

        Raises:
            RuntimeError: the earlier save failed, and nothing is saved now; or this one cannot begin.
        """
        run = _as_json({"architecture": self._architecture, "extra": extra})
        self.wait()
        manager = self._manager
        if step == self._at and step in manager.all_steps():
            return
        left = [old for old in manager.all_steps() if old >= step]
        if left:
            self._report(f"checkpoint {step} replaces {_listed(left)} in {self.directory}, which the run left")
            self._empty_trash()
        for old in left:
            manager.delete(old)
        self._at = step
        args = ocp.args.Composite(state=ocp.args.StandardSave(state), run=ocp.args.JsonSave(run))
        try:
            manager.save(step, args=args, force=True)  # force: when to save is the caller's decision
        except OSError as error:
            raise self._not_written(error) from error

    def wait(self) -> None:
        """Returns when the save in progress has been written. Raises RuntimeError where it failed."""
        if not self._opened_for_saving:
            return
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            self._manager.reload()  # it has already forgotten the steps that this save would have replaced
            raise self._not_written(error) from error

    def close(self) -> None:
        """Waits as `wait` does, then frees the disk space of deleted steps and the background threads."""
        if not self._opened_for_saving:
            return
        try:
            self.wait()
        finally:
            self._manager.close()
            self._empty_trash()

    def restore(self, abstract_state: Any, step: int | None = None) -> tuple[int, Any, dict[str, Any]] | None:
        """The step, the state and the extra of the newest undamaged checkpoint, or of `step`; None if there is none.

        abstract_state: the tree of jax.ShapeDtypeStruct to restore, each with the sharding wanted now. The files are
        first compared with their manifest. A damaged step is reported and the one before it is tried.

        Raises:
            InputError: `step` does not exist or is damaged, all steps are damaged, or what was saved has another
                architecture, tree, shape or dtype than `abstract_state`.
        """
        found = self._chosen(step)
        if not found:
            return None
        chosen, folder, run = found
        with closing(ocp.StandardCheckpointHandler()) as reader:
            saved = reader.metadata(folder / "state").tree
            if set(saved) == {"params"}:
                raise InputError(
                    f"{folder}: holds weights without the state of a training run\n"
                    f"  fix   train from them in another --workdir, with --set train.init_from={self.directory.parent}"
                )
            _check_tree(saved, abstract_state, f"{folder}")
            state = reader.restore(folder / "state", args=ocp.args.StandardRestore(abstract_state))
        self._at = chosen
        return chosen, state, run["extra"]

    def restore_weights(self, abstract_params: Any, step: int | None = None) -> tuple[int, Any] | None:
        """The step and the parameters alone, of a checkpoint of a whole state or of {"params": parameters}.

        Chosen, checked and placed as `restore` does, and cast to the dtypes of `abstract_params`; nothing else of the
        state is read.
        """
        found = self._chosen(step)
        if not found:
            return None
        chosen, folder, _ = found
        wanted = {"params": abstract_params}
        with closing(ocp.PyTreeCheckpointHandler()) as reader:
            saved = {name: tree for name, tree in reader.metadata(folder / "state").tree.items() if name == "params"}
            _check_tree(saved, wanted, f"{folder}", casts=True)
            args = ocp.args.PyTreeRestore(
                wanted, ocp.checkpoint_utils.construct_restore_args(wanted), partial_restore=True
            )
            return chosen, reader.restore(folder / "state", args=args)["params"]

    def _chosen(self, step: int | None) -> tuple[int, epath.Path, dict[str, Any]] | None:
        """The number and the folder of the checkpoint to restore, with what was saved beside its arrays."""
        self.wait()
        steps = self.steps()
        if step is not None and step not in steps:
            raise InputError(
                f"{self.directory}: there is no checkpoint {step}\n"
                f"  fix   {f'use one of {_listed(steps)}' if steps else 'give the workdir of a run that has saved one'}"
            )
        if not steps:
            return None
        chosen = self._first_undamaged(steps[::-1] if step is None else [step])
        folder = self.directory / str(chosen)
        run = json.loads((folder / "run" / "metadata").read_text())
        self._check_architecture(run["architecture"], f"{folder}")
        return chosen, folder, run

    def _not_written(self, error: Exception) -> RuntimeError:
        return RuntimeError(f"checkpoint {self._at} was not written to {self.directory}: {error}")

    @cached_property
    def _manager(self) -> ocp.CheckpointManager:
        policies = ocp.checkpoint_managers
        kept: list[Any] = [policies.LatestN(self._keep)]
        if self._keep_every:
            kept.append(policies.EveryNSteps(self._keep_every))
        options = ocp.CheckpointManagerOptions(
            preservation_policy=policies.AnyPreservationPolicy(kept),
            todelete_subdir=_TRASH,
            cleanup_tmp_directories=True,  # what a killed run left half-written
            lightweight_initialize=True,  # a damaged old step must not prevent new ones
            async_options=ocp.AsyncOptions(
                post_finalization_callback=self._before_commit,
                create_directories_asynchronously=False,  # where it fails, the process could not end for 20 minutes
            ),
        )
        manager = ocp.CheckpointManager(self.directory, options=options)
        self._opened_for_saving = True
        return manager

    def _before_commit(self) -> None:
        """Writes the manifest. Orbax calls this on the first process, in the background thread, when all processes
        have written all files and the folder does not count as a checkpoint yet: none is ever without its manifest.
        """
        self._empty_trash()
        (folder,) = [path for path in self.directory.iterdir() if path.name.split(".")[0] == str(self._at)]
        files = [top / name for item in _ITEMS for top, _, names in (folder / item).walk() for name in names]
        with ThreadPoolExecutor() as pool:
            sums = zip(files, pool.map(_sum, files), strict=True)
            manifest = {str(file.relative_to(folder)): {"bytes": size, "sha256": sha} for file, (size, sha) in sums}
        (folder / _MANIFEST).write_text(json.dumps(manifest, indent=1, sort_keys=True))

    def _empty_trash(self) -> None:
        trash = self.directory / _TRASH
        if jax.process_index() == 0 and trash.exists():
            trash.rmtree()

    def _first_undamaged(self, candidates: Sequence[int]) -> int:
        """The first of `candidates` that agrees with its manifest, as the first process finds. Raises InputError."""
        damages: dict[int, str] = {}
        chosen = -1
        for step in candidates if jax.process_index() == 0 else ():
            damage = _damage(self.directory / str(step))
            if not damage:
                chosen = step
                break
            damages[step] = damage
            self._report(f"checkpoint {step} in {self.directory} is damaged ({damage}) and is not used")
        chosen, found = _from_first_process([chosen, list(damages.items())])
        if chosen < 0:
            lines = "\n".join(f"  {step}: {damage}" for step, damage in found)
            raise InputError(
                f"{self.directory}: damaged, and no other checkpoint to use\n{lines}\n"
                "  fix   restore another step, or start in another --workdir"
            )
        return chosen

    def _check_architecture(self, saved: Mapping[str, Any], place: str) -> None:
        wanted = self._architecture
        names = [
            name
            for name in sorted({*saved, *wanted} - _FREE)
            if saved.get(name, _DEFAULTS.get(name, _ABSENT)) != wanted.get(name, _ABSENT)
        ]
        differences = [
            f"  {name}: {saved.get(name, 'absent')} in the checkpoint, {wanted.get(name, 'absent')} in the config"
            for name in names
        ]
        if differences:
            fix = "  fix   use the config it was saved with, or another --workdir"
            if all(name.startswith("padded_") for name in names):
                sets = " ".join(f"--set model.{name}={wanted[name]}" for name in names)
                fix = f"  fix   padding is part of the weights: convert again, with {sets}, into another --workdir"
            raise InputError("\n".join([f"{place}: a checkpoint of another architecture", *differences, fix]))


def _open_directory(directory: str) -> epath.Path:
    """The absolute path of `directory`, reached once, so that a wrong one stops the run before it starts."""
    path = epath.Path(directory)
    scheme, is_url, _ = directory.partition("://")
    if is_url and scheme != "gs":  # Orbax 0.12.8 makes s3:/ of s3:// and calls it a relative path
        raise InputError(
            f"{directory}: Orbax writes checkpoints to local paths and to gs://, not to {scheme}://\n"
            "  fix   mount the bucket as a file system and give its path, or use gs://"
        )
    try:
        if not is_url:
            path = path.expanduser().absolute()
        is_other = path.exists() and not path.is_dir()
    except ImportError as error:
        raise InputError(f"{directory}: this kind of path needs a package that is not installed\n  {error}") from error
    if is_other:
        raise InputError(f"{directory}: not a directory\n  fix   give another path for checkpoints")
    return path


def _is_worth_reading(record: logging.LogRecord) -> bool:
    """False for Orbax's progress notes: hundreds of lines per run under absl's default verbosity."""
    return record.levelno >= logging.WARNING or "orbax" not in record.pathname


def _as_json(values: Mapping[str, Any]) -> dict[str, Any]:
    """A copy with the types that JSON gives back (tuples become lists). Raises TypeError for what JSON cannot hold."""
    return json.loads(json.dumps(values))


_ABSENT = object()
# A checkpoint from before a field of Model was there has its default.
_DEFAULTS = _as_json(
    {field.name: field.default for field in dataclasses.fields(Model) if field.default is not dataclasses.MISSING}
)


def _from_first_process(value: Any) -> Any:
    """The JSON value that the first process passed, on every process."""
    if jax.process_count() == 1:
        return value
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    length = int(multihost_utils.broadcast_one_to_all(np.int32(text.size)))
    return json.loads(np.asarray(multihost_utils.broadcast_one_to_all(np.resize(text, length))).tobytes())


def _sum(file: epath.Path) -> tuple[int, str]:
    """The size in bytes and the sha256 sum of a file."""
    sha256 = hashlib.sha256()
    size_bytes = 0
    with file.open("rb") as stream:
        while block := stream.read(1 << 20):
            sha256.update(block)
            size_bytes += len(block)
    return size_bytes, sha256.hexdigest()


def _damage(folder: epath.Path) -> str:
    """What is wrong with the files of a step, or ''."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_text()).items()
        sums = {name: (entry["bytes"], entry["sha256"]) for name, entry in manifest}
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
    ) as error:  # whatever a flipped byte can make of it
        return f"{_MANIFEST} cannot be read: {error}"
    with ThreadPoolExecutor() as pool:
        damages = pool.map(lambda name: _damage_of_file(folder / name, *sums[name]), sums)
        found = [f"{name}: {damage}" for name, damage in zip(sums, damages, strict=True) if damage]
    return ", ".join(found[:2]) + (f" and {len(found) - 2} more" if len(found) > 2 else "")


def _damage_of_file(file: epath.Path, expected_bytes: int, expected_sha256: str) -> str:
    try:
        size_bytes, sha256 = _sum(file)
    except FileNotFoundError:
        return "missing"
    except OSError as error:
        return str(error)
    if size_bytes != expected_bytes:
        return f"{size_bytes} bytes instead of {expected_bytes}"
    return "" if sha256 == expected_sha256 else "its sha256 has changed"


def _check_tree(saved: Any, wanted: Any, place: str, casts: bool = False) -> None:
    """Raises InputError where the arrays of two trees differ in name, shape or, unless they are cast, dtype."""
    saved_arrays, wanted_arrays = dict(_arrays(saved)), dict(_arrays(wanted))

    def same(name: str) -> bool:
        pair = saved_arrays[name], wanted_arrays[name]
        return pair[0] == pair[1] or (casts and pair[0].partition("[")[2] == pair[1].partition("[")[2])

    problems = {
        "missing": [f"{name}: {wanted_arrays[name]}" for name in wanted_arrays if name not in saved_arrays],
        "unexpected": [f"{name}: {saved_arrays[name]}" for name in saved_arrays if name not in wanted_arrays],
        "different": [
            f"{name}: {saved_arrays[name]} in the checkpoint, {wanted_arrays[name]} wanted"
            for name in wanted_arrays
            if name in saved_arrays and not same(name)
        ],
    }
    lines = [f"{place}: the checkpoint holds another state than this run's (another optimizer?)"]
    for kind, found in problems.items():
        lines += [f"  {kind}: {line}" for line in found[:_SHOWN]]
        lines += [f"  {kind}: {len(found) - _SHOWN} more"] if len(found) > _SHOWN else []
    if any(problems.values()):
        raise InputError("\n".join([*lines, "  fix   use the config it was saved with, or another --workdir"]))


def _arrays(tree: Any) -> Iterator[tuple[str, str]]:
    """The dotted name and the dtype[shape] of each array; random keys as the integers that Orbax stores."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.eval_shape(jax.random.key_data, leaf)
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        yield name, f"{np.dtype(leaf.dtype).name}[{', '.join(map(str, leaf.shape))}]"


def _listed(steps: Sequence[int]) -> str:
    return ", ".join(map(str, steps))
