"""train --elastic: a run goes on with as many devices as there are. The first process decides for all."""

import dataclasses
import json
from typing import TYPE_CHECKING, Any

from absl import flags

from gspmd_lm import files
from gspmd_lm.cli import inputs, outputs
from gspmd_lm.config import Config
from gspmd_lm.errors import InputError
from gspmd_lm.sharding import rules_file
from gspmd_lm.sharding.rules import Rules
from gspmd_lm.units import human_clock, human_seconds
from gspmd_lm.workdir import layout

if TYPE_CHECKING:
    from etils import epath

    from gspmd_lm.hardware.target import Target
    from gspmd_lm.runtime.startup import Runtime
    from gspmd_lm.session import Session
    from gspmd_lm.workdir.history import RunHistory


@dataclasses.dataclass(frozen=True)
class Beginning:
    """The layout with which a run began, from which that of every restart is derived."""

    rules: dict[str, Any]  # the plain values of the rules file
    devices: int
    padded_batch: int  # data.padded_batch


class Restart:
    """The start of a run with --elastic, on one process."""

    def __init__(self, values: flags.FlagValues):
        """values: of the flags of train."""
        self.values = values
        self._beginning: Beginning | None = None

    def read_rules(self) -> Rules:
        """The rules that --rules names, else those with which the run in the workdir began, else none."""
        values = self.values
        if values.rules is None and (kept := layout.find_earlier(values.workdir, layout.BEGINNING)):
            text = json.dumps(_read_beginning(files.open_path(values.workdir)).rules)
            return rules_file.from_text(text, kept, values.mesh, overrides=inputs.rules_sets(values))
        return inputs.read_rules(values)

    def settle(self, config: Config, rules: Rules, machine: "Runtime", simulated: int) -> tuple[Config, Rules]:
        """The config and the rules that fit the devices that are there. simulated: how many, if they are simulated."""
        from gspmd_lm.plan import elastic
        from gspmd_lm.runtime import processes

        decided = processes.from_first(self._decide(config, rules, simulated) if machine.is_main else None)
        if decided["text"] is not None:
            rules = rules_file.from_text(decided["text"], decided["path"])
        return elastic.with_rows(config, decided["rows"]), rules

    def _decide(self, config: Config, rules: Rules, simulated: int) -> dict[str, Any]:
        """The rows of a batch, and the name and the text of other rules if those that were given do not fit."""
        from gspmd_lm.hardware import target as targets
        from gspmd_lm.plan import elastic
        from gspmd_lm.runtime import startup

        target, values = targets.from_devices(startup.devices_of(simulated)), self.values
        workdir = files.open_path(values.workdir) if values.workdir else None
        earlier = _read_earlier(workdir) if workdir else None
        known = _find_beginning(workdir, earlier) if workdir else None
        if known and values.config is None:  # that of the workdir may be padded for the devices of the last start
            config = elastic.with_rows(config, known.padded_batch or config.data.batch)
        plain = rules_file.to_dict(rules)
        self._beginning = Beginning(plain, target.devices, config.data.padded_batch)
        if known and known.rules == plain:
            self._beginning = known
        found = elastic.adapt(config, rules, self._beginning.devices, target, outputs.say)
        if found.change:
            outputs.say(f"--elastic: {found.change}")
        if earlier and (line := _forecast(earlier, found.config, target, values.steps)):
            outputs.say(f"--elastic: {line}")
        text = None if found.rules is rules else found.rules.text
        return {"rows": found.config.data.rows, "path": found.rules.path, "text": text}

    def keep(self, workdir: "epath.Path") -> None:
        """Writes down how the run began, for later restarts. Only the first process does."""
        if self._beginning:
            files.replace_json(workdir / layout.BEGINNING, dataclasses.asdict(self._beginning))


def explain_refusal(error: InputError, begun: "Session") -> InputError:
    """The error of rules that do not fit the devices, which names --elastic where the run had others before."""
    from gspmd_lm.workdir import history

    before = history.count_devices(begun.workdir) if begun.workdir else 0
    if before in (0, len(begun.devices)):
        return error
    return InputError(
        f"{error}\nthe run had {before} devices when it was last started, and has {len(begun.devices)} now\n"
        "  fix   add --elastic: the run then goes on with rules that fit, and with the same batches"
    )


def _read_beginning(workdir: "epath.Path") -> Beginning:
    return files.read_fields(Beginning, workdir / layout.BEGINNING, "delete it, and give --rules")


def _read_earlier(workdir: "epath.Path") -> "RunHistory | None":
    """The history of earlier starts in the workdir; None if no step was logged there."""
    from gspmd_lm.workdir import history

    return history.read_runs([str(workdir)])[0] if (workdir / layout.METRICS).exists() else None


def _find_beginning(workdir: "epath.Path", earlier: "RunHistory | None") -> Beginning | None:
    """The beginning of a run, or its last start if it had no --elastic so far; None for a new run."""
    if (workdir / layout.BEGINNING).exists():
        return _read_beginning(workdir)
    if earlier is None or not earlier.devices:
        return None
    rules = rules_file.from_text(earlier.rules, f"{workdir / layout.RULES}")
    return Beginning(rules_file.to_dict(rules), earlier.devices, earlier.whole("data", "padded_batch"))


def _forecast(earlier: "RunHistory", config: Config, target: "Target", stop: int | None) -> str:
    """The time of a step and the time and price of those that are left; '' where no device is lost or added.

    Steps take longer by as much as a device has more rows. stop: the last step; None: train.steps.
    """
    step_time_s, before, now = earlier.speed("step_time_s"), earlier.devices, target.devices
    if not step_time_s or before in (0, now):
        return ""
    rows = earlier.whole("data", "padded_batch") or earlier.whole("data", "batch") or config.data.rows
    after_s = step_time_s * (config.data.rows / now) / (rows / before)
    left = max(0, (stop or config.train.steps) - earlier.step)
    line = f"a step took {human_seconds(step_time_s)} on {before} devices, and will take about {human_seconds(after_s)}"
    line += f"; the {left:,} steps that are left: about {human_clock(left * after_s)}"
    if price := target.price({}).on_demand:
        usd = price * target.chips * left * after_s / 3600
        line += f", {usd:,.2f} USD at {price:.2f} USD a chip and hour"
    return line
