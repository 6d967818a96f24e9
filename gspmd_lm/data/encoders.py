"""Opens the source that a config names, and the encoder that turns its documents into tokens."""

from collections.abc import Sequence
from pathlib import Path

from gspmd_lm.config import Config
from gspmd_lm.data import chat, labelled, pairs, sources, tokenizer, trained
from gspmd_lm.data.tokens import Encoder
from gspmd_lm.errors import InputError


def open_encoder(config: Config) -> Encoder:
    """What makes tokens of texts, or of the records that `data` describes.

    Raises InputError if the tokenizer cannot be read, is yet to be trained, or does not fit the model.
    """
    data = config.data
    if data.conversations:
        encoder = chat.Chat(data.tokenizer)
    else:
        encoder = tokenizer.load_tokenizer(data.tokenizer)
        if data.fields:
            encoder = pairs.Pairs(config, encoder) if config.model.encoder else labelled.Labelled(data, encoder)
    trained.check_vocabulary(config, encoder.vocab_size)
    return encoder


def open_source(
    config: Config, progress: sources.Progress | None = None, known: Sequence[str] = (), hashed: bool = True
) -> tuple[sources.DocumentSource, Encoder, Path | None]:
    """The source of a config, what makes tokens of it, and the file of a tokenizer that is trained on the source.

    known: the classes that the model has learnt, in their order. hashed: see `sources.open_source`. Raises InputError
    if the source, the tokenizer or the labels cannot be read or do not fit the model.
    """
    data = config.data
    if size := tokenizer.trained_size(data.tokenizer):
        source = sources.open_source(data, progress, hashed=hashed)
        path = trained.tokenizer_of_source(source, size, progress, config.objective in ("masked", "replaced"))
        encoder = tokenizer.load_tokenizer(str(path))
        trained.check_vocabulary(config, encoder.vocab_size)
        return source, encoder, path
    encoder = open_encoder(config)
    of_record = encoder.document if isinstance(encoder, chat.Chat | labelled.Labelled | pairs.Pairs) else None
    source = sources.open_source(data, progress, of_record, hashed)
    if isinstance(encoder, labelled.Labelled):
        encoder.learn_classes(source, known, progress)
        check_classes(config, encoder)
    return source, encoder, None


def take_classes(config: Config, encoder: labelled.Labelled, classes: tuple[str, ...], known: Sequence[str]) -> None:
    """Gives an encoder the classes with which the tokens of a folder were made.

    Raises InputError if the model has no room for them, or has learnt them in another order.
    """
    if labelled.order_classes(classes, known) != classes:
        raise InputError(
            f"data.source: the tokens have the classes in the order {', '.join(classes)}, and the model has learnt "
            f"{', '.join(known)}\n  fix   name the texts in place of the tokens"
        )
    encoder.classes = classes
    check_classes(config, encoder)


def check_classes(config: Config, encoder: labelled.Labelled) -> None:
    """Raises InputError if the model has no room for the token types or the classes of labelled texts."""
    data = config.data
    if encoder.has_types and config.model.embedding.token_types == 1:
        raise InputError(
            f"data.tokenizer={data.tokenizer} gives a second text the token type 1, and "
            "model.embedding.token_types is 1\n"
            "  fix   name the model's own tokenizer.json, or set model.embedding.token_types to 2"
        )
    if data.label_kind != "number" and len(encoder.classes) != config.model.num_classes:
        raise InputError(
            f"data.label={data.label} has {len(encoder.classes):,} labels, and model.classes.count is "
            f"{config.model.num_classes:,} ({labelled.about_classes(encoder.classes)})\n"
            f"  fix   --set model.classes.count={len(encoder.classes)}, or correct the labels"
        )
