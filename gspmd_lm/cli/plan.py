"""plan: find the best layout for hardware that need not be here, and write it as a rules file."""

import itertools
import math
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from absl import flags

from gspmd_lm.cli import outputs
from gspmd_lm.cli.verb import RESULTS, Flags, Verb, about_job, on_target, overrides
from gspmd_lm.errors import InputError, RunFailed
from gspmd_lm.units import whole_number

if TYPE_CHECKING:
    from gspmd_lm.config import Config
    from gspmd_lm.hardware.target import Target
    from gspmd_lm.plan import outcome
    from gspmd_lm.plan.candidate import Plan

_EXAMPLE = "plan --config=llama3_8b --target=v5e:4x8 --out=rules/mine.yaml"


def _define(flags: Flags) -> None:
    on_target(flags)
    flags.text(
        "target",
        None,
        "The hardware, which need not be here: v5e:4x8, 2@v6e:16x16, h100:8, h100:2x8/800, ... "
        "Commas separate several, which are compared.",
    )
    flags.text(
        "phase",
        "train",
        "The step to plan for: train, or decode, which makes a token of each of data.batch rows with data.seq slots "
        "each.",
    )
    flags.several(
        "measured",
        "Plan with what a run on this chip has measured: its workdir, or its record (errors shows them). This flag may "
        "be repeated.",
    )
    flags.group("The search")
    flags.number(
        "minutes",
        15.0,
        "Compile nothing new after this many minutes, which all targets share. A plan that "
        "was stopped goes on from what it has compiled.",
    )
    flags.text("batch", None, "A:B: let the batch be any of A, 2A, 4A, ... up to B rows. By default it is data.batch.")
    flags.number(
        "tokens", None, "How many tokens to train on, such as 1e12: say how long that takes, and what it costs."
    )
    flags.number("days", None, "In how many days --tokens must be done.")
    about_job(flags)
    flags.group(RESULTS)
    flags.path(
        "out",
        None,
        "Write the best layout to this rules file. Of several targets, the best layout of each "
        "goes into a file beside it that has the target in its name.",
    )
    flags.path("json", None, "Write all figures to this file (docs/plan.md).")
    flags.path("html", None, "Write one self-contained page to this file.")
    overrides(flags, mesh=False)


def run(values: flags.FlagValues, names: list[str]) -> int:
    """Plans for each target, prints what was found and writes the files of the flags. Returns the exit code."""
    from gspmd_lm.cli import inputs
    from gspmd_lm.hardware import capacity
    from gspmd_lm.hardware import target as targets

    inputs.no_rules_sets(values)
    config = inputs.read_config(values)
    if not values.target:
        raise InputError(f"plan needs --target\n  fix   {_EXAMPLE}")
    if values.chip:
        values.target = targets.with_chip(values.target, values.chip)
    places = [targets.parse(text) for text in values.target.split(",")]
    if values.measured:
        from gspmd_lm.foresight import step_records

        records, place = step_records.read_records(values.measured), f"--measured={','.join(values.measured)}"
        places = [step_records.correct(one, records, place) for one in places]
        for one in places:
            outputs.say(f"{one.text}: {one.chip and one.chip.note}")
    cases = [(place, one) for place in places for one in _batches(config, values.batch)]
    prices = capacity.read_prices(values.price, [place.chip for place in places])
    assumed = capacity.read_assumptions(values.assume)
    outputs.check_writable((values.json, values.html, values.out), inputs.read_files(values))
    _check(values, cases)
    inputs.log_to_stderr()
    inputs.on_the_cpu()
    from gspmd_lm.plan import advice, candidate, outcome, search
    from gspmd_lm.show import plan as shown

    console = outputs.console(140)
    command = outputs.command_line(sys.argv[1:])
    outcomes: list[outcome.Outcome] = []
    ends_s = time.monotonic() + 60 * values.minutes
    for place, asked in cases:
        outputs.say(f"planning {config.name} with {asked.data.batch} rows a step for {place.text}")
    searched = [(asked, place) for place, asked in cases]
    rank_by = search.ranking(places[0])
    how = {"minutes": values.minutes, "say": outputs.say, "rank_by": rank_by, "phase": values.phase}
    plans = search.plans(searched, **how)
    for planned, (place, asked) in zip(plans, cases, strict=True):
        sought = values.tokens or 0.0, values.days or 0.0
        outcomes.append(outcome.Outcome(planned, asked.data.batch, place.price(prices), *sought, assumed))
    best = shown.rank(outcomes)[0]
    asked = next(asked for (_, asked), one in zip(cases, outcomes, strict=True) if one is best)
    advised: list[shown.Note] = []
    is_training = values.phase == "train"  # of a step of decode, no estimate says what else would help
    if is_training and best.plan.best and best.plan.target.chip:
        advised = shown.helps(advice.changes(asked, best.plan))
    elif is_training and not best.plan.best and len(cases) == 1:
        larger = advice.larger(asked, best.plan, outputs.say, ends_s)
        late = not larger and time.monotonic() > ends_s
        advised = shown.fixes(larger, advice.savings(asked, best.plan), late)
    shown.show(outcomes, console, advised)
    outputs.write_results(values, outcome.to_json(outcomes), lambda command: shown.page(outcomes, advised, command))
    if best.plan.best is None:
        why = "no layout that was compiled in the time fits" if best.plan.late else "no layout fits"
        raise RunFailed(f"{why}, and no rules file was written")
    if values.out:
        for path, one in rules_files(Path(values.out), best, outcomes).items():
            assert one.best
            outputs.write(str(path), candidate.rules_file(one, one.best, command))
            console.print(f"wrote {path}, for {one.target.text}", soft_wrap=True)
    if best.in_time is False:
        raise RunFailed(f"{shown.answer(best)}\n  fix   {shown.enough(best)}, more --days, or fewer --tokens")
    return 0


