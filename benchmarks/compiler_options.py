"""What each default compiler option does: the step compiled without it, beside the step with all of them.

    python -m benchmarks.compiler_options [--targets v5p:2x2x2 h100:8] [--layouts fsdp_tp fsdp8] [--write]
    python -m benchmarks.compiler_options --set xla_gpu_threshold_for_windowed_einsum_mib=0 --targets h100:8

An option that changes no program is not worth a default. Two programs are the same if their instructions are, in their
order. Nothing runs: bytes and temporaries are those of the compiled program, times are predicted.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from benchmarks import measure
from benchmarks.layout_traffic import MODEL, WIDE, compiled
from gspmd_lm import config
from gspmd_lm.config.core_yaml import scalar
from gspmd_lm.hardware import target
from gspmd_lm.runtime import compiler
from gspmd_lm.sharding import rules_file
from gspmd_lm.sharding.rules import Rules

COLUMNS = {"target": "target", "layout": "layout", "option": "option", "program": "program",
           "sent_mb": "sent, MB", "temporaries_mb": "temporaries, MB", "step_ms": "predicted step, ms",
           "ratio": "step, ratio"}  # fmt: skip
_NAMES = re.compile(r", (?:metadata|backend_config|frontend_attributes)=\{.*")  # what follows names and costs


def figures(rules: Rules, where: str, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The instructions of the step with these options besides the defaults, and its figures. None removes a default."""
    place, cfg = target.parse(where), config.load("tiny", [*MODEL, *WIDE])
    changed = dataclasses.replace(rules, compiler_options={place.platform: dict(options)})
    program, _, made = compiled(cfg, changed, place)
    return "\n".join(_NAMES.sub("", line) for line in program.text.splitlines()[1:]), made


def rows(layout: str, where: str, sets: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row with all defaults, then one for each option of `sets`, or without each default where `sets` is empty."""
    place, rules = target.parse(where), rules_file.load(layout)
    kind = place.chip.kinds[0] if place.chip else ""
    changes = sets or dict.fromkeys(compiler.options(place.platform, {}, "defaults", kind))
    text, whole = figures(rules, where, {})
    made = [{"target": where, "layout": layout, "option": "all defaults", "program": "", **whole, "ratio": 1.0}]
    for name, value in changes.items():
        other, without = figures(rules, where, {name: value})
        made.append({
            "target": where, "layout": layout,
            "option": f"without {name}" if value is None else f"{name}={value}",
            "program": "same" if other == text else "differs", **without,
            "ratio": round(without["step_ms"] / whole["step_ms"], 4),
        })  # fmt: skip
        print(made[-1], flush=True)
    return made


def main() -> None:
    parser = measure.flags(__doc__)
    parser.add_argument("--targets", nargs="*", default=["v5p:2x2x2", "v6e:2x4", "h100:8"])
    parser.add_argument("--layouts", nargs="*", default=["fsdp_tp"])
    parser.add_argument("--set", action="append", default=[], help="an option to add, as NAME=VALUE, one at a time")
    arguments = parser.parse_args()
    sets = {name: scalar(value) for name, _, value in (one.partition("=") for one in arguments.set)}
    made = [row for where in arguments.targets for layout in arguments.layouts for row in rows(layout, where, sets)]
    print(measure.markdown(made, COLUMNS))
    if arguments.write:
        measure.write("compiler_options", made)


if __name__ == "__main__":
    main()
