"""Every family generates what transformers' greedy generate did, in one ragged batch."""

import dataclasses

import jax
import pytest

from gspmd_lm import rules_file
from gspmd_lm.data.tokenizer import Bytes
from gspmd_lm.infer.generate import Generator, plan
from tests.convert import ours, references


@pytest.mark.parametrize("name", references.cases())
def test_same_tokens_as_transformers(name, tmp_path):
    golden = references.load(name)
    found = ours.read(golden, tmp_path / name)
    rules = dataclasses.replace(rules_file.load("single"), compiler_options={"cpu": ours.QUICK})
    prompts, new = golden.about["prompts"], references.NEW_TOKENS
    built, _ = plan(found.config, rules, jax.devices()[:1], "cpu", prompts, new_tokens=new, batch=len(prompts))
    results = Generator(built, ours.on_one_device(found), Bytes()).results(prompts, new_tokens=new, ends=())
    assert [result.tokens for result in results] == golden.about["tokens"]
    assert [result.smallest_gap for result in results] == pytest.approx(golden.about["gaps"], abs=1e-4)
