"""keys: prints the keys of a config and of a rules file, or their JSON schemas."""

from absl import flags

from gspmd_lm.cli.verb import Flags, Verb
from gspmd_lm.errors import InputError


def _define(flags: Flags) -> None:
    flags.yes_no("markdown", "Print all keys as a page in Markdown.")
    flags.text(
        "schema",
        None,
        "Print the JSON schema of a file, config or rules, with which an editor completes and "
        "checks keys (docs/rules.md).",
    )


def run(values: flags.FlagValues, names: list[str]) -> int:
    """Prints a schema, the page, or the keys with a word in them, and returns the exit code."""
    from gspmd_lm.show import config_keys

    if len(names) + bool(values.schema) + values.markdown > 1:
        raise InputError("keys: one of a word, --schema and --markdown at a time\n  fix   drop the others")
    if values.schema:
        print(config_keys.schema_text(values.schema))
    else:
        print(config_keys.page().rstrip() if values.markdown else config_keys.text("".join(names[:1])))
    return 0


KEYS = Verb(
    "keys",
    "Print the keys of a config and of a rules file, and names of arrays: all, or those with a word.",
    [
        ("keys", "All keys, which --set can set too."),
        ("keys rope", "Those with rope in their names or meanings."),
        ("keys wq", "What the array wq is, which a row of a rules file may name."),
        ("keys lr", "The key that other projects call lr."),
        ("keys --schema=rules > rules.schema.json", "What an editor needs to complete a rules file."),
    ],
    _define,
    run,
    takes_names=True,
)
