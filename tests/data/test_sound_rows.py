"""Sounds of tables: their frames, their texts, and what is no sound."""

import json
import wave

import numpy as np
import pytest

from gspmd_lm import InputError
from gspmd_lm.data import loader, sounds
from tests.data import configs, media

RATE = 16000


def spoken(number, seconds):
    """Samples from -1 to 1 of a tone that rises, and of noise."""
    time = np.arange(int(seconds * RATE)) / RATE
    noise = 0.02 * np.random.default_rng(number).standard_normal(len(time))
    return 0.4 * np.sin(2 * np.pi * (150 * number + 900 * time) * time) + noise


def written(path, samples, rate=RATE, width=2, channels=1):
    """A wav file of whole numbers."""
    whole = np.round(np.clip(samples, -1, 1) * (2 ** (8 * width - 1) - 1)).astype("<i4")
    raw = whole.view(np.uint8).reshape(-1, 4)[:, :width]
    raw = (raw ^ 128) if width == 1 else raw
    with wave.open(str(path), "wb") as file:
        file.setparams((channels, width, rate, 0, "NONE", ""))
        file.writeframes(np.repeat(raw, channels, axis=0).tobytes())
    return path


def config_of(source, *, bands=8, held_out=0.0, fields=("file", "text"), model=(), **data):
    own = {"vocab": 257, "context": 16, "frames": {"bands": bands},
           "encoder": {"context": 20, "start_token": 3, "first_tokens": [5, 6]}}  # fmt: skip
    of_data = {"source": str(source), "batch": 4, "seq": 12, "source_seq": 24, "held_out": held_out, "fields": fields}
    return configs.config_of(of_data | data, own | dict(model), "seq2seq", configs.MEDIA, steps=3, trackers=[])


@pytest.fixture
def folder(tmp_path):
    """Five sounds, and a table that names them."""
    (tmp_path / "speech" / "wav").mkdir(parents=True)
    lines = ["file,text"]
    for number in range(5):
        written(tmp_path / "speech" / "wav" / f"{number}.wav", spoken(number, 0.1 + 0.05 * number))
        lines.append(f"wav/{number}.wav,text {number}")
    (tmp_path / "speech" / "table.csv").write_text("\n".join(lines))
    return tmp_path / "speech"


def test_a_row_has_the_frames_around_each_of_its_places_and_a_text(folder):
    train, held_out = loader.open_loaders(config_of(folder))
    assert held_out is None and len(train.rows) == 5 and "skipped" not in train.description
    found = train.rows.read([1, -1])
    sound = sounds.samples("", (folder / "wav" / "1.wav").read_bytes(), 20)
    np.testing.assert_allclose(sound, spoken(1, 0.15), atol=1e-4)
    frames = sounds.log_mel(np.pad(sound, (0, 20 * 320 - len(sound))), 8)
    assert frames.shape == (40, 8) and frames.max() - frames.min() == pytest.approx(2)
    heard = found["source_frames"]
    assert heard.shape == (2, 24, 5, 8) and heard.dtype == np.float32
    for place in (1, 7, 18):
        np.testing.assert_allclose(heard[0, place], frames[2 * place - 2 : 2 * place + 3], atol=1e-6)
    assert not heard[0, 0, :2].any() and not heard[0, 19, 4:].any() and not heard[0, 20:].any()
    assert found["source_segment_ids"].tolist() == [[1] * 20 + [0] * 4, [0] * 24]
    assert found["source_positions"][0].tolist() == [*range(20), 0, 0, 0, 0]
    text = [5, 6, *b"text 1", 256]
    assert found["targets"].tolist() == [text + [-1] * 3, [-1] * 12]
    assert found["tokens"][0].tolist() == [3, *text[:-1], 0, 0, 0]
    assert found["segment_ids"][:, :10].tolist() == [[1] * 9 + [0], [0] * 10]


