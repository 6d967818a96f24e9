"""The keys of a config, as the verb `keys` and the page of the site show them, against config/."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Annotated, Literal

import jsonschema
import pydantic
import pytest

from gspmd_lm import config
from gspmd_lm.config import Classes, core_yaml, nest, types
from gspmd_lm.config.layers import Convolution, RelativeVectors
from gspmd_lm.config.masks import Masks
from gspmd_lm.config.media import Frames, Patches
from gspmd_lm.config.stacks import Encoder, Queries, Vision
from gspmd_lm.config.windows import Windows
from gspmd_lm.errors import InputError
from gspmd_lm.sharding import rules_file, rules_keys
from gspmd_lm.show import config_keys as keys

ROOT = Path(__file__).parent.parent.parent
KEYS = [key for section in keys.sections() for key in section.keys]


def test_every_key_has_a_meaning():
    assert [key.name for key in KEYS if not re.fullmatch(r"\S.*\.", key.meaning)] == []
    assert all(section.about for section in keys.sections())


def test_the_page_has_every_key_and_its_place_in_the_site():
    listed = re.findall(r"^\| `([^`]+)` \|", keys.page(), re.M)
    assert listed == [key.name for key in KEYS] and "config.md" in (ROOT / "mkdocs.yml").read_text()
    assert not (ROOT / "docs/config.md").exists(), "docs/site.py makes it when the site is built"


def test_every_key_can_be_set_and_has_the_default_that_is_said():
    """Laying each default over a config changes nothing, and a key that is required cannot be left out."""
    raw = {
        "name": "x",
        "model": nest({
            "lora": {"targets": ["wq"]}, "norm": {}, "feed_forward": {}, "embedding": {}, "logits": {}, "residual": {},
            "attention.rope": {"scaling": {}, "dim": 4}, "attention.temperature": {},
            "attention.relative_positions": {}, "attention.linear": {"key_heads": 1, "value_heads": 1, "head_dim": 4},
            "attention.latent": {"kv_rank": 8, "v_head_dim": 4}, "experts": {"count": 2, "per_token": 1},
        }),
        "data": {"images": {}},
        "optimizer": {"learning_rate": 3e-4},  # by default, adapters have another one
        "train": {},
    }  # fmt: skip
    sizes = dict.fromkeys(["layers", "embed", "heads", "kv_heads", "head_dim", "mlp", "vocab", "context"], 8)
    raw["model"] |= sizes | {"context": 256}
    raw["train"] |= {"steps": 1, "samples": {"prompts": ["a"]}}
    wanted = config.from_dict(raw, "here")
    plain = config.to_dict(wanted) | {"objective": None}  # which says that it follows from the model
    # Most others go without these.
    apart = {"model.patches": Patches(image=8, size=4), "model.encoder": Encoder(), "model.frames": Frames(),
             "model.attention.relative_vectors": RelativeVectors(), "model.convolution": Convolution(),
             "model.vision.patches": Patches(image=8, size=4),
             "model.vision": Vision(patches=Patches(image=8, size=4)), "model.vision.queries": Queries(rows=2),
             "model.windows": Windows(size=2), "model.masks": Masks(), "model.classes": Classes(count=1)}  # fmt: skip
    of_apart = [key for key in KEYS if key.name.rpartition(".")[0] in apart]
    for key in of_apart:
        section, _, field = key.name.rpartition(".")
        default = getattr(apart[section], field)
        default = list(default) if isinstance(default, tuple) else default
        assert key.default == keys.REQUIRED or core_yaml.load(key.default) == default, key
    for key in [key for key in KEYS if "[]" not in key.name and key not in of_apart]:  # a list is empty by default
        *sections, field = key.name.split(".")
        within, again = plain, raw
        for section in sections:
            within, again = within[section], again[section]
        assert field in within, key
        if key.default != keys.REQUIRED and field not in again:
            assert core_yaml.load(key.default) == within[field], key
            config.override(raw, [f"{key.name}={key.default}"], "here")
        elif key.default == keys.REQUIRED:
            kept = again.pop(field)
            with pytest.raises(InputError, match=f"{key.name}: missing"):
                config.from_dict(raw, "here")
            again[field] = kept
    assert config.from_dict(raw, "here") == wanted
    assert len(KEYS) == len({key.name for key in KEYS}) == sum(len(section.keys) for section in keys.sections())


def test_what_config_keys_reads_of_a_class():
    @dataclasses.dataclass
    class Inner:
        """One of several. It has a key."""

        weight: Annotated[float, pydantic.Field(gt=0)] = 1.0  # how much of it

    @dataclasses.dataclass
    class Outer:
        """What holds them."""

        many: tuple[Inner, ...] = ()
        # Written above,
        # on two lines.
        choice: Literal["a", "b", "c"] | None = "b"  # and beside
        size: types.BelowOne = 0.5  # some_word is kept
        text: str = "yes"  # text: as it is

        def unrelated(self):
            x: int = 3  # not a key
            return x

    found = {section.name: section for section in keys.sections(Outer)}
    assert [dataclasses.astuple(key) for key in found[""].keys] == [
        ("many", "list of mapping", "[]", "One of several. It has a key."),
        ("choice", "a, b or c or null", "b", "Written above, on two lines. and beside."),
        ("size", "number from 0 to below 1", "0.5", "some_word is kept."),
        ("text", "text", "'yes'", "text: as it is."),
    ]
    assert [dataclasses.astuple(key) for key in found["many[]"].keys] == [
        ("many[].weight", "number above 0", "1.0", "How much of it.")
    ]


def shown(word):
    return re.findall(r"^  (\S+): ", keys.text(word), re.M)


@pytest.mark.long
def test_the_keys_that_contain_a_word():
    groups = [*keys.every_key()]
    assert shown("rope") == [key.name for group in groups for key in group.keys
                             if "rope" in key.name or re.search(r"\brope", key.meaning)]  # fmt: skip
    assert len(shown("rope")) > 5
    assert shown("") == [key.name for group in groups for key in group.keys]
    assert {"rules.remat", "rules.remat.save", "rules.pipeline.keep"} <= {*shown("remat")}  # keep: by its meaning
    assert {f"rules.{name}" for name in rules_file.SECTIONS} <= {*shown("rules")}
    assert [key.name for group in keys.sections(rules_keys.RulesFile) for key in group.keys if not key.meaning] == []


def test_words_of_other_projects():
    """Those of this project's own list, and the fields of config.json."""
    assert shown("lr") == ["optimizer.learning_rate"] and shown("n_layers") == ["model.layers"]
    assert shown("n_routed_experts") == ["model.experts.count"]
    for word, ours in types.OTHER_WORDS.items():
        assert any(types.is_end_of(ours, key.name) for key in KEYS), ours
        assert not any(key.name.count(".") == 1 and types.is_end_of(word, key.name) for key in KEYS), word


