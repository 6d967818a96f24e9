"""errors: show how far predicted steps were off on one's own machines."""

from absl import flags

from gspmd_lm.cli import outputs
from gspmd_lm.cli.verb import RESULTS, Flags, Verb
from gspmd_lm.runtime.quiet import import_jax


def _define(flags: Flags) -> None:
    flags.group(RESULTS)
    flags.path("json", None, "Write all figures to this file.")


def run(values: flags.FlagValues, names: list[str]) -> int:
    """Prints a row for each run, writes the file of --json, and returns the exit code."""
    outputs.check_writable((values.json,))
    import_jax()
    from gspmd_lm.foresight import step_records
    from gspmd_lm.show import errors as shown

    records = step_records.read_records(names)
    shown.show(records, outputs.console(140))
    if values.json:
        outputs.write_json(values.json, step_records.to_json(records))
    return 0


ERRORS = Verb(
    "errors",
    "Show how far predicted steps were off in runs of your own: errors, or errors RUN RUN2.",
    [
        ("errors", "Every run on this machine that has ended."),
        ("errors runs/a --json=errors.json", "One run, by its workdir."),
    ],
    _define,
    run,
    takes_names=True,
)
