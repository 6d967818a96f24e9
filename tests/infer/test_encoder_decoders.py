"""What an encoder-decoder writes: what whole texts give token by token, in any layout."""

import jax
import numpy as np
import pytest

from gspmd_lm.config import Encoder, Frames, Patches, Queries, RelativePositions, Vision
from gspmd_lm.data.tokenizer import Bytes
from gspmd_lm.errors import InputError
from gspmd_lm.foresight import explain
from gspmd_lm.hardware import target
from gspmd_lm.infer import generate, programs
from gspmd_lm.model.families import decode
from gspmd_lm.model.loss import logits
from gspmd_lm.sharding import rules_file

NEW = 9
T5 = {
    "objective": "seq2seq", "encoder": Encoder(layers=1, start_token=5), "positions": "none", "kv_heads": 4,
    "attention.relative_positions": RelativePositions(ranges=8, distance=6),
}  # fmt: skip
LEARNED = {"objective": "seq2seq", "encoder": Encoder(start_token=2), "positions": "learned",
           "embedding.position_offset": 2,
           "attention.qkv_bias": True, "layers": 3}  # fmt: skip
SPLIT = {"mesh": {"context": 2, "tensor": 4}, "rules": {
    "heads": "tensor", "kv_heads": "tensor", "mlp": "tensor", "seq": "context", "cache.kv_seq": "context",
}}  # fmt: skip


@pytest.fixture(scope="module")
def written(speaking, generator, prompts):
    """A function that gives what a model writes, each once: written(T5, "single")."""
    known = {}

    def write(model, rules):
        key = repr((model, rules))
        if key not in known:
            results = generator(speaking(**model), rules).results(prompts, new_tokens=NEW, ends=())
            known[key] = [result.tokens for result in results]
        return known[key]

    return write


# By default, Whisper in convert/test_kinds.py and a decoder in test_generate.py have learned positions.
@pytest.mark.long
@pytest.mark.parametrize(
    "model", [pytest.param(T5, id="T5"), pytest.param(LEARNED, marks=pytest.mark.slow, id="learned")]
)
def test_a_cache_changes_no_token(model, written, weights, speaking, prompts):
    found = written(model, "single")
    cfg = speaking(**model).model
    params = jax.device_put(weights(cfg))

    @jax.jit
    def likeliest(source, tokens):
        batch = {"row": np.arange(len(tokens))}
        for prefix, ids in (("", tokens), ("source_", source)):
            positions = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
            named = {"tokens": ids, "positions": positions, "segment_ids": (ids >= 0).astype(int)}
            batch |= {f"{prefix}{name}": x for name, x in named.items()}
        x_BTD, table, bias = decode(cfg, params, batch)
        return logits(x_BTD, table, bias, cfg).argmax(-1)

    padded = np.array([prompt + [-1] * (max(map(len, prompts)) - len(prompt)) for prompt in prompts])
    whole = likeliest(padded, np.array([[cfg.encoder.start_token, *text[:-1]] for text in found]))
    assert whole.tolist() == found
    assert len({token for text in found for token in text}) > 5  # what repeats itself shows little


@pytest.mark.long
@pytest.mark.parametrize(
    "rules",
    ["fsdp2_tp4", *(pytest.param(one, marks=pytest.mark.slow) for one in ("decode_tp8", "dp2_tp4", SPLIT))],
    ids=str,
)
def test_a_layout_changes_no_token(rules, written):
    model = T5 | {"kv_heads": 8} if rules == "decode_tp8" else T5
    assert written(model, rules) == written(model, "single")


WHISPER = {
    "objective": "seq2seq", "frames": Frames(bands=6), "positions": "learned", "attention.qkv_bias": True,
    "attention.key_bias": False,
    "encoder": Encoder(context=20, start_token=5, first_tokens=(7, 9), suppressed=tuple(range(0, 256, 2)),
                       suppressed_first=tuple(range(1, 200, 2))),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("rules", ["fsdp2_tp4", "tp8", SPLIT], ids=str)
def test_a_layout_changes_nothing_that_is_written_of_sounds(rules, speaking, generator):
    config = speaking(**WHISPER)
    heard = [np.random.default_rng(number).standard_normal((20, 5, 6)).astype(np.float32) for number in range(3)]

    def written(rules):
        made = generator(config, rules, prompts=heard)
        return [result.tokens for result in made.results(heard, new_tokens=NEW, ends=())]

    texts = written("single")
    assert written(rules) == texts
    assert all(len(text) == NEW and text[0] >= 200 and all(token % 2 for token in text) for text in texts)
    with pytest.raises(InputError, match=r"31 new tokens, and 2 that texts begin with, are more than"):
        generate.check_prompts(config, heard, 31)


BLIP2 = {
    "positions": "learned", "data": {"seq": 24, "source_seq": 16},
    "vision": Vision(patches=Patches(image=12, size=4), head_dim=3,
                     queries=Queries(rows=8, layers=3, embed=24, head_dim=3, token=3, start_token=5)),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("rules", ["fsdp2_tp4", "tp8", SPLIT], ids=str)
@pytest.mark.parametrize("beside", [{}, T5 | {"kv_heads": 8, "data": {"source_seq": 16}}], ids=["OPT", "T5"])
def test_a_layout_changes_nothing_that_is_written_of_images(beside, rules, speaking, generator):
    config = speaking(**BLIP2 | beside)
    seen = [np.random.default_rng(number).standard_normal((10, 48)).astype(np.float32) for number in range(3)]

    def written(rules):
        made = generator(config, rules, prompts=seen)
        return [result.tokens for result in made.results(seen, new_tokens=NEW, ends=())]

    texts = written("single")
    assert written(rules) == texts and len({tuple(text) for text in texts}) == 3
    with pytest.raises(
        InputError,
        match=r"33 new tokens are more|24 new tokens, and 9 that texts begin with, are more than model.context=32",
    ):
        generate.check_prompts(config, seen, 33 if beside else 24)


def test_sources_and_texts_have_rooms_of_their_own(speaking):
    config = speaking(**T5 | {"encoder": Encoder(context=20)})
    generate.check_prompts(config, [[1] * 20], 32)
    with pytest.raises(InputError, match="prompt 1: 21 tokens are more than the encoder's context=20"):
        generate.check_prompts(config, [[1] * 21], 1)
    with pytest.raises(InputError, match=r"33 new tokens are more than model\.context=32"):
        generate.check_prompts(config, [[1]], 33)


def test_texts_that_are_written_from_sources_are_not_scored_without_them(speaking):
    config = speaking(**T5)
    programs.check_causal(config, or_of_source=True)
    with pytest.raises(InputError, match="scoring texts alone leaves out their sources"):
        programs.check_causal(config)


@pytest.mark.parametrize("settings", [dict(objective="masked"), {"objective": "classes", "classes.count": 3}], ids=str)
def test_a_model_that_writes_no_text_says_so_before_a_prompt_is_read(settings, speaking):
    config = speaking(**{"attention.mask": "full"}, **settings)
    with pytest.raises(InputError, match=f"objective: {settings['objective']}: generating and scoring texts need"):
        generate.encoding(config, Bytes())
    with pytest.raises(InputError, match="use a config of objective: causal"):
        explain.reports(config, [rules_file.load("single")], target.parse("cpu:1"), phase="decode")
