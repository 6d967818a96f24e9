"""The keys of before: each is refused with its new name."""

import pytest

from gspmd_lm import config
from gspmd_lm.config.renamed import RENAMED
from gspmd_lm.config.values import default_at
from gspmd_lm.errors import InputError

MODEL = {"layers": 1, "embed": 8, "heads": 2, "kv_heads": 2, "head_dim": 4, "mlp": 8, "vocab": 9, "context": 8}


def refusal(**model) -> str:
    with pytest.raises(InputError) as error:
        config.from_dict({"name": "x", "model": MODEL | model, "train": {"steps": 1}}, "old.yaml")
    return str(error.value)


def test_each_key_of_before_is_refused_with_its_new_name():
    old = {path.removeprefix("model."): 1 for path in RENAMED}
    lines = refusal(**old).splitlines()
    assert lines[0] == f"old.yaml: {len(RENAMED)} problems"
    for path, new in RENAMED.items():
        (line,) = (line for line in lines if line.startswith(f"  {path}: "))
        assert line.endswith(f"key is now {new}")


def test_each_new_name_is_a_key():
    for path in RENAMED.values():
        default_at(config.Config, path)


def test_a_key_of_a_mapping_of_before_names_the_mapping():
    assert refusal(rope_scaling={"factor": 2.0}).endswith(
        "\n  model.rope_scaling: this key is now model.attention.rope.scaling"
    )
