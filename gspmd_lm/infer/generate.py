"""Batches of prompts -> text, token by token, with the two compiled programs of infer/programs.py."""

import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from gspmd_lm.config import Config
from gspmd_lm.data import chat, images, sounds
from gspmd_lm.data.tokenizer import Tokenizer, encode_source, load_tokenizer
from gspmd_lm.errors import InputError, RunFailed, is_whole_number
from gspmd_lm.infer import generation_config, programs
from gspmd_lm.infer.detokenizer import Detokenizer, Stops, special_stops
from gspmd_lm.infer.programs import GenerationPrograms, Prompts
from gspmd_lm.infer.sampling import NO_TOKEN, Choice, Sampling
from gspmd_lm.infer.sizes import sizes as sizes_of
from gspmd_lm.sharding.rules import Rules


@dataclasses.dataclass(frozen=True)
class Result:
    """The text that was generated after one prompt."""

    text: str
    tokens: list[int]  # an end-of-text token is not among them; those of a stop string are
    finish_reason: str  # stop (a stop string), end (an end-of-text token), length
    smallest_gap: float  # over the tokens chosen (see sampling.Choice): below 1e-3, another layout may choose others


@dataclasses.dataclass(frozen=True)
class TextChunk:
    """The next chunk of the text after prompt `number`; the last one of a prompt has its result."""

    number: int
    text: str
    result: Result | None = None


@dataclasses.dataclass
class Figures:
    """Counts and times of generation so far, without compilation."""

    cache_bytes_per_device: int
    prompt_tokens: int = 0
    new_tokens: int = 0
    decoded_tokens: int = 0  # new tokens but the first of each prompt, which prefill gives
    prefill_s: float = 0.0
    decode_s: float = 0.0
    first_token_s: float = 0.0  # of the first batch, from the call to its first tokens
    smallest_gap: float = float("inf")

    @property
    def prefill_tokens_per_s(self) -> float:
        return self.prompt_tokens / self.prefill_s if self.prefill_s else 0.0

    @property
    def decode_tokens_per_s(self) -> float:
        return self.decoded_tokens / self.decode_s if self.decode_s else 0.0

    def __str__(self) -> str:
        decode = f", decode {self.decode_tokens_per_s:,.1f} tokens/s" if self.decoded_tokens else ""
        return (
            f"{self.new_tokens:,} tokens: prefill {self.prefill_tokens_per_s:,.1f} tokens/s{decode}, first token after "
            f"{self.first_token_s:.3f} s, cache {self.cache_bytes_per_device:,} bytes per device, "
            f"smallest gap {self.smallest_gap:.2g}"
        )


def programs_for(
    config: Config,
    rules: Rules,
    devices: Sequence[Any],
    platform: str,
    prompts: Sequence[Sequence[int]],
    *,
    new_tokens: int,
    batch: int,
    tokenizer: Tokenizer | None = None,
    places: Sequence[str] = (),
) -> tuple[GenerationPrograms, list[str]]:
    """The programs that generate `new_tokens` tokens after each of `prompts`, `batch` at a time, and notes to print.

    Nothing is compiled or allocated. `places` says where each prompt stands, for messages. Raises InputError for
    prompts, a tokenizer or rules that do not fit.
    """
    check_prompts(config, prompts, new_tokens, places)
    if tokenizer:
        check_tokenizer(config, tokenizer)
    if batch < 1:
        raise InputError(f"batch={batch}: must be at least 1\n  fix   --batch=8")
    longest = max(map(len, prompts))
    asked = min(batch, len(prompts))
    written = new_tokens + given_tokens(config)
    sizes = sizes_of(rules, asked, longest, written, platform, config.model)
    arrays, warnings = programs.arrays_and_warnings(config, rules, platform, sizes)
    first_tokens = config.model.encoder.first_tokens if config.model.encoder else ()
    processors, notes = generation_config.read(tokenizer, bool(config.model.frames), first_tokens)
    notes += [f"warning: {warning}" for warning in warnings]
    if sizes.rows > asked:
        split = ", ".join(dict.fromkeys(row.place for row in rules.rows if row.axis == "batch" and row.mesh_axes))
        notes.append(
            f"a batch of {asked} is padded to {sizes.rows} rows, and results of padding are dropped ({split}); "
            f"{sizes.rows} prompts at a time cost the same"
        )
    unrolled = platform == "cpu" and rules.devices == 1 and not config.model.shared_layers
    built = programs.build_programs(config, rules, arrays, devices, sizes, unrolled, processors)
    notes += built.choices
    return built, notes