def invalid(kind, raw):
    schema = json.loads(keys.schema_text(kind))
    return [error.message for error in jsonschema.Draft202012Validator(schema).iter_errors(raw)]


@pytest.mark.parametrize(
    ("kind", "folder"), [pytest.param("config", "configs", marks=pytest.mark.long), ("rules", "rules")]
)
def test_the_schemas_take_every_shipped_file(kind, folder):
    files = sorted((ROOT / folder).glob("*.yaml"))
    assert len(files) > 10
    assert {file.name: invalid(kind, core_yaml.load(file.read_text())) for file in files} == {
        file.name: [] for file in files
    }


@pytest.mark.parametrize(
    ("kind", "file", "key", "value"),
    [
        ("config", "configs/tiny.yaml", "model.layrs", 2),
        ("config", "configs/tiny.yaml", "model.layers", "two"),
        ("config", "configs/tiny.yaml", "optimizer.lr", 1.0),
        ("rules", "rules/tp8.yaml", "rule", {}),
        ("rules", "rules/tp8.yaml", "rules.hed", "tensor"),
        ("rules", "rules/tp8.yaml", "rules.residal.seq", "tensor"),
        ("rules", "rules/tp8.yaml", "rules.heads", "tesnor"),
        ("rules", "rules/tp8.yaml", "mesh.tesnor", 8),
        ("rules", "rules/tp8.yaml", "remat", "blocks"),
    ],
)
def test_the_schemas_refuse_a_misspelled_word(kind, file, key, value):
    raw = core_yaml.load((ROOT / file).read_text())
    *sections, last = key.split(".", 1) if kind == "rules" else key.split(".")
    within = raw
    for section in sections:
        within = within.setdefault(section, {})
    within[last] = value
    assert invalid(kind, raw)


def test_the_schemas_say_what_keys_mean():
    found = json.loads(keys.schema_text("config"))
    (layers,) = (key for key in KEYS if key.name == "model.layers")
    assert found["$defs"]["ModelConfig"]["properties"]["layers"]["description"] == layers.meaning
