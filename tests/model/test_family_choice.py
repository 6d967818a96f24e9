"""Every family is chosen by its own settings, whatever other settings it shares with others, and by no others."""

import pkgutil

import pytest

from gspmd_lm.config import Encoder, Frames, Masks, ModelConfig, Patches, Queries, Vision, Windows, from_values
from gspmd_lm.model import families

SIZES = {name: 8 for name in ("embed", "heads", "kv_heads", "head_dim", "mlp", "vocab", "context")} | {"layers": 2}
FULL = {"attention.mask": "full"}
PATCHES = Patches(image=8, size=4, class_row=False, pool="mean")
IMAGE = FULL | {"vocab": 0, "context": 4, "positions": "none", "patches": PATCHES, "classes.count": 3}
BOTH = {"patches": Patches(image=8, size=4, pool="both"), "context": 5}
SEEN = {"positions": "learned", "vision": Vision(patches=Patches(image=8, size=4), projection=4)}
READ = {"vision": Vision(patches=Patches(image=8, size=4), queries=Queries(rows=2))}
SOURCE = {"encoder": Encoder(start_token=1)}
SETTINGS = {
    "text": [{}, FULL],
    "gemma3n": [{"residual.layer_embed": 4, "residual.streams": 2}],
    "bert": [FULL | {"classes.count": 3}],
    "t5": [SOURCE],
    "whisper": [SOURCE | {"frames": Frames(bands=4), "positions": "learned"}],
    "vit": [IMAGE],
    "dinov2": [IMAGE | BOTH],
    "swin": [IMAGE | {"windows": Windows(size=2)}],
    "sam": [
        IMAGE | {"classes": None, "masks": Masks(embed=32)},
        IMAGE | {"classes": None, "windows": Windows(size=2), "masks": Masks(embed=32)},
    ],
    "clip": [SEEN],
    "blip2": [READ, READ | SOURCE],
}


@pytest.mark.parametrize(("name", "settings"), [(name, one) for name, every in SETTINGS.items() for one in every])
def test_the_family_of_a_config_makes_the_arrays_that_it_is_initialised_with(name, settings):
    cfg = from_values(ModelConfig, SIZES | settings)
    chosen = families.family(cfg)
    assert chosen is getattr(families, name).FAMILY
    assert {"row"} < chosen.dummy(cfg).keys()
    assert chosen.module(cfg).cfg is cfg


def test_every_file_of_a_family_is_in_the_list():
    files = {module.name for module in pkgutil.iter_modules(families.__path__)}
    assert files == SETTINGS.keys()
