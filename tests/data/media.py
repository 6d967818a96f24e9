"""What tests of images with texts and of sounds with texts share."""

import numpy as np
import pyarrow
import pyarrow.parquet

from gspmd_lm.data import loader


def check_columns(config_of, folder, columns, count):
    """Fails unless each of `columns` gives the rows of table.csv, with the texts of the column text."""
    pyarrow.parquet.write_table(pyarrow.table(columns), folder / "all.parquet")
    want = loader.open_loaders(config_of(folder / "table.csv"))[0].rows.read(range(count))
    for name in columns.keys() - {"text"}:
        found = loader.open_loaders(config_of(folder / "all.parquet", fields=(name, "text")))[0].rows.read(range(count))
        assert all(np.array_equal(found[array], want[array]) for array in want), name


def checked_restart(config, items):
    """How many rows there are. Fails unless they are the same when they are opened again, and equal ones on one side.

    items: rows -> what they hold.
    """
    (train, apart), (again, _) = loader.open_loaders(config), loader.open_loaders(config)
    assert train.fingerprint == again.fingerprint
    first, second = (one.rows_at(7, slice(0, 4)) for one in (train, again))
    assert all(np.array_equal(first[name], second[name]) for name in first)
    sums = [{item.encoded.sha256 for item in items(one.rows)} for one in (train, apart)]
    assert not sums[0] & sums[1]
    return len(train.rows) + len(apart.rows)
