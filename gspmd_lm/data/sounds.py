"""Sounds with texts, from tables that name wav files or hold them, as frames of an encoder (arXiv 2212.04356)."""

import contextlib
import dataclasses
import functools
import io
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from gspmd_lm import files
from gspmd_lm.config import Config, ModelConfig
from gspmd_lm.config.media import WINDOW
from gspmd_lm.data import labelled, media, trained
from gspmd_lm.data.remote import Progress
from gspmd_lm.data.tokenizer import Tokenizer, load_tokenizer
from gspmd_lm.errors import InputError

RATE, HOP, FOURIER = 16_000, 160, 400  # samples in a second, from frame to frame, and in a Fourier transform
ROW_SAMPLES = 2 * HOP  # of a row of the encoder
WIDEST = 4  # bytes of a sample
LEAST_POWER = 1e-10
RANGE = 8.0  # powers of ten below the loudest number, at which quieter numbers are cut off
_CONVERT = "ffmpeg -i FILE -ar 16000 -ac 1 -c:a pcm_s16le FILE.wav"


@dataclasses.dataclass(frozen=True, eq=False)
class SoundRows(media.Rows):
    """Rows with one sound and its text in each."""

    seq: int
    source_seq: int
    model: ModelConfig

    def empty(self, count: int) -> dict[str, np.ndarray]:
        """What `pairs.PairRows` gives of pairs, with float32 source_frames [count, source_seq, WINDOW, bands] in place
        of source_tokens.
        """
        widths = {"": self.seq, "source_": self.source_seq}
        fields = {
            f"{prefix}{name}": np.zeros((count, width), np.int32)
            for prefix, width in widths.items()
            for name in ("segment_ids", "positions")
        }
        tokens, targets = np.zeros((count, self.seq), np.int32), np.full((count, self.seq), -1, np.int32)
        frames = np.zeros((count, self.source_seq, WINDOW, sizes(self.model)[1]), np.float32)
        return fields | {"tokens": tokens, "targets": targets, "source_frames": frames}

    def fill(self, fields: dict[str, np.ndarray], i: int, item: media.Item) -> None:
        assert self.model.encoder
        frames = encoder_frames(item.encoded, self.model)
        rows, length = len(frames), len(item.text)
        fields["source_frames"][i, :rows] = frames
        fields["source_segment_ids"][i, :rows] = 1
        fields["source_positions"][i, :rows] = np.arange(rows)
        fields["tokens"][i, :length] = [self.model.encoder.start_token, *item.text[:-1]]
        fields["targets"][i, :length] = item.text
        fields["segment_ids"][i, :length] = 1
        fields["positions"][i, :length] = np.arange(length)


def sizes(model: ModelConfig) -> tuple[int, int]:
    """The rows that the encoder makes of a sound, and the numbers of a frame."""
    assert model.frames and model.encoder_config
    return model.encoder_config.context, model.frames.bands


def open_sounds(config: Config, progress: Progress | None = None) -> media.Opened:
    """The sounds of `data.source` and of `data.held_out`, a share of which is chosen by content.

    Raises an InputError that names the place of a sound that is no wav file, is empty or too long, has another rate, or
    has a text that is too long.
    """
    data, model = config.data, config.model
    tokens = load_tokenizer(data.tokenizer)
    trained.check_vocabulary(config, tokens.vocab_size)
    found = media.read_tables(data, (".wav",), "sounds", functools.partial(_sound, config, tokens), progress)
    rows = functools.partial(SoundRows, seq=data.seq, source_seq=config.source_seq, model=model)
    settings = sizes(model), model.encoder, data.seq, config.source_seq
    return media.open_rows(data, "sounds", "sounds", rows, found, settings)


def _sound(config: Config, tokens: Tokenizer, table: Path, where: str, record: dict[str, Any]) -> media.Item:
    """The sound of a record and its text. It is read once, for its size and what it holds."""
    data, model = config.data, config.model
    assert model.encoder
    name, text_name = data.fields
    encoded, content = media.content_of(table, where, record, name, "sound")
    samples(encoded.place, content, sizes(model)[0])
    text, _ = labelled.valid(labelled.text_of(record, text_name, encoded.place))
    ids = np.asarray([*model.encoder.first_tokens, *tokens.encode(text.encode()), tokens.end], np.int32)
    if len(ids) > data.seq:
        longer = f"set data.seq to {len(ids):,}" if len(ids) <= model.context else "cut the sound and its text"
        raise InputError(
            f"{encoded.place}: {text_name}: {len(ids):,} tokens, first and last ones included, are more than "
            f"data.seq={data.seq:,} (model.context={model.context:,})\n"
            f"  fix   {longer}, or leave the record out"
        )
    return media.Item(encoded, text=ids)


def read_sound_frames(name: str, model: ModelConfig) -> np.ndarray:
    """The frames of a wav file, as `encoder_frames` gives them."""
    return encoder_frames(media.Encoded.of(name, media.bytes_of(files.expand_user(name))), model)