def rules_files(out: Path, best: "outcome.Outcome", outcomes: "Sequence[outcome.Outcome]") -> "dict[Path, Plan]":
    """The plan that each file of --out holds: the best one's, and, of several, each one's, named by its target.

    mine.yaml has beside it mine-v5e-4x8.yaml, and mine-v5e-4x8-256.yaml if there are several batches.
    """
    files = {out: best.plan}
    several = len({outcome.batch for outcome in outcomes}) > 1
    for outcome in outcomes if len(outcomes) > 1 else ():
        name = re.sub(r"\W+", "-", outcome.plan.target.text) + (f"-{outcome.batch}" if several else "")
        if outcome.plan.best:
            files[out.with_name(f"{out.stem}-{name}{out.suffix}")] = outcome.plan
    return files


def _batches(config: "Config", span: str | None) -> "list[Config]":
    """The config, or one for each batch from A to B of --batch=A:B, doubled from one to the next."""
    from gspmd_lm import config as configs

    if span is None:
        return [config]
    low, high = (whole_number(size) or 0 for size in (*span.split(":", 1), "")[:2])
    if not 1 <= low <= high:
        raise InputError(f"--batch={span}: not two sizes, the smaller first\n  fix   --batch=128:1024")
    sizes = itertools.takewhile(lambda size: size <= high, (low * 2**n for n in itertools.count()))
    plain = configs.to_dict(config)
    try:
        return [configs.from_dict({**plain, "data": {**plain["data"], "batch": n}}, f"--batch={span}") for n in sizes]
    except InputError as error:
        raise InputError(f"{error}\n  fix   --batch=128:1024") from error


def _check(values: flags.FlagValues, cases: "Sequence[tuple[Target, Config]]") -> None:
    """Raises InputError for flags that do not go together."""
    if values.days and not values.tokens:
        raise InputError(f"--days={values.days:g}: days for how many tokens?\n  fix   --tokens=1e12 too")
    for name in ("tokens", "days", "minutes"):
        value = getattr(values, name)
        if value is not None and not 0 < value < math.inf:
            raise InputError(f"--{name}={value:g}: must be a finite number above 0\n  fix   drop it, or give another")
    if len(cases) > 1 and any(place.chip is None for place, _ in cases):
        fix = "drop --batch" if len({place for place, _ in cases}) == 1 else "plan for it alone"
        raise InputError(f"--target=cpu:N has no times to compare with others\n  fix   {fix}")
    if values.tokens and any(place.chip is None for place, _ in cases):
        raise InputError("--tokens: simulated devices have no times\n  fix   a --target such as v5e:4x8 or h100:8")


PLAN = Verb(
    "plan",
    "Find the best layout for hardware you do not have, and write its rules file.",
    [
        ("plan --config=llama3_8b --target=v5e:4x8 --out=mine.yaml", "Find the best layout, and write it."),
        ("plan --config=llama3_8b --target=v5e:4x8,v5p-32 --tokens=1e12", "Compare hardware for a trillion tokens."),
        (
            "plan --config=llama3_8b --target=v5e:2x4 --phase=decode --set data.batch=8",
            "Find the best one to generate.",
        ),
    ],
    _define,
    run,
)
