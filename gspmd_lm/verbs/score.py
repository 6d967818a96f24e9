"""eval --text and eval --continuations: how likely given texts are under the weights of a workdir."""

import glob
from pathlib import Path

from absl import flags

from gspmd_lm import compile_cache
from gspmd_lm.config import InputError, read_text
from gspmd_lm.data import tokenizer
from gspmd_lm.infer import generate, score
from gspmd_lm.verbs import session
from gspmd_lm.verbs.generate import restored


def run(values: flags.FlagValues) -> int:
    """Scores a text, or continuations line by line."""
    workdir = session.needs_weights(values, "eval --workdir=DIR --text=FILE")
    if values.text and values.continuations:
        raise InputError("--text and --continuations: one of them at a time\n  fix   drop one")
    if values.text and values.output:
        raise InputError(f"--output={values.output}: for the results of --continuations=FILE.jsonl\n  fix   drop it")
    session.check_output(values.output, values.continuations)
    here = session.begin(values, stderr=not values.text)
    config = here.config
    tokens = tokenizer.load(config.data.tokenizer)
    generate.check_tokenizer(config, tokens)
    context = config.model.context
    lines = score.read(values.continuations, tokens, context) if values.continuations else []
    text = "\n".join(read_text(path) for path in _files(values.text)) if values.text else ""
    seq = max((len(line.request.tokens) - 1 for line in lines), default=context)
    built, warnings = score.build(config, here.rules, here.devices, here.machine.platform, values.batch, seq)
    for warning in warnings:
        here.say(f"warning: {warning}")
    compile_cache.enable(values.compile_cache)
    scorer = score.Scorer(built, restored(here, workdir, built.abstract_params, values.step), tokens)
    if values.text:
        found = scorer.text(text)
        here.say(
            f"{values.text}: loss {found.loss:.4f}, perplexity {found.perplexity:.2f}, "
            f"{found.bits_per_byte:.4f} bits per byte over {found.tokens:,} tokens, {found.bytes:,} bytes"
        )
        return 0
    scores = scorer.scores([line.request for line in lines])
    here.deliver(scores, values.output, lambda found, out: score.write(lines, found, out))
    if values.output:
        here.say(f"{values.output}: {len(lines):,} lines")
    return 0


def _files(pattern: str) -> list[Path]:
    found = sorted(Path(name) for one in pattern.split() for name in glob.glob(one, recursive=True))
    if not found:
        raise InputError(f"--text={pattern}: no such file\n  fix   give a text file, or globs of some")
    return found
