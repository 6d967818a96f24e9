"""BLIP-2 against transformers: logits behind an image, and folders there and back. `pytest -m parity` does it anew.

With GSPMD_LM_RECORD=1 that run writes golden/reading.json: config.json, shapes of tensors and logits of each case.
"""

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from einops import rearrange

import gspmd_lm
from gspmd_lm import InputError
from gspmd_lm.convert import architecture, export, pretrained
from gspmd_lm.data import images as of_image
from gspmd_lm.data import media
from tests.convert import ours, references

GOLDEN = Path(__file__).parent / "golden" / "reading.json"
IMAGE, START, LENGTHS = 254, 255, (7, 3)  # the token of an image's rows, that behind them, and the tokens of each text
NEW = 12  # tokens that are written
LAST = np.cumsum(LENGTHS) + 4 * np.arange(1, 3) - 1  # the last token of each text among all
SIZES = {"num_attention_heads": 4, "intermediate_size": 40}
VISION = {"hidden_size": 24, "num_hidden_layers": 2, "image_size": 8, "patch_size": 4, **SIZES}
QUERIES = {"hidden_size": 16, "num_hidden_layers": 3, "vocab_size": 7, **SIZES}
OPT = {
    "model_type": "opt", "vocab_size": 257, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "ffn_dim": 48, "max_position_embeddings": 24, "word_embed_proj_dim": 32, "bos_token_id": START, "eos_token_id": 256,
    "pad_token_id": 1,
}  # fmt: skip
T5 = {
    "model_type": "t5", "vocab_size": 257, "d_model": 32, "num_layers": 2, "num_decoder_layers": 1, "num_heads": 4,
    "d_kv": 8, "d_ff": 48, "n_positions": 24, "bos_token_id": START, "eos_token_id": 256, "pad_token_id": 0,
    "decoder_start_token_id": 0, "feed_forward_proj": "gated-gelu", "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 6, "tie_word_embeddings": False,
}  # fmt: skip
BLIP2 = {"vision_config": VISION, "num_query_tokens": 4, "image_token_index": IMAGE}
CASES = {
    "blip2-opt": BLIP2 | {"text_config": OPT, "qformer_config": QUERIES},
    "blip2-t5": BLIP2 | {"text_config": T5, "qformer_config": QUERIES},
    # Every layer of the queries reads the image, and norms stand after the sums of the decoder.
    "blip2-opt-post": BLIP2 | {
        "text_config": OPT | {"do_layer_norm_before": False, "tie_word_embeddings": False},
        "qformer_config": QUERIES | {"cross_attention_frequency": 1, "num_hidden_layers": 2, "hidden_act": "relu"},
        "vision_config": VISION | {"hidden_act": "gelu_new", "layer_norm_eps": 1e-4},
    },
}  # fmt: skip


def folder_of(case, folder):
    """A folder with the config.json of a case, and weights with which an image and each token decide what follows."""

    def weight(name, shape):
        smaller = 0.2 if "embed_tokens" in name else 1.0  # a larger tied table makes a text repeat its last token
        return references.weight(name, tuple(shape), case["salt"], "t5") * np.float32(smaller)

    weights = {name: weight(name, shape) for name, shape in case["tensors"].items()}
    return references.save(folder, dict(case["config"]), weights)


def drawn(config):
    """Texts with padding at their right behind the rows of images, what is no padding, and images. With an encoder,
    the texts alone."""
    rng, rows = np.random.default_rng(0), config["num_query_tokens"]
    mask = np.arange(max(LENGTHS)) < np.array(LENGTHS)[:, None]
    tokens = np.where(mask, rng.integers(4, IMAGE, mask.shape), 1)
    tokens[:, 0] = START
    side = config["vision_config"]["image_size"]
    images = rng.standard_normal((len(LENGTHS), 3, side, side)).astype(np.float32)
    if config["text_config"]["model_type"] == "t5":
        return tokens, mask, images
    ahead = np.full((len(LENGTHS), rows), IMAGE)
    return np.concatenate([ahead, tokens], 1), np.concatenate([ahead > 0, mask], 1), images


