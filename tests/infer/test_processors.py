"""What generation_config.json asks of the logits: against definitions in plain Python, and against transformers."""

import json
import math

import jax
import numpy as np
import pytest

import gspmd_lm as g
from gspmd_lm.data import special_tokens
from gspmd_lm.errors import InputError
from gspmd_lm.infer import generate, generation_config, programs
from gspmd_lm.infer.processors import EMPTY, Processors, begin_history, with_tokens
from gspmd_lm.infer.sampling import Sampling
from gspmd_lm.model.families import decode
from gspmd_lm.model.loss import logits
from tests.convert import references
from tests.infer import spelled

V = 20
SETTINGS = {
    "repetition_penalty": dict(repetition_penalty=1.3),
    "a small penalty": dict(repetition_penalty=0.7),
    "1-grams": dict(no_repeat_ngram_size=1),
    "2-grams": dict(no_repeat_ngram_size=2),
    "3-grams": dict(no_repeat_ngram_size=3),
    "n-grams that are longer than texts": dict(no_repeat_ngram_size=30),
    "biases": dict(biases=(((3,), -1.5), ((4,), 2.0), ((1, 4), 1.0), ((2, 1, 5), -math.inf), ((99,), 1.0))),
    "suppressed": dict(suppressed=(0, 7, 99)),
    "suppressed at first": dict(suppressed_first=(2, 3)),
    "min_length": dict(min_length=6, ends=(4, 5)),
    "min_new_tokens": dict(min_new_tokens=2, ends=(4,)),
    "all": dict(repetition_penalty=1.2, no_repeat_ngram_size=2, biases=(((3, 1), 3.0), ((6,), -0.5)), suppressed=(9,),
                min_new_tokens=3, ends=(5,), given=1, suppressed_first=(1,)),
}  # fmt: skip


def reference(asked, scores, text, new):
    """The scores of the token after a text, of which the last `new` were generated; float64 [V]."""
    scores = scores.astype(np.float64)
    if new < asked.given:
        return scores
    for tokens, bias in asked.biases:
        if (
            len(tokens) <= len(text) + 1
            and list(tokens[:-1]) == text[len(text) + 1 - len(tokens) :]
            and tokens[-1] < len(scores)
        ):
            scores[tokens[-1]] += bias
    for token in set(text):
        factor = asked.repetition_penalty
        scores[token] = scores[token] * factor if scores[token] < 0 else scores[token] / factor
    never = [*asked.suppressed, *(asked.suppressed_first if new == asked.given else ())]
    if len(text) < asked.min_length or new < asked.min_new_tokens:
        never += asked.ends
    if n := asked.no_repeat_ngram_size:
        grams = [text[at : at + n] for at in range(len(text) - n + 1)]
        never += [gram[-1] for gram in grams if gram[:-1] == text[len(text) - n + 1 :]]
    scores[[token for token in never if token < len(scores)]] = -np.inf
    return scores


@pytest.mark.parametrize("name", SETTINGS)
def test_each_processor_is_its_definition(name):
    asked, rng, prompt = Processors(**SETTINGS[name]), np.random.default_rng(0), 5
    texts = [rng.integers(0, 7, size).tolist() for size in (5, 1, 4)]
    padded_BT = np.asarray([[EMPTY] * (prompt - len(text)) + text for text in texts], np.int32)
    history_BT, run = begin_history(padded_BT, prompt + 3), jax.jit(asked.__call__)
    for new in range(4):
        scores = rng.normal(size=(3, V)).astype(np.float32)
        length_B = np.asarray([len(text) for text in texts])
        found = run(scores, history_BT, np.int32(prompt + new), length_B, np.int32(new))
        for row, one, text in zip(np.asarray(found), scores, texts, strict=True):
            np.testing.assert_allclose(row, reference(asked, one, text, new), rtol=1e-6)
        chosen = rng.integers(0, 5, 3)
        history_BT = with_tokens(history_BT, chosen.astype(np.int32), np.int32(prompt + new))  # the last has no slot
        for text, token in zip(texts, chosen.tolist(), strict=True):
            text.append(token)


