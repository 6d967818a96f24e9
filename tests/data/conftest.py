"""What tests of tokens share."""

import pytest


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
