"""Reports of layouts: each is checked, compiled for the target, and read."""

import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from gspmd_lm.config import Config
from gspmd_lm.foresight import advice, collectives, floor, hlo, memory, schedule
from gspmd_lm.foresight.compile import Program, Progress, Request, programs
from gspmd_lm.foresight.network import Network
from gspmd_lm.foresight.report import Array, Report
from gspmd_lm.foresight.target import Target
from gspmd_lm.rules import Problem, Rules
from gspmd_lm.train import state, table
from gspmd_lm.train.state import Arrays

# Mean absolute error of predicted step times against published ones, and how many there were. Source: docs/foresight.md
# and benchmarks/results/foresight_times.json, which `python -m benchmarks.foresight times --write` makes.
KNOWN_ERRORS = {"v5e": (0.002, 1), "v5p": (0.022, 2), "tpu7x": (0.106, 1), "h100": (0.224, 1)}
NOT_ON_CPU = "simulated devices have no speed of their own: give a --target such as v5p:2x2x2 or h100:8"


def reports(
    config: Config,
    layouts: Sequence[Rules],
    target: Target,
    say: Progress = lambda _: None,
    export: Path | None = None,
) -> list[Report]:
    """One report for each of `layouts`, in their order, for the step that `train` would run on `target`.

    Everything is checked before anything is compiled. With `export`, the executable of the only layout is kept there.
    Raises ShardingError, InputError or RunFailed.
    """
    filled = [rules.fill(target.devices, f"a target of {{known}} devices: {target.text} has {target.devices}")
              for rules in layouts]  # fmt: skip
    found = [state.checked(config, rules, target.platform) for rules in filled]
    compiled = programs([Request(config, rules, target, export is not None) for rules in filled], say)
    if export and compiled[0].executable:
        shutil.copyfile(compiled[0].executable, export)
    return [
        report(config, rules, target, arrays, problems, program)
        for rules, (arrays, problems), program in zip(filled, found, compiled, strict=True)
    ]


def report(
    config: Config, rules: Rules, target: Target, arrays: Arrays, problems: Sequence[Problem], program: Program
) -> Report:
    """What a compiled step says of a layout. `rules` are filled; `problems` are the warnings of its check."""
    named = [Array(*row) for row in table.rows(config, rules, arrays)]
    network = Network(
        target.chip, program.coords, program.slices, program.hosts, tuple(rules.mesh.values()), tuple(rules.mesh)
    )
    least = floor.floor(config, rules, arrays, target.chip)
    limit_bytes = target.chip.usable_hbm_bytes if target.chip else None
    found, predicted, reason = (), None, NOT_ON_CPU
    if program.refusal:
        module = None
        held = memory.refused(program.refusal, program.state_bytes, limit_bytes)
        reason = "the compiler refused the program: it does not fit"
    else:
        module = hlo.parse(program.text)
        known, accepted = _known(named, rules.mesh), target.platform == "tpu"
        held = memory.measure(program.memory, program.state_bytes, limit_bytes, module, known, accepted)
        found = collectives.find(module, rules, named, network)
        if target.chip:
            tokens = config.data.batch * config.data.seq // target.devices
            error = known_error(target.chip.name)
            predicted, reason = schedule.predict(module, target.chip, network, least.flops, tokens, error), ""
    return Report(
        target=target.text,
        chip=target.chip.kinds[0] if target.chip else "",
        devices=target.devices,
        config=config.name,
        rules=rules.path,
        phase="train",
        mesh=dict(rules.mesh),
        parameters=arrays.parameter_count,
        tokens=config.data.batch * config.data.seq,
        memory=held,
        collectives=found,
        prediction=predicted,
        no_prediction=reason,
        floor=least,
        warnings=advice.warnings(config, rules, named, problems, found, least, held, module, program.notes),
        compile_s=program.compile_s,
        versions={**program.versions, **{name: str(value) for name, value in program.options.items()}},
        arrays=tuple(named),
    )


def known_error(chip: str) -> str:
    """How wrong predictions for a chip were where they could be compared."""
    if chip not in KNOWN_ERRORS:
        return "not compared with any measurement"
    error, rows = KNOWN_ERRORS[chip]
    return f"{error:.1%} against {rows} published step time{'s' * (rows > 1)}"


def _known(arrays: Sequence[Array], mesh: Mapping[str, int]) -> list[memory.Named]:
    """What a device holds of each array, at rest and in use."""
    found = []
    for array in arrays:
        for spec in filter(None, (array.in_use, array.at_rest)):
            pieces = [math.prod(mesh[name] for name in names) for names in spec]
            shape = tuple(size // n for size, n in zip(array.shape, pieces, strict=True))
            found.append(memory.Named(array.path, array.axes, shape))
    return found
