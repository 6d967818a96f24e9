"""Metadata of checkpoints, changed at random together with its checksums: python -m tests.attacks.forged --count=400

It prints how many were read as they were written and how many refused. It fails at the first traceback, or where
another value is read.
"""

import argparse
import json
import random
import shutil
import tempfile
from collections import Counter
from pathlib import Path

from gspmd_lm import files
from gspmd_lm.errors import InputError
from gspmd_lm.runtime import startup
from gspmd_lm.train.saving import Best
from tests.workdir.saved import Run, abstract, assert_equal, make_state

VALUES = (None, True, 0, -1, 1.5, "x", "", [], {}, [1], {"a": 1}, 2**70, "int32", [[1, 2]], 1e308)


def places(value, place=()):
    """Every place of a JSON value."""
    yield place
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inner:
        yield from places(one, (*place, key))


def forge(folder, count, seed):
    """How often each end came."""
    draw, state, ends = random.Random(seed), make_state(1), Counter()
    run = Run(folder / "run" / "checkpoints")
    run.save(1).close()
    shutil.copytree(run.directory / "1", folder / "whole")
    found = [path.relative_to(folder / "whole") for path in sorted((folder / "whole").rglob("*")) if path.is_file()]
    found = [path for path in found if path.name in ("metadata", "_METADATA", "_sharding", "process_0")]
    for number in range(count):
        shutil.rmtree(run.directory / "1")
        shutil.copytree(folder / "whole", run.directory / "1")
        name = draw.choice(found)
        raw = at = {"": json.loads((folder / "whole" / name).read_text())}
        place = ("", *draw.choice([*places(raw[""])]))
        for key in place[:-1]:
            at = at[key]
        value = draw.choice((*VALUES, places))
        if value is places and place[1:]:
            del at[place[-1]]
        else:
            at[place[-1]] = None if value is places else value
        (run.directory / "1" / name).write_text(json.dumps(raw[""]))
        files.seal(run.directory / "1", ("state", "run"))
        try:
            _, restored, extra = run.open().restore(abstract(state))
            Best.from_extra(extra)
        except InputError:
            ends["refused"] += 1
            continue
        except Exception as error:
            raise AssertionError(f"{number}: {name} {place}: {value!r}") from error
        assert_equal(restored, state)
        ends["read as it was written"] += 1
    return ends


if __name__ == "__main__":
    flags = argparse.ArgumentParser()
    flags.add_argument("--count", type=int, default=400)
    flags.add_argument("--seed", type=int, default=0)
    given = flags.parse_args()
    startup.prepare_cpu(8)
    with tempfile.TemporaryDirectory() as scratch:
        print(dict(forge(Path(scratch), given.count, given.seed)))