def test_frames_are_logarithms_of_the_power_in_bands():
    """By their definitions: mirrored ends, a Hann window, a Fourier sum, and triangles on Slaney's scale of mels."""
    bands, length, hertz = 8, 1600, np.arange(201) * 40.0
    sound = np.random.default_rng(0).normal(size=length) * (np.arange(length) > 800)
    at = np.abs(160 * np.arange(10)[:, None] - 200 + np.arange(400))
    pieces = sound[np.where(at < length, at, 2 * (length - 1) - at)] * np.sin(np.pi * np.arange(400) / 400) ** 2
    power = np.abs(pieces @ np.exp(-2j * np.pi * np.outer(np.arange(400), np.arange(201)) / 400)) ** 2
    grid = np.linspace(1, 8000, 800_000)
    mels = np.where(grid < 1000, 3 * grid / 200, 15 + 27 * np.log(grid / 1000) / np.log(6.4))
    edges = np.interp(np.linspace(0, mels[-1], bands + 2), mels, grid)
    edges[0] = 0
    triangles = [np.interp(hertz, edges[i : i + 3], [0, 2, 0]) / (edges[i + 2] - edges[i]) for i in range(bands)]
    logs = np.log10(np.maximum(power @ np.transpose(triangles), 1e-10))
    assert logs.min() == -10 < logs.max() - 8
    np.testing.assert_allclose(sounds.log_mel(sound, bands), (np.maximum(logs, logs.max() - 8) + 4) / 4, atol=1e-4)
    assert (sounds.log_mel(np.zeros(length), bands) == (-10 + 4) / 4).all()


def test_tables_of_other_kinds_hold_the_same_sounds(folder, tmp_path):
    contents = [(folder / "wav" / f"{number}.wav").read_bytes() for number in range(5)]
    columns = {
        "audio": [{"bytes": content, "path": "other.wav"} for content in contents], "plain": contents,
        "file": [f"wav/{number}.wav" for number in range(5)], "text": [f"text {number}" for number in range(5)],
    }  # fmt: skip
    media.check_columns(config_of, folder, columns, 5)


def test_rows_are_the_same_after_a_restart_and_equal_sounds_are_on_one_side(folder):
    (folder / "wav" / "copy.wav").write_bytes((folder / "wav" / "0.wav").read_bytes())
    with open(folder / "table.csv", "a") as table:
        table.write("\nwav/copy.wav,text 9")
    config = config_of(folder, held_out=0.4)
    assert media.checked_restart(config, lambda rows: rows.items) == 6


@pytest.mark.parametrize(("width", "channels"), [(1, 1), (2, 2), (3, 1), (4, 2)])
def test_samples_of_each_width_are_read(width, channels, tmp_path):
    path = written(tmp_path / "a.wav", spoken(2, 0.1), width=width, channels=channels)
    np.testing.assert_allclose(
        sounds.samples("", path.read_bytes(), 20), spoken(2, 0.1), atol=2 * 2 ** -(8 * width - 1)
    )