def computed(opened, seq, source_seq, image_rows):
    """The logits of our model at all tokens, with so many of a text, of its source and rows of an image."""
    model, (tokens, mask, images) = opened.config.model, drawn(opened.like)
    patches, padding, T = model.vision.patches, ((0, 0), (0, seq - tokens.shape[1])), tokens.shape[1]
    cut = rearrange(images, "B c (h p) (w q) -> B (h w) (c p q)", p=patches.size, q=patches.size)
    batch = {
        "tokens": np.pad(tokens, padding, constant_values=5), "segment_ids": np.pad(mask.astype(np.int32), padding),
        "positions": np.tile(np.arange(seq), (len(tokens), 1)),
        "patches": np.pad(cut, ((0, 0), (1, image_rows - patches.rows), (0, 0)), constant_values=7.0),
    }  # fmt: skip
    if model.encoder:
        row = np.pad([IMAGE] * 4 + [START], (0, source_seq - 5), constant_values=5)
        source = {"tokens": row, "segment_ids": np.arange(source_seq) < 5, "positions": np.arange(source_seq)}
        batch |= {f"source_{name}": np.tile(one.astype(np.int32), (len(tokens), 1)) for name, one in source.items()}
    return np.asarray(ours.compiled(model, ours.on_one_device(opened), batch))[:, :T][mask]


def files(folder):
    """The files of two images."""
    image = pytest.importorskip("PIL.Image", reason="pip install 'gspmd_lm[vision]'")
    paths = [folder / f"{number}.png" for number in range(2)]
    for number, path in enumerate(paths):
        pixels = np.random.default_rng(number).integers(0, 256, (8, 8, 3), np.uint8)
        image.fromarray(pixels).save(path)
    return paths


def check(found, want):
    assert np.abs(found - want).max() <= 1e-5 * np.abs(want).max()


@pytest.fixture(scope="module")
def golden():
    return json.loads(GOLDEN.read_text())


def test_logits_are_those_of_transformers_and_files_come_back(golden, tmp_path):
    case = golden["blip2-opt"]
    opened = pretrained.open_folder(folder_of(case, tmp_path / "in"), [ours.EXACT])
    model, data = opened.config.model, opened.config.data
    assert (opened.family.name, opened.config.objective, data.seq, data.source_seq) == ("BLIP-2", "causal", 24, 8)
    assert model.frozen == ("vision",)
    check(computed(opened, 12, 8, 8)[LAST], np.array(case["logits"]))
    params = jax.device_get(ours.on_one_device(opened))
    for like in (opened.like, None):
        out = tmp_path / f"out {like is None}"
        export.write_folder(out, dataclasses.replace(model, frozen=()), params, like)
        written, original = ours.tensors(out), ours.tensors(tmp_path / "in")
        assert written.keys() == original.keys()
        assert all(np.array_equal(written[tensor], original[tensor]) for tensor in original)
        assert pretrained.open_folder(out, [ours.EXACT]).config.model == model


def test_texts_are_those_of_transformers(golden, tmp_path):
    case, paths = golden["blip2-opt"], files(tmp_path)
    loaded = gspmd_lm.load(folder_of(case, tmp_path / "in"), rules="none", overrides=[ours.EXACT])
    texts = loaded.generate([str(path) for path in paths], max_new_tokens=NEW)
    assert texts == [bytes(tokens).decode(errors="replace") for tokens in case["tokens"]]
    with pytest.raises(InputError, match="chat_template: the prompts of this model are files"):
        loaded.generate(str(paths[0]), chat_template=True)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vision_config": {"qkv_bias": False}}, r"vision_config\.qkv_bias: False has no biases of queries, keys"),
        ({"vision_config": {"num_channels": 1}}, r"vision_config\.num_channels: 1 is another number of colours"),
        ({"vision_config": {"hidden_act": "quick_gelu"}}, r"vision_config\.hidden_act: 'quick_gelu' is not known"),
        ({"qformer_config": {"use_qformer_text_input": True}}, r"use_qformer_text_input: True also reads a text"),
        ({"qformer_config": {"some": 1}}, r"qformer_config\.some: 1 is an unknown field(.|\n)*--ignore=qformer_config"),
        ({"text_config": {"model_type": "llama"}}, r"text_config\.model_type: 'llama' is not supported in blip-2"),
        ({"text_config": {"ffn_dim": None}}, r"text_config\.ffn_dim: missing"),
        ({"num_query_tokens": 40}, r"vision\.queries has 40 rows, and a text has a token before it"),
    ],
)
def test_what_is_not_supported_is_refused(changes, words, golden, tmp_path):
    case = golden["blip2-opt"]
    changed = {part: case["config"][part] | more if isinstance(more, dict) else more for part, more in changes.items()}
    folder = folder_of({**case, "config": case["config"] | changed}, tmp_path / "in")
    with pytest.raises(InputError, match=words):
        pretrained.open_folder(folder, [])


