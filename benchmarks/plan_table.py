"""Planned layouts of published models on targets that people have: the files of benchmarks/plans/.

    python -m benchmarks.plan_table --minutes=4 --hours=8 [--only=llama] [--targets h100:8]    # compiles, too
    python -m benchmarks.plan_table --minutes=0 [--again]    # estimates alone
    python -m benchmarks.plan_table show    # makes the page alone

Each file is a rules file, which any verb takes. Its comments say which command found it, what is expected of it and how
wrong such predictions are known to be. A pair that has a file is passed over, unless the file holds an estimate and
something may be compiled now. So the command goes on where it was stopped: with four minutes for each, all pairs take
two nights. A pair of which no layout fits is a file without rules. benchmarks/planned.md is the page of all of them.
"""

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import measure
from gspmd_lm import config as configs
from gspmd_lm.config import Config
from gspmd_lm.errors import InputError
from gspmd_lm.foresight.known_errors import estimate_error
from gspmd_lm.hardware import target as targets
from gspmd_lm.hardware.target import Target
from gspmd_lm.plan import candidate, search
from gspmd_lm.units import human_bytes, human_seconds

PLANS = measure.ROOT / "benchmarks" / "plans"
SHIPPED = ("deepseek_v3", "gpt2_124m", "llama3_405b", "llama3_70b", "llama3_8b", "llama3_8b_128k", "mixtral_8x7b",
           "qwen3_235b_a22b", "t5_11b", "vit_22b")  # fmt: skip
TARGETS = ("h100:8", "h100:16x8", "h200:4x8", "b200:2x8", "a100:8x8", "v4:4x4x4", "v5e:16x16", "v5p:4x4x8",
           "v6e:16x16", "tpu7x:4x4x4")  # fmt: skip
SEARCH_MINUTES = 60  # without compiling; so long that a busy machine leaves nothing out
TOKENS_PER_DEVICE = 16384  # of a step. What has no tokens has one row for each device.
FACTS = "# facts: "
PAGE = """# Planned layouts of published models

`python -m benchmarks.plan_table` makes this page and the rules files that it links to, which any verb takes:
`python main.py explain --config=MODEL --rules=FILE --target=TARGET`. The first line of a file has the command that
found the layout, and the known error of what is expected of it. A step has {tokens:,} tokens for each device. It has
one row for each device where a row is longer, or where the model reads no tokens. Nothing here ran on an accelerator.
`compiled` is how many layouts were compiled. With 0 it is the best estimate that is shown. Of {all} pairs of a model
and a target, {done} are planned.
"""
TABLE = """
## {target}
{error}
| model | layout | a step | memory of a device | compiled |
|---|---|---|---|---|
"""


