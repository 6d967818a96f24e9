"""tokenize: makes the tokens of a source once, for runs on any number of machines."""

from absl import flags

from gspmd_lm.cli.verb import INPUTS, RUN, Flags, Verb, on_config, overrides


def _define(flags: Flags) -> None:
    flags.group(INPUTS)
    on_config(flags, "Its section data says what is tokenized, and how. The default is tiny.")
    overrides(flags, mesh=False)
    flags.group(RUN)
    flags.text(
        "out",
        None,
        "The folder of the tokens, or its address in a bucket (gs://). The same command may run in several "
        "processes at once, on any machines that see the folder. After a kill it goes on.",
    )


def run(values: flags.FlagValues, names: list[str]) -> int:
    """Makes the tokens, and returns the exit code."""
    from gspmd_lm.cli import inputs
    from gspmd_lm.errors import InputError

    if values.out is None:
        raise InputError("--out is missing\n  fix   --out=FOLDER, or an address such as gs://bucket/tokens")
    inputs.no_rules_sets(values, "tokens do not depend on rules", "drop it")
    config = inputs.read_config(values)
    inputs.log_to_stderr()
    from gspmd_lm.data.tokenize import tokenize
    from gspmd_lm.show import terminal
    from gspmd_lm.show.progress import progress

    console = terminal.console(240, True)
    for line in tokenize(config, values.out, progress(console)):
        console.print(line, soft_wrap=True, highlight=False, markup=False)
    return 0


TOKENIZE = Verb(
    "tokenize",
    "Make the tokens of data.source once, for runs that read them by share.",
    [
        (
            "tokenize --set data.source=FOLDER --set data.tokenizer=bpe:4096 --set model.vocab=0 "
            "--out=gs://bucket/tokens",
            "Make the tokens, together with other processes that run the same command.",
        ),
        ("tokenize --set data.source=FOLDER --out=TOKENS", "Then train with --set data.source=TOKENS."),
    ],
    _define,
    run,
)
