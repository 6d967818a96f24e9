"""A model with its weights on this program's devices, which continues texts."""

import html
from collections.abc import Callable, Sequence
from typing import Any

from gspmd_lm.config import Config
from gspmd_lm.data import chat, tokenizer
from gspmd_lm.infer import generate as generation
from gspmd_lm.infer.lines import ids_of
from gspmd_lm.infer.sampling import Sampling
from gspmd_lm.runtime import compile_cache
from gspmd_lm.sharding.rules import Rules

ROWS = 8  # prompts that are continued at a time


class Continuation(str):
    """What a model wrote after a prompt."""

    prompt: str

    @classmethod
    def after(cls, prompt: str, text: str) -> "Continuation":
        continuation = cls(text)
        continuation.prompt = prompt
        return continuation

    def _repr_html_(self) -> str:
        return f'<p style="white-space:pre-wrap"><i>{html.escape(self.prompt)}</i>{html.escape(self)}</p>'


class Continuations(list[Continuation]):
    """What a model wrote after several prompts, in their order."""

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
    ) -> Continuation | Continuations:
        """The text after a prompt, or the texts after several. Both are strings.

        The first call compiles and reads the weights. Later ones do so if they need more room.

        Args:
            prompts: one text, or several; for a model that hears sounds, the names of wav files.
            max_new_tokens: where to stop at the latest.
            temperature: of sampling; 0 takes the most likely token.
            top_k: sample from so many of the most likely tokens; 0 from all.
            top_p: sample from the most likely tokens whose probabilities add up to this.
            min_p: sample from the tokens with at least this share of the most likely one's probability.
            seed: of sampling.
            stop: stop before this text, or any of these.
            chat_template: treat each prompt as a user's message.

        Raises:
            InputError: an option or a prompt does not fit the model, or the rules do not.
        """
        several = [prompts] if isinstance(prompts, str) else list(prompts)
        if not several:
            return Continuations()
        stops = [stop] if isinstance(stop, str) else list(stop)
        sampling = Sampling(temperature, top_k, top_p, min_p, seed)
        name = self.config.data.tokenizer
        if chat_template:
            render = chat.Chat(name)
            ids = [render.prompt([{"role": "user", "content": one}]).tolist() for one in several]
        else:
            encode = generation.encoding(self.config, self.tokenizer)
            ids = [ids_of(encode(one)) for one in several]
        generator = self._ready(ids, max_new_tokens)
        results = generator.results(
            ids, new_tokens=max_new_tokens, sampling=sampling, stops=stops, ends=chat.stop_ids(name)
        )
        answered = zip(several, results, strict=True)
        texts = Continuations(Continuation.after(prompt, result.text) for prompt, result in answered)
        return texts[0] if isinstance(prompts, str) else texts

    def _ready(self, ids: Sequence[Sequence[int]], new_tokens: int) -> generation.Generator:
        """Programs that are large enough for these prompts, with the weights: those of the last call if they are."""
        last = self._generator
        generation.check_prompts(self.config, ids, new_tokens, [f"prompt {n}" for n in range(1, len(ids) + 1)])
        if last is not None:
            sizes = last.programs.sizes
            written = new_tokens + generation.given_tokens(self.config)
            if sizes.hold(max(map(len, ids)), written) and sizes.rows >= min(len(ids), ROWS):
                return last
        built, notes = generation.programs_for(
            self.config, self.rules, self._devices, self._platform, ids, new_tokens=new_tokens,
            batch=min(len(ids), ROWS), tokenizer=self.tokenizer,
        )  # fmt: skip
        for note in notes:
            self._say(note)
        self._generator = generation.Generator(built, self._read(built.abstract_params), self.tokenizer)
        return self._generator

    def __repr__(self) -> str:
        return f"{self.config.name} of {self._name} under {self.rules.path}"