def encoder_frames(encoded: media.Encoded, model: ModelConfig) -> np.ndarray:
    """The frames that each row of the encoder hears, float32 [rows, WINDOW, bands]: those around frame 2 s of row s.

    Silence follows a sound that is shorter. Beyond the frames are zeros. Raises InputError as `samples` does.
    """
    rows, bands = sizes(model)
    sound = samples(encoded.place, encoded.read(), rows)
    frames = log_mel(np.pad(sound, (0, rows * ROW_SAMPLES - len(sound))), bands)
    around = np.pad(frames, ((WINDOW // 2, WINDOW // 2), (0, 0))).astype(np.float32)
    return np.lib.stride_tricks.sliding_window_view(around, WINDOW, axis=0)[::2].transpose(0, 2, 1)


def samples(place: str, encoded: bytes, rows: int) -> np.ndarray:
    """The samples of a wav file, float64 from -1 to 1, the mean of its channels.

    Raises an InputError that begins with `place` if it has another rate than RATE, none, or more than `rows` hold.
    """
    with _reading(place), wave.open(io.BytesIO(encoded)) as file:
        rate, width, channels, count = file.getframerate(), file.getsampwidth(), file.getnchannels(), file.getnframes()
        if rate != RATE:
            raise InputError(f"{place}: {rate:,} samples a second, and sounds need {RATE:,}\n  fix   {_CONVERT}")
        if width > WIDEST:
            raise InputError(f"{place}: samples of {8 * width} bits, and {8 * WIDEST} are the most\n  fix   {_CONVERT}")
        content = file.readframes(count)
    if len(content) != count * width * channels or not count:  # a program that writes to a pipe cannot say the length
        what = "there are no samples" if not count else "it ends early, or its header says a wrong length"
        raise InputError(f"{place}: {what}\n  fix   make it whole, as {_CONVERT} does, or leave it out")
    if count > rows * ROW_SAMPLES:
        most = f"{rows * ROW_SAMPLES / RATE:g} s"
        raise InputError(
            f"{place}: {count / RATE:.2f} s, and model.encoder.context={rows:,} holds {most}\n"
            "  fix   cut it into pieces with texts of their own, or leave it out"
        )
    raw = np.frombuffer(content, np.uint8).reshape(-1, width)
    if width == 1:  # from 0 to 255; wider ones have a sign
        raw = raw ^ np.uint8(128)
    padded = np.concatenate([np.zeros((len(raw), WIDEST - width), np.uint8), raw], axis=1)
    return (padded.view("<i4").reshape(-1, channels) / 2.0**31).mean(axis=1)


def log_mel(sound: np.ndarray, bands: int) -> np.ndarray:
    """The frames of samples, float64 [samples / HOP, bands]: logarithms of the power in bands, scaled for Whisper."""
    around = np.pad(sound, FOURIER // 2, mode="reflect")
    hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(FOURIER) / FOURIER)
    pieces = np.lib.stride_tricks.sliding_window_view(around, FOURIER)[::HOP][: len(sound) // HOP]
    power = np.abs(np.fft.rfft(pieces * hann)) ** 2
    logarithms = np.log10(np.maximum(power @ mel_filters(bands), LEAST_POWER))
    return (np.maximum(logarithms, logarithms.max() - RANGE) + 4) / 4


@functools.lru_cache(maxsize=4)
def mel_filters(bands: int) -> np.ndarray:
    """What each frequency of a Fourier transform adds to each band, [FOURIER / 2 + 1, bands].

    A band is a triangle between the middles of its neighbours, which are equally far from each other on the mel scale
    of Slaney's Auditory Toolbox: linear up to 1,000 Hz, and logarithmic above. All triangles have the same area.
    """
    per_mel, knee, step = 200 / 3, 15.0, np.log(6.4) / 27
    mels = np.linspace(0, knee + np.log(RATE / 2 / 1000) / step, bands + 2)
    middles = np.where(mels < knee, per_mel * mels, 1000 * np.exp(step * (mels - knee)))
    frequencies = np.linspace(0, RATE / 2, FOURIER // 2 + 1)[:, None]
    below, middle, above = middles[:-2], middles[1:-1], middles[2:]
    rising, falling = (frequencies - below) / (middle - below), (above - frequencies) / (above - middle)
    return np.maximum(0, np.minimum(rising, falling)) * 2 / (above - below)


@contextlib.contextmanager
def _reading(place: str) -> Iterator[None]:
    """A context in which what is said of a wav file becomes an InputError that names its place."""
    try:
        yield
    except (wave.Error, EOFError, RuntimeError) as error:  # RuntimeError: a part is said to be longer than the file
        raise InputError(
            f"{place}: cannot be read as a wav file of whole numbers ({str(error) or 'it ends early'})\n"
            f"  fix   {_CONVERT}, or leave it out"
        ) from error
