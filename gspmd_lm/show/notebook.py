"""What the functions of api.py give back: objects that show themselves, in a notebook as a page, elsewhere as text."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from etils import epath

from gspmd_lm.config import Config
from gspmd_lm.errors import InputError
from gspmd_lm.foresight.report import Report, to_json
from gspmd_lm.plan import candidate, outcome, row_changes
from gspmd_lm.plan.search import Plan
from gspmd_lm.program.task import Task
from gspmd_lm.sharding.rules import Rules
from gspmd_lm.show import comparison, plan, run, svg
from gspmd_lm.show import dry_run as dry_runs
from gspmd_lm.show import row_changes as shown_rows
from gspmd_lm.show.terminal import text_of
from gspmd_lm.train import decoder
from gspmd_lm.workdir import history

PAGE_HEIGHT = 640  # of a page within a notebook, in pixels; it scrolls


@dataclasses.dataclass(frozen=True, repr=False)
class Explanation(Report):
    """A report on a layout's costs. Its attributes are those of the JSON of `explain`, in docs/explain_json.md."""

    def __repr__(self) -> str:
        return text([self])

    def _repr_html_(self) -> str:
        return frame(comparison.page([self]))

    def to_json(self) -> Any:
        """The plain values that `explain --json` writes."""
        return to_json([self])


class Comparison(tuple[Explanation, ...]):
    """Explanations of several layouts, in the order in which they were asked for."""

    def __new__(cls, reports: Iterable[Report]) -> "Comparison":
        return super().__new__(cls, (Explanation(**vars(report)) for report in reports))

    def __repr__(self) -> str:
        return text(self)

    def _repr_html_(self) -> str:
        return frame(comparison.page(self))


@dataclasses.dataclass(frozen=True, repr=False)
class ComparedRows(row_changes.RowComparison):
    """What each row in which two layouts differ changes."""

    def __repr__(self) -> str:
        return text_of(lambda console: shown_rows.show(self, console), 120)

    def _repr_html_(self) -> str:
        return frame(shown_rows.page(self))

    def to_json(self) -> Any:
        """The plain values that `compare --rows --json` writes."""
        return row_changes.to_json(self)


@dataclasses.dataclass(frozen=True, repr=False)
class FoundPlan(Plan):
    """What a search found, with the rules file of the best layout."""

    batch: int = 0  # rows of a step

    @classmethod
    def of(cls, plan: Plan, task: Task | Config) -> "FoundPlan":
        return cls(**vars(plan), batch=decoder.task(task).rows)

    @property
    def yaml(self) -> str:
        """The text of the best layout's rules file. Raises InputError where nothing fits."""
        if self.best is None:
            found = self._outcome
            fix = "the plan, shown, says what comes nearest" if found.searched == "full" else "plan(..., minutes=60)"
            raise InputError(f"{self.config} on {self.target.text}: {found.found_nothing}\n  fix   {fix}")
        return candidate.rules_file(self, self.best, self._command)

    @property
    def rules(self) -> Rules:
        """The rules of the best layout. Raises InputError where nothing fits."""
        content = self.yaml
        assert self.best is not None, "else there is no yaml"
        return dataclasses.replace(self.best.rules, text=content)

    @property
    def _command(self) -> str:
        phase = f", phase={self.phase!r}" if self.phase != "train" else ""
        return f"gspmd_lm.plan({self.config!r}, {self.target.text!r}{phase})"

    @property
    def _outcome(self) -> outcome.Outcome:
        return outcome.Outcome(self, self.batch, self.target.price({}))

    def __repr__(self) -> str:
        return text_of(lambda console: plan.show([self._outcome], console), 140)

    def _repr_html_(self) -> str:
        return frame(plan.page([self._outcome], [], self._command))


class ShownDryRun(str):
    """The tables of a dry run as text, with its `dry_run` and `warnings`."""

    dry_run: dry_runs.DryRun
    warnings: Sequence[str]

    def __new__(cls, dry_run: dry_runs.DryRun, warnings: Sequence[str]) -> "ShownDryRun":
        tables = text_of(lambda console: dry_runs.show(dry_run, console), 240)
        text = super().__new__(cls, "\n".join([*(f"warning: {warning}" for warning in warnings), tables]))
        text.dry_run, text.warnings = dry_run, warnings
        return text

    def draw(self, *names: str, width: int = 120) -> str:
        """The picture of some arrays for a terminal. Raises InputError for a name that no array has."""
        return text_of(lambda console: dry_runs.draw(self.dry_run, names, console), width)

    def _repr_html_(self) -> str:
        return frame(dry_runs.page(self.dry_run, warnings=self.warnings))


class Trained(dict[str, float]):
    """The values that a run logged last, by name, and its `workdir`.

    `has_work_left` says whether the run was stopped, by SIGTERM or Ctrl-C, before its last step.
    """

    def __init__(self, last: Mapping[str, float], workdir: epath.Path, has_work_left: bool = False):
        super().__init__(last)
        self.workdir, self.has_work_left = workdir, has_work_left

    @property
    def run(self) -> history.RunHistory:
        """All that the run has logged, as the verb plot reads it."""
        return history.read_runs([str(self.workdir)])[0]

    @property
    def losses(self) -> list[tuple[float, float]]:
        """The steps that were logged, each with its loss."""
        return self.run.points("loss")

    def _repr_html_(self) -> str:
        return frame(run.page([self.run], f"gspmd_lm.train(..., workdir={str(self.workdir)!r})"))


def text(reports: Sequence[Report], width: int = 120) -> str:
    """The page of a report, or the comparison of several, as the command line prints it."""
    return text_of(lambda console: comparison.show(reports, console), width)


def frame(document: str) -> str:
    """A whole page within a notebook, apart from its styles and scripts."""
    return (
        f'<iframe srcdoc="{svg.text(document)}" sandbox="allow-scripts" '
        f'style="width:100%;height:{PAGE_HEIGHT}px;border:0"></iframe>'
    )