def test_a_missing_tensor_is_named(golden, tmp_path):
    case = golden["blip2-opt"]
    kept = {name: shape for name, shape in case["tensors"].items() if "layers.1.self_attn.qkv.bias" not in name}
    kept["query_tokens"] = [1, 3, 16]
    words = r"missing      vision_model\.encoder\.layers\.1\.self_attn\.qkv\.bias\n.*query_tokens is \[1, 3, 16\], not"
    with pytest.raises(InputError, match=words):
        pretrained.open_folder(folder_of({**case, "tensors": kept}, tmp_path / "in"), [])


def test_images_of_one_colour_are_not_written(golden, tmp_path):
    model = pretrained.open_folder(folder_of(golden["blip2-opt"], tmp_path / "in"), []).config.model
    grey = dataclasses.replace(model.vision.patches, channels=1)
    with pytest.raises(InputError, match=r"no family of transformers has this model; the nearest is (.|\n)*channels=1"):
        architecture.describe(dataclasses.replace(model, vision=dataclasses.replace(model.vision, patches=grey)), None)


@pytest.mark.filterwarnings("ignore")  # what torch and transformers warn of is theirs
@pytest.mark.parity
@pytest.mark.parametrize("name", CASES)
def test_transformers_itself(name, tmp_path):
    import torch

    kind, sizes = ours.case_of("Blip2ForConditionalGeneration", CASES[name], tmp_path / "empty")
    if "t5" in name:  # transformers 5 leaves it to the files whether there is a head
        sizes["config"]["text_config"]["tie_word_embeddings"] = False
        sizes["tensors"]["language_model.lm_head.weight"] = sizes["tensors"]["language_model.shared.weight"]
    tokens, mask, images = drawn(sizes["config"])

    def logits(model):
        arrays = {"input_ids": tokens, "attention_mask": mask.astype(np.int64), "pixel_values": images}
        if model.config.text_config.model_type == "t5":
            source = np.array([[IMAGE] * 4 + [START]] * len(tokens))
            arrays = {"input_ids": source, "decoder_input_ids": tokens, "pixel_values": images}
        with torch.no_grad():
            return model(**{key: torch.from_numpy(one) for key, one in arrays.items()}).logits.numpy()[mask]

    def written(model, opened):
        vision, texts = opened.config.model.vision, []
        for path in files(tmp_path):
            seen = of_image.pixels(media.Encoded.of("", path.read_bytes()), vision.patches, opened.config.data.images)
            pixels = torch.from_numpy(seen.transpose(2, 0, 1)[None])
            with torch.no_grad():
                found = model.generate(pixel_values=pixels, do_sample=False, max_new_tokens=NEW)
            ahead = 1 if opened.config.model.encoder else vision.queries.rows + 1
            texts.append(found[0, ahead:].tolist())
        return texts

    for salt in range(50):
        case = sizes | {"salt": salt}
        folder = folder_of(case, tmp_path / f"in {salt}")
        model, opened = ours.by_transformers(kind, folder), pretrained.open_folder(folder, [ours.EXACT])
        texts = written(model, opened)
        if min(len({*text}) for text in texts) >= 8 and texts[0] != texts[1] and max(map(max, texts)) < IMAGE:
            break
    else:
        raise AssertionError("no weights with which a text does not repeat itself")
    want, last = logits(model), LAST if "opt" in name else np.cumsum(LENGTHS) - 1
    recorded = ours.recorded(GOLDEN, name, case | {"logits": want[last].tolist(), "tokens": texts})
    check(np.array(recorded["logits"]), want[last])
    assert recorded["tokens"] == texts
    for sizes in ((11, 5, 5), (16, 8, 16)):
        check(computed(opened, *sizes), want)
    for out in ours.written(opened, tmp_path):
        np.testing.assert_array_equal(logits(ours.by_transformers(kind, out)), want)
