"""What a checkpoint says besides its arrays, and what follows from it for the run that goes on."""

import dataclasses

import pytest

from gspmd_lm.errors import InputError
from gspmd_lm.train.saving import Best, moved_rows


def test_rows_that_another_batch_skips_or_reads_again_are_counted():
    assert moved_rows(21, {"batch": 8}, 8) == moved_rows(21, {}, 8) == []
    (more,), (fewer,) = moved_rows(21, {"batch": 8}, 16), moved_rows(21, {"batch": 100}, 8)
    assert more.startswith("warning: step 21 is at row 336 with batches of 16 rows, and was at 168 with those of 8: ")
    assert more.endswith("168 rows are skipped")
    assert fewer.endswith("was at 2,100 with those of 100: 1,932 rows are read again")


def test_the_best_evaluation_knows_how_many_later_ones_were_not_better():
    best = Best()
    for step, loss in ((2, 3.0), (4, 2.0), (6, 2.0), (8, float("nan"))):
        best = best.after(step, loss)
    assert best == Best(step=4, loss=2.0, since=2, evaluated=8)
    assert best.ends(2) and not best.ends(3) and not best.ends(0)


def test_only_an_evaluation_is_the_best_one():
    best = Best(step=4, loss=2.0, since=1, evaluated=6)
    assert Best.from_extra({"best": dataclasses.asdict(best)}) == best and Best.from_extra({}) == Best()
    for wrong in (None, 7, [], {"step": "4"}, {"since": None}, {"other": 1}):
        with pytest.raises(InputError, match="best evaluation is not one"):
            Best.from_extra({"best": wrong})
