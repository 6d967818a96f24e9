"""Two processes of four devices: each reads its own part, and together they write one folder."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.convert import ours, references

PROGRAM = """
import sys
from pathlib import Path
import jax
jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{sys.argv[1]}", 2, int(sys.argv[2]))
from gspmd_lm.convert import export, pretrained
from gspmd_lm.convert.safetensors import Stored
from tests.convert import ours
folder = Path(sys.argv[3])
found = pretrained.open_folder(folder / "in", ["model.padded_vocab=104"])
taken, read = [], Stored.read
Stored.read = lambda self, view, index: taken.append(read(self, view, index)) or taken[-1]
params = found.load(ours.shardings(found, ours.placement(found.config.model, "fsdp2_tp4")))
print("read", sum(part.nbytes for part in taken))
export.GATHERED_BYTES = 1500  # several pieces for each array, and a rest
export.write_folder(folder / "out", found.config.model, params, found.like, file_bytes=40_000)
print("files", len(list((folder / "out").iterdir())))
"""


@pytest.mark.long
def test_two_hosts(tmp_path):
    golden = references.load("gpt2")
    golden.folder(tmp_path / "in")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    together = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(port), str(i), str(tmp_path)],
            cwd=Path(__file__).parent.parent.parent,
            env=os.environ | {"PYTHONPATH": ".", "JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for i in range(2)
    ]
    said = [process.communicate(timeout=300)[0] for process in together]
    assert [process.returncode for process in together] == [0, 0], "\n".join(said)
    whole = sum(4 * int(np.prod(shape)) for shape in golden.tensors.values())
    read = [int(output.split("read ")[1].split()[0]) for output in said]
    # The mesh's first axis crosses hosts: each has half of every matrix, and all of what is not split.
    assert all(whole / 2 <= taken < 0.6 * whole for taken in read)
    before, after = ours.tensors(tmp_path / "in"), ours.tensors(tmp_path / "out")
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name], after[name]) for name in before)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == whole
    counted = {int(output.split("files ")[1].split()[0]) for output in said}  # both return when all is written
    assert counted == {len(set(index["weight_map"].values())) + 2}
