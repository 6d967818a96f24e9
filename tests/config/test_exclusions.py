"""What of a model does not go together."""

from typing import get_args

import pytest

from gspmd_lm.config import Experts, default_at
from gspmd_lm.config.exclusions import EXCLUSIONS
from gspmd_lm.config.model import ModelConfig

NAMED = sorted({setting for row in EXCLUSIONS for group in row for setting in group})


@pytest.mark.parametrize("setting", NAMED)
def test_each_setting_is_a_key(setting):
    path, _, values = setting.partition(": ")
    default_at(ModelConfig, path)  # an unknown path raises
    kind = ModelConfig
    for name in path.split(".") if values else ():
        kind = kind.__annotations__[name]
    known = ("true", "false") if kind is bool else get_args(kind)
    assert all(value in known for value in values.split(" or ") if value)


def test_no_setting_excludes_itself():
    for row in EXCLUSIONS:
        names = [setting for group in row for setting in group]
        assert len(row) > 1 and len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("settings", "lines"),
    [
        ({"attention.mask": "full", "classes.count": 2, "logits.bias": True, "logits.z_loss": 0.1},
         ["classes does not go with logits.bias", "classes does not go with logits.z_loss"]),
        ({"positions": "alibi_bf16", "attention.sinks": True},
         ["attention.sinks does not go with positions: alibi_bf16"]),
        ({"shared_layers": True, "experts": Experts(count=4, per_token=1), "attention.shared_kv_layers": 1},
         ["shared_layers does not go with experts", "shared_layers does not go with attention.shared_kv_layers",
          "experts does not go with attention.shared_kv_layers"]),
        ({"norm.pre": False, "residual.laurel_rank": 2}, ["residual.laurel_rank does not go with norm.pre: false"]),
    ],
)  # fmt: skip
def test_each_two_settings_have_a_sentence(settings, lines, small):
    with pytest.raises(ValueError) as error:
        small(**settings)
    said = str(error.value)
    assert said[said.index("Value error, ") :].split(" [type")[0].removeprefix("Value error, ").split("\n") == lines
