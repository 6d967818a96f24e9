"""Every config under every shipped rules file: it resolves, or says what golden/layouts.txt has recorded."""

import math
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from recorded import same_as_recorded, shapes_once, titles  # noqa: F401  (a fixture)

from gspmd_lm import config
from gspmd_lm.errors import InputError
from gspmd_lm.foresight import table
from gspmd_lm.infer import programs
from gspmd_lm.sharding import axes, rules_file
from gspmd_lm.sharding.shapes import pairs
from gspmd_lm.show import dry_run as shown
from gspmd_lm.show import terminal
from gspmd_lm.train import state

ROOT = Path(__file__).parent.parent
CONFIGS = sorted(path.stem for path in (ROOT / "configs").glob("*.yaml"))
LAYOUTS = sorted(path.stem for path in (ROOT / "rules").glob("*.yaml"))
PODS = [("fsdp", 256), ("fsdp", 512), ("fsdp_tp", 256), ("fsdp_tp", 512)]
PAIRS = [(name, layout, 8) for name in CONFIGS for layout in LAYOUTS]
PAIRS += [(name, layout, devices) for name in CONFIGS for layout, devices in PODS]
# By default every fifteenth pair: each config meets another layout, and each layout a config.
DEFAULT = [pair if i % 15 == 0 else pytest.param(*pair, marks=pytest.mark.slow) for i, pair in enumerate(PAIRS)]

# One variant for every array that a rules file may name.
BIASED = (
    *(f"model.{name}=true" for name in ("attention.qkv_bias", "attention.out_bias", "feed_forward.bias", "logits.bias",
                                        "norm.bias")),
    "model.norm.kind=layernorm", "model.positions=learned",
)  # fmt: skip
ROUTED = (
    "model.experts.router_bias=true",
    "model.experts.balance=bias",
    "model.experts.shared_mlp=64",
    "model.experts.shared_gate=true",
)
OTHERS = (
    "attention.qk_norm=true",
    "attention.gate=true",
    "attention.sinks=true",
    "embedding.width=64",
    "embedding.tied=true",
)
ADAPTED = "lora={rank: 2, alpha: 4, targets: [wq, wk, wv, wo, w_gate, w_up, w_down]}"
VARIANTS = [BIASED, tuple(f"model.{one}" for one in ("block=parallel", *OTHERS, ADAPTED))]


@pytest.fixture(autouse=True)
def from_the_root(monkeypatch, shapes_once):  # noqa: F811
    monkeypatch.chdir(ROOT)  # messages name rules/<layout>.yaml


def filled(layout, devices):
    found = rules_file.load(layout)
    return found.fill(found.devices if found.devices > 0 else devices)


def title(name, layout, devices):
    return f"{name} under {layout}" + (f" on {devices} devices" if layout in ("fsdp", "fsdp_tp") else "")


@pytest.mark.parametrize(("name", "layout", "devices"), DEFAULT)
def test_config_under_rules(name, layout, devices):
    try:
        _, warnings = state.arrays_and_warnings(config.load(name), filled(layout, devices), "cpu")
        outcome = "\n".join(f"warning: {warning}" for warning in warnings) or "resolves"
    except InputError as error:
        outcome = str(error)
    if outcome == "resolves":
        assert title(name, layout, devices) not in titles("layouts.txt")
    else:
        same_as_recorded("layouts.txt", title(name, layout, devices), outcome)


def test_every_recorded_pair_is_still_there():
    assert titles("layouts.txt") <= {title(*pair) for pair in PAIRS}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rules_file_begins_with_its_idea(layout):
    first, second = (ROOT / "rules" / f"{layout}.yaml").read_text().split("\n")[:2]
    assert re.fullmatch(r"# [A-Z].*\.", first)
    assert second.startswith("mesh: {")


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_begins_with_a_command(name):
    first = (ROOT / f"configs/{name}.yaml").read_text().partition("\n")[0]
    assert first.startswith("# python main.py ") and (f"--config={name} " in f"{first} " or name == "tiny")


def leaves(arrays):
    """Path, logical axes, shape and bytes of an element, for each weight and for each array of the optimizer."""
    for part, named, abstract in (
        ("weights", arrays.named_params, arrays.params),
        ("optimizer", arrays.named_optimizer, arrays.optimizer),
    ):
        for leaf, like in pairs(named, abstract):
            yield part, leaf.path, leaf.axes, like.shape, jnp.dtype(like.dtype).itemsize