FILE = {
    "repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "suppress_tokens": [2], "begin_suppress_tokens": [3],
    "min_new_tokens": 4, "bad_words_ids": [[5, 6], [1]], "sequence_bias": [[[7], -2.5]], "min_length": 0,
}  # fmt: skip


NEW = 24


@pytest.fixture
def beside(tmp_path):
    """A function that writes generation_config.json beside a tokenizer, whose end is 1, and gives this."""
    tokens = spelled.tokenizer("byte-level", tmp_path)

    def write(**fields):
        (tmp_path / special_tokens.GENERATION).write_text(json.dumps(fields))
        return tokens

    return write


def test_the_file_becomes_processors_and_sentences(beside, tmp_path):
    path = tmp_path / special_tokens.GENERATION
    assert generation_config.read(None) == (None, []) == generation_config.read(beside(eos_token_id=1, top_p=0.9))
    found, notes = generation_config.read(beside(**FILE, num_beams=4, typical_p=1.0, length_penalty=2.0, novel=[0]))
    assert found == Processors(
        1.3, 2, (((7,), -2.5), ((5, 6), -math.inf)), (2,), (3,), min_new_tokens=4, ends=(1,)
    )  # bad words leave out the end
    assert notes[0].startswith(f"{path}: repetition_penalty=1.3, no_repeat_ngram_size=2, sequence_bias=[[[7], -2.5]], ")
    assert notes[1:] == [f"warning: {path}: not supported, and left out: num_beams=4, novel=[0]"]
    neutral = dict(repetition_penalty=1.0, suppress_tokens=[], min_length=0, num_beams=1, stop_strings=None)
    assert generation_config.read(beside(**neutral)) == (None, [])
    heard = beside(suppress_tokens=[1], lang_to_id={"<|en|>": 2}, forced_bos_token_id=3)
    assert generation_config.read(heard, hears=True, first_tokens=(3,)) == (None, [])
    with pytest.raises(InputError) as caught:
        generation_config.read(
            beside(repetition_penalty=0, min_length=-1, suppress_tokens=[True], sequence_bias=[[1, 2]])
        )
    assert [line.split(": ")[1].split("=")[0] for line in str(caught.value).split("\n")[:-1]] == [
        "repetition_penalty", "min_length", "suppress_tokens", "sequence_bias",
    ]  # fmt: skip


def test_sampling_that_the_file_asks_for_and_nobody_else_is_said(beside, tmp_path):
    def said(asked, **fields):
        return [note.partition("sample with ")[2] for note in generation_config.about_sampling(beside(**fields), asked)]

    asks = dict(do_sample=True, temperature=0.6, top_k=20, top_p=1.0)
    taken = "; the most likely tokens are taken, unless you set these yourself"
    assert said(Sampling(), **asks) == [f"temperature=0.6, top_k=20{taken}"]
    assert said(Sampling(), do_sample=True) == [f"temperature=1.0{taken}"]
    assert said(Sampling(), temperature=0.6) == [] == said(Sampling(0.8, top_k=5), **asks)
    assert said(Sampling(0.8), **asks) == ["top_k=20; other tokens are sampled from, unless you set these yourself"]


