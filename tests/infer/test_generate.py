"""What is generated: the same with and without a cache, alone or in a batch, and under every layout."""

import copy
import dataclasses

import jax
import numpy as np
import pytest

from benchmarks.collectives import count
from gspmd_lm.config import LatentAttention, Lora, RopeScaling
from gspmd_lm.data.tokenizer import Bytes
from gspmd_lm.errors import InputError, RunFailed
from gspmd_lm.infer import generate, programs
from gspmd_lm.infer.sampling import Choice, Sampling
from gspmd_lm.model.families import decode
from gspmd_lm.model.loss import logits
from gspmd_lm.sharding.problems import ShardingError
from tests.infer import spelled

NEW = 10
DRAWN = Sampling(temperature=1.3, top_k=40, top_p=0.95, min_p=0.02, seed=5)
VARIANTS = {
    "rope": {"kv_heads": 2, "attention.qk_norm": True, "attention.softcap": 5.0, "logits.softcap": 3.0},
    "alibi": {"positions": "alibi", "block": "parallel", "embedding.norm": True},
    "learned": {"layers": 1, "positions": "learned", "embedding.position_offset": 2, "norm.kind": "layernorm",
                "norm.bias": True, "feed_forward.kind": "plain"},
    "pattern": {"layers": 3, "layer_pattern": ("sliding", "full"), "attention.window": 4,
                "attention.rope.window_theta": 100.0, "attention.rope.scaling": RopeScaling(kind="longrope",
                                                                                            original_context=12,
                                                                                            short_factors=(1.0, 2.0),
                                             long_factors=(4.0, 7.0))},
}  # fmt: skip
GROUPED = dict(kv_heads=4)
LATENT = {
    "attention.latent": LatentAttention(kv_rank=16, q_rank=24, v_head_dim=4),
    "head_dim": 6,
    "attention.rope.dim": 2,
}
SHARED = dict(shared_layers=True, layers=3)
VARIANTS |= {"latent": LATENT, "shared": SHARED}
LAYOUTS = {
    "decode_tp8": ({}, "decode_tp8"),
    "decode_tp8, latent": (LATENT, "decode_tp8"),
    "fsdp2_tp4": ({}, "fsdp2_tp4"),
    "fsdp2_tp4, shared": (SHARED, "fsdp2_tp4"),
    "slots split, latent": (LATENT, {
        "mesh": {"context": 2, "tensor": 4}, "rules": {"heads": "tensor", "mlp": "tensor", "cache.kv_seq": "context"},
    }),
    "dp2_tp4": (GROUPED, "dp2_tp4"),
    "kv_heads on every device": (GROUPED, {
        "mesh": {"tensor": 8}, "rules": {"heads": "tensor", "mlp": "tensor", "vocab": "tensor", "kv_heads": None},
    }),
    "queries move to rows": (dict(kv_heads=1), "decode_rows8"),
    "queries move to rows, latent": (LATENT, "decode_rows8"),
    "queries move to rows and slots": (GROUPED, {
        "mesh": {"tensor": 2, "fsdp": 2, "context": 2},
        "rules": {
            "heads": ["tensor", "fsdp", "context"], "kv_heads": "tensor", "mlp": ["tensor", "fsdp", "context"],
            "cache.batch": "fsdp", "cache.kv_seq": "context", "decode_q.batch": "fsdp", "decode_out.batch": "fsdp",
            "decode_q.heads": "tensor", "decode_out.heads": "tensor",
        },
    }),
    "prompts and slots split": (GROUPED, {
        "mesh": {"context": 2, "tensor": 4},
        "rules": {
            "heads": "tensor", "kv_heads": "tensor", "mlp": "tensor", "seq": "context", "cache.kv_seq": "context",
        },
    }),
}  # fmt: skip


MIXTURE = {
    "experts.count": 8,
    "experts.per_token": 2,
    "experts.mlp": 16,
    "experts.shared_mlp": 8,
    "experts.dense_layers": 1,
}
ADAPTED = MIXTURE | dict(lora=Lora(rank=4, alpha=8.0, targets=("wo", "w_gate", "w_up", "w_down")))
MIXTURES = {
    "tokens travel": (MIXTURE, "expert4"),
    "experts split in use": (MIXTURE, {
        "mesh": {"tensor": 8},
        "rules": {"heads": "tensor", "kv_heads": "tensor", "vocab": "tensor", "expert": "tensor"},
    }),
    "tokens travel, adapters": (ADAPTED, "expert4"),
    "mlp split, adapters": (ADAPTED, "dp2_tp4"),
}  # fmt: skip


