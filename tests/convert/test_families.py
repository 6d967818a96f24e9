"""Every family against what transformers computed, under layouts, and there and back."""

import json

import jax
import numpy as np
import pytest

from gspmd_lm.convert import architecture, export, pretrained
from gspmd_lm.convert.families import FAMILIES
from gspmd_lm.convert.safetensors import Stored
from tests.convert import kinds, ours, references, test_encoder_families

# What a layout of eight devices needs of a family: its heads or its vocabulary do not divide.
PADDED = {"bloom": ["model.padded_heads=8"], "gpt2": ["model.padded_vocab=104"]}
# Padding of each kind of attention, of a tied and an untied vocabulary.
MORE_PADDED = {
    "llama": ["model.padded_heads=12", "model.padded_vocab=100"],
    "llama3": ["model.padded_heads=12", "model.padded_vocab=100"],
    "falcon-7b": ["model.padded_heads=11"],
    "falcon-40b": ["model.padded_heads=16"],
    "gptj": ["model.padded_heads=9", "model.padded_vocab=128"],
}
# Models that an earlier family of the table has too; only the names or the layout of its tensors differ.
SAME_AS = {
    "glm4-moe-lite": "deepseek_v3",
    "mt5": "t5",
    "ernie": "llama",
    "chatglm": "glm",
    "starcoder-all-heads": "gpt2",
    "longrope-short": "llama",
}
CASES = list(references.CASES)
# One case of each kind of block, bias, attention, mixture, table and loss. `pytest -m slow` has the others.
BACKWARD = ("llama3", "gemma2", "opt-350m", "bloom", "falcon-40b", "cohere", "phimoe")
SPLIT = {("gpt2", "tp8"), ("falcon-40b", "tp8"), ("phi3", "fsdp2_tp4"), ("bloom", "fsdp2_tp4"),
         ("gemma3n", "fsdp2_tp4")}  # fmt: skip
# Those whose numbers are computed as in another case. That their tensors have their places, all tests below show.
RENAMED = (*references.NEARLY, "mixtral", "ernie", "starcoder-all-heads", "longrope-short", "llama4-scout",
           "glm4-moe-lite")  # fmt: skip
NUMBERS = [name for name in CASES if name not in RENAMED]
# Those whose logits are compared under a layout by default, or whose tokens are in infer/test_references.py.
ELSEWHERE = ("falcon-7b", "gemma3n", "gpt2", "phi3")
# Relatives of cases that the default run has. `pytest -m parity` compares their logits, and their gradients too.
RELATIVES = (
    "mistral", "qwen2", "gemma", "glm", "gptneox-sequential", "granite", "olmo", "olmo2", "smollm3", "starcoder2",
    "stablelm-parallel", "nemotron", "seed-oss", "arcee", "phi", "dynamic", "glm4-moe", "deepseek-v2", "t5-v1.1", "mt5",
    "mbart",
)  # fmt: skip
# Those that take longest.
LONG = ("qwen3-next", "gpt-oss", "llama4", "gemma3", "olmo3", "bart")
OTHERS = [name for name in CASES if name not in (*BACKWARD, *LONG)]
ALL_DTYPES = ("gpt2", "phimoe")


def test_every_family_has_a_case():
    others = {*test_encoder_families.KINDS, *(kind.class_name(name) for name, kind in kinds.CASES.items())}
    elsewhere = {family.model_type for family in FAMILIES if family.architecture in others}
    assert {kind for kind, _ in references.CASES.values()} == {family.model_type for family in FAMILIES} - elsewhere


def logits_are_those_of(golden, logits):
    real = golden.batch["segment_ids"] > 0
    np.testing.assert_allclose(np.asarray(logits)[real], golden.logits[real], rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "name", references.marked(OTHERS, (*RENAMED, *ELSEWHERE, *RELATIVES)) + references.marked(LONG, (), "long")
)
def test_logits_are_those_of_transformers(name, tmp_path):
    golden = references.load(name)
    found = ours.read(golden, tmp_path / name)
    logits_are_those_of(golden, ours.compiled(found.config.model, ours.on_one_device(found), golden.batch))


