"""A command of the command line."""

from pathlib import Path

import pytest

from gspmd_lm import cli

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def run(capsys, monkeypatch):
    """Exit code, stdout and stderr of a command, run in this process from the root of the checkout."""
    monkeypatch.chdir(ROOT)

    def run(*arguments):
        with pytest.raises(SystemExit) as end:
            cli.main(["main.py", *arguments])
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        return end.value.code, out, err

    return run
