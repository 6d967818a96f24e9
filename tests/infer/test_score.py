"""Log-likelihoods, and loss, perplexity and bits per byte of a text."""

import io
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer, processors

from gspmd_lm.data.tokenizer import Bytes, HuggingFace
from gspmd_lm.errors import InputError
from gspmd_lm.infer import score
from gspmd_lm.model import loss
from gspmd_lm.model.families import decode
from gspmd_lm.sharding.problems import ShardingError
from tests.infer import spelled


@pytest.fixture(scope="module")
def scorer(speaking, filled, weights):
    """A function that builds the scorer of four rows of 16 tokens under rules, with a softcap and a vocabulary bias."""

    def build(rules, tokens=16):
        cfg, rules = speaking(**{"logits.bias": True, "logits.softcap": 4.0}), filled(rules)
        built, warnings = score.build_scoring(cfg, rules, jax.devices()[: rules.devices], "cpu", 4, tokens)
        assert warnings == []
        shardings = jax.tree.map(lambda like: like.sharding, built.abstract_params)
        return score.Scorer(built, jax.device_put(weights(cfg.model), shardings), Bytes())

    return build


@pytest.fixture(scope="module")
def one(scorer):
    return scorer("single")


@pytest.fixture(scope="module")
def log_probabilities(one):
    """A function that gives the log-probabilities after each token of a text of up to 16, with no program of ours."""
    cfg = one.program.config.model

    @jax.jit
    def whole(params, tokens_BT):
        with jax.default_matmul_precision("highest"):
            batch = {"tokens": tokens_BT, "positions": jnp.arange(16)[None], "row": jnp.zeros(1, jnp.int32)}
            x_BTD, table, bias = decode(cfg, params, batch)
            return jax.nn.log_softmax(loss.logits(x_BTD, table, bias, cfg))[0]

    def of(tokens):
        padded = np.zeros((1, 16), np.int32)
        padded[0, : len(tokens)] = tokens
        return np.asarray(whole(one.params, padded))[: len(tokens)]

    return of


REQUESTS = [
    score.Request([1, 2, 3, 4, 5], 2), score.Request([*range(17)], 16), score.Request([9, 8], 1),
    score.Request([30, 31, 32], 1), score.Request([40, 50, 60, 70], 3), score.Request([7] * 12, 5),
]  # fmt: skip


def test_scores_are_sums_of_log_probabilities(one, log_probabilities, monkeypatch):
    for (tokens, scored), found in zip(REQUESTS, one.scores(REQUESTS), strict=True):
        logs = log_probabilities(tokens[:-1])[-scored:]
        targets = tokens[-scored:]
        wanted = sum(row[target] for row, target in zip(logs, targets, strict=True))
        assert found.log_likelihood == pytest.approx(wanted, abs=1e-4)
        assert (found.tokens, found.greedy) == (scored, logs.argmax(-1).tolist() == targets)
    first = log_probabilities([1, 2, 3])
    best = int(first[-1].argmax())
    likely = [score.Request([1, 2, 3, token], 1) for token in (best, (best + 1) % 256)]
    assert [found.greedy for found in one.scores(likely)] == [True, False]


@pytest.mark.long
def test_a_layout_and_chunks_of_logits_change_nothing(one, scorer, monkeypatch):
    monkeypatch.setattr(loss, "CHUNK_TOKENS", 8)
    split = scorer("fsdp2_tp4")
    text = split.program.lower().as_text()
    assert "4x4x264xf32" in text and "4x16x264xf32" not in text  # logits of 8 tokens per device at a time
    for found, wanted in zip(split.scores(REQUESTS), one.scores(REQUESTS), strict=True):
        assert found.log_likelihood == pytest.approx(wanted.log_likelihood, abs=1e-4)
        assert found[1:] == wanted[1:]