@pytest.mark.long
@pytest.mark.parametrize("name", references.marked(NUMBERS, [name for name in NUMBERS if name not in BACKWARD]))
def test_logits_loss_and_gradients_are_those_of_transformers(name, tmp_path):
    golden = references.load(name)
    found = ours.read(golden, tmp_path / name)
    model, batch = found.config.model, golden.batch
    (loss, logits), gradients = ours.compiled(model, ours.on_one_device(found), batch, gradients=True)
    logits_are_those_of(golden, logits)
    assert abs(float(loss) - golden.about["loss"]) < 1e-5 * golden.about["loss"]
    export.write_folder(tmp_path / "gradients", model, jax.device_get(gradients), found.like)
    written = ours.tensors(tmp_path / "gradients")
    assert written.keys() == golden.tensors.keys()
    nothing = 1e-6 * np.linalg.norm(golden.norms)  # a key's bias without rope moves no softmax: its gradient is noise
    for at, (tensor, shape) in enumerate(golden.tensors.items()):
        norm, sample = golden.norms[at], golden.samples[at]
        got = written[tensor]
        assert abs(np.linalg.norm(got) - norm) <= 1e-3 * norm + nothing, tensor
        error = np.linalg.norm(got.ravel()[references.sampled(tensor, shape)] - sample)
        assert error <= 1e-3 * max(np.linalg.norm(sample), norm * (len(sample) / got.size) ** 0.5) + nothing, tensor


def split_cases():
    """Each case under a layout, those that are not compared by default under one of two in turn, marked for their run.

    `pytest -m slow` has the first cases under one layout, and the others under the layout that parity leaves out.
    """
    default = {name for name, _ in SPLIT}
    for at, case in enumerate(references.cases()):
        name, marks = (case, None) if isinstance(case, str) else (case.values[0], case.marks)
        for layout in ("tp8", "fsdp2_tp4"):
            in_turn = name not in default and layout == ("tp8", "fsdp2_tp4")[at % 2]
            if (name, layout) in SPLIT:
                yield pytest.param(name, layout, marks=pytest.mark.long if name == "gemma3n" else ())
            elif in_turn:
                yield pytest.param(name, layout, marks=marks or pytest.mark.slow)
            elif marks:
                yield pytest.param(name, layout, marks=pytest.mark.slow)


@pytest.mark.parametrize(("name", "layout"), list(split_cases()))
def test_a_layout_changes_no_logit(name, layout, tmp_path):
    golden = references.load(name)
    found = ours.read(golden, tmp_path / name, *PADDED.get(name, ()))
    placed = ours.placement(found.config.model, layout)
    params = found.load(ours.shardings(found, placed))
    logits = np.asarray(ours.compiled(found.config.model, params, golden.batch, placed))
    real, vocab = golden.batch["segment_ids"] > 0, found.config.model.vocab
    np.testing.assert_allclose(logits[real][:, :vocab], golden.logits[real], rtol=0, atol=1e-4)
    assert (logits[..., vocab:] == -np.inf).all()


def dtype_cases():
    """Each case in float32, for which the tests above have traced its model, and some in all dtypes: how numbers are
    stored does not depend on where a family has them.
    """
    for name in CASES:
        others = name not in references.ALIKE and name not in BACKWARD  # whose gradients are written, by default
        for dtype in ("float32", "bfloat16", "float16") if name in ALL_DTYPES else ("float32", "bfloat16"):
            default = name in ALL_DTYPES or (others and dtype == "float32")
            yield pytest.param(name, dtype, marks=() if default else pytest.mark.slow)


@pytest.mark.parametrize(("name", "dtype"), list(dtype_cases()))
def test_there_and_back_is_bit_exact(name, dtype, tmp_path):
    golden = references.load(name)
    overrides = MORE_PADDED.get(name, PADDED.get(name, ()))
    found = ours.read(golden, tmp_path / name, *overrides, dtype=dtype)
    model = found.config.model
    assert model.weight_dtype == ("bfloat16" if dtype == "bfloat16" else "float32")
    assert model.compute_dtype == ("float32" if dtype == "float32" else "bfloat16")
    params = jax.device_get(ours.on_one_device(found))
    export.write_folder(tmp_path / "out", model, params, found.like)
    before, after = ours.tensors(tmp_path / name), ours.tensors(tmp_path / "out")
    assert before.keys() == after.keys()
    for tensor, want in before.items():
        got = after[tensor]
        assert (got.dtype, got.shape, got.tobytes()) == (want.dtype, want.shape, want.tobytes()), tensor
    # Nothing of the original config.json is lost, but for the name of the dtype.
    was, now = (json.loads((tmp_path / folder / "config.json").read_text()) for folder in (name, "out"))
    was.pop("dtype")
    assert now == was | {"torch_dtype": dtype}