@pytest.fixture(scope="module")
def made(speaking, generator):
    """A function that builds generators once."""
    found = {}

    def build(key, model, rules, **options):
        if key not in found:
            found[key] = generator(speaking(**model), rules, **options)
        return found[key]

    return build


def alone(made, model):
    """The generator on one device."""
    return made(f"one device {model}", model, "single")


def planned(cfg, rules, prompts, **options):
    options = {"new_tokens": NEW, "batch": 8, "tokenizer": Bytes()} | options
    return generate.programs_for(cfg, rules, jax.devices()[: rules.devices], "cpu", prompts, **options)


def tokens(results):
    return [result.tokens for result in results]


# Two have the positions of families of test_references.py, one is in model/test_latent_attention.py.
SLOW_VARIANTS = ("rope", "alibi", "shared", "latent")


@pytest.mark.long
@pytest.mark.parametrize(
    "variant", [pytest.param(name, marks=pytest.mark.slow if name in SLOW_VARIANTS else ()) for name in VARIANTS]
)
def test_cached_equals_uncached(variant, speaking, generator, prompts, weights):
    """Each prompt's tokens, generated in a ragged batch, are the best ones when its whole text is read at once.

    Positions may depend on the length of a text, but not on that of the texts beside it.
    """
    cfg = speaking(**VARIANTS[variant])
    results = generator(cfg, "single").results(prompts, new_tokens=NEW, ends=())
    texts = [prompt + result.tokens for prompt, result in zip(prompts, results, strict=True)]
    tokens_BT = np.zeros((len(texts), max(map(len, texts))), np.int32)
    for row, text in enumerate(texts):
        tokens_BT[row, : len(text)] = text
    positions_BT = np.broadcast_to(np.arange(tokens_BT.shape[1]), tokens_BT.shape)

    @jax.jit
    def whole(params):
        with jax.default_matmul_precision("highest"):
            batch = {"tokens": tokens_BT, "positions": positions_BT, "row": np.arange(len(texts)),
                     "length": np.array([len(text) - 1 for text in texts])}  # fmt: skip
            return logits(*decode(cfg.model, params, batch), cfg.model)

    logits_BTV = np.asarray(whole(weights(cfg.model)))
    for row, (prompt, result) in enumerate(zip(prompts, results, strict=True)):
        steps = logits_BTV[row, len(prompt) - 1 : len(texts[row]) - 1]
        second, first = np.sort(steps, axis=-1)[:, -2:].T
        assert result.tokens == steps.argmax(-1).tolist()
        assert result.smallest_gap == pytest.approx((first - second).min(), abs=1e-4) and result.smallest_gap > 1e-4
    assert len({token for result in results for token in result.tokens}) > 2


# By default test_eight_bits.py has fsdp2_tp4 and latent attention, and cli/test_verbs.py has the same text under two.
SLOW = ("dp2_tp4", "decode_tp8", "decode_tp8, latent", "fsdp2_tp4", "slots split, latent", "fsdp2_tp4, shared",
        "kv_heads on every device", "queries move to rows, latent", "queries move to rows and slots",
        *MIXTURES)  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in (*LAYOUTS, *MIXTURES)]
)
def test_a_layout_never_changes_a_token(layout, made, prompts):
    model, rules = {**LAYOUTS, **MIXTURES}[layout]
    one, split = alone(made, model), made(layout, model, rules)
    for sampling in (Sampling(), DRAWN):
        wanted = one.results(prompts, new_tokens=NEW, sampling=sampling, ends=())
        found = split.results(prompts, new_tokens=NEW, sampling=sampling, ends=())
        assert min(result.smallest_gap for result in wanted) > 1e-4
        assert tokens(found) == tokens(wanted)
    assert split.programs.mesh.size == 8


@pytest.mark.long
def test_text_depends_on_seed_and_number_not_on_the_batch(made, prompts):
    three, two = alone(made, {}), made("two rows", {}, "single", batch=2)
    for sampling in (Sampling(), DRAWN):
        options = {"new_tokens": NEW, "sampling": sampling, "ends": ()}
        wanted = tokens(three.results(prompts, **options))
        assert tokens(two.results(prompts, **options)) == wanted
        assert tokens(two.results(prompts[2:], first_number=2, **options)) == wanted[2:]
        assert wanted == tokens(three.results(prompts, **options))
    same = [prompts[0]] * 3
    options = {"new_tokens": NEW, "ends": ()}
    drawn = tokens(three.results(same, sampling=DRAWN, **options))
    assert len({tuple(found) for found in drawn}) == 3  # prompts alike have numbers of their own
    assert drawn != tokens(three.results(same, sampling=Sampling(1.3, 40, 0.95, 0.02, seed=6), **options))


