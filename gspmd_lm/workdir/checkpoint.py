"""The checkpoints of a run: written in the background with their sha256, restored under any sharding.

Each process takes the sha256 of the files that it writes, and of a share of those that it restores.

A checkpoint counts as healthy once a later step was finite: its weights then gave a finite loss and finite gradients.
The newest healthy checkpoint is never rotated away. A checkpoint that no finite step followed is used only if it is
asked for.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cached_property
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp
from etils import epath

from gspmd_lm import files
from gspmd_lm.config import Config, Train
from gspmd_lm.errors import InputError, RunFailed
from gspmd_lm.runtime.processes import from_first, gather
from gspmd_lm.workdir import compatible, layout, orbax_folder
from gspmd_lm.workdir.health import Health

RUN = "run/metadata"  # in the folder of a step: what `compatible.read_run` reads
_ITEMS = ("state", "run")  # in the folder of a step: Orbax's arrays, and a JSON file with architecture and extra

_NAMES = ocp.path.step.standard_name_format()  # CheckpointManager's own format: a committed folder is named by its step

_log = logging.getLogger(__name__)


def run_checkpoints(
    workdir: epath.Path | str, config: Config, report: Callable[[str], None] = lambda _: None
) -> "OpenCheckpoints":
    """A context with the checkpoints of a run's workdir, which are closed when it ends."""
    return open_checkpoints(workdir, config.train, compatible.facts(config.model), report)


@contextmanager
def open_checkpoints(
    workdir: epath.Path | str,
    train: Train,
    architecture: Mapping[str, Any],
    report: Callable[[str], None] = lambda _: None,
) -> Iterator["Checkpoints"]:
    """A context of the checkpoints in a workdir, of a model that `architecture` describes: see `run_checkpoints`.

    An error within the context is raised even if a save in progress, or closing, fails too: only `report` says that.
    """
    directory = str(epath.Path(workdir) / layout.CHECKPOINTS)
    checkpoints = Checkpoints(
        directory, keep=train.keep_checkpoints, keep_every=train.keep_every, architecture=architecture, report=report
    )
    try:
        yield checkpoints
    except BaseException:
        try:
            checkpoints.close()
        except Exception as error:  # a store raises what it likes
            report(str(error).partition("\n")[0])
        raise
    checkpoints.close()


class Chosen(NamedTuple):
    """A checkpoint that agrees with its manifest and with the run's architecture."""

    step: int
    folder: epath.Path
    extra: dict[str, Any]


