"""Models with their weights on this program's devices: a decoder that continues texts, and a model of one's own."""

import functools
import html
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gspmd_lm.config import Config
from gspmd_lm.data import chat, tokenizer
from gspmd_lm.data.batches import Batches, check_arrays
from gspmd_lm.errors import InputError, is_whole_number
from gspmd_lm.infer import generate as generation
from gspmd_lm.infer.detokenizer import special_stops
from gspmd_lm.infer.generation_config import about_sampling
from gspmd_lm.infer.lines import ids_of
from gspmd_lm.infer.sampling import NO_TOKEN, Sampling, SamplingSettings, choose
from gspmd_lm.program.program import TaskProgram, add_totals
from gspmd_lm.runtime import compile_cache
from gspmd_lm.sharding import placement, shapes
from gspmd_lm.sharding.rules import Rules

ROWS = 8  # prompts that are continued at a time
Batch = Mapping[str, Any]


class Continuation(str):
    """The text that a model wrote after a prompt."""

    prompt: str

    @classmethod
    def after(cls, prompt: str, text: str) -> "Continuation":
        continuation = cls(text)
        continuation.prompt = prompt
        return continuation

    def _repr_html_(self) -> str:
        return f'<p style="white-space:pre-wrap"><i>{html.escape(self.prompt)}</i>{html.escape(self)}</p>'


class Continuations(list[Continuation]):
    """The texts that a model wrote after several prompts, in their order."""

    def _repr_html_(self) -> str:
        return "<hr>".join(text._repr_html_() for text in self)


class Model:
    """A model with its weights. `config` says what it computes, and `rules` where its weights live."""

    def __init__(
        self,
        config: Config,
        rules: Rules,
        devices: Sequence[Any],
        platform: str,
        name: str,
        read: Callable[[Any], Any],
        say: Callable[[str], None],
    ):
        """`read` takes a tree of jax.ShapeDtypeStruct and gives the weights, placed as it says. `name`: in its repr."""
        self.config, self.rules = config, rules
        self.tokenizer = tokenizer.load_tokenizer(config.data.tokenizer)
        self._devices, self._platform, self._name, self._read, self._say = devices, platform, name, read, say
        self._generator: generation.Generator | None = None
        self._said: set[str] = set()
        compile_cache.enable(None)

    def generate(
        self,
        prompts: str | Sequence[str],
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int = 0,
        stop: str | Sequence[str] = (),
        chat_template: bool = False,
        special: bool = False,
    ) -> Continuation | Continuations:
        """The text after a prompt, or the texts after several. Both are strings.

        The first call compiles and reads the weights. Later ones do so if they need more room.

        Args:
            prompts: one text, or several; for a model that hears sounds or sees images, the names of their files.
            max_new_tokens: where to stop at the latest.
            temperature: of sampling; 0 takes the most likely token.
            top_k: sample from so many of the most likely tokens; 0 from all.
            top_p: sample from the most likely tokens whose probabilities add up to this.
            min_p: sample from the tokens with at least this share of the most likely one's probability.
            seed: of sampling.
            stop: stop before this text, or any of these. One may be a special token.
            chat_template: treat each prompt as a user's message.
            special: show special tokens in the texts, such as the marks of tool calls.

        Raises:
            InputError: an option or a prompt does not fit the model, or the rules do not.
            RunFailed: the model gives logits that are not numbers.
        """
        several = [prompts] if isinstance(prompts, str) else list(prompts)
        if not several:
            return Continuations()
        stops = [stop] if isinstance(stop, str) else list(stop or ())
        if wrong := [one for one in several if not isinstance(one, str | Path)] + [
            one for one in stops if not isinstance(one, str)
        ]:
            raise InputError(f"generate: {wrong[0]!r} is not text\n  fix   give prompts and stop as texts")
        sampling = Sampling(temperature, top_k, top_p, min_p, seed)
        name, model = self.config.data.tokenizer, self.config.model
        encode = generation.encoding(self.config, self.tokenizer)
        if chat_template and (model.frames or model.vision):
            raise InputError("chat_template: the prompts of this model are files\n  fix   drop it")
        if chat_template:
            render = chat.Chat(name)
            ids = [render.prompt([{"role": "user", "content": one}]).tolist() for one in several]
        else:
            ids = [ids_of(encode(one)) for one in several]
        special_stops(stops, self.tokenizer, special)  # raises before anything is compiled
        self._note([*about_sampling(self.tokenizer, sampling), *tokenizer.dropped_characters_note(self.tokenizer)])
        generator = self._ready(ids, max_new_tokens)
        results = generator.results(
            ids, new_tokens=max_new_tokens, sampling=sampling, stops=stops, ends=chat.stop_ids(name), special=special
        )
        answered = zip(several, results, strict=True)
        texts = Continuations(Continuation.after(prompt, result.text) for prompt, result in answered)
        return texts[0] if isinstance(prompts, str) else texts

    def _ready(self, ids: Sequence[Sequence[int]], new_tokens: int) -> generation.Generator:
        """Programs that are large enough for these prompts, with the weights: those of the last call if they are."""
        last = self._generator
        if last is not None:
            sizes = last.programs.sizes
            written = new_tokens + generation.given_tokens(self.config)
            if sizes.hold(max(map(len, ids)), written) and sizes.rows >= min(len(ids), ROWS):
                return last
        built, notes = generation.programs_for(
            self.config,
            self.rules,
            self._devices,
            self._platform,
            ids,
            new_tokens=new_tokens,
            batch=min(len(ids), ROWS),
            tokenizer=self.tokenizer,
        )
        self._note(notes)
        self._generator = generation.Generator(built, self._read(built.abstract_params), self.tokenizer)
        return self._generator

    def _note(self, notes: Sequence[str]) -> None:
        """Says what was not said before."""
        for note in notes:
            if note not in self._said:
                self._said.add(note)
                self._say(note)

    def __repr__(self) -> str:
        return f"{self.config.name} of {self._name} under {self.rules.label}"


