"""Texts that a model in training writes after the prompts of train.samples."""

import functools
from collections.abc import Sequence
from typing import Any

import jax

from gspmd_lm.config import Config
from gspmd_lm.data import tokenizer
from gspmd_lm.errors import InputError
from gspmd_lm.infer import generate
from gspmd_lm.infer.sampling import Sampling
from gspmd_lm.sharding.rules import Rules


class SampleGenerator:
    """Writes the texts. They depend on the weights alone, up to rounding: not on the layout, nor on earlier texts."""

    def __init__(self, config: Config, rules: Rules, devices: Sequence[Any], platform: str):
        """Nothing is compiled. Raises InputError for prompts, a tokenizer or rules that do not fit."""
        assert config.train.samples
        self.asked = config.train.samples
        self.tokens = tokenizer.load_tokenizer(config.data.tokenizer)
        self.prompts = [self.tokens.encode_prompt(prompt).tolist() for prompt in self.asked.prompts]
        try:
            self.programs, _ = generate.programs_for(
                config, rules, devices, platform, self.prompts, new_tokens=self.asked.tokens, batch=len(self.prompts),
                tokenizer=self.tokens, places=[f"train.samples.prompts {n}" for n in range(1, len(self.prompts) + 1)],
            )  # fmt: skip
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
        _ = self.programs.compiled

    def __call__(self, params: Any) -> list[tuple[str, str]]:
        """Each prompt with the text that the weights of training write after it."""
        writing = generate.Generator(self.programs, self.cast(params), self.tokens)
        sampling = Sampling(temperature=self.asked.temperature)
        results = writing.results(self.prompts, new_tokens=self.asked.tokens, sampling=sampling)
        return [(prompt, result.text) for prompt, result in zip(self.asked.prompts, results, strict=True)]
