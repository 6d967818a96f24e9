"""What tests of tokens share."""

import fsspec
import pytest

from gspmd_lm.data import folders


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty working directory, with a cache of its own."""
    monkeypatch.setenv("GSPMD_LM_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def bucket():
    """An empty store in memory."""
    found = fsspec.filesystem("memory")
    found.store.clear()
    found.pseudo_dirs[:] = [""]
    yield found
    found.store.clear()


@pytest.fixture
def read_sizes(monkeypatch):
    """The bytes of each span that is read of a folder, as they are asked for."""
    sizes, read = [], folders.Folder.read_spans

    def noting(self, spans):
        sizes.extend(stop - start for _, start, stop in spans)
        return read(self, spans)

    monkeypatch.setattr(folders.Folder, "read_spans", noting)
    return sizes


@pytest.fixture
def stop():
    """A progress function that interrupts the making of tokens at the third report."""
    calls = 0

    def report(what, *_):
        nonlocal calls
        calls += what == "tokenizing"
        if calls == 3:
            raise KeyboardInterrupt

    return report