def encoding(config: Config, tokenizer: Tokenizer) -> Callable[[str], np.ndarray]:
    """A function from a prompt to what the model reads: its tokens, or the content of the file that it names.

    Raises InputError for a model that writes no text.
    """
    programs.check_causal(config, or_of_source=True)
    if config.model.frames:
        return functools.partial(sounds.read_sound_frames, model=config.model)
    if config.model.vision:
        return functools.partial(
            images.read_image_rows, patches=config.model.vision.patches, prepared=config.data.images
        )
    return functools.partial(encode_source, tokenizer) if config.model.encoder else tokenizer.encode_prompt


def given_tokens(config: Config) -> int:
    """The number of tokens at the beginning of a text that the encoder gives, and that are no part of it."""
    return len(config.model.encoder.first_tokens) if config.model.encoder else 0


def check_prompts(
    config: Config, prompts: Sequence[Sequence[int]], new_tokens: int, places: Sequence[str] = ()
) -> None:
    """Raises InputError that lists every prompt that is empty or, with its answer, longer than the model's context.

    Prompts that an encoder reads have a context of their own.
    """
    encoder, context = config.model.encoder_config, config.model.context
    places = places or [f"prompt {number}" for number in range(1, len(prompts) + 1)]
    if not is_whole_number(new_tokens, 1):
        raise InputError(f"{new_tokens} new tokens: nothing to generate\n  fix   ask for a whole number from 1")
    queries = config.model.queries_config
    first = queries.context + 1 if queries and not encoder else given_tokens(config)
    if (encoder or queries) and first + new_tokens > context:
        more = f", and {first} that texts begin with," if first else ""
        raise InputError(
            f"{new_tokens:,} new tokens{more} are more than model.context={context:,}\n  fix   ask for fewer"
        )
    if not prompts:
        raise InputError("there is no prompt\n  fix   give a prompt, or a file with prompts")
    if queries:  # all images are of one size
        return
    wrong = [f"{place}: empty" for place, prompt in zip(places, prompts, strict=True) if not len(prompt)]
    fixes = ["give at least one token to go on from"] * bool(wrong)
    beside, name = (0, "the encoder's context") if encoder else (new_tokens, "model.context")
    context = encoder.context if encoder else context
    long = [
        (place, len(prompt)) for place, prompt in zip(places, prompts, strict=True) if len(prompt) + beside > context
    ]
    and_new = f" and {new_tokens:,} new ones" if beside else ""
    wrong += [f"{place}: {length:,} tokens{and_new} are more than {name}={context:,}" for place, length in long]
    if long:
        room, fewer = context - beside, context - max(length for _, length in long)
        ways = [f"shorten the prompt to {room:,} tokens"] * (room > 0)
        ways += [f"ask for {fewer:,} new ones"] * (beside > 0 and fewer > 0)
        fixes.append(", or ".join(ways) or "shorten the prompt, and ask for fewer new ones")
    if wrong:
        raise InputError("\n".join([*wrong, *(f"  fix   {fix}" for fix in fixes)]))


def check_tokenizer(config: Config, tokenizer: Tokenizer) -> None:
    """Raises InputError where the tokenizer has ids that the model has no embedding for."""
    if tokenizer.vocab_size > config.model.vocab:
        raise InputError(
            f"data.tokenizer={config.data.tokenizer} has {tokenizer.vocab_size:,} tokens, more than "
            f"model.vocab={config.model.vocab:,}\n  fix   set data.tokenizer to the one that the model was trained with"
        )


