"""eval: scores the held-out rows, texts or continuations with the weights of a workdir."""

import functools
from typing import TYPE_CHECKING

from absl import flags

from gspmd_lm import files
from gspmd_lm.cli import outputs
from gspmd_lm.cli.verb import RESULTS, RUN, Flags, Verb, on_devices
from gspmd_lm.errors import InputError
from gspmd_lm.runtime.quiet import import_jax

if TYPE_CHECKING:
    from gspmd_lm.config import Config
    from gspmd_lm.sharding.rules import Rules


def _define(flags: Flags) -> None:
    on_devices(flags)
    flags.text("text", None, "Score texts instead of the held-out rows: a folder, a file or a glob.")
    flags.path("continuations", None, "Score this JSONL file of {prompt, continuation} instead.")
    flags.group(RESULTS)
    flags.path("output", None, "Write the log-likelihoods to this file, as JSONL. The default is the terminal.")
    flags.group(RUN)
    flags.whole("batch", 8, "How many rows of --text, or continuations, are scored at a time.", 1)
    flags.whole(
        "seq",
        None,
        "How many tokens a row of --text has. The default is data.seq, with which the model was trained.",
        1,
    )


def run(values: flags.FlagValues, names: list[str]) -> int:
    """Scores the held-out rows, a text, or each line of continuations, and returns the exit code."""
    from gspmd_lm.cli import inputs

    # What is wrong with a file is told before jax is imported, which takes a second.
    rules, config = inputs.read_rules(values), inputs.read_config(values)
    import_jax()
    return (_score if values.text or values.continuations else _held_out)(values, config, rules)


def _held_out(values: flags.FlagValues, config: "Config", rules: "Rules") -> int:
    from gspmd_lm import session
    from gspmd_lm.cli import inputs

    inputs.needs_weights(values, "eval --workdir=DIR, the folder of a run that has saved a checkpoint")
    _refuse(values, "the held-out rows, of which data.batch are scored at a time", "output", "batch", "seq")
    begun = inputs.begin(values, config, rules)
    built, warnings = session.build_step(begun)
    with session.open_run(begun, built, warnings, writes=False, compile_cache=values.compile_cache) as run:
        run.evaluate(values.step)
    return 0


def _score(values: flags.FlagValues, config: "Config", rules: "Rules") -> int:
    from gspmd_lm import session
    from gspmd_lm.cli import inputs
    from gspmd_lm.data import tokenizer
    from gspmd_lm.infer import eight_bits, generate, programs, score
    from gspmd_lm.runtime import compile_cache

    folder = inputs.folder_with_weights(values, "eval --workdir=DIR --text=FILE")
    if values.text and values.continuations:
        raise InputError("--text and --continuations: one of them at a time\n  fix   drop one")
    _refuse(values, *(("--text", "output") if values.text else ("--continuations", "seq")))
    outputs.check_writable((values.output,), (values.continuations,))
    begun, read = inputs.begin_with_weights(values, folder, config, rules, stderr=not values.text)
    config = begun.config
    tokens = tokenizer.load_tokenizer(config.data.tokenizer)
    programs.check_causal(config)
    generate.check_tokenizer(config, tokens)
    if values.text:
        text, notes = _text(values.text, config.data.text_field)
        if notes:
            begun.say(notes)
        ids, lines = tokens.encode(text), []
        if not len(ids):
            raise InputError(f"--text={values.text}: the text is empty\n  fix   give a text")
        seq = min(_window(values.seq, config), len(ids))
        rows = -(-len(ids) // seq)
        session.compare_texts(begun, tokens, [ids])
    else:
        text, ids = b"", []
        lines = score.read_continuations(values.continuations, tokens, config.model.context)
        session.compare_texts(begun, tokens, [line.request.tokens for line in lines])
        seq, rows = max(len(line.request.tokens) - 1 for line in lines), len(lines)
    rows = min(values.batch, rows)
    for note in tokenizer.dropped_characters_note(tokens):
        begun.say(note)
    compile_cache.enable(values.compile_cache)

    def scorer_of(config: "Config") -> "score.Scorer":
        built, warnings = score.build_scoring(config, begun.rules, begun.devices, begun.machine.platform, rows, seq)
        for message in (*(f"warning: {warning}" for warning in warnings), *built.choices):
            begun.say(message)
        _ = built.compile_forward  # whether the program fits is known before the weights are read
        return score.Scorer(built, read(built.abstract_params), tokens)

    if values.text:
        measures, beside = scorer_of(config).text(ids, len(text)), ""
        if in_compute_dtype := eight_bits.without(config):
            whole = scorer_of(in_compute_dtype).text(ids, len(text))
            change = f"{measures.loss - whole.loss:+.4f}, perplexity {measures.perplexity - whole.perplexity:+.2f}"
            model = config.model
            beside = f"; weights of {model.weight_dtype} against {model.compute_dtype} on this text: loss {change}"
        begun.say(
            f"{values.text}: loss {measures.loss:.4f}, perplexity {measures.perplexity:.2f}, "
            f"{measures.bits_per_byte:.4f} bits per byte over {measures.tokens:,} tokens, {measures.bytes:,} bytes, "
            f"in rows of up to {seq:,} tokens{beside}"
        )
        return 0
    scorer = scorer_of(config)
    scores = scorer.scores([line.request for line in lines])
    outputs.deliver(begun.machine.is_main, scores, values.output, functools.partial(score.write_scores, lines))
    if values.output:
        begun.say(f"{values.output}: {len(lines):,} lines")
    return 0


def _refuse(values: flags.FlagValues, scored: str, *names: str) -> None:
    """Raises InputError if a flag is given that has no effect on what is scored."""
    for name in names:
        if values[name].present:
            raise InputError(f"--{name}={values[name].value}: has no effect on {scored}\n  fix   drop it")


def _window(asked: int | None, config: "Config") -> int:
    """The tokens of one row of text: those of --seq, else as many as the model was trained with."""
    if asked is not None and asked > config.model.context:
        raise InputError(
            f"--seq={asked}: longer than model.context={config.model.context}\n  fix   --seq={config.model.context}"
        )
    return asked or config.data.seq


def _text(name: str, field: str) -> tuple[bytes, str]:
    """The texts that --text names, as data.source would, and what is to be said of their files.

    A file that is named itself may have any ending.
    """
    from gspmd_lm.config.paths import read_text
    from gspmd_lm.data import corpus, formats

    path = files.expand_user(name)
    if path.is_file() and formats.format_of(path) is None:
        return read_text(path).encode(), ""
    notes = corpus.FileNotes()
    paths = corpus.files([name], "--text", notes)
    return b"\n".join(formats.whole(path, field) for path in paths), str(notes)


EVAL = Verb(
    "eval",
    "Score the held-out rows, a text or continuations with a checkpoint of the workdir.",
    [
        ("eval --workdir=runs/a", "Score the held-out rows."),
        ("eval --workdir=runs/a --text='books/*.txt'", "Score texts."),
    ],
    _define,
    run,
)