class TaskModel:
    """A model of one's own with its weights. `task` says what it computes, and `rules` where its weights live."""

    def __init__(self, built: TaskProgram, params: Any):
        """`params`: the weights, placed as they rest under the rules of `built`."""
        self.task, self.rules, self.params = built.task, built.rules, params
        self._built, self._compiled = built, dict[Any, Any]()

    def evaluate(self, batches: Sequence[Batch]) -> dict[str, float]:
        """The scores over batches of numpy arrays, as training logs them: `eval_loss` and others.

        Raises InputError if there are no batches, or for arrays that are not those of the task's inputs.
        """
        task = self.task
        if not len(batches):
            raise InputError("evaluate: there are no batches\n  fix   give at least one batch of the task's inputs")
        rows = Batches(batches.__getitem__, task.batch(task.rows), "evaluation", len(batches))
        shardings = {name: like.sharding for name, like in self._built.batch_of(task.rows).items()}

        def totals() -> Iterator[Any]:
            for _, batch in rows.batches(0, shardings):
                lower = functools.partial(jax.jit(self._built.evaluate).lower, self.params, batch)
                yield self._program("evaluation", batch, lower)(self.params, batch)

        return task.evaluation_values(add_totals(totals()))

    def generate(
        self,
        batch: Batch,
        max_new_tokens: int,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int = 0,
    ) -> list[list[int]]:
        """The tokens that the task's `generation` writes for each row of a batch, up to its token `end`.

        The sampling options are those of `load(...).generate`. A new number of rows or of tokens is compiled.

        Args:
            batch: numpy arrays, those of the task's inputs that `begin` reads; any number of rows.
            max_new_tokens: where to stop at the latest.

        Raises:
            InputError: the task has no `generation`, or an option, the batch or the rules do not fit it.
            RunFailed: the model gives logits that are not numbers.
        """
        settings = Sampling(temperature, top_k, top_p, min_p, seed).settings
        if self.task.generation is None:
            raise InputError(
                f"generate: task {self.task.name} does not say how it generates\n"
                "  fix   Task(..., generation=gspmd_lm.Generation(begin, extend))"
            )
        if not is_whole_number(max_new_tokens, 1):
            raise InputError(
                f"max_new_tokens={max_new_tokens}: nothing to generate\n  fix   ask for a whole number from 1"
            )
        padded, rows = self._pad_batch(batch)
        likes = self._built.batch_of(len(next(iter(padded.values()))))
        arrays = {name: generation.to_devices(x, likes[name].sharding) for name, x in padded.items()}
        lower = functools.partial(self._lower_tokens, max_new_tokens, arrays, settings)
        program = self._program(f"generating {max_new_tokens:,} tokens of each row", arrays, lower)
        tokens_BT, end = np.asarray(program(self.params, arrays, settings))[:rows], self.task.generation.end
        texts = [list(itertools.takewhile(lambda token: token != end, row)) for row in tokens_BT.tolist()]
        if any(NO_TOKEN in text for text in texts):
            raise generation.not_numbers("generate", self.task.name)
        return texts

    def _pad_batch(self, batch: Batch) -> tuple[dict[str, np.ndarray], int]:
        """The batch with copies of its last row, up to a number of rows that the mesh divides; its rows before."""
        rows = max((len(array) for array in batch.values() if np.ndim(array)), default=0)
        if not rows:
            raise InputError("generate: the batch has no rows\n  fix   give the task's inputs that begin() reads")
        inputs = {name: like for name, like in self.task.batch(rows).items() if name in batch}
        arrays = check_arrays(batch, inputs, "generate: batch")
        splits = (self.rules.split("rules", spec.array, spec.axes[0]) for spec in self.task.specs().values())
        more = -rows % math.lcm(*map(self.rules.num_shards, splits))
        return {name: np.concatenate([array, np.repeat(array[-1:], more, 0)]) for name, array in arrays.items()}, rows

    def _tokens(self, length: int, params: Any, batch: Batch, settings: SamplingSettings) -> jax.Array:
        """`length` tokens for each row, int32 [B, length]."""
        built, task = self._built, self.task
        with built.trace_under():
            logits_BV, state = task.begin_generation(params, batch)
            number_B = jnp.arange(len(logits_BV), dtype=jnp.int32)

            def turn(carry: tuple[jax.Array, Any], position: jax.Array) -> tuple[tuple[jax.Array, Any], jax.Array]:
                logits_BV, state = carry
                whole_BV = jax.lax.with_sharding_constraint(logits_BV, built.whole)
                tokens_B = choose(whole_BV, settings, number_B, jnp.broadcast_to(position, number_B.shape)).tokens_B
                return task.extend_generation(params, state, tokens_B), tokens_B

            _, tokens_TB = jax.lax.scan(turn, (logits_BV, state), jnp.arange(length, dtype=jnp.int32))
        return tokens_TB.T

    def _lower_tokens(self, length: int, batch: Batch, settings: SamplingSettings) -> jax.stages.Lowered:
        """The program of `_tokens`. Raises InputError where the rules do not fit what generation places."""
        arrays = self._built.arrays
        recorded = placement.record(self.rules, self.task.first_tokens, arrays.params, dict(batch))
        shapes.check_layout(arrays, self.rules, [recorded])
        return jax.jit(functools.partial(self._tokens, length)).lower(self.params, batch, settings)

    def _program(self, what: str, batch: Batch, lower: Callable[[], jax.stages.Lowered]) -> Any:
        """The program that `lower` gives, compiled; the same for batches of the same shapes."""
        key = what, *((name, x.shape) for name, x in batch.items())
        if key not in self._compiled:
            self._compiled[key] = self._built.compile(lower(), what, "fewer rows, or rules that split more")
        return self._compiled[key]
