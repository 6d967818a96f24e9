"""keys: prints the keys of a config."""

from absl import flags

from gspmd_lm.cli.verb import Flags, Verb


def _define(flags: Flags) -> None:
    flags.yes_no("markdown", "Print all keys as a page in Markdown.")


def run(values: flags.FlagValues, names: list[str]) -> int:
    """Prints the page, or the keys with a word in them, and returns the exit code."""
    from gspmd_lm.cli import config_keys

    print(config_keys.page().rstrip() if values.markdown else config_keys.text("".join(names[:1])))
    return 0


KEYS = Verb(
    "keys",
    "Print the keys of a config, each with its type, default and meaning: all, or those with a word in them.",
    [("keys", "All keys, which --set can set too."), ("keys rope", "Those with rope in their names.")],
    _define, run, takes_names=True,
)  # fmt: skip
