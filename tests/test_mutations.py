"""The mutations that `python -m tests.mutations` tries still change what they name."""

import pytest

from tests.mutations import MUTATIONS, ROOT


@pytest.mark.parametrize("mutation", MUTATIONS, ids=[f"{one.file} {n}" for n, one in enumerate(MUTATIONS, 1)])
def test_a_mutation_changes_one_place_and_names_tests(mutation):
    text = (ROOT / "gspmd_lm" / mutation.file).read_text()
    assert text.count(mutation.before) == 1 and mutation.after not in (mutation.before, "")
    compile(text.replace(mutation.before, mutation.after), mutation.file, "exec")
    for test in mutation.tests.split():
        path, _, name = test.partition("[")[0].partition("::")
        assert f"def {name}" in (ROOT / "tests" / path).read_text() if name else (ROOT / "tests" / path).exists()