@pytest.mark.long
def test_generation_chooses_among_processed_logits(speaking, filled, weights, prompts, generator):
    """In a ragged batch, with a cache: as whole texts and the definitions say. Without processors nothing is added."""
    cfg = speaking(layers=1)
    padded = (0, *prompts[1], 90), 50.0  # padding is no token of a text
    asked = Processors(1.5, 2, (((7,), -2.5), ((101,), 1.5), padded), (2, 3), (65,), min_new_tokens=4, ends=(256,))
    plain = generator(cfg, "single")
    params = weights(cfg.model)
    built = programs.build_programs(
        cfg, filled("single"), plain.programs.arrays, jax.devices()[:1], plain.programs.sizes, True, asked
    )
    results = generate.Generator(built, params, plain.tokenizer).results(prompts, new_tokens=10, ends=())

    @jax.jit
    def whole(params, tokens_BT):
        with jax.default_matmul_precision("highest"):
            T = tokens_BT.shape[1]
            batch = {"tokens": tokens_BT, "positions": np.arange(T)[None], "row": np.zeros(1, np.int32)}
            return logits(*decode(cfg.model, params, batch), cfg.model)[0]

    for prompt, result in zip(prompts, results, strict=True):
        text = prompt + result.tokens
        padded = np.zeros((1, 17), np.int32)
        padded[0, : len(text)] = text
        logits_TV = np.asarray(whole(params, padded))[:, :257]
        for new, token in enumerate(result.tokens):
            given = text[: len(prompt) + new]
            assert token == reference(asked, logits_TV[len(given) - 1], given, new).argmax()
    assert built.abstract_decode_state.history_BT.shape == (3, 16)
    assert plain.programs.abstract_decode_state.history_BT is None


def saved_model(made, folder):
    """Saves a model of transformers with drawn weights and a tokenizer beside it."""
    import torch

    rng = np.random.default_rng(0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.tensor(rng.standard_normal(parameter.shape, np.float32)))
    made.eval().save_pretrained(folder)
    spelled.tokenizer("byte-level", folder).path.rename(folder / "tokenizer.json")


@pytest.mark.parametrize("kind", references.marked(["llama", "bart"], ["bart"], "parity"))
def test_greedy_tokens_equal_those_of_transformers(kind, tmp_path):
    import torch
    import transformers

    common = dict(vocab_size=320, eos_token_id=1, bos_token_id=None, pad_token_id=0)
    if kind == "llama":
        made = transformers.LlamaForCausalLM(transformers.LlamaConfig(
            hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            max_position_embeddings=64, **common))  # fmt: skip
    else:
        made = transformers.BartForConditionalGeneration(transformers.BartConfig(
            d_model=32, encoder_layers=1, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
            encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=64, decoder_start_token_id=1,
            forced_bos_token_id=0, forced_eos_token_id=None, **common))  # fmt: skip
    saved_model(made, tmp_path)
    begin = {"decoder_start_token_id": 1, "forced_bos_token_id": 0} if kind == "bart" else {}
    given = len(begin) // 2
    prompt = g.load(str(tmp_path), "none").tokenizer.encode(b"Once upon").tolist()
    read = prompt + [1] * given  # an encoder reads an end behind the text

    def written(**fields):
        """What both write; the tokens that ends of texts, the given ones among them, leave."""
        fields = {"eos_token_id": 1, "pad_token_id": 0, "repetition_penalty": 1.3} | begin | fields
        (tmp_path / special_tokens.GENERATION).write_text(json.dumps(fields))
        model, end = g.load(str(tmp_path), "none"), fields["eos_token_id"]
        results = model._ready([read], NEW - given).results([read], new_tokens=NEW - given, ends=(end,))
        made.generation_config = transformers.GenerationConfig(**fields)
        theirs = made.generate(torch.tensor([read]), max_new_tokens=NEW, do_sample=False)[0].tolist()
        theirs = theirs[(2 * given) or len(read) :]
        assert results[0].smallest_gap > 1e-3
        assert results[0].tokens == theirs[: theirs.index(end) if end in theirs else None], fields
        return results[0].tokens

    plain = written()
    first, second, end = plain[0], next(token for token in plain if token != plain[0]), plain[-1]
    length = plain.index(end) + 1 + (len(read) if kind == "llama" else 2)
    for fields in (
        {"repetition_penalty": 0.9, "no_repeat_ngram_size": 2, "begin_suppress_tokens": [first]},
        {"bad_words_ids": [[plain[0], plain[1]], [end]], "sequence_bias": [[[second], -5.5]]},
        {"suppress_tokens": [second, 500], "min_new_tokens": plain.index(end) + given + 1, "eos_token_id": end},
        {"min_length": length, "eos_token_id": end},
    ):
        without = plain[: plain.index(end)] if "eos_token_id" in fields else plain
        assert written(**fields) != without, fields
