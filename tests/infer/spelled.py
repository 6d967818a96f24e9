"""Small tokenizers of the four kinds that published models have, and random texts of all scripts, emoji included."""

import json
import random
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from gspmd_lm.data.tokenizer import HuggingFace

KINDS = ("byte-level", "byte-fallback", "metaspace", "wordpiece")
SPECIAL = ["<unk>", "</s>", "<|tool|>"]
_SAMPLES = (
    "Once upon a time there was, don't you know, a naïve café; it wasn't 1,000 £.", "Ещё раз: привет, мир!",
    "Γειά σου Κόσμε", "שלום עולם", "مرحبا بالعالم", "नमस्ते दुनिया", "สวัสดีชาวโลก", "မင်္ဂလာပါ", "გამარჯობა", "አማርኛ ሰላም",
    "日本語のテキスト。", "你们都很棒", "안녕하세요 세계", "𝒜𝓑 𐍈𐌰 𓀀𓂀", "e\u0301 o\u0308 \u200d\u200b \ufeff",
    "  \n\t\ufffd▁ ▁▁",
)  # fmt: skip
_EMOJI = (
    "😁", "👍🏽", "👩\u200d🚀", "👨\u200d👩\u200d👧\u200d👦", "🇩🇪🇫🇷", "❤\ufe0f\u200d🔥", "1\ufe0f\u20e3",
    "🏴\U000e0067\U000e0062\U000e007f",
)  # fmt: skip


def text(rng: random.Random) -> str:
    """A random text of pieces of several scripts."""
    pieces = []
    for _ in range(rng.randint(1, 6)):
        sample = rng.choice(_SAMPLES)
        first = rng.randrange(len(sample))
        pieces.append(rng.choice([sample[first : first + rng.randint(1, 12)], rng.choice(_EMOJI)]))
    return rng.choice(["", " "]).join(pieces)


def _made(kind: str) -> tuple[Tokenizer, Any]:
    """A tokenizer of a kind that has seen nothing, and its trainer."""
    common: dict[str, Any] = {"special_tokens": SPECIAL, "show_progress": False}
    if kind == "byte-level":
        made = Tokenizer(models.BPE())
        made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        return made, trainers.BpeTrainer(vocab_size=330, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), **common)
    if kind == "byte-fallback":  # with the decoder of Llama 2's file
        made = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        made.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        return made, trainers.BpeTrainer(vocab_size=100, **common)
    if kind == "metaspace":
        made = Tokenizer(models.Unigram())
        made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
        return made, trainers.UnigramTrainer(vocab_size=250, unk_token="<unk>", **common)
    made = Tokenizer(models.WordPiece(unk_token="<unk>"))
    made.pre_tokenizer, made.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    return made, trainers.WordPieceTrainer(vocab_size=300, **common)


def tokenizer(kind: str, folder: Path) -> HuggingFace:
    """A tokenizer of one of KINDS that has seen little, with the special tokens SPECIAL."""
    made, trainer = _made(kind)
    knows_bytes = kind.startswith("byte")
    seen = [_SAMPLES[0], "Once upon a time there were words. 日 é ▁"] if knows_bytes else [*_SAMPLES, *_EMOJI]
    made.train_from_iterator(seen, trainer)
    file = json.loads(made.to_str())
    if kind == "byte-fallback":
        vocab = file["model"]["vocab"]
        vocab |= {f"<0x{byte:02X}>": len(vocab) + byte for byte in range(256)}
    path = folder / f"{kind}.json"
    path.write_text(json.dumps(file))
    return HuggingFace(path)
