"""The objective follows from the model, and what does not fit it is refused."""

import dataclasses
from typing import get_args

import pytest

from gspmd_lm import config
from gspmd_lm.config import Encoder, Masks, Patches, Queries, Vision
from gspmd_lm.config.objective import _FOLLOWS, _RECORDS, Objective
from gspmd_lm.errors import InputError

FULL = {"attention.mask": "full"}
SIDE = Patches(image=8, size=4)
IMAGES = FULL | {
    "vocab": 0, "padded_vocab": 0, "context": 4, "positions": "learned",
    "patches": dataclasses.replace(SIDE, class_row=False, pool="mean"),
}  # fmt: skip
SEEN = {"positions": "learned", "data": {"source_seq": 8}}
READING = SEEN | {"vision": Vision(patches=SIDE, queries=Queries(rows=2))}
PAIRS = ("two texts",)
# What a model predicts, its settings, and which of RECORDS it reads.
MODELS = [
    ("causal", {}, ("conversations",)),
    ("causal", READING, PAIRS),
    ("masked", FULL, ()),
    ("classes", FULL | {"classes.count": 2}, ("one with a label", "two with a label")),
    ("classes", IMAGES | {"classes.count": 2}, ("one with a label",)),
    ("replaced", FULL | {"classes.count": 1, "classes.of": "tokens"}, ()),
    ("seq2seq", {"encoder": Encoder()}, PAIRS),
    ("seq2seq", READING | {"encoder": Encoder()}, PAIRS),
    ("contrastive", SEEN | {"vision": Vision(patches=SIDE, projection=8)}, PAIRS),
    ("masks", IMAGES | {"masks": Masks()}, ("two texts", "three texts")),
]


@pytest.mark.parametrize(("objective", "settings", "reads"), MODELS)
def test_it_follows_from_the_model_and_may_be_named(objective, settings, reads, small):
    found = small(**settings)
    assert found.objective == objective
    assert small(**settings, objective=objective) == found
    assert config.from_dict(config.to_dict(found), "again") == found
    for other in {*get_args(Objective)} - {objective}:
        with pytest.raises(ValueError, match=f"objective: {other} needs model.*it is {objective}: leave objective out"):
            small(**settings, objective=other)


def test_each_objective_follows_from_a_setting_and_has_records():
    assert {*get_args(Objective)} == {*_FOLLOWS.values()} == {*_RECORDS} == {objective for objective, *_ in MODELS}


RECORDS = {
    "conversations": {"messages_field": "m"},
    "one text": {"fields": ("a",)},
    "one with a label": {"fields": ("a",), "label": "l"},
    "two texts": {"fields": ("a", "b")},
    "two with a label": {"fields": ("a", "b"), "label": "l"},
    "three texts": {"fields": ("a", "b", "c")},
    "a label": {"label": "l"},
    "both": {"fields": ("a",), "label": "l", "messages_field": "m"},
}


@pytest.mark.parametrize(("objective", "settings", "reads"), MODELS)
def test_each_model_has_records_of_its_own(objective, settings, reads, small):
    for name, data in RECORDS.items():
        changes = settings | {"data": settings.get("data", {}) | data}
        if name in reads:
            small(**changes)
        else:
            with pytest.raises(ValueError, match=r" needs .*: this config has data\.\w+"):
                small(**changes)


@pytest.mark.parametrize(("kind", "fits"), [("class", (2, 40)), ("classes", (2, 31)), ("number", (1,))])
def test_a_kind_of_labels_has_numbers_of_classes(kind, fits, small):
    for count in (1, 2, 31, 32, 40):
        settings = FULL | {"classes.count": count, "data": {"label_kind": kind}}
        if fits[0] <= count <= fits[-1]:
            assert small(**settings).model.num_classes == count
        else:
            with pytest.raises(ValueError, match=f"label_kind: {kind} goes with .*, not {count}: set one of them"):
                small(**settings)


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        ("optimizer.eps=0", "optimizer.eps: must be at least 1e-30, got 0"),
        ("train.samples.prompts=[]", "train.samples.prompts: must have at least one entry, got []"),
        ("train.samples.prompts=['']", "train.samples.prompts.0: must not be empty, got ''"),
        ("data.source=[]", "data.source: must have at least one entry, got []"),
        ("model.masks={embed: 36}", "model.masks.embed: must be a multiple of 8, got 36"),
    ],
)
def test_a_type_says_what_is_wrong(sets, message):
    with pytest.raises(InputError) as error:
        config.load("tiny", [sets])
    assert message in [line.strip() for line in str(error.value).splitlines()]
