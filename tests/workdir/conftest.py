import pytest

from tests.workdir.saved import Run


@pytest.fixture
def run(tmp_path):
    run = Run(tmp_path / "run" / "checkpoints")
    yield run
    for checkpoints in run.opened:
        checkpoints.close()
