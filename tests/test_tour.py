"""The tour of layouts: `python -m tests.test_tour` draws its pictures, and the tests ask whether they are current."""

import re
from pathlib import Path

import pytest

from gspmd_lm import config as configs
from gspmd_lm.sharding import rules_file
from gspmd_lm.show import dry_run
from gspmd_lm.train import state

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs/tour"
PAGE = ROOT / "docs/tour.md"
DRAWN = ("layers.mlp.w_up", "residual")
# Picture -> config, rules file, and what is laid over the rules.
STATIONS = {
    "one_device": ("tiny", "single"),
    "data": ("tiny", "dp8"),
    "zero1": ("tiny", "zero1_8"),
    "zero3": ("tiny", "fsdp8"),
    "tensor": ("tiny", "tp8"),
    "sequence": ("tiny", "tp8", "rules.rules.residual.seq=tensor"),
    "pipeline": ("tiny", "pp2_fsdp2_tp2"),
    "experts": ("tiny_experts", "expert4"),
}


def draw(name, layout, *overrides):
    """The picture of a layout."""
    config, rules = configs.load(name), rules_file.load(layout, overrides=overrides)
    filled = rules.fill(rules.devices)
    arrays, _ = state.arrays_and_warnings(config, filled, "cpu")
    return dry_run.picture(dry_run.read(config, filled, arrays), DRAWN)


@pytest.mark.parametrize("station", STATIONS)
def test_the_pictures_are_current(station):
    made = draw(*STATIONS[station])
    assert (FOLDER / f"{station}.svg").read_text(encoding="utf-8") == made, "python -m tests.test_tour draws it anew"


def test_each_station_has_a_picture_and_three_sentences():
    parts = re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.M)[1:]
    pictures = [re.findall(r"\]\(tour/(\w+)\.svg\)", part) for part in parts]
    assert pictures == [[station] for station in STATIONS]
    assert {path.stem for path in FOLDER.glob("*")} == set(STATIONS)
    for part, (config, layout, *overrides) in zip(parts, STATIONS.values(), strict=True):
        assert f"`{layout}`" in part.partition("\n")[0], part
        sentences = re.findall(r"\.(?=\s)", re.sub(r"!\[.*", "", part, flags=re.S))
        assert len(sentences) == 3, part
        assert all(f"--set {one}" in part for one in overrides)
        assert config == "tiny" or config in part


def main():
    for station, drawn in STATIONS.items():
        (FOLDER / f"{station}.svg").write_text(draw(*drawn), encoding="utf-8")


if __name__ == "__main__":
    main()