@pytest.mark.parametrize("name", references.marked(CASES, references.ALIKE))
def test_a_config_is_written_without_the_original_one(name, tmp_path):
    golden = references.load(name)
    model = ours.read(golden, tmp_path / name).config.model
    family, fields = architecture.describe(model, None)
    assert family.model_type == SAME_AS.get(name, golden.about["config"]["model_type"])
    assert not architecture.differences(family, fields, model)


def test_padding_is_zero_and_real_values_stay(tmp_path):
    golden = references.load("llama3")
    plain = ours.on_one_device(ours.read(golden, tmp_path / "plain"))
    padded = ours.on_one_device(ours.read(golden, tmp_path / "padded", *MORE_PADDED["llama3"]))
    for path, real in jax.tree_util.tree_leaves_with_path(jax.device_get(plain)):
        wide = jax.device_get(padded)
        for key in path:
            wide = wide[key.key]
        inside = tuple(slice(0, size) for size in real.shape)
        np.testing.assert_array_equal(wide[inside], real)
        wide = wide.copy()
        wide[inside] = 0
        assert not wide.any()


def test_a_sharded_model_is_written_in_several_files(tmp_path):
    golden = references.load("llama")
    found = ours.read(golden, tmp_path / "in")
    params = found.load(ours.shardings(found, ours.placement(found.config.model, "fsdp2_tp4")))
    (tmp_path / "tokenizer.json").write_text("{}")
    out = tmp_path / "deep" / "out"
    sidecars = {"tokenizer.json": tmp_path / "tokenizer.json"}
    export.write_folder(out, found.config.model, params, sidecars=sidecars, file_bytes=40_000)
    files = sorted(path.name for path in out.iterdir())
    assert "model-00001-of-00003.safetensors" in files and "model.safetensors.index.json" in files
    assert "tokenizer.json" in files
    assert not list(out.parent.glob("*.partial"))
    before, after = ours.tensors(tmp_path / "in"), ours.tensors(out)
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[tensor], after[tensor]) for tensor in before)


@pytest.mark.parametrize("name", ["llama", "gpt2", "falcon-40b", "phi3", "gptj"])
def test_a_shard_reads_its_own_bytes(name, tmp_path, monkeypatch):
    found = ours.read(references.load(name), tmp_path / name, *PADDED.get(name, ()))
    sharded = ours.shardings(found, ours.placement(found.config.model, "fsdp2_tp4"))
    taken = []
    read = Stored.read

    def counted(self, view, index):
        part = read(self, view, index)
        taken.append(part.nbytes)
        return part

    monkeypatch.setattr(Stored, "read", counted)
    device = jax.devices()[5]
    for place, where in zip(jax.tree.leaves(found.locations), jax.tree.leaves(sharded), strict=True):
        index = where.devices_indices_map(place.shape)[device]
        index = tuple(slice(*at.indices(size)[:2]) for at, size in zip(index, place.shape, strict=True))
        taken.clear()
        part = found.part(place, index)
        padding = part.nbytes - sum(taken)
        assert padding == 0 or (name == "gpt2" and place.path == "embedding" and padding == 7 * part.shape[1] * 4)


def test_each_part_is_read_once_however_many_devices_hold_it(tmp_path, monkeypatch):
    found = ours.read(references.load("llama"), tmp_path / "llama")
    sharded = ours.shardings(found, ours.placement(found.config.model, "tp8"))
    parts = []
    part = type(found).part
    monkeypatch.setattr(type(found), "part", lambda self, *at: parts.append(part(self, *at)) or parts[-1])
    params = found.load(sharded)
    assert sum(piece.nbytes for piece in parts) == sum(array.nbytes for array in jax.tree.leaves(params))


@pytest.mark.parametrize("name", ["llama", "gpt2", "falcon-40b", "gptj"])
def test_reading_in_blocks_changes_nothing(name, tmp_path, monkeypatch):
    found = ours.read(references.load(name), tmp_path / name, *PADDED.get(name, ()))
    whole = jax.device_get(ours.on_one_device(found))
    read, blocks = Stored.read, []
    monkeypatch.setattr(Stored, "read", lambda self, view, index: blocks.append(index) or read(self, view, index))
    monkeypatch.setattr(pretrained, "BLOCK_BYTES", 700)  # a few rows of a matrix
    pieces = jax.device_get(ours.on_one_device(found))
    assert len(blocks) > 3 * len(found.files)
    jax.tree.map(np.testing.assert_array_equal, pieces, whole)
