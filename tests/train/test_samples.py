"""Texts that are written at evaluation: the same under every layout, and those that generation gives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gspmd_lm.config import Samples
from gspmd_lm.data import tokenizer
from gspmd_lm.errors import InputError
from gspmd_lm.infer import generate
from gspmd_lm.infer.generate import SampleGenerator
from gspmd_lm.infer.sampling import Sampling
from tests.courses import begun

PROMPTS = ("Once upon", "x", "two words")


@pytest.fixture
def asked(small):
    """A function that makes a config of the bytes, with samples."""

    def make(prompts=PROMPTS, tokens=6, **model):
        sizes = {"layers": 1, "vocab": 257, "padded_vocab": 264, "context": 32}
        return small(**sizes | model, train={"samples": Samples(prompts=prompts, tokens=tokens)})

    return make


@pytest.mark.long
def test_layouts_write_the_same_and_what_generation_writes(asked, built):
    config, texts = asked(), []
    for layout in ("tp8", "none"):
        step = built(config, layout)
        params = begun(step).params
        writer = SampleGenerator(config, step.rules, list(step.mesh.devices.flat), "cpu")
        texts.append(writer(params))
        assert writer(params) == texts[-1]
        assert jax.tree.all(jax.tree.map(lambda x: not x.is_deleted(), params))
    assert texts[0] == texts[1] and [prompt for prompt, _ in texts[0]] == list(PROMPTS)
    assert len({text for _, text in texts[0]}) == 3

    tokens = tokenizer.load_tokenizer("bytes")
    prompts = [tokens.encode_prompt(prompt).tolist() for prompt in PROMPTS]
    generator = generate.Generator(writer.programs, params, tokens)
    found = generator.results(prompts, new_tokens=6, sampling=Sampling(0.8))
    assert [text for _, text in texts[1]] == [one.text for one in found]


def test_weights_are_cast_where_they_are(asked, built):
    config = asked(compute_dtype="bfloat16")
    step = built(config, "fsdp8")
    params = begun(step).params
    writer = SampleGenerator(config, step.rules, list(step.mesh.devices.flat), "cpu")
    cast, wanted = writer.cast(params), writer.programs.abstract_params
    assert jnp.dtype("bfloat16") in {x.dtype for x in jax.tree.leaves(cast)}
    jax.tree.map(
        lambda x, like: np.testing.assert_equal((x.dtype, x.sharding), (like.dtype, like.sharding)), cast, wanted
    )
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype("float32")}


def test_prompts_that_do_not_fit_are_refused_before_anything_is_read(asked, built):
    config = asked(prompts=("short", "a prompt that is long"), tokens=20)
    step = built(config, "fsdp8")
    with pytest.raises(
        InputError, match=r"(?s)train\.samples\.prompts 2: 21 tokens and 20 new ones are more than .*=32.*fix"
    ):
        SampleGenerator(config, step.rules, list(step.mesh.devices.flat), "cpu")
