"""Whisper against transformers: logits, what it writes, and folders there and back. `pytest -m parity` computes them.

With GSPMD_LM_RECORD=1 that run writes golden/sounds.json: config.json, shapes of tensors, logits and texts of a case.
"""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

import gspmd_lm
from gspmd_lm import InputError
from gspmd_lm.config import Encoder, Frames, ModelConfig
from gspmd_lm.convert import export, pretrained
from gspmd_lm.convert.families import whisper
from gspmd_lm.data import sounds
from tests.convert import ours, references
from tests.data.test_sound_rows import spoken, written

GOLDEN = Path(__file__).parent / "golden" / "sounds.json"
ROWS, TEXT, NEW = 20, 5, 24
FIRST = [1, 2, 3]
SIZES = {
    "vocab_size": 257, "d_model": 32, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 8,
    "decoder_attention_heads": 8, "encoder_ffn_dim": 48, "decoder_ffn_dim": 64, "num_mel_bins": 8,
    "max_source_positions": ROWS, "max_target_positions": 40, "pad_token_id": 256, "bos_token_id": 256,
    "eos_token_id": 256, "decoder_start_token_id": 0,
}  # fmt: skip
# All but the bytes of letters, and at first all but some of these: nothing ends a text.
NEVER, NEVER_FIRST = [*range(32), *range(127, 257)], [*range(32, 100), *range(110, 127)]
CASES = {
    "whisper": SIZES,
    "whisper-new": SIZES | {"encoder_layers": 2, "encoder_attention_heads": 4, "activation_function": "gelu_new"},
}
GENERATION = {
    "decoder_start_token_id": 0, "eos_token_id": 256, "pad_token_id": 256,
    "suppress_tokens": NEVER, "begin_suppress_tokens": NEVER_FIRST,
    "forced_decoder_ids": [[place, token] for place, token in enumerate(FIRST, 1)],
}  # fmt: skip


def weight(name, shape, salt):
    """Such that the sound, each place and each token decide what is written."""
    drawn = references.weight(name, shape, salt, "t5")
    return drawn * np.float32(0.1) if "embed_tokens" in name else drawn


def folder_of(case, folder):
    weights = {name: weight(name, tuple(shape), case["salt"]) for name, shape in case["tensors"].items()}
    references.save(folder, dict(case["config"]), weights)
    (folder / "generation_config.json").write_text(json.dumps(GENERATION))
    return folder


def heard(folder):
    """Two sounds, as wav files."""
    return [written(folder / f"{number}.wav", spoken(number, seconds)) for number, seconds in ((1, 0.4), (2, 0.31))]


def texts():
    return np.random.default_rng(0).integers(0, 257, (2, TEXT))


def batch(model, paths, source_seq=ROWS):
    frames = np.stack([sounds.of_file(str(path), model) for path in paths])
    padding = ((0, 0), (0, source_seq - ROWS), (0, 0), (0, 0))
    places = np.tile(np.arange(source_seq), (2, 1))
    return {
        "tokens": texts(), "positions": np.tile(np.arange(TEXT), (2, 1)), "segment_ids": np.ones((2, TEXT), int),
        "source_frames": np.pad(frames, padding, constant_values=7.0), "source_positions": places % ROWS,
        "source_segment_ids": (places < ROWS).astype(int),
    }  # fmt: skip


@pytest.fixture(scope="module")
def golden():
    return json.loads(GOLDEN.read_text())


@pytest.mark.parametrize("name", CASES)
def test_logits_and_texts_are_those_of_transformers_and_files_come_back(name, golden, tmp_path):
    case = golden[name]
    folder = folder_of(case, tmp_path / "in")
    opened = pretrained.open_folder(folder, [ours.EXACT])
    model = opened.config.model
    assert (opened.family.name, opened.config.objective, opened.config.source_seq) == ("Whisper", "seq2seq", 24)
    assert list(model.encoder.first_tokens) == FIRST and list(model.encoder.suppressed) == NEVER
    paths, params = heard(tmp_path), ours.on_one_device(opened)
    want = np.array(case["logits"])
    found = ours.compiled(model, params, batch(model, paths, 24))
    assert np.abs(found - want).max() <= 1e-5 * np.abs(want).max()
    params = jax.device_get(params)
    for like in (opened.like, None):
        out = tmp_path / f"out {like is None}"
        export.write_folder(out, model, params, like)
        tensors, original = ours.tensors(out), ours.tensors(folder)
        assert tensors.keys() == original.keys()
        assert all(np.array_equal(tensors[tensor], original[tensor]) for tensor in original)
        if like is None:  # and what generation begins with is in the new config.json
            assert pretrained.open_folder(out, [ours.EXACT]).config.model.encoder == model.encoder
    if name == "whisper":
        loaded = gspmd_lm.load(folder, rules="none", overrides=[ours.EXACT])
        for path, tokens in zip(paths, case["tokens"], strict=True):
            assert loaded.generate(str(path), max_new_tokens=NEW) == bytes(tokens).decode()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"suppress_tokens": ["a"]}, r"suppress_tokens: \['a'\] is not a list of tokens|suppress_tokens"),
        ({"forced_decoder_ids": [1]}, "forced_decoder_ids"),
        ({"scale_embedding": True}, "scales the token table"),
    ],
)
def test_what_is_not_supported_is_refused(changes, words, golden, tmp_path):
    case = golden["whisper"]
    folder = folder_of({**case, "config": {**case["config"], **changes}}, tmp_path / "in")
    with pytest.raises(InputError, match=words):
        pretrained.open_folder(folder, [])


