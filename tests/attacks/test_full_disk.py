"""A disk that fills up while a run trains on it: pytest -n 0 -m slow tests/attacks/test_full_disk.py"""

import shlex
import shutil
import subprocess
import sys

import pytest

from tests.attacks.runs import RANDOM, SMALL, losses
from tests.launched import ROOT

OWN_MOUNTS = ["unshare", "--user", "--map-root-user", "--mount", "--propagation=private"]
MAY_MOUNT = (
    shutil.which("unshare")
    and not subprocess.run([*OWN_MOUNTS, "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True).returncode
)


@pytest.mark.slow
@pytest.mark.skipif(not MAY_MOUNT, reason="not run: no disk can be made here (unshare, mount)")
def test_a_full_disk_leaves_the_last_save_intact(tmp_path):
    often = "--set=train.checkpoint_every=5", "--set=train.keep_checkpoints=100", "--set=train.steps=400"
    flags = [*SMALL, *RANDOM, *often, "--rules=none"]
    train = shlex.join([sys.executable, "main.py", *flags])
    disk = tmp_path / "disk"
    disk.mkdir()
    script = f"""
        cd {shlex.quote(str(ROOT))}; export GSPMD_LM_CACHE={tmp_path}/cache
        mount -t tmpfs -o size=64m tmpfs {disk}
        head -c 61m /dev/zero > {disk}/filler
        {train} --workdir={disk}/run > {tmp_path}/first 2>&1; echo $? > {tmp_path}/code
        rm {disk}/filler
        {train} --workdir={disk}/run > {tmp_path}/second 2>&1 && cp {disk}/run/metrics.jsonl {tmp_path}/
    """
    subprocess.run([*OWN_MOUNTS, "bash", "-c", script], check=True)
    subprocess.run(f"{train} --workdir={tmp_path}/straight > {tmp_path}/third 2>&1", shell=True, cwd=ROOT, check=True)
    said = (tmp_path / "first").read_text()
    assert (tmp_path / "code").read_text() == "1\n"
    place, fix = said.rstrip().splitlines()[-2:]  # TensorStore may print of its other writes that asyncio has ended
    assert "was not written to" in place and fix.startswith("  fix   check the folder (free space"), said
    assert f'File "{ROOT}' not in said, said
    assert "restored step" in (tmp_path / "second").read_text()
    resumed, straight = ((tmp_path / name).read_text() for name in ("metrics.jsonl", "straight/metrics.jsonl"))
    assert losses(resumed) == losses(straight)