def test_every_token_of_a_text_is_scored_once(one, log_probabilities):
    text = "Grüße an alle, die hier sind; und noch etwas mehr."
    data = text.encode()
    found = one.text(Bytes().encode(data), len(data))
    whole = [256, *data]
    nats = 0.0
    for at in range(0, len(data), 16):
        window = whole[at : at + 17]
        logs = log_probabilities(window[:-1])
        nats -= sum(row[target] for row, target in zip(logs, window[1:], strict=True))
    assert (found.tokens, found.bytes) == (len(data), len(data))
    assert found.loss == pytest.approx(nats / len(data), rel=1e-5)
    assert found.perplexity == pytest.approx(math.exp(found.loss))
    assert found.bits_per_byte == pytest.approx(nats / math.log(2) / len(data), rel=1e-5)
    requests = score.windows(data, 256, 16)
    assert [token for request in requests for token in request.tokens[-request.scored :]] == [*data]


def test_files_of_continuations(tmp_path, one):
    path = tmp_path / "asked.jsonl"
    path.write_text('{"prompt": "ab ", "continuation": "c", "id": 1}\n{"prompt": "", "continuation": "de"}\n')
    found = score.read_continuations(path, Bytes(), 32)
    assert [line.request for line in found] == [
        score.Request([*b"ab c"], 2),  # the space belongs to the continuation
        score.Request([256, *b"de"], 2),
    ]
    out = io.StringIO()
    score.write_scores(found, one.scores([line.request for line in found]), out)
    rows = [json.loads(line) for line in out.getvalue().splitlines()]
    assert list(rows[0]) == ["prompt", "continuation", "id", "log_likelihood", "tokens", "greedy"]
    assert rows[1]["tokens"] == 2 and rows[1]["log_likelihood"] < 0

    path.write_text('{"prompt": "a"}\n{"prompt": "a", "continuation": ""}\n' + json.dumps(
        {"prompt": "a" * 30, "continuation": "bcde"}))  # fmt: skip
    with pytest.raises(InputError) as caught:
        score.read_continuations(path, Bytes(), 32)
    assert str(caught.value).split("\n")[:-1] == [
        f"{path}:1: no text in continuation",
        f"{path}:2: continuation is empty",
        f"{path}:3: 34 tokens do not fit model.context=32",
    ]


@pytest.mark.parametrize("single", ["$A </s>", "<unk> $A </s>", "<unk> $A"])
def test_what_a_template_puts_after_a_text_is_not_scored(tmp_path, single):
    tokens = framed(tmp_path, single)
    path, begin = tmp_path / "asked.jsonl", [tokens.special["<unk>"]] if "<unk>" in single else []
    path.write_text('{"prompt": "Once upon", "continuation": " a time there"}\n{"prompt": "", "continuation": "was"}\n')
    one, empty = (line.request for line in score.read_continuations(path, tokens, 32))
    given, scored = (tokens.encode(text).tolist() for text in (b"Once upon", b" a time there"))
    assert one == score.Request([*begin, *given, *scored], len(scored))
    was = tokens.encode(b"was").tolist()
    assert empty == score.Request([*(begin or [tokens.end]), *was], len(was))
    assert score.lead(tokens) == (begin or [tokens.end])[0]


def framed(folder, single):
    """A tokenizer with a template."""
    made = Tokenizer.from_file(str(spelled.tokenizer("byte-level", folder).path))
    made.post_processor = processors.TemplateProcessing(single=single, special_tokens=[("<unk>", 0), ("</s>", 1)])
    made.save(str(folder / "framed.json"))
    return HuggingFace(folder / "framed.json")


def test_numbers_that_are_not_finite_are_null(tmp_path):
    path, out = tmp_path / "asked.jsonl", io.StringIO()
    path.write_text('{"prompt": "a", "continuation": "b", "own": [NaN, {"most": 1e999}], "é": 1}\n')
    found = score.read_continuations(path, Bytes(), 32)
    score.write_scores(found, iter([score.Score(-1.5, 1, True)]), out)
    assert '"own": [null, {"most": null}], "é": 1, "log_likelihood": -1.5' in out.getvalue()


def test_a_layout_that_does_not_fit_is_an_error(speaking, filled):
    with pytest.raises(ShardingError, match="kv_heads=2 does not divide over tensor=8"):
        score.build_scoring(speaking(kv_heads=2), filled("tp8"), jax.devices(), "cpu", 4, 16)