class Generator:
    """Compiled programs and the weights they run with: generates after any number of prompts."""

    def __init__(self, built: GenerationPrograms, params: Any, tokenizer: Tokenizer):
        """`params`: placed as `built.abstract_params`; where layers are unrolled, a copy of them is kept instead."""
        self.programs, self.params, self.tokenizer = built, built.unstack_layers(params), tokenizer
        self.prefill, self.decode = built.compile_both
        self.figures = Figures(built.cache_bytes_per_device)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        new_tokens: int,
        sampling: Sampling | None = None,
        stops: Sequence[str] = (),
        ends: Collection[int] | None = None,
        first_number: int = 0,
        special: bool = False,
    ) -> Iterator[TextChunk]:
        """The chunks of text after each prompt, as they come; prompts are numbered from `first_number`.

        A text ends before a stop string, at a token of `ends` (by default the tokenizer's end), or after `new_tokens`
        tokens. A stop string may be a special token. special: the text shows those that do not end it. A prompt's text
        depends on its number and the seed, not on the prompts beside it.

        Raises RunFailed where the model gives what is not a number.
        """
        check_prompts(self.programs.config, prompts, new_tokens)
        sampling = sampling or Sampling()
        sizes = self.programs.sizes
        longest = max(map(len, prompts))
        given = given_tokens(self.programs.config)
        assert sizes.hold(longest, given + new_tokens), (longest, new_tokens, sizes)
        follows = not (self.programs.model.encoder or self.programs.model.vision)  # a text goes on from its prompt
        reasons = dict.fromkeys(special_stops(stops, self.tokenizer, special), "stop")
        reasons |= dict.fromkeys((self.tokenizer.end,) if ends is None else ends, "end")
        for first in range(0, len(prompts), sizes.rows):
            batch = prompts[first : first + sizes.rows]
            texts = [
                _Completion(
                    number,
                    Detokenizer(self.tokenizer, prompt if follows else (), special),
                    Stops(stops),
                    reasons,
                    new_tokens,
                )
                for number, prompt in enumerate(batch, first_number + first)
            ]
            choices = self._choices(batch, first_number + first, given + new_tokens, sampling, texts)
            for choice in itertools.islice(choices, given, None):
                tokens, gaps = np.asarray(choice.tokens_B), np.asarray(choice.gap_B)
                for text, token, gap in zip(texts, tokens.tolist(), gaps.tolist(), strict=False):
                    if text.result is None:
                        if token == NO_TOKEN:
                            raise not_numbers(f"prompt {text.number + 1}", self.programs.config.name)
                        self.figures.new_tokens += 1
                        self.figures.smallest_gap = min(self.figures.smallest_gap, gap)
                        yield text.add(token, gap)

    def results(self, prompts: Sequence[Sequence[int]], **options: Any) -> list[Result]:
        """The results alone, in the order of the prompts; `options` as for `generate`."""
        results = {chunk.number: chunk.result for chunk in self.generate(prompts, **options) if chunk.result}
        return [results[number] for number in sorted(results)]

    def _choices(
        self,
        batch: Sequence[Sequence[int]],
        number: int,
        new_tokens: int,
        sampling: Sampling,
        texts: "list[_Completion]",
    ) -> Iterator[Choice]:
        """The choices of each step until all `texts` have ended, each fetched while the devices do the next step."""
        figures, settings = self.figures, sampling.settings
        began = time.perf_counter()
        state, choice = self.prefill(self.params, self._place_batch(batch, number, new_tokens), settings)
        for step in range(new_tokens):
            following = None
            if step + 1 < new_tokens:
                state, following = self.decode(self.params, state, settings)
            choice = jax.device_get(choice)
            taken_s = time.perf_counter() - began
            open_rows = sum(text.result is None for text in texts)
            if step:
                figures.decode_s += taken_s
                figures.decoded_tokens += open_rows
            else:
                figures.first_token_s = figures.first_token_s or taken_s
                figures.prefill_s += taken_s
                figures.prompt_tokens += sum(map(len, batch))
            yield choice
            if all(text.result for text in texts):
                return  # `following` is not needed
            choice, began = following, time.perf_counter()

    def _place_batch(self, batch: Sequence[Sequence[int]], number: int, new_tokens: int) -> Prompts:
        """The prompts on the devices. Each row that pads the batch holds one token of padding."""
        sizes, abstract = self.programs.sizes, self.programs.abstract_prompts
        tokens_BT = np.zeros(abstract.tokens_BT.shape, abstract.tokens_BT.dtype)
        start_B = np.full(sizes.rows, sizes.longest_prompt - 1, np.int32)
        if queries := self.programs.model.queries_config:
            start_B[:] = (sizes.source or sizes.prompt) - queries.context - 1
        for row, prompt in enumerate(batch):
            if queries:
                tokens_BT[row, : len(prompt)] = prompt
                continue
            start_B[row] = sizes.longest_prompt - len(prompt)
            tokens_BT[row, start_B[row] :] = prompt
        numbers_B = number + np.arange(sizes.rows, dtype=np.int32)
        begins_B = np.zeros_like(start_B) if self.programs.model.encoder else start_B
        length_B = sizes.prompt - begins_B + np.int32(new_tokens - 1)  # nothing attends to the last new token
        host = Prompts(tokens_BT, start_B, numbers_B, length_B)
        return Prompts(*(to_devices(x, like.sharding) for x, like in zip(host, abstract, strict=True)))


