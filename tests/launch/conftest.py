"""What the tests of launch share."""

import pytest

from tests.launch.cloud import Cloud


@pytest.fixture
def cloud(tmp_path, monkeypatch):
    """Google Cloud, Slurm and Kubernetes, as stand-ins in a folder."""
    return Cloud(tmp_path / "cloud", monkeypatch)