class Checkpoints:
    """The checkpoints of one run: numbered folders of an Orbax CheckpointManager, each with a sha256 manifest.

    Every process of a run calls every method, in the same order. Before the first save nothing is created, cleaned up
    or deleted, so another program may read the checkpoints of a run in progress.
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

        keep: how many of the newest steps stay. keep_every: every multiple of it stays too; 0 means none.
        architecture: plain values that are saved with each step. `choose` refuses a step with other values.
        report: called on the first process, about steps that are not used and steps that a rewind replaces.

        Raises:
            InputError: `directory` is a file, or a path of a kind that cannot be opened.
        """
        self.directory = orbax_folder.resolve(directory)
        self._keep = keep
        self._keep_every = keep_every
        self._architecture = compatible.as_json(architecture)
        self._report = report if jax.process_index() == 0 else lambda message: None
        self._at = -1  # the step that was last saved, even if it is still being written, or restored
        self._undamaged = -1  # the step that last agreed with its manifest
        self._written = 0  # the step that was restored here, or last written whole
        self._opened_for_saving = False
        self._saved: list[str] = []  # the names of the arrays that are being written
        self._health = Health(self.directory)
        self._kept_too = orbax_folder.Steps()
        logging.getLogger("absl").addFilter(orbax_folder.is_worth_reading)

    def steps(self) -> list[int]:
        """The steps whose writing has finished, oldest first."""
        return from_first(self._steps())

    def newest_healthy(self) -> int | None:
        """The newest step that is known to be healthy."""
        healthy = [step for step in self._steps() if self._health.is_healthy(step)] if jax.process_index() == 0 else []
        return from_first(max(healthy, default=None))

    def confirm(self, finite_step: int) -> None:
        """Notes that `finite_step` was finite, so that earlier steps that were saved or restored here are healthy."""
        self._health.confirm(finite_step)
        if self._health.unwritten and not self.writing:
            self._health.write(self._steps())

    @property
    def writing(self) -> bool:
        """Whether a save is in progress."""
        return self._opened_for_saving and self._manager.is_saving_in_progress()

    def give_up(self) -> int | None:
        """The newest healthy step. Notes that no finite step followed the step that was saved or restored last."""
        self.wait()
        self._health.reject()
        self._health.write(self._steps())
        return self.newest_healthy()

    def last_written(self) -> int:
        """The step that was restored here, or last written whole; 0 without one. Waits for a save in progress."""
        with suppress(RunFailed):
            self.wait()
        return self._written

    def save(self, step: int, state: Any, extra: Mapping[str, Any], keep: int | None = None) -> None:
        """Copies `state` (a pytree of arrays) to the host, then writes it in the background, with `extra` (small JSON).

        The checkpoint of step `keep` stays too, until another one is named at a later save.
        Waits for an earlier save. The step that was just saved or restored is not written again. Other steps from
        `step` on belong to a course that the run left, because it was rewound or they were damaged. They are reported
        and deleted first, so that the step that was saved last is always the newest.

        Raises:
            RunFailed: the earlier save failed, or this one cannot begin. Nothing is saved then.
        """
        run = compatible.as_json({"architecture": self._architecture, "step": step, "extra": extra})
        self.wait()
        manager = self._manager
        if step == self._at and step in manager.all_steps():
            return
        left = [old for old in manager.all_steps() if old >= step]
        if left:
            self._report(f"checkpoint {step} replaces {_list_steps(left)} in {self.directory}, which the run left")
            self._empty_trash()
        for old in left:
            manager.delete(old)
        self._kept_too.steps = {self.newest_healthy(), keep}
        self._at = step
        self._health.unknown.add(step)
        self._saved = [name for name, _ in compatible.name_leaves(state)]
        args = ocp.args.Composite(state=ocp.args.PyTreeSave(state), run=ocp.args.JsonSave(run))
        try:
            manager.save(step, args=args, force=True)  # force: the caller decides when to save
        except OSError as error:
            raise self._not_written(error) from error

    def wait(self) -> None:
        """Returns when the save in progress has been written. Raises RunFailed if it failed."""
        if not self._opened_for_saving:
            return
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            self._health.unknown.discard(self._at)
            self._manager.reload()  # the manager has forgotten the steps that this save would have replaced
            raise self._not_written(error) from error
        self._written = max(self._at, 0)
        if self._health.unwritten:
            self._health.write(self._steps())

    def close(self) -> None:
        """Waits as `wait` does, then ends the background threads and deletes what is left of deleted steps."""
        if not self._opened_for_saving:
            return
        try:
            self.wait()
        finally:
            self._manager.close()
            self._empty_trash()

    def candidates(self, step: int | None = None) -> list[int]:
        """The steps that `choose` tries, in its order; none if nothing was saved. No file of arrays is read.

        Raises:
            InputError: `step` does not exist, no finite step followed any of them, or the first of them has another
                architecture.
        """
        steps = self.steps()
        if step is not None and step not in steps:
            fix = f"use one of {_list_steps(steps)}" if steps else "give the workdir of a run that has saved one"
            raise InputError(f"{self.directory}: there is no checkpoint {step}\n  fix   {fix}")
        candidates = self._without_unhealthy(steps[::-1]) if step is None else [step]
        if steps and not candidates:
            raise InputError(
                f"{self.directory}: no finite step followed any checkpoint ({_list_steps(steps)})\n"
                f"  fix   --step={steps[-1]} uses it nevertheless; or give another workdir"
            )
        legible = [first for first in candidates[:1] if jax.process_index() == 0 and not self._damage(first, ("run",))]
        for first in from_first(legible):
            self._read_description(first)
        return candidates

    def choose(self, step: int | None = None, abstract_state: Any = None) -> Chosen | None:
        """The newest undamaged checkpoint, or `step`; None if there is none. Its arrays are not read.

        Its files are compared with their manifest. A damaged step is reported, and the one before it is tried. The same
        happens to a step that no finite step followed. abstract_state: what `restore` will be asked for.

        Raises:
            InputError: as `candidates` does. Also if `step` or every step is damaged, or if a checkpoint has another
                tree, shape or dtype than `abstract_state`.
        """
        self.wait()
        candidates = self.candidates(step)
        if not candidates:
            return None
        chosen = self._first_undamaged(candidates)
        folder, run = self._read_description(chosen)
        if abstract_state is not None:
            saved = orbax_folder.tree(folder / "state")
            if set(saved) == {"params"}:
                raise InputError(
                    f"{folder}: holds weights without the state of a training run\n"
                    f"  fix   train from them in another --workdir, with --set train.init_from={self.directory.parent}"
                )
            compatible.compare(saved, abstract_state, f"{folder}")
        return Chosen(chosen, folder, run["extra"])

    def restore(self, abstract_state: Any, step: int | None = None) -> tuple[int, Any, dict[str, Any]] | None:
        """The step, the state and the extra of the checkpoint that `choose` finds, read as by `read`; None without one.

        Raises InputError as `choose` does.
        """
        chosen = self.choose(step, abstract_state)
        return (chosen.step, self.read(chosen, abstract_state), chosen.extra) if chosen else None

    def read(self, chosen: Chosen, abstract_state: Any) -> Any:
        """The state of a checkpoint that was chosen for it; later steps decide whether the checkpoint is healthy.

        abstract_state: the tree of jax.ShapeDtypeStruct to restore, each with the sharding that it is to have.
        """
        state = orbax_folder.read_arrays(chosen.folder / "state", abstract_state)
        self._at = self._written = chosen.step
        if not from_first(self._health.is_healthy(chosen.step)):
            self._health.unknown.add(chosen.step)
        return state

    def restore_weights(self, abstract_params: Any, step: int | None = None) -> tuple[int, Any] | None:
        """The step and the parameters of the checkpoint that `choose` finds, read as by `read_weights`."""
        chosen = self.choose(step)
        return (chosen.step, self.read_weights(chosen, abstract_params)) if chosen else None

    def read_weights(self, chosen: Chosen, abstract_params: Any, part: bool = False) -> Any:
        """The parameters of a checkpoint, which may hold a whole state or {"params": parameters}.

        They are placed and cast as `abstract_params` says. The rest of the state is not read. part: `abstract_params`
        has only some of them. Raises InputError if the checkpoint has other parameters.
        """
        wanted = {"params": abstract_params}
        saved = {name: tree for name, tree in orbax_folder.tree(chosen.folder / "state").items() if name in wanted}
        compatible.compare(saved, wanted, f"{chosen.folder}", casts=True, part=part)
        return orbax_folder.read_arrays(chosen.folder / "state", wanted)["params"]

    def _steps(self) -> list[int]:
        return sorted(folder.step for folder in _NAMES.find_all(self.directory))

    def _without_unhealthy(self, steps: Sequence[int]) -> list[int]:
        is_main = jax.process_index() == 0
        unhealthy = from_first([step for step in steps if is_main and self._health.is_healthy(step) is False])
        if unhealthy:
            listed = _list_steps(unhealthy[::-1])
            self._report(f"checkpoint {listed} in {self.directory}: not used, because no finite step followed")
        return [step for step in steps if step not in unhealthy]

    def _not_written(self, error: Exception) -> RunFailed:
        kept = [step for step in self._steps() if step != self._at] if jax.process_index() == 0 else []
        newest = f"it begins from checkpoint {kept[-1]} if that is intact" if kept else "there is no other checkpoint"
        text = " ".join(str(error).split())
        logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # at exit it would tell of each other write that failed
        return RunFailed(
            f"checkpoint {self._at} was not written to {self.directory}: {text[:300]}\n"
            f"  fix   check the folder (free space, permissions, connection), then start the same command: {newest}"
        )

    @cached_property
    def _manager(self) -> ocp.CheckpointManager:
        manager = orbax_folder.manager(
            self.directory, self._keep, self._keep_every, self._kept_too, self._before_commit
        )
        self._opened_for_saving = True
        return manager

    def _before_commit(self) -> None:
        """Writes the manifest, so that no checkpoint is ever without its manifest or without all of its arrays.

        Orbax calls this on the first process, in the background thread. All processes have then written all files, and
        the folder does not count as a checkpoint yet.
        """
        self._empty_trash()
        (folder,) = [path for path in self.directory.iterdir() if path.name.split(".")[0] == str(self._at)]
        missing = sorted(set(self._saved) - orbax_folder.names(folder / "state"))
        if missing:
            raise RuntimeError(f"{folder}: {len(missing)} arrays were not written, among them {missing[0]}")
        files.seal(folder, _ITEMS, [f"state/{part.name}" for part in orbax_folder.parts(folder / "state")])

    def _empty_trash(self) -> None:
        trash = self.directory / orbax_folder.TRASH
        if jax.process_index() == 0 and trash.exists():
            trash.rmtree()

    def _first_undamaged(self, candidates: Sequence[int]) -> int:
        """The first of `candidates` that agrees with its manifest; each process reads a share. Raises InputError."""
        damages: dict[int, str] = {}
        share = jax.process_index(), jax.process_count()
        for step in candidates:
            damage = next(filter(None, from_first(gather(self._damage(step, _ITEMS, share)))), "")
            if not damage:
                self._undamaged = step
                return step
            damages[step] = damage
            self._report(f"checkpoint {step} in {self.directory} is damaged ({damage}) and is not used")
        lines = "\n".join(f"  {step}: {damage}" for step, damage in damages.items())
        raise InputError(
            f"{self.directory}: damaged, and no other checkpoint to use\n{lines}\n"
            "  fix   restore another step, or start in another --workdir"
        )

    def _damage(self, step: int, items: Sequence[str], share: tuple[int, int] = (0, 1)) -> str:
        if step == self._undamaged:
            return ""
        folder = self.directory / str(step)
        if not (damage := files.damage(folder, items, share)):
            try:
                compatible.read_run(folder / RUN, step)
            except InputError as error:
                damage = str(error)
        return damage

    def _read_description(self, step: int) -> tuple[epath.Path, dict[str, Any]]:
        """The folder of a step and the JSON that its run saved. Raises InputError if it has another architecture."""
        folder = self.directory / str(step)
        run = compatible.read_run(folder / RUN, step)
        compatible.check_model(run["architecture"], self._architecture, f"{folder}")
        return folder, run


def _list_steps(steps: Sequence[int]) -> str:
    return ", ".join(map(str, steps))


OpenCheckpoints = AbstractContextManager[Checkpoints]