@pytest.mark.parametrize(("layout", "devices"), [("fsdp_tp", 512), ("fsdp", 8)])
def test_bytes_per_device_of_405b(layout, devices):
    """The totals of --dry_run, against the architecture's own arithmetic."""
    cfg, found = config.load("llama3_405b"), filled(layout, devices)
    arrays, _ = state.arrays_and_warnings(cfg, found, "cpu")
    page = terminal.text_of(lambda console: shown.show(shown.read(cfg, found, arrays), console), 200)
    said = dict(re.findall(r"^  (weights|optimizer|gradients) +([\d,]+)  ", page, re.MULTILINE))
    totals = {name: int(number.replace(",", "")) for name, number in said.items()}

    m, tensor, fsdp = cfg.model, found.mesh.get("tensor", 1), found.mesh["fsdp"]
    per_layer = {
        "wq and wo": 2 * m.embed * m.heads * m.head_dim / tensor,
        "wk and wv": 2 * m.embed * m.kv_heads * m.head_dim / tensor,
        "gate, up and down": 3 * m.embed * m.mlp / tensor,
        "norms": 2 * m.embed,
    }
    tables = 2 * m.vocab_rows * m.embed / tensor
    weights = 4 * (m.layers * sum(per_layer.values()) + tables + m.embed) / fsdp  # float32; embed is split over fsdp
    assert totals["weights"] == totals["gradients"] == weights
    assert totals["optimizer"] == pytest.approx(2 * weights, abs=64)  # two moments and counters
    assert "405,853,388,800 parameters" in page  # as published for Llama 3.1 405B


def test_the_table_lists_every_array():
    cfg, found = config.load("tiny"), filled("fsdp2_tp4", 8)
    arrays, _ = state.arrays_and_warnings(cfg, found, "cpu")
    page = terminal.text_of(lambda console: shown.show(shown.read(cfg, found, arrays), console), 200)
    lines = {line.split()[0]: line for line in page.splitlines() if line.strip()}
    for _, path, *_ in (leaf for leaf in leaves(arrays) if leaf[0] == "weights"):
        assert path in lines
    assert re.sub(r"  +", " | ", lines["layers.attention.wq"]) == (
        "layers.attention.wq | layers embed heads head_dim | 4 x 128 x 8 x 16 | embed/fsdp heads/tensor | heads/tensor"
        " | 32,768"
    )
    assert re.sub(r"  +", " | ", lines["residual"]) == (
        "residual | batch seq embed | 16 x 128 x 128 | batch/fsdp seq/tensor | 131,072"
    )


def test_the_table_shows_the_chunk_of_logits_that_a_step_makes():
    """1024 tokens on each of eight devices: two tokens of each of 512 rows."""
    cfg = config.load("tiny", ["data.batch=512"])
    found = rules_file.from_dict({"mesh": {"context": 8}, "rules": {"seq": "context"}}, "here.yaml")
    arrays, _ = state.arrays_and_warnings(cfg, found, "cpu")
    listed = table.rows(cfg, found, arrays, state.record_arrays(cfg, arrays, 1, found).arrays)
    (logits,) = (row for row in listed if row.path == "logits")
    assert (logits.shape, logits.in_use) == ((512, 16, 264), ((), ("context",), ()))
    assert logits.bytes_per_device == 1024 * 264 * 4


def test_what_is_known_of_arrays_and_axes_is_of_those_in_the_table():
    assert {axes.BALANCE_BIAS, *axes.TO_RESIDUAL, *axes.EXACT, *axes.ADAPTED} <= {*axes.DECODER.weights}
    assert {*axes.STACKED, *axes.NARROW, *axes.HIDDEN} <= {*axes.AXES}


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor", "lion", "muon"])
def test_every_array_has_known_axes_and_its_pieces_are_whole(optimizer):
    cfg, found = config.load("tiny", [f"optimizer.name={optimizer}"]), filled("fsdp2_tp4", 8)
    arrays, _ = state.arrays_and_warnings(cfg, found, "cpu")
    for part, path, names, shape, itemsize in leaves(arrays):
        assert len(names) == len(shape), path
        assert set(names) <= {*axes.AXES, ""}, path
        for split, size in zip(found.resolve(part, path, names, shape, itemsize)[0], shape, strict=True):
            assert size % math.prod(found.mesh[name] for name in split) == 0, path


