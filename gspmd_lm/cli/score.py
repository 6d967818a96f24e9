"""eval --text and eval --continuations: scores texts with the weights of a workdir."""

from pathlib import Path

from absl import flags

from gspmd_lm.cli import session, weights
from gspmd_lm.config import Config
from gspmd_lm.config.paths import read_text
from gspmd_lm.data import corpus, formats, tokenizer
from gspmd_lm.errors import InputError
from gspmd_lm.infer import generate, score
from gspmd_lm.runtime import compile_cache


def run(values: flags.FlagValues) -> int:
    """Scores a text, or each line of continuations, and returns the exit code."""
    folder = weights.needed(values, "eval --workdir=DIR --text=FILE")
    if values.text and values.continuations:
        raise InputError("--text and --continuations: one of them at a time\n  fix   drop one")
    if values.text and values.output:
        raise InputError(
            f"--output={values.output}: only for the results of --continuations=FILE.jsonl\n  fix   drop it"
        )
    session.check_output(values.output, values.continuations)
    here, read = weights.begin(values, folder, stderr=not values.text)
    config = here.config
    tokens = tokenizer.load(config.data.tokenizer)
    generate.check_tokenizer(config, tokens)
    if values.text:
        text, notes = _text(values.text, config.data.text_field)
        if notes:
            here.say(notes)
        ids, lines = tokens.encode(text), []
        if not len(ids):
            raise InputError(f"--text={values.text}: the text is empty\n  fix   give a text")
        seq = min(_window(values.seq, config), len(ids))
        rows = -(-len(ids) // seq)
        session.compare_texts(here, tokens, [ids])
    else:
        text, ids = b"", []
        lines = score.read(values.continuations, tokens, config.model.context)
        session.compare_texts(here, tokens, [line.request.tokens for line in lines])
        seq, rows = max(len(line.request.tokens) - 1 for line in lines), len(lines)
    rows = min(values.batch, rows)
    built, warnings = score.build(config, here.rules, here.devices, here.machine.platform, rows, seq)
    for warning in warnings:
        here.say(f"warning: {warning}")
    if built.attention:
        here.say(f"attention: {built.attention}")
    compile_cache.enable(values.compile_cache)
    _ = built.compiled  # whether the program fits is known before the weights are read
    scorer = score.Scorer(built, read(built.abstract_params), tokens)
    if values.text:
        found = scorer.text(ids, len(text))
        here.say(
            f"{values.text}: loss {found.loss:.4f}, perplexity {found.perplexity:.2f}, {found.bits_per_byte:.4f} bits "
            f"per byte over {found.tokens:,} tokens, {found.bytes:,} bytes, in rows of up to {seq:,} tokens"
        )
        return 0
    scores = scorer.scores([line.request for line in lines])
    here.deliver(scores, values.output, lambda found, out: score.write(lines, found, out))
    if values.output:
        here.say(f"{values.output}: {len(lines):,} lines")
    return 0


def _window(asked: int | None, config: Config) -> int:
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
    path = Path(name).expanduser()
    if path.is_file() and formats.of(path) is None:
        return read_text(path).encode(), ""
    notes = corpus.Notes()
    paths = corpus.files([name], "--text", notes)
    return b"\n".join(formats.whole(path, field) for path in paths), str(notes)
