"""The section `data` of a config: where tokens come from."""

import dataclasses
from typing import Annotated, Any, Literal

import pydantic
from pydantic.dataclasses import dataclass

from gspmd_lm.config.media import Images
from gspmd_lm.config.types import STRICT, BelowOne, Count, NonEmpty, Positive, Seed, Size

MOST_OF_SEVERAL = 31  # classes of which a text may have several: one bit for each in a label, and none for its sign


def _tag(value: Any) -> str:
    """The form in which a source is given, so that a message speaks of this form alone.

    The tags <...> stand in the places of pydantic's findings, and config_types takes them out.
    """
    return "<list>" if isinstance(value, list | tuple | dict) else "<text>"


def _tag_entry(value: Any) -> str:
    return "<one>" if isinstance(value, dict | Source) else "<text>"


def _tag_held_out(value: Any) -> str:
    return _tag(value) if isinstance(value, str | list | tuple | dict) else "<share>"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Source:
    """One of several sources, with what is its own."""

    path: str  # a folder, a file, a glob, an address such as hf://... or gs://..., or stdlib
    # Rows are drawn from the sources in proportion to their weights, which all have or none has. Without weights,
    # each row of all sources is read once per epoch.
    weight: Positive | None = None
    text_field: str = ""  # "" means data.text_field
    messages_field: str = ""  # "" means data.messages_field


_Text = Annotated[str, pydantic.Tag("<text>")]
_Several = Annotated[
    NonEmpty[Annotated[_Text | Annotated[Source, pydantic.Tag("<one>")], pydantic.Discriminator(_tag_entry)]],
    pydantic.Tag("<list>"),
]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Data:
    """Where tokens come from and how they are put into rows."""

    # stdlib | stdlib:pairs | random:ROWS | a folder, a file, a glob or an address, or a list of them (docs/data.md).
    # Entries of a list may be {path, weight, text_field, messages_field}.
    source: Annotated[_Text | _Several, pydantic.Discriminator(_tag)] = "stdlib"
    # bytes | path of a Hugging Face tokenizer.json, or of a .tiktoken file | bpe:TOKENS, which the run trains on its
    # source and keeps
    tokenizer: str = "bytes"
    # The numbers in .bin files of tokens that nothing describes, such as those of nanoGPT (docs/data.md).
    token_dtype: Literal["", "uint16", "uint32"] = ""
    # The field of a JSON object, or the column of a table, that holds the text, or a list of its tokens.
    text_field: str = "text"
    # The field or column that holds a conversation: a list of {role, content}. Rows are then written with the
    # tokenizer's chat template, and the loss is on the assistant's tokens. "" means that the source is text.
    messages_field: str = ""
    # The fields or columns of the texts of a record. With a label: one or two, and each row holds one record. For a
    # model with an encoder: the source, a text or the file of a sound, and the text that is made from it. For one that
    # draws masks: the image, the mask of an object, and, if there is one, the prompt that means it.
    fields: tuple[str, ...] = ()
    label: str = ""  # the field or column of the label
    # class: a label is the name of a class, and the training data has them all. classes: it is a list of such names, of
    # up to 31 classes, and each is scored for itself. number: it is a number to predict.
    label_kind: Literal["class", "classes", "number"] = "class"
    # objective: masks. What a record without a prompt has: a point of its mask, or the box around it.
    prompt: Literal["point", "box"] = "point"
    images: Images = dataclasses.field(default_factory=Images)  # how those of a model with `patches` are prepared
    # Of the tokens of a row, the share that is masked, or replaced, for a model that guesses these.
    masked_share: Annotated[float, pydantic.Field(gt=0, lt=1)] = 0.15
    # stream: rows are cut from one text, and attention crosses documents.
    packing: Literal["documents", "stream"] = "documents"
    # once: texts are tokenized before the run, and the tokens are kept. ahead: while it trains, and nothing is kept.
    tokenize: Literal["once", "ahead"] = "once"
    batch: Size = 32  # sequences per step, over all devices
    # Rows per step, with those that no source gives and that have no targets. They fill devices that do not divide
    # batch. 0 means batch.
    padded_batch: Count = 0
    seq: Size = 256  # tokens per sequence
    # Tokens per source that model.encoder reads; 0 means seq. With model.frames or
    # model.vision: rows per sound or image; 0 means as many as one has.
    source_seq: Count = 0
    # For evaluation: a share of the documents, chosen by their content; or a source of its own, written as `source` is.
    held_out: Annotated[
        Annotated[BelowOne, pydantic.Tag("<share>")] | _Text | _Several, pydantic.Discriminator(_tag_held_out)
    ] = 0.02
    seed: Seed = 0  # decides the order of rows

    def __post_init__(self):
        wrong = []
        weights = [one.weight for one in self.sources]
        if None in weights and any(weights):
            wrong.append("source: some entries have a weight and others have none: give one to each or to none")
        for one in self.held_out_sources:
            if one.weight:
                wrong.append(f"held_out: {one.path} has a weight, but evaluation reads each row once: drop the weight")
        fields = {one.messages_field for one in self.sources + self.held_out_sources}
        if "" in fields and len(fields) > 1:
            wrong.append("source: some entries have a messages_field and others have none: texts and conversations "
                         "do not mix")  # fmt: skip
        if 0 < self.padded_batch < self.batch:
            wrong.append(f"padded_batch={self.padded_batch} is smaller than batch={self.batch}: set it to 0 or to more")
        if wrong:
            raise ValueError("\n".join(wrong))

    @property
    def rows(self) -> int:
        """Rows per step over all devices, those without targets included."""
        return self.padded_batch or self.batch

    @property
    def sources(self) -> tuple[Source, ...]:
        """The sources to train on, each with its fields filled in."""
        return self._fill(self.source)

    @property
    def held_out_share(self) -> float:
        """The share of the documents that is held out; 0 if evaluation has sources of its own."""
        return self.held_out if isinstance(self.held_out, int | float) else 0.0

    @property
    def held_out_sources(self) -> tuple[Source, ...]:
        """The sources for evaluation, likewise; () if `held_out` is a share of the others."""
        return () if isinstance(self.held_out, int | float) else self._fill(self.held_out)

    @property
    def conversations(self) -> bool:
        """Whether the sources hold conversations, not texts."""
        return any(one.messages_field for one in self.sources)

    def _fill(self, value: str | tuple[str | Source, ...]) -> tuple[Source, ...]:
        listed = (value,) if isinstance(value, str) else value
        return tuple(
            dataclasses.replace(
                one, text_field=one.text_field or self.text_field,
                messages_field=one.messages_field or self.messages_field,
            )
            for one in (Source(path=one) if isinstance(one, str) else one for one in listed)
        )  # fmt: skip
