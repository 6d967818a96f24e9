"""The state of a workbench: its inputs, what is shown of them, and the jobs that work it out."""

import asyncio
import dataclasses
import shlex
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any

from gspmd_lm import files, versions
from gspmd_lm.config.paths import read_text
from gspmd_lm.errors import InputError
from gspmd_lm.explore import controls, fixes
from gspmd_lm.explore.background import Compilation, Search
from gspmd_lm.explore.display import Display, describe_problem
from gspmd_lm.explore.inputs import Inputs
from gspmd_lm.explore.jobs import Follower
from gspmd_lm.hardware import target as targets

RULES = Path("rules")  # the folder in which new files may be written
MOST_VERSIONS = 100  # edits whose inputs are kept, for answers that come late


class FileExists(InputError):
    """A file that is to be written exists, and its writer has not said that it may be replaced."""


class Workbench:
    """The state of one layout while a person edits it. All methods are called in one event loop."""

    def __init__(self, inputs: Inputs, subject: bytes):
        self.inputs = inputs
        self.version = 1
        self.display = Display()
        self.pinned: tuple[Inputs, Mapping[str, Any]] | None = None
        self.compilation = Compilation(subject, self.tell)
        self.search = Search(subject, self.tell)
        self.revision = 0  # counts the changes of the state
        self._versions = {1: inputs}
        self._saved = {inputs.path: inputs.text}  # the texts that files had when they were read or written
        self._layouts = Follower("layouts", subject, self._take_layout, self._fail)
        self._layers = Follower("layers", subject, self._take_layer, self._fail_layer)
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    # What the page reads

    def state(self) -> dict[str, Any]:
        """The state as a page reads it."""
        display, inputs = self.display, dataclasses.asdict(self.inputs)
        for size in ("batch", "seq"):
            inputs[size] = getattr(self.inputs, size) or display.shown.get(size)
        compiled = self.compilation.results.get(display.inputs) if display.inputs else None
        return {
            "version": self.version,
            "shown_version": display.version,
            "busy": "estimating" if self._layouts.busy else "tracing" if self._layers.busy else None,
            "inputs": inputs,
            "controls": self._controls(),
            "problems": display.problems,
            **display.views(self.pinned and self.pinned[1], compiled),
            "pinned": self.pinned and {"text": self.pinned[0].text, "target": self.pinned[0].target},
            "search": self.search.state(),
            "compile": self.compilation.state(self._version_of(self.compilation.inputs)),
            "command": self.command,
        }

    def _controls(self) -> list[dict[str, Any]]:
        try:
            target = targets.parse(self.inputs.target)
        except InputError:  # it stands among the problems
            return []
        return controls.list_controls(self.inputs.text, target) if self.inputs.editable else []

    def _version_of(self, inputs: Inputs | None) -> int | None:
        return next((version for version, one in reversed(self._versions.items()) if one == inputs), None)

    @property
    def command(self) -> str:
        """What trains the layout that stands in the editor, once it is saved; of a step of one's own, explains it."""
        inputs = self.inputs
        if inputs.program and inputs.editable:
            return f"gspmd_lm.train({inputs.program.rpartition(':')[2]}, {inputs.path!r}, data=batch)"
        if inputs.program:
            return f"{versions.program()} explain {shlex.quote(f'--program={inputs.program}')} --target={inputs.target}"
        words = [f"--config={inputs.config}", *(f"--set={one}" for one in inputs.overrides), f"--rules={inputs.path}"]
        return f"{versions.program()} {shlex.join(words)}"

    def tell(self) -> None:
        """Wakes up those who wait for a change."""
        self.revision += 1
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def wait(self, seconds: float) -> None:
        """Waits until something changes, or for so long."""
        waiting = asyncio.ensure_future(self._changed.wait())
        await asyncio.wait([waiting], timeout=seconds)
        waiting.cancel()

    # What is done

    async def start(self) -> None:
        """Begins to work out the figures."""
        self._spawn(self._layouts.run())
        self._spawn(self._layers.run())
        await self._ask()

    async def finish(self) -> dict[str, Any]:
        """The state once all of it is worked out. The workbench begins and ends."""
        await self.start()
        while self._layouts.busy or self._layers.busy or self.display.checked < self.version:
            await self.wait(1.0)
        state = self.state()
        await self.stop()
        return state

    async def stop(self) -> None:
        """Ends all jobs, and waits until they have ended."""
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def edit(self, asked: Mapping[str, Any]) -> int:
        """Takes new inputs. Returns their version; figures follow. Raises InputError for those that may not be."""
        inputs = self.inputs.with_changes(asked)
        if inputs != self.inputs:
            self.inputs = inputs
            self.version += 1
            self._versions[self.version] = inputs
            for old in [*self._versions][:-MOST_VERSIONS]:
                del self._versions[old]
            self.compilation.stop()
            await self._ask()
            self.tell()
        return self.version

    def control(self, name: Any, value: Any) -> str:
        """The text with the value of a control. Raises InputError for what cannot be."""
        self._check_editable()
        return controls.set_control(self.inputs.text, targets.parse(self.inputs.target), name, value)

    def fix(self, index: Any) -> str:
        """The text with a problem fixed. Raises InputError where the problem has no fix that can be applied."""
        problems = self.display.problems
        known = isinstance(index, int) and not isinstance(index, bool) and 0 <= index < len(problems)
        if not known or self.display.checked != self.version or not problems[index]["fix_text"]:
            raise InputError(f"problem {index}: there is no such problem, or no fix that can be applied to the text")
        return fixes.apply_edits(self.inputs.text, problems[index]["edits"])

    async def pin(self, clear: bool) -> None:
        """Keeps the layout that is shown, to compare with; or forgets it."""
        display = self.display
        if not clear and not (display.inputs and display.shown):
            raise InputError("pin: no layout is shown yet")
        self.pinned = None if clear or not display.inputs else (display.inputs, display.shown)
        display.changes = None
        if display.inputs:
            await self._trace()
        self.tell()

    def compile(self, stop: bool) -> None:
        """Has the layout that is shown compiled, or stops that."""
        if stop:
            self.compilation.stop()
        elif self.display.inputs != self.inputs:
            raise InputError("compile: the text is no layout that can be compiled, or it is not estimated yet")
        else:
            self._spawn(self.compilation.run(self.inputs))
        self.tell()

    def find(self, stop: bool) -> None:
        """Begins the search for the best layouts, or stops it."""
        self._check_editable()
        if stop:
            self.search.stop()
        else:
            self._spawn(self.search.run(self.inputs))
        self.tell()

    def load(self, rank: Any) -> str:
        """The text of a layout of the search. Raises InputError where there is none."""
        self._check_editable()
        return self.search.text(rank)

    def save(self, path: Any, overwrite: bool) -> str:
        """Writes the text into the file that was given, or into one of the folder of rules. Returns its path.

        Raises:
            FileExists: the file is there, and is not as it was when it was read.
            InputError: it may not be written.
        """
        self._check_editable()
        path = self.inputs.path if path is None else path
        if not isinstance(path, str) or not path or len(path) > 200 or "\0" in path:
            raise InputError("save: needs the path of a file")
        file = self._writable(path)
        if file.exists() and not overwrite and read_text(file) not in (self._saved.get(path), self.inputs.text):
            raise FileExists(f"{path}: is there already, with another text\n  fix   replace it, or give another name")
        try:
            files.replace(file, self.inputs.text)
        except OSError as error:
            raise InputError(f"{path}: cannot be written ({error.strerror})\n  fix   give another name") from error
        self._saved[path] = self.inputs.text
        if path != self.inputs.path:
            self.inputs = dataclasses.replace(self.inputs, path=path)
            self.version += 1
            self._versions[self.version] = self.inputs
            self._spawn(self._ask())
        self.tell()
        return path

    def _writable(self, path: str) -> Path:
        """The file of a path that may be written. Raises InputError for any other."""
        file = Path(path)
        # The file that was given, or that was written since. Rules of a program may have a name that is no file.
        if path in self._saved and (file.suffix == ".yaml" or file.is_file()):
            return file
        inside = file.resolve().parent == RULES.resolve() and not file.is_symlink()
        if not inside or file.suffix != ".yaml":
            raise InputError(
                f"{path}: only the file that was given is written, or one of the folder {RULES}/\n"
                f"  fix   {RULES}/NAME.yaml"
            )
        if not RULES.is_dir():
            raise InputError(f"{path}: there is no folder {RULES} here\n  fix   make it, or save {self.inputs.path}")
        return file

    def _check_editable(self) -> None:
        if not self.inputs.editable:
            raise InputError("a step of one's own has no rules file to change")

    async def _ask(self) -> None:
        await self._layouts.ask({"version": self.version, "inputs": dataclasses.asdict(self.inputs)})

    async def _trace(self) -> None:
        """Has the layer of what is shown worked out."""
        display = self.display
        assert display.inputs
        pinned = self.pinned and dataclasses.asdict(self.pinned[0])
        await self._layers.ask(
            {"version": display.version, "inputs": dataclasses.asdict(display.inputs), "pinned": pinned}
        )

    def _take_layout(self, answer: Mapping[str, Any]) -> None:
        """Takes the figures of an edit."""
        version = answer["version"]
        if self.display.take_layout(answer, self._versions.get(version), version == self.version):
            self._spawn(self._trace())
        self.tell()

    def _take_layer(self, answer: Mapping[str, Any]) -> None:
        """Takes the layer of an edit."""
        self.display.take_layer(answer)
        self.tell()

    def _fail(self, version: int, why: str) -> None:
        """Says that an edit cannot be estimated."""
        if version == self.version:
            self.display.checked = version
            self.display.problems = [describe_problem(f"this layout cannot be estimated: {why}")]
        self.tell()

    def _fail_layer(self, version: int, why: str) -> None:
        """Says that the layer of an edit cannot be worked out."""
        self.display.layer, self.display.layer_version = None, version
        self.display.layer_not_known, self.display.changes = f"the layer: {why}", None
        self.tell()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