def test_a_tensor_parallel_decode_step_reduces_twice_per_layer_and_gathers_only_logits(speaking, filled, prompts):
    built, _ = planned(speaking(), filled("decode_tp8"), prompts, batch=3)
    compiled = built.trace_decode().lower().compile()
    found = count(compiled.as_text())
    cfg, rows = built.config.model, built.sizes.rows
    in_layers = [c for c in found if c.in_loop]
    assert [(c.kind, c.times, c.elements) for c in in_layers] == [("all-reduce", cfg.layers, rows * cfg.embed)] * 2
    outside = sorted((c.kind, c.elements) for c in found if not c.in_loop)
    assert outside == [("all-gather", rows * cfg.vocab_rows), ("all-reduce", rows * cfg.embed)]
    # The cache is handed back where it was.
    memory = compiled.memory_analysis()
    cache_bytes = 2 * cfg.layers * rows * built.sizes.slots * cfg.kv_heads * cfg.head_dim * 4 // 8
    assert built.cache_bytes_per_device == cache_bytes <= memory.alias_size_in_bytes
    assert memory.output_size_in_bytes - memory.alias_size_in_bytes < 1000
    assert memory.temp_size_in_bytes < cache_bytes + 28_000  # no second cache, no whole weight


def test_pieces_come_one_by_one_and_make_up_the_text(made, prompts):
    one = alone(made, {})
    stream = one.generate(prompts, new_tokens=NEW, ends=())
    first = next(stream)
    assert first.number == 0 and first.result is None
    pieces = [first, *stream]
    assert [piece.number for piece in pieces] == [0, 1, 2] * NEW
    for number, prompt in enumerate(prompts):
        mine = [piece for piece in pieces if piece.number == number]
        result = mine[-1].result
        assert result and [piece.result for piece in mine[:-1]] == [None] * (NEW - 1)
        assert "".join(piece.text for piece in mine) == result.text
        whole = Bytes().decode([*prompt, *result.tokens]).decode("utf-8", "replace")
        assert whole.endswith(result.text) and result.finish_reason == "length" and len(result.tokens) == NEW


def test_stop_strings_and_end_tokens(made, prompts):
    one = alone(made, {})
    options = {"new_tokens": NEW}
    free = one.results(prompts, ends=(), **options)
    ending = free[0].tokens[4]
    ended = one.results(prompts, ends=(ending,), **options)[0]
    before = free[0].tokens[: free[0].tokens.index(ending)]
    assert (ended.tokens, ended.finish_reason) == (before, "end")
    text = free[2].text
    stop = text[3:6]  # of several tokens
    pieces = list(one.generate(prompts, stops=(stop, "never said"), ends=(), **options))
    printed = "".join(piece.text for piece in pieces if piece.number == 2)
    stopped = next(piece.result for piece in pieces if piece.number == 2 and piece.result)
    assert stopped.text == printed == text[: text.index(stop)]
    assert stopped.finish_reason == "stop" and len(stopped.tokens) < NEW
    with pytest.raises(InputError, match="empty stop string"):
        one.results(prompts, stops=("",), **options)


def test_texts_of_byte_tokens_are_whole_and_a_stop_may_be_a_special_token(made, prompts, tmp_path, monkeypatch):
    one = copy.copy(alone(made, {}))
    one.programs = dataclasses.replace(one.programs, sizes=programs.Sizes(rows=3, prompt=7, slots=40))
    one.tokenizer = tokens = spelled.tokenizer("byte-fallback", tmp_path)
    mark = tokens.special["<|tool|>"]
    written = [*tokens.encode("ok 👍🏽!".encode()), mark, *tokens.encode("日本語".encode())]
    chosen = [Choice(np.full(3, token, np.int32), np.ones(3, np.float32)) for token in written]
    monkeypatch.setattr(one, "_choices", lambda *_: iter(chosen))

    def result(**options):
        return one.results(prompts[1:2], new_tokens=len(written), ends=(), **options)[0]

    shown = " ok 👍🏽!{} 日本語"
    assert (result().text, result(special=True).text) == (shown.format(""), shown.format("<|tool|>"))
    stopped = result(stops=["本"])
    assert (stopped.text, stopped.finish_reason) == (shown.format("").partition("本")[0], "stop")
    assert len(stopped.tokens) == len(written) - len("語".encode())
    stopped = result(stops=["<|tool|>"])
    assert (stopped.text, stopped.finish_reason, stopped.tokens[-1]) == (" ok 👍🏽!", "stop", mark)
    with pytest.raises(InputError, match="holds the special token"):
        result(stops=["!<|tool|>"])
    assert result(stops=["!<|tool|>"], special=True).text == " ok 👍🏽"