def not_numbers(place: str, model: str) -> RunFailed:
    """The error for a model whose logits are not numbers."""
    return RunFailed(
        f"{place}: {model} gives logits that are not numbers\n"
        "  fix   use other weights, or, if these are sound, --set model.compute_dtype=float32"
    )


def to_devices(x: np.ndarray, sharding: Any) -> jax.Array:
    """An array that every process holds in full, placed on the devices of all processes."""
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


@dataclasses.dataclass
class _Completion:
    """The text after one prompt while it grows."""

    number: int
    detokenizer: Detokenizer
    stops: Stops
    reasons: Mapping[int, str]  # a token that ends the text -> why: end or stop
    new_tokens: int
    result: Result | None = None
    tokens: list[int] = dataclasses.field(default_factory=list)
    text: str = ""
    gap: float = float("inf")

    def add(self, token: int, gap: float) -> TextChunk:
        """The chunk that the token adds, with the result if the text ends with it."""
        self.gap, reason = min(self.gap, gap), self.reasons.get(token, "")
        if reason == "end":
            return self._end("", reason)
        self.tokens.append(token)
        if reason:
            return self._end("", reason)
        text, stopped = self.stops.add(self.detokenizer.add(token), self.detokenizer.pending_text)
        if stopped:
            return self._end(text, "stop", whole=True)
        if len(self.tokens) == self.new_tokens:
            return self._end(text, "length")
        self.text += text
        return TextChunk(self.number, text)

    def _end(self, chunk: str, reason: str, whole: bool = False) -> TextChunk:
        if not whole:
            more, stopped = self.stops.add(self.detokenizer.rest())
            chunk += more if stopped else more + self.stops.rest()
            reason = "stop" if stopped else reason
        self.text += chunk
        self.result = Result(self.text, self.tokens, reason, self.gap)
        return TextChunk(self.number, chunk, self.result)


class SampleGenerator:
    """Writes texts with a model in training, after the prompts of train.samples.

    They depend on the weights alone, up to rounding: not on the layout, nor on earlier texts.
    """

    def __init__(self, config: Config, rules: Rules, devices: Sequence[Any], platform: str):
        """Nothing is compiled. Raises InputError for prompts, a tokenizer or rules that do not fit."""
        assert config.train.samples
        self.asked = config.train.samples
        self.tokens, self.ends = load_tokenizer(config.data.tokenizer), chat.stop_ids(config.data.tokenizer)
        self.prompts = [self.tokens.encode_prompt(prompt).tolist() for prompt in self.asked.prompts]
        try:
            self.programs, _ = programs_for(
                config,
                rules,
                devices,
                platform,
                self.prompts,
                new_tokens=self.asked.tokens,
                batch=len(self.prompts),
                tokenizer=self.tokens,
                places=[f"train.samples.prompts {n}" for n in range(1, len(self.prompts) + 1)],
            )
        except InputError as error:
            raise InputError(f"train.samples: {error}\n  fix   drop train.samples, or as above") from error

    @functools.cached_property
    def cast(self) -> Any:
        """A function that gives the weights of training in the dtypes of generation, where they are."""
        wanted = self.programs.abstract_params
        shardings = jax.tree.map(lambda like: like.sharding, wanted)

        def cast(params: Any) -> Any:
            return jax.tree.map(lambda x, like: x.astype(like.dtype), params, wanted)

        return jax.jit(cast, out_shardings=shardings)

    def compile(self) -> None:
        """Compiles the programs, which otherwise the first call does."""
        _ = self.programs.compile_both

    def __call__(self, params: Any) -> list[tuple[str, str]]:
        """Each prompt with the text that the weights of training write after it."""
        writing = Generator(self.programs, self.cast(params), self.tokens)
        sampling = Sampling(temperature=self.asked.temperature)
        try:
            results = writing.results(self.prompts, new_tokens=self.asked.tokens, sampling=sampling, ends=self.ends)
        except RunFailed:  # a run goes on: the loss of the evaluation tells the same
            return [(prompt, " (the model gives logits that are not numbers)") for prompt in self.asked.prompts]
        return [(prompt, result.text) for prompt, result in zip(self.asked.prompts, results, strict=True)]
