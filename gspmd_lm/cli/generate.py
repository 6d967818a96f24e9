"""generate: continues prompts, and streams the text to the terminal or writes JSONL."""

import functools
import re
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TextIO

from absl import flags

from gspmd_lm.cli import outputs
from gspmd_lm.cli.verb import Flags, Verb, on_devices
from gspmd_lm.errors import InputError
from gspmd_lm.runtime.quiet import import_jax

if TYPE_CHECKING:
    import numpy as np

    from gspmd_lm.data import tokenizer
    from gspmd_lm.infer import generate, lines

_NO_CHARACTER = re.compile("[\ud800-\udfff]")  # in arguments, Python shows bytes that are not UTF-8 so


def _define(flags: Flags) -> None:
    on_devices(flags)
    flags.group("Prompts and texts")
    flags.several("prompt", "Continue this prompt, or write down this wav file or image. This flag may be repeated.")
    flags.path("prompts", None, "Continue the prompts of this JSONL file of {prompt} or {messages} instead.")
    flags.path("output", None, "Write the texts to this file, as JSONL. The default is the terminal.")
    flags.yes_no("chat", "Treat each prompt as a user's message, in the model's chat template.")
    flags.several("stop", "Stop before this text, or at this special token. This flag may be repeated.")
    flags.yes_no("special", "Show special tokens in the texts, such as the marks of tool calls.")
    flags.whole("max_new_tokens", 128, "Stop after this many tokens at the latest.", 1)
    flags.whole("batch", 8, "How many prompts are continued at a time.", 1)
    flags.group("Sampling")
    flags.number("temperature", 0.0, "The temperature of sampling. With 0, the most likely token is taken.")
    flags.whole("top_k", 0, "Sample from this many of the most likely tokens. With 0, sample from all tokens.", 0)
    flags.number("top_p", 1.0, "Sample from the most likely tokens whose probabilities add up to this.")
    flags.number(
        "min_p", 0.0, "Sample from the tokens with at least this share of the most likely token's probability."
    )
    flags.whole("seed", 0, "The seed of sampling.")


def run(values: flags.FlagValues, names: list[str]) -> int:
    """Continues --prompt, or each line of --prompts, and returns the exit code."""
    from gspmd_lm.cli import inputs

    # What is wrong with a file is told before jax is imported, which takes a second.
    rules, config = inputs.read_rules(values), inputs.read_config(values)
    import_jax()
    from gspmd_lm import session
    from gspmd_lm.data import chat, tokenizer
    from gspmd_lm.data.tokenizer import dropped_characters_note
    from gspmd_lm.infer import generate, generation_config, lines
    from gspmd_lm.infer.detokenizer import Stops, special_stops
    from gspmd_lm.infer.sampling import Sampling
    from gspmd_lm.runtime import compile_cache

    folder = inputs.folder_with_weights(values, "generate --workdir=DIR, the folder of a run or of a published model")
    if bool(values.prompt) == bool(values.prompts):
        raise InputError("generate needs a prompt\n  fix   give either --prompt=TEXT or --prompts=FILE.jsonl")
    if values.output and not values.prompts:
        raise InputError(f"--output={values.output}: only for the results of --prompts=FILE.jsonl\n  fix   drop it")
    outputs.check_writable((values.output,), (values.prompts,))
    Stops(values.stop)  # raises if a stop is not valid
    sampling = Sampling(values.temperature, values.top_k, values.top_p, values.min_p, values.seed)
    if not values.temperature and sampling != Sampling(seed=values.seed):
        raise InputError("--top_k, --top_p and --min_p: temperature 0 takes the best token\n  fix   --temperature=0.8")
    begun, read = inputs.begin_with_weights(values, folder, config, rules, stderr=True)
    config = begun.config
    if values.chat and (config.model.frames or config.model.vision):
        what = "hears sounds, and prompts are wav" if config.model.frames else "sees images, and prompts are their"
        raise InputError(f"--chat: the model {what} files\n  fix   drop it")
    tokens = tokenizer.load_tokenizer(config.data.tokenizer)
    special_stops(values.stop, tokens, values.special)  # raises likewise
    prompts = _prompts(values, config.data.tokenizer, tokens, generate.encoding(config, tokens))
    session.compare_texts(begun, tokens, [line.tokens for line in prompts])
    built, notes = generate.programs_for(
        config,
        begun.rules,
        begun.devices,
        begun.machine.platform,
        [line.tokens for line in prompts],
        new_tokens=values.max_new_tokens,
        batch=values.batch,
        tokenizer=tokens,
        places=[line.place for line in prompts],
    )
    ends = chat.stop_ids(config.data.tokenizer)
    for note in (*notes, *generation_config.about_sampling(tokens, sampling), *dropped_characters_note(tokens)):
        begun.say(note)
    compile_cache.enable(values.compile_cache)
    began = time.perf_counter()
    _ = built.compile_both  # whether the program fits is known before the weights are read
    begun.say(f"prefill and decode: compiled in {time.perf_counter() - began:.1f} s")
    generator = generate.Generator(built, read(built.abstract_params), tokens)
    pieces = generator.generate(
        [line.tokens for line in prompts],
        new_tokens=values.max_new_tokens,
        sampling=sampling,
        stops=values.stop,
        ends=ends,
        special=values.special,
    )
    write = (
        functools.partial(lines.write_results, prompts) if values.prompts else functools.partial(_stream, len(prompts))
    )
    outputs.deliver(begun.machine.is_main, pieces, values.output, write)
    begun.say(str(generator.figures))
    return 0


def _prompts(
    values: flags.FlagValues, name: str, tokens: "tokenizer.Tokenizer", encode: Callable[[str], "np.ndarray"]
) -> "list[lines.PromptLine]":
    """The prompts of the flags or of the file, as `encode` gives them."""
    from gspmd_lm.data import chat
    from gspmd_lm.infer import lines

    chats = chat.Chat(name) if values.chat else None
    if values.prompts:
        read_template = functools.cache(chat.Chat)  # at the first line with messages

        def render(line: "lines.Fields") -> Any:
            return (chats or read_template(name)).prompt_of(line)

        return lines.read_prompts(values.prompts, tokens, None if name == "bytes" else render, values.chat, encode)
    prompts = []
    for number, text in enumerate(values.prompt, 1):
        if _NO_CHARACTER.search(text):
            raise InputError(f"--prompt {number}: not UTF-8\n  fix   --prompts=FILE.jsonl holds any text")
        ids = chats.prompt([{"role": "user", "content": text}]) if chats else encode(text)
        prompts.append(lines.PromptLine(f"--prompt {number}", {}, lines.ids_of(ids)))
    return prompts


def _stream(count: int, pieces: "Iterable[generate.TextChunk]", out: TextIO) -> None:
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


GENERATE = Verb(
    "generate",
    "Continue prompts with the weights of the workdir.",
    [
        ("generate --workdir=runs/a --prompt='Once upon'", "Take the most likely tokens."),
        ("generate --workdir=runs/a --prompt='Once upon' --temperature=0.8 --top-p=0.95", "Sample."),
    ],
    _define,
    run,
)