def test_logits_that_are_not_numbers_are_no_text(made, prompts):
    broken = copy.copy(alone(made, {}))
    broken.params = jax.tree.map(lambda x: np.asarray(x) * np.float32(np.nan), broken.params)
    with pytest.raises(RunFailed, match=r"prompt 3: small gives logits that are not numbers\n  fix "):
        broken.results(prompts[2:], new_tokens=NEW, first_number=2)
    with pytest.raises(RunFailed, match="logits that are not numbers"):
        broken.results(prompts, new_tokens=NEW, sampling=Sampling(temperature=1.0, top_k=3))


def test_figures(made, prompts):
    one = made("two rows", {}, "single", batch=2)
    one.figures = generate.Figures(one.programs.cache_bytes_per_device)
    results = one.results(prompts, new_tokens=NEW, ends=())
    figures = one.figures
    assert (figures.prompt_tokens, figures.new_tokens, figures.decoded_tokens) == (12, 30, 27)
    assert figures.smallest_gap == min(result.smallest_gap for result in results)
    assert 0 < figures.first_token_s < figures.prefill_s
    assert figures.decode_tokens_per_s == pytest.approx(27 / figures.decode_s)
    model, sizes = one.programs.config.model, one.programs.sizes
    assert sizes == programs.Sizes(2, 7, 7 + NEW - 1)
    assert f"cache {2 * model.layers * 2 * 16 * 8 * 4 * 4:,} bytes per device" in str(figures)


def test_what_does_not_fit_is_an_error_before_anything_is_allocated(speaking, small, filled, prompts):
    single, cfg = filled("single"), speaking()
    before = {id(array) for array in jax.live_arrays()}
    with pytest.raises(InputError) as caught:
        planned(cfg, single, [[1] * 30, [2], [3] * 23, []])
    assert str(caught.value).split("\n") == [
        "prompt 4: empty",
        "prompt 1: 30 tokens and 10 new ones are more than model.context=32",
        "prompt 3: 23 tokens and 10 new ones are more than model.context=32",
        "  fix   give at least one token to go on from",
        "  fix   shorten the prompt to 22 tokens, or ask for 2 new ones",
    ]
    with pytest.raises(InputError, match=r"model\.context=32\n  fix   ask for 29 new ones$"):
        planned(cfg, single, [[1] * 3], new_tokens=40)
    with pytest.raises(InputError, match=r"fix   shorten the prompt, and ask for fewer new ones$"):
        planned(cfg, single, [[1] * 33], new_tokens=40)
    with pytest.raises(InputError, match=r"file\.jsonl:3: empty"):
        planned(cfg, single, [[1], []], places=["file.jsonl:1", "file.jsonl:3"])
    with pytest.raises(InputError, match=r"has 257 tokens, more than model\.vocab=61"):
        planned(small(), single, prompts)
    with pytest.raises(ShardingError) as caught:
        planned(speaking(kv_heads=2), filled("decode_tp8"), prompts)
    assert "layers.attention.wk: kv_heads=2 does not divide over tensor=8" in str(caught.value)
    assert "cache" in str(caught.value) and "fix   --set rules.rules.kv_heads=null" in str(caught.value)
    assert {id(array) for array in jax.live_arrays()} <= before


def test_rows_that_nobody_asked_for_are_padding_and_said_so(speaking, filled, prompts):
    built, notes = planned(speaking(), filled("fsdp2_tp4"), prompts[:1])
    assert built.sizes == programs.Sizes(rows=2, prompt=8, slots=17)
    assert notes == [
        f"a batch of 1 is padded to 2 rows, and results of padding are dropped ({filled('fsdp2_tp4').path}: "
        "rules.batch: fsdp); 2 prompts at a time cost the same"
    ]
    assert planned(speaking(), filled("fsdp2_tp4"), prompts[:2])[1] == []
