"""explain and compare: print what layouts cost on hardware that need not be here."""

import json
import sys
from pathlib import Path

from absl import flags
from rich.console import Console

from gspmd_lm import files
from gspmd_lm.cli import given, outputs
from gspmd_lm.errors import InputError, did_you_mean
from gspmd_lm.foresight import compile
from gspmd_lm.hardware import target as targets
from gspmd_lm.runtime import without_a_gpu


def run(verb: str, values: flags.FlagValues, layouts: list[str]) -> int:
    """Prints the reports of `layouts` and --rules, writes the files of the flags, and returns the exit code."""
    config, rules = given.config(values), given.layouts(values, layouts)
    if not rules or values.target is None:
        lacking = "--target" if rules else "--rules"
        named = "--rules=fsdp8" if verb == "explain" else "fsdp8 tp8"
        raise InputError(f"{verb} needs {lacking}\n  fix   {verb} {named} --target=v5p:2x2x2 (or cpu:8, h100:8)")
    target = targets.parse(values.target)
    if values.phase not in compile.PHASES:
        known = ", ".join(compile.PHASES)
        raise InputError(f"--phase={values.phase}: no such phase{did_you_mean(values.phase, compile.PHASES)}\n"
                         f"  fix   use one of {known}")  # fmt: skip
    if values.export and values.phase != "train":
        raise InputError(f"--export={values.export}: only a train step is exported\n  fix   drop --phase")
    if values.export and len(rules) > 1:
        raise InputError(f"--export={values.export}: a file holds one executable\n  fix   give one rules file")
    outputs.check((values.json, values.html, values.export))
    without_a_gpu.import_jax()
    import jax

    jax.config.update("jax_platforms", "cpu")  # shapes are computed on the CPU, without this machine's accelerator
    from gspmd_lm.foresight import explain, report
    from gspmd_lm.plan import fits
    from gspmd_lm.show import comparison

    export = Path(values.export) if values.export else None
    found = explain.reports(config, rules, target, outputs.say, export, values.phase)
    found = fits.with_fixes(config, found, rules, target)
    comparison.show(found, Console(highlight=False, width=None if sys.stdout.isatty() else 120))
    if values.json:
        files.replace(Path(values.json), json.dumps(report.to_json(found), indent=1) + "\n")
    if values.html:
        files.replace(Path(values.html), comparison.page(found, outputs.command_line(sys.argv[1:])))
    return 0
