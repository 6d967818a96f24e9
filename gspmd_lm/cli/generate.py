"""generate: continues prompts, and streams the text to the terminal or writes JSONL."""

import re
import time
from collections.abc import Iterable
from typing import Any, TextIO

from absl import flags

from gspmd_lm.cli import session, weights
from gspmd_lm.data import chat, tokenizer
from gspmd_lm.errors import InputError
from gspmd_lm.infer import generate, lines
from gspmd_lm.infer.sampling import Sampling
from gspmd_lm.infer.text import Stops
from gspmd_lm.runtime import compile_cache

_NO_CHARACTER = re.compile("[\ud800-\udfff]")  # in arguments, Python shows bytes that are not UTF-8 so


def run(values: flags.FlagValues) -> int:
    """Continues --prompt, or each line of --prompts, and returns the exit code."""
    folder = weights.needed(values, "generate --workdir=DIR, the folder of a run or of a published model")
    if bool(values.prompt) == bool(values.prompts):
        raise InputError("generate needs a prompt\n  fix   give either --prompt=TEXT or --prompts=FILE.jsonl")
    if values.output and not values.prompts:
        raise InputError(f"--output={values.output}: only for the results of --prompts=FILE.jsonl\n  fix   drop it")
    session.check_output(values.output, values.prompts)
    Stops(values.stop)  # raises if a stop is not valid
    sampling = Sampling(values.temperature, values.top_k, values.top_p, values.min_p, values.seed)
    if not values.temperature and sampling != Sampling(seed=values.seed):
        raise InputError("--top_k, --top_p and --min_p: temperature 0 takes the best token\n  fix   --temperature=0.8")
    here, read = weights.begin(values, folder, stderr=True)
    config = here.config
    tokens = tokenizer.load(config.data.tokenizer)
    prompts = _prompts(values, config.data.tokenizer, tokens)
    session.compare_texts(here, tokens, [line.tokens for line in prompts])
    built, notes = generate.plan(
        config, here.rules, here.devices, here.machine.platform, [line.tokens for line in prompts],
        new_tokens=values.max_new_tokens, batch=values.batch, tokenizer=tokens,
        places=[line.place for line in prompts],
    )  # fmt: skip
    ends = chat.stop_ids(config.data.tokenizer)
    for note in notes:
        here.say(note)
    compile_cache.enable(values.compile_cache)
    began = time.perf_counter()
    _ = built.compiled  # whether the program fits is known before the weights are read
    here.say(f"prefill and decode: compiled in {time.perf_counter() - began:.1f} s")
    generator = generate.Generator(built, read(built.abstract_params), tokens)
    pieces = generator.generate(
        [line.tokens for line in prompts],
        new_tokens=values.max_new_tokens,
        sampling=sampling,
        stops=values.stop,
        ends=ends,
    )
    if values.prompts:
        here.deliver(pieces, values.output, lambda found, out: lines.write(prompts, found, out))
    else:
        here.deliver(pieces, None, lambda found, out: _stream(found, len(prompts), out))
    here.say(str(generator.figures))
    return 0


def _prompts(values: flags.FlagValues, name: str, tokens: tokenizer.Tokenizer) -> list[lines.Line]:
    """The prompts of the flags or of the file, encoded."""
    chats = chat.Chat(name) if values.chat else None
    if values.prompts:
        render = chats.prompt_of if chats else None if name == "bytes" else _late_chat(name)
        return lines.read(values.prompts, tokens, render, chat=values.chat)
    found = []
    for number, text in enumerate(values.prompt, 1):
        if _NO_CHARACTER.search(text):
            raise InputError(f"--prompt {number}: not UTF-8\n  fix   --prompts=FILE.jsonl holds any text")
        ids = chats.prompt([{"role": "user", "content": text}]) if chats else tokens.encode_prompt(text)
        found.append(lines.Line(f"--prompt {number}", {}, ids.tolist()))
    return found


def _late_chat(name: str) -> Any:
    """A function that renders a line's messages. It reads the template at the first such line."""
    found: list[chat.Chat] = []

    def render(line: lines.Fields) -> Any:
        if not found:
            found.append(chat.Chat(name))
        return found[0].prompt_of(line)

    return render


def _stream(pieces: Iterable[generate.Piece], count: int, out: TextIO) -> None:
    """Prints a single text piece by piece; several texts are printed when all of them are complete."""
    whole: dict[int, str] = {}
    for piece in pieces:
        if count == 1:
            print(piece.text, end="", flush=True, file=out)
        elif piece.result:
            whole[piece.number] = piece.result.text
    for number in sorted(whole):
        print(f"--- {number + 1}\n{whole[number]}", file=out)
    if count == 1:
        print(file=out)