def broken(folder, what):
    """Makes the first sound, or its text, unusable."""
    path, table = folder / "wav" / "0.wav", folder / "table.csv"
    if what == "rate":
        written(path, spoken(0, 0.1), rate=44100)
    elif what == "long":
        written(path, spoken(0, 0.5))
    elif what == "empty":
        written(path, np.zeros(0))
    elif what == "cut":
        path.write_bytes(path.read_bytes()[:-100])
    elif what == "pipe":
        path.write_bytes(path.read_bytes()[:40] + b"\xff" * 4 + path.read_bytes()[44:])
    elif what == "wide":
        content = bytearray(path.read_bytes())
        content[32:36] = b"\x08\x00\x40\x00"
        path.write_bytes(content)
    elif what == "long part":
        path.write_bytes(path.read_bytes()[:36] + b"LIST" + b"\xff" * 4 + path.read_bytes()[44:])
    elif what == "no name":
        (folder / "table.jsonl").write_text(json.dumps({"file": "wav/\0.wav", "text": "a"}))
        table.unlink()
    elif what == "no wav":
        path.write_bytes(b"ID3" + bytes(100))
    elif what == "nothing":
        path.write_bytes(b"")
    elif what == "missing":
        path.unlink()
    elif what == "long text":
        table.write_text("file,text\nwav/0.wav,a text that is long")
    elif what == "too long text":
        table.write_text(f"file,text\nwav/0.wav,{'a' * 30}")
    elif what == "column":
        table.write_text("sound,text\nwav/0.wav,a")
    elif what == "no text":
        (folder / "table.jsonl").write_text(json.dumps({"file": "wav/0.wav", "text": None}))
        table.unlink()


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("rate", r"table\.csv:2: .*0\.wav: 44,100 samples a second, and sounds need 16,000\n  fix   ffmpeg"),
        ("long", r"0\.wav: 0\.50 s, and model\.encoder\.context=20 holds 0\.4 s\n  fix   cut it into pieces"),
        ("empty", r"0\.wav: there are no samples\n  fix   make it whole"),
        ("cut", r"0\.wav: it ends early"),
        ("pipe", r"0\.wav: it ends early, or its header says a wrong length\n  fix   make it whole, as ffmpeg"),
        ("wide", r"0\.wav: samples of 64 bits, and 32 are the most\n  fix   ffmpeg"),
        ("no name", r"cannot be read \(embedded null byte\)\n  fix "),
        ("no wav", r"0\.wav: cannot be read as a wav file of whole numbers \(.*\)\n  fix   ffmpeg"),
        ("nothing", r"0\.wav: cannot be read as a wav file of whole numbers \(it ends early\)"),
        ("long part", r"0\.wav: cannot be read as a wav file of whole numbers \(it ends early\)"),
        ("missing", r"0\.wav: cannot be read \(No such file or directory\)"),
        ("long text", r"table\.csv:2.*: text: 22 tokens, .* data\.seq=12 \(model\.context=16\)\n  fix   cut the sound"),
        ("too long text", r"text: 33 tokens"),
        ("column", r"table\.csv:2: file is not one of sound, text: there is no sound\n  fix   name in data\.fields"),
        ("no text", r"table\.jsonl:1.*: text is empty"),
    ],
)
def test_what_is_no_sound_with_a_text_is_refused_with_its_place(what, words, folder):
    broken(folder, what)
    with pytest.raises(InputError, match=words):
        loader.open_loaders(config_of(folder))


def test_settings_that_contradict_each_other_are_refused(folder):
    for changes, words in (
        ({"source_seq": 16}, r"model\.frames gives 20 rows of a sound: set data\.source_seq=16 to 20 or more"),
        ({"model": {"encoder": None}}, r"model\.frames needs model\.encoder"),
        ({"model": {"encoder": {"suppressed": [257]}}}, r"encoder\.suppressed=257, which is not below vocab=257"),
    ):
        with pytest.raises(InputError, match=words):
            config_of(folder, **changes)


def test_whoever_has_no_sounds_is_told(folder, tmp_path):
    (tmp_path / "none").mkdir()
    with pytest.raises(InputError, match="nothing to read"):
        loader.open_loaders(config_of(tmp_path / "none"))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parity
@pytest.mark.parametrize("bands", [80, 128])
def test_frames_are_those_of_transformers(bands):
    import transformers

    extractor = transformers.WhisperFeatureExtractor(feature_size=bands)
    sound = spoken(1, 7.3)
    padded = np.pad(sound, (0, 480_000 - len(sound)))
    found = sounds.log_mel(padded, bands).T
    exact = extractor._np_extract_fbank_features(padded[None], "cpu")[0]
    np.testing.assert_allclose(found, exact, rtol=0, atol=1e-6)
    # With torch, transformers computes in float32.
    quick = extractor(sound.astype(np.float32), sampling_rate=RATE, return_tensors="np").input_features[0]
    np.testing.assert_allclose(found, quick, rtol=0, atol=2e-4)