class Pair(NamedTuple):
    """A published model, by the name of its config, and a target."""

    model: str
    target: str

    @property
    def file(self) -> Path:
        return PLANS / self.target.replace(":", "-") / f"{Path(self.model).stem}.yaml"

    def load(self) -> tuple[Config, Target, str]:
        """The config with rows for all devices, the target, and the command of the plan."""
        where = targets.parse(self.target)
        base = configs.load(self.model)
        rows = where.devices * max(TOKENS_PER_DEVICE // base.data.seq, 1) if base.model.vocab else where.devices
        setting = f"data.batch={rows}"
        command = f"python main.py plan --config={self.model} --set {setting} --target={self.target}"
        return configs.load(self.model, [setting]), where, command


def pairs(only: str = "", of: Sequence[str] = TARGETS) -> Iterator[Pair]:
    """All pairs of models whose name has some text in it, and targets."""
    own = sorted(str(path.relative_to(measure.ROOT)) for path in (measure.ROOT / "benchmarks/models").glob("*.yaml"))
    for target in of:
        yield from (Pair(model, target) for model in (*SHIPPED, *own) if only in model)


def facts(file: Path) -> dict[str, Any]:
    """What was found for a pair; {} if nothing was looked for yet."""
    lines = file.read_text().splitlines() if file.exists() else []
    return next((json.loads(line.removeprefix(FACTS)) for line in lines if line.startswith(FACTS)), {})


def find(pair: Pair, minutes: float) -> str:
    """The text of the file of a pair. With 0 minutes nothing is compiled."""
    config, where, command = pair.load()
    try:
        plan = search.plan(config, where, minutes=minutes or SEARCH_MINUTES, most=40 if minutes else 0, say=print)
    except InputError as error:
        return _text("no layout: " + str(error).splitlines()[0], {"minutes": minutes}, "")
    fitting = [one for one in plan.candidates if one.limit_bytes and one.estimate.peak_bytes <= one.limit_bytes]
    best = plan.best or min(fitting if not plan.compiled else (), key=lambda one: one.step_time_s, default=None)
    if best is None:
        nearest = plan.nearest or min(plan.candidates, key=lambda one: one.peak_bytes)
        least = f"the least needs {human_bytes(nearest.peak_bytes)} a device"
        return _text(f"no layout fits: {least} ({command})", {"minutes": minutes}, "")
    known = estimate_error(where)
    error = f"; mean error of estimates: {known[1]:.1%} of {known[0]} compiled" if known and not best.compiled else ""
    first = f"{best.name}, found by: {command} ({candidate.expectation(plan, best)}{error})"
    found = {
        "minutes": minutes,
        "step_s": round(best.step_time_s, 5),
        "estimate_s": round(best.estimate.step_time_s, 5),
        "peak_bytes": best.peak_bytes,
        "compiled": plan.compiled,
        "searched": plan.searched,
    }
    return _text(first, found, candidate.yaml(best.raw))


def _text(first: str, found: dict[str, Any], rules: str) -> str:
    provenance = {name: text for name, text in measure.provenance().items() if name in ("date", "jax")}
    return f"# {first}\n{FACTS}{json.dumps(found | provenance)}\n{rules}"


def page() -> str:
    """The page of all pairs that were looked for, one table for each target."""
    done, text = 0, ""
    for target in TARGETS:
        lines = [_line(pair, found) for pair in pairs(of=[target]) if (found := facts(pair.file))]
        done += len(lines)
        known = estimate_error(targets.parse(target))
        error = f"\nEstimates are {known[1]:.1%} off in the mean of {known[0]} compiled layouts.\n" if known else ""
        text += TABLE.format(target=target, error=error) + "".join(lines) if lines else ""
    return PAGE.format(tokens=TOKENS_PER_DEVICE, all=len([*pairs()]), done=done) + text


def _line(pair: Pair, found: dict[str, Any]) -> str:
    """The line of a pair in the table of its target."""
    model, first = Path(pair.model).stem, pair.file.read_text().splitlines()[0].removeprefix("# ")
    if "step_s" not in found:
        return f"| `{model}` | {first.partition(' (')[0]} | | | |\n"
    layout, step = first.partition(", found by")[0], human_seconds(found["step_s"])
    file, memory = pair.file.relative_to(PLANS.parent), human_bytes(found["peak_bytes"])
    return f"| [`{model}`]({file}) | {layout} | {step} | {memory} | {found['compiled']} |\n"


def main() -> None:
    parser = measure.flags(__doc__, writes=False)
    parser.add_argument("what", nargs="?", choices=("make", "show"), default="make")
    parser.add_argument("--minutes", type=float, default=4, help="for each pair; 0 estimates alone")
    parser.add_argument("--hours", type=float, default=1e9, help="after which no other pair begins")
    parser.add_argument("--only", default="", help="a part of the names of models")
    parser.add_argument("--targets", nargs="*", default=TARGETS)
    parser.add_argument("--again", action="store_true", help="also what has a file already")
    options = parser.parse_args()
    until = time.monotonic() + 3600 * options.hours
    for pair in pairs(options.only, options.targets) if options.what == "make" else ():
        if time.monotonic() > until:
            break
        done = facts(pair.file)
        if done and not options.again and done["minutes"] >= options.minutes:
            continue
        print(f"{pair.model} on {pair.target}", flush=True)
        text = find(pair, options.minutes)
        pair.file.parent.mkdir(parents=True, exist_ok=True)
        pair.file.write_text(text)
    (PLANS.parent / "planned.md").write_text(page())


if __name__ == "__main__":
    main()
