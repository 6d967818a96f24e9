"""data: shows what a run would read, before it runs."""

import json
from typing import TYPE_CHECKING

from absl import flags

from gspmd_lm.cli import outputs
from gspmd_lm.cli.verb import INPUTS, RESULTS, Flags, Verb, on_config, overrides
from gspmd_lm.runtime.quiet import import_jax

if TYPE_CHECKING:
    from gspmd_lm.config import Config


def _define(flags: Flags) -> None:
    flags.group(INPUTS)
    on_config(flags, "Its section data says what is read. The default is tiny, with the vocabulary of the tokenizer.")
    overrides(flags, mesh=False)
    flags.group(RESULTS)
    flags.path("json", None, "Write all counts, and the rows as text, to this file.")
    flags.path("html", None, "Write a page with whole rows to this file.")


def run(values: flags.FlagValues, names: list[str]) -> int:
    """Prints the counts and the first rows, and returns the exit code."""
    from gspmd_lm.cli import inputs

    outputs.check_writable((values.json, values.html))
    inputs.no_rules_sets(values, "data does not depend on rules", "drop it")
    inputs.log_to_stderr()
    import_jax()
    from gspmd_lm.data import overview
    from gspmd_lm.show import data, terminal
    from gspmd_lm.show.progress import progress

    found = overview.look(_read_config(values), progress(terminal.console(240, stderr=True)))
    data.show(found, outputs.console(120))
    outputs.write_results(values, data.to_json(found), lambda command: data.page(found, command))
    return 0


def _read_config(values: flags.FlagValues) -> "Config":
    """The config of --config; else tiny, with the settings with which the tokens of data.source were made."""
    from gspmd_lm import api
    from gspmd_lm.cli import inputs
    from gspmd_lm.data import tokens

    if values.config:
        return inputs.read_config(values)
    own = ["model.vocab=0"]
    config = api.load_config("tiny", [*own, *inputs.config_sets(values)])
    for folder, manifest in tokens.find_folders(config.data)[:1]:
        made = {key: manifest[key] for key in ("messages_field", "held_out") if manifest[key] is not None}
        made["tokenizer"] = tokens.kept_tokenizer(folder, manifest)
        own += [f"data.{key}={json.dumps(value)}" for key, value in made.items()]
        config = api.load_config("tiny", [*own, *inputs.config_sets(values)])
    return config


DATA = Verb(
    "data",
    "Show what a run would read: rows, tokens, skipped files, and rows as text with the loss mask.",
    [
        ("data --set data.source=FOLDER", "Look at the texts of a folder, as bytes in rows of 128."),
        ("data --config=tiny --html=data.html", "Look at what a config reads, with whole rows on a page."),
    ],
    _define,
    run,
)