def test_sounds_that_are_prepared_otherwise_are_refused(golden, tmp_path):
    folder = folder_of(golden["whisper"], tmp_path / "in")
    (folder / "preprocessor_config.json").write_text(json.dumps({"sampling_rate": 8000, "feature_size": 8}))
    with pytest.raises(InputError, match="sampling_rate: 8000 is not 16000"):
        pretrained.open_folder(folder, [])


def test_what_is_written_for_transformers_is_read_again(tmp_path):
    sizes = {"layers": 1, "embed": 8, "heads": 1, "kv_heads": 1, "head_dim": 8, "mlp": 8, "vocab": 257, "context": 8}
    encoder = Encoder(context=1500, start_token=4, first_tokens=(5, 6), suppressed=(7,))
    model = ModelConfig(**sizes, frames=Frames(bands=80), encoder=encoder)
    written_files = whisper.write_sidecars(model, {"eos_token_id": 9}, 256)
    for name, content in written_files.items():
        (tmp_path / name).write_bytes(content)
    settings = json.loads((tmp_path / "generation_config.json").read_text())
    assert (settings["decoder_start_token_id"], settings["eos_token_id"]) == (4, 9)
    found = whisper.read_generation(tmp_path)
    assert found == {"first_tokens": [5, 6], "suppressed": [7], "suppressed_first": []}
    whisper.check_preprocessing(tmp_path, 80)
    assert "generation_config.json" not in whisper.write_sidecars(model, settings, 256)  # it says the same


def test_a_text_begins_in_english_where_the_language_is_left_open(tmp_path):
    (tmp_path / "generation_config.json").write_text(json.dumps({
        "lang_to_id": {"<|de|>": 7, "<|en|>": 8}, "task_to_id": {"transcribe": 9}, "no_timestamps_token_id": 11,
        "suppress_tokens": [1, 2], "forced_decoder_ids": [[1, None], [2, 9]],
    }))  # fmt: skip
    assert whisper.read_generation(tmp_path) == {
        "first_tokens": [8, 9, 11], "suppressed": [1, 2], "suppressed_first": [],
    }  # fmt: skip


@pytest.mark.filterwarnings("ignore")  # what torch and transformers warn of is theirs
@pytest.mark.parity
@pytest.mark.parametrize("name", CASES)
def test_transformers_itself(name, tmp_path):
    import torch
    import transformers

    kind, sizes = ours.case_of("WhisperForConditionalGeneration", CASES[name], tmp_path / "empty")
    extractor = transformers.WhisperFeatureExtractor(feature_size=8, chunk_length=1)
    extractor.n_samples = ROWS * sounds.ROW_SAMPLES
    paths = heard(tmp_path)
    features = extractor(
        [sounds.samples("", path.read_bytes(), ROWS).astype(np.float32) for path in paths], sampling_rate=16000,
        return_tensors="pt", max_length=ROWS * sounds.ROW_SAMPLES,
    ).input_features  # fmt: skip

    def logits(model, features):
        with torch.no_grad():
            return model(input_features=features, decoder_input_ids=torch.from_numpy(texts())).logits.numpy()

    def generated(model):
        found = [model.generate(one[None], do_sample=False, max_new_tokens=NEW) for one in features]
        return [one[0].tolist() for one in found]

    for salt in range(50):
        case = sizes | {"salt": salt}
        folder = folder_of(case, tmp_path / f"in {salt}")
        model = ours.by_transformers(kind, folder)
        tokens = generated(model)
        if min(len({*text}) for text in tokens) >= 8 and tokens[0][8:] != tokens[1][8:]:
            break
    else:
        raise AssertionError("no weights with which a text does not repeat itself")
    want = logits(model, features)
    recorded = ours.recorded(GOLDEN, name, case | {"logits": want.tolist(), "tokens": tokens})
    assert np.abs(np.array(recorded["logits"]) - want).max() <= 1e-5 * np.abs(want).max()
    assert recorded["tokens"] == tokens
    opened = pretrained.open_folder(folder, [ours.EXACT])
    # The same frames, and those that are computed here.
    same = batch(opened.config.model, paths)
    params = ours.on_one_device(opened)
    assert np.abs(ours.compiled(opened.config.model, params, same) - want).max() <= 1e-5 * np.abs(want).max()
    for out in ours.written(opened, tmp_path):
        np.testing.assert_array_equal(logits(ours.by_transformers(kind, out), features), want)
