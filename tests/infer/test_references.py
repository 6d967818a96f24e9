"""Every family generates what transformers' greedy generate did, in one ragged batch."""

import jax
import pytest

from gspmd_lm.data.tokenizer import Bytes
from gspmd_lm.infer.generate import Generator, programs_for
from gspmd_lm.sharding import rules_file
from tests.convert import ours, references

# By default one of each kind: alibi, rotary positions and windows with capped scores, keys that all heads share. What
# the others compute without a cache is compared in convert/test_families.py.
KINDS = ("bloom", "gemma2", "falcon-7b")
CASES = references.marked([name for name in references.FIRST if name not in KINDS], references.FIRST)
CASES += [pytest.param("bloom", marks=pytest.mark.long), pytest.param("gemma2", marks=pytest.mark.long), "falcon-7b"]


@pytest.mark.parametrize("name", [*CASES, *references.cases()[len(CASES) :]])
def test_same_tokens_as_transformers(name, tmp_path):
    golden = references.load(name)
    found = ours.read(golden, tmp_path / name)
    prompts, one, encoder = golden.about["prompts"], rules_file.load("single"), found.config.model.encoder
    first = list(encoder.first_tokens) if encoder else []  # which transformers counts too
    new = references.NEW_TOKENS - len(first)
    built, _ = programs_for(found.config, one, jax.devices()[:1], "cpu", prompts, new_tokens=new, batch=len(prompts))
    results = Generator(built, ours.on_one_device(found), Bytes()).results(prompts, new_tokens=new, ends=())
    assert [first + result.tokens for result in results] == golden.about["tokens"]
    assert [result.smallest_gap for result in results] == pytest.approx(golden.about["gaps"], abs=1e-4)