@pytest.mark.long
@pytest.mark.parametrize("names", [["tiny"], pytest.param(CONFIGS, marks=pytest.mark.slow)], ids=["tiny", "all"])
def test_every_array_of_every_config_is_in_the_table_and_nothing_else(names):
    configs = [config.load(name) for name in names]
    configs += [config.load("tiny", variant) for variant in VARIANTS]
    configs.append(config.load("tiny_experts", ROUTED))
    linear = "model.attention.linear={key_heads: 2, value_heads: 4, head_dim: 8}"
    latent = "model.attention.latent={kv_rank: 16, q_rank: 16, v_head_dim: 8}"
    configs.append(
        config.load("tiny", [linear, latent, "model.layer_pattern=[linear, full]", "model.attention.rope.dim=8"])
    )
    streams = ["residual.streams=2", "residual.laurel_rank=4", "residual.layer_embed=8", "feed_forward.sparsity=0.5"]
    configs.append(config.load("tiny", [f"model.{one}" for one in (*streams, "attention.shared_kv_layers=1")]))
    full = ["model.attention.mask=full", "model.embedding.token_types=2"]
    narrow = ["model.embedding.width=64", "model.embedding.input=sum", "model.shared_layers=true"]
    vectors = "model.attention.relative_vectors={own_projections: true}"
    scored = [vectors, "model.positions=none", "model.attention.qkv_bias=true", "model.convolution={}", *full]
    configs.append(config.load("tiny", ["objective=masked", "model.logits.transform=true", *scored]))
    near = ["model.attention.relative_positions={}", "model.feed_forward.kind=plain"]
    configs.append(config.load("tiny", ["objective=classes", "model.classes.count=3", *near, *narrow, *full]))
    seen_by_images = ["model.vocab=0", "model.padded_vocab=0", "objective=classes", "model.classes.count=3",
                      "model.patches={image: 8, size: 4, distillation: head}", "model.context=6", "data.seq=8",
                      "model.positions=learned", "model.attention.mask=full"]  # fmt: skip
    configs.append(config.load("tiny", [*seen_by_images, "model.residual.layer_scale=0.1"]))
    levels = "{size: 2, levels: [{layers: 1, embed: 8, heads: 8, mlp: 8}]}"
    in_windows = [f"model.windows={levels}", "model.patches={image: 8, size: 2, class_row: false, pool: mean}",
                  "model.context=16", "data.seq=16", "model.positions=none", "model.kv_heads=8"]  # fmt: skip
    configs.append(config.load("tiny", [*seen_by_images, *in_windows]))
    whole = ["objective=masks", "model.classes=null", "model.masks={embed: 16}",
             "model.windows={size: 2, vectors: true}",
             "model.layer_pattern=[full, whole]"]  # fmt: skip
    configs.append(config.load("tiny", [*seen_by_images, *in_windows, *whole]))
    heard = ["objective=seq2seq", "model.frames={bands: 4}", "model.encoder={context: 8}", "model.positions=learned"]
    configs.append(config.load("tiny", [*heard, "data.source_seq=8"]))
    tower = "model.vision={patches: {image: 8, size: 4}, projection: 8}"
    configs.append(config.load("tiny", ["objective=contrastive", "model.positions=learned", tower]))
    reading = "model.vision={patches: {image: 8, size: 4}, queries: {rows: 2}}"
    configs.append(config.load("tiny", [reading, "model.frozen=[vision]"]))
    seen, one = {"memory"}, rules_file.load("single")  # of models with two stacks, which no config describes
    for cfg in configs:
        arrays = state.arrays(cfg)
        seen |= {leaf.path.split(".")[-1] for leaf, _ in pairs(arrays.named_params, arrays.params)}
        seen |= set(state.record_arrays(cfg, arrays, 1, one).arrays)
        # Generation reads the same arrays, and what it has kept of earlier tokens.
        asked = cfg is configs[0] or cfg.model.attention.linear or len(names) > 1
        if asked and cfg.objective == "causal":
            for recorder in programs.record_arrays(cfg, arrays, programs.whole_context(cfg), one).values():
                seen |= set(recorder.arrays)
    assert seen == set(axes.ARRAYS)


def test_nothing_is_allocated():
    before = {id(array) for array in jax.live_arrays()}
    state.arrays_and_warnings(config.load("llama3_405b"), filled("fsdp_tp", 512), "cpu")
    grown = [array.nbytes for array in jax.live_arrays() if id(array) not in before]
    assert sum(grown) < 1_000_000
