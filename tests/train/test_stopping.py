"""The best evaluation, and the settings that go with it."""

import json
import math

import pytest

from gspmd_lm import config as configs
from gspmd_lm.errors import InputError
from gspmd_lm.train.stopping import Best


def test_the_best_is_the_lowest_finite_loss_and_goes_through_a_checkpoint():
    best = Best()
    for step, loss in ((10, math.nan), (20, 3.0), (30, 2.0), (40, 2.0), (50, math.inf), (60, math.nan)):
        best = Best.of({"best": json.loads(json.dumps(vars(best)))}).after(step, loss)
    assert best == Best(step=30, loss=2.0, since=3, evaluated=60)
    assert [best.ends(patience) for patience in (0, 2, 3, 4)] == [False, True, True, False]
    assert Best.of({"data": "an older checkpoint"}) == Best() == Best.of({"best": {}})
    assert Best().after(10, math.nan) == Best(since=1, evaluated=10)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["train.eval_every=0", "train.patience=2"], "patience needs evaluations during training: set eval_every"),
        (["train.eval_every=0", "train.keep_best=true"], "keep_best needs evaluations during training"),
        (["data.held_out=0.0", "train.keep_best=true"], "data.held_out=0 leaves no rows: set data.held_out"),
        (["data.held_out=0.0", "train.samples.prompts=[a]"], "data.held_out=0 leaves no rows: set data.held_out"),
        (["train.samples.prompts=[]"], "must have at least one prompt, and none that is empty"),
        (["train.samples.prompts=['']"], "must have at least one prompt, and none that is empty"),
    ],
)
def test_settings_that_need_others(changes, message):
    with pytest.raises(InputError, match=message):
        configs.load("tiny", changes)
    assert configs.load("tiny", ["train.keep_best=true", "train.samples.prompts=[a]"]).train.keeps_best
