"""What a run writes down, and what the trackers that it opens take with them."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PROGRAM = """
import sys
from etils import epath
from gspmd_lm.config import Train
from gspmd_lm.workdir.log import Log
log = Log(epath.Path(sys.argv[1]), 0, Train(steps=4, trackers=("tensorboard",)), {})
log.write(3, {"loss": 0.25})
log.close()
assert "torch" not in sys.modules
import torch
print(torch.HERE)
"""


def test_tensorboard_gets_scalars_and_does_not_import_torch(tmp_path):
    (tmp_path / "torch.py").write_text("HERE = 'found afterwards'\nclass Tensor: pass\n")
    (tmp_path / "run").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "run")],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "found afterwards\n"
    (events,) = (tmp_path / "run" / "tensorboard").iterdir()
    assert b"\n\x04loss" in events.read_bytes() and b"\x15\x00\x00\x80>" in events.read_bytes()  # tag, 0.25 as a float
