"""Reading a folder: its config, overrides, tensors that do not fit; and exports that are refused or killed."""

import json

import jax
import numpy as np
import pytest

from gspmd_lm.config import RopeScaling
from gspmd_lm.convert import export, pretrained, safetensors
from gspmd_lm.errors import InputError
from tests.convert import ours, references


@pytest.fixture
def folder(tmp_path):
    """A function that makes the folder of a case, with tensors and fields changed: None takes one away."""

    def make(name, tensors=None, fields=None, dtype="float32"):
        golden = references.load(name)
        weights = {tensor: references.weight(tensor, shape, 0) for tensor, shape in golden.tensors.items()}
        config = dict(golden.about["config"]) | (fields or {})
        weights |= tensors or {}
        weights = {tensor: array for tensor, array in weights.items() if array is not None}
        return references.save(tmp_path / name, config, weights, dtype)

    return make


def refused(folder, *overrides):
    with pytest.raises(InputError) as error:
        pretrained.open_folder(folder, overrides)
    return str(error.value)


def test_what_is_read(folder):
    path = folder("llama", dtype="float16")
    found = pretrained.open_folder(path, ["model.padded_vocab=128", "data.batch=4"])
    assert (found.config.name, found.family.name, found.tokenizer) == ("llama", "Llama", None)
    assert found.config.data.seq == 96 and found.config.data.batch == 4 and found.config.data.tokenizer == "bytes"
    assert found.config.model.padded_vocab == 128
    assert (found.config.model.weight_dtype, found.config.model.compute_dtype) == ("float32", "bfloat16")
    assert found.like["torch_dtype"] == "float16"  # of the files, whatever config.json says
    (path / "tokenizer.json").write_text("{}")
    assert pretrained.open_folder(path).config.data.tokenizer == str(path / "tokenizer.json")


@pytest.mark.parametrize(
    ("other", "wanted"), [("rotary_emb.inv_freq", "bfloat16"), ("input_layernorm.weight", "float32")]
)
def test_a_tensor_of_another_dtype(folder, other, wanted):
    """Weights of two dtypes become float32, which holds both; what is no weight does not count."""
    path = folder("llama", dtype="bfloat16")
    tensors = ours.tensors(path)
    name = f"model.layers.0.{other}"
    files = {"a": {name: np.ones(32, np.float32)}, "b": {key: at for key, at in tensors.items() if key != name}}
    for file, held in files.items():
        kinds = {key: ("F32" if file == "a" else "BF16", array.shape) for key, array in held.items()}
        data = b"".join(array.tobytes() for array in held.values())
        (path / f"{file}.safetensors").write_bytes(safetensors.header_bytes(kinds) + data)
    places = {f"{file}.safetensors": list(held) for file, held in files.items()}
    (path / safetensors.INDEX).write_text(safetensors.index_text(places, 0))
    (path / safetensors.SINGLE).unlink()
    assert pretrained.open_folder(path).config.model.weight_dtype == wanted


def test_overrides_are_checked(folder):
    path = folder("llama")
    assert "--set model.padded_vocab=9: " in refused(path, "model.padded_vocab=9")
    assert "padded_vocab=9 is smaller than vocab=96" in refused(path, "model.padded_vocab=9")
    assert "model.padded_vocabs: unknown key (did you mean padded_vocab?)" in refused(path, "model.padded_vocabs=128")
    assert "write --set section.key=value" in refused(path, "padded")
    assert "Llama has no tensor for attention.k_norm.scale, attention.q_norm.scale" in refused(
        path, "model.attention.qk_norm=true"
    )
    assert "layers is not a mapping" in refused(path, "model.layers.x=1")
    scaled = pretrained.open_folder(
        path, ["model.attention.rope.scaling.kind=linear", "model.attention.rope.scaling.factor=2.0"]
    )
    assert scaled.config.model.attention.rope.scaling == RopeScaling(kind="linear", factor=2.0)


def test_tensors_that_do_not_fit_are_all_listed(folder):
    layer = "model.layers.{}.self_attn"
    wrong = {
        f"{layer.format(0)}.q_proj.weight": None,
        f"{layer.format(1)}.q_proj.weight": None,
        f"{layer.format(1)}.k_proj.weight": np.zeros((16, 32), np.float32),
        f"{layer.format(0)}.q_proj.bias": np.zeros(32, np.float32),
        f"{layer.format(1)}.q_proj.bias": np.zeros(32, np.float32),
        "model.norm.weight": None,
        "score.weight": np.zeros(3, np.float32),
    }
    message = refused(folder("llama", wrong))
    assert "5 kinds of tensors that do not fit Llama as config.json has it\n" in message
    for line in (
        "unexpected   model.layers.{}.self_attn.q_proj.bias (2 of them)",
        "unexpected   score.weight",
        "missing      model.layers.{}.self_attn.q_proj.weight (2 of them)",
        "missing      model.norm.weight",
        "misshapen    model.layers.1.self_attn.k_proj.weight is [16, 32], not [32, 32]",
    ):
        assert f"\n  {line}" in message


def test_nothing_is_allocated_before_everything_fits(folder, monkeypatch):
    monkeypatch.setattr(safetensors.Stored, "read", lambda *_: pytest.fail("read"))
    monkeypatch.setattr(jax, "device_put", lambda *_, **__: pytest.fail("allocated"))
    refused(folder("llama", {"model.norm.weight": None}))
    pretrained.open_folder(folder("llama"))


def test_numbers_of_another_kind(folder):
    path = folder("llama")
    file = path / "model.safetensors"
    data = file.read_bytes()
    assert data.count(b'"model.norm.weight":{"dtype":"F32"') == 1
    file.write_bytes(data.replace(b'"model.norm.weight":{"dtype":"F32"', b'"model.norm.weight":{"dtype":"I32"'))
    assert "no number    model.norm.weight is I32; supported are F32, F16, BF16" in refused(path)


@pytest.mark.parametrize("name", ["llama", "gpt2", "bloom", "opt"])
def test_names_without_the_prefix_of_the_base_model(name, folder):
    path = folder(name)
    family = pretrained.open_folder(path).family
    before = ours.tensors(path)
    bare = {tensor.removeprefix(family.prefix): array for tensor, array in before.items()}
    assert bare.keys() != before.keys()
    references.save(path, json.loads((path / "config.json").read_text()), bare)
    found = pretrained.open_folder(path)
    assert found.files.keys() == before.keys()


def test_names_that_are_no_weights(folder):
    masks = {
        "transformer.h.0.attn.bias": np.ones((1, 1, 96, 96), np.float32),
        "h.1.attn.masked_bias": np.float32([0]),
    }
    assert len(pretrained.open_folder(folder("gpt2", masks)).files) == len(references.load("gpt2").tensors)
    frequencies = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(2, np.float32)}
    pretrained.open_folder(folder("llama", frequencies))
    assert "unexpected   transformer.h.0.attn.bias" in refused(folder("llama", masks))


def test_a_tied_table_that_stands_twice(folder):
    table = references.weight("transformer.wte.weight", (97, 32), 0)
    path = folder("gpt2", {"lm_head.weight": table})
    assert "lm_head.weight" not in pretrained.open_folder(path).files
    message = refused(folder("gpt2", {"lm_head.weight": table + 1}))
    assert (
        "unexpected   lm_head.weight: not equal to transformer.wte.weight; set tie_word_embeddings to false" in message
    )
    found = pretrained.open_folder(folder("gpt2", {"lm_head.weight": table + 1}, {"tie_word_embeddings": False}))
    assert not found.config.model.embedding.tied and "lm_head.weight" in found.files


def test_weights_are_cast_while_they_are_read(folder):
    found = pretrained.open_folder(folder("llama"))
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    places, plain = found.locations, jax.device_get(ours.on_one_device(found))
    dtypes = jax.tree.map(lambda place: jax.numpy.bfloat16 if place.letters == "DNH" else place.dtype, places)
    cast = jax.device_get(found.load(jax.tree.map(lambda place: one, places), dtypes))
    jax.tree.map(lambda x, kept, dtype: np.testing.assert_array_equal(x, kept.astype(dtype)), cast, plain, dtypes)
    assert {str(x.dtype) for x in jax.tree.leaves(cast)} == {"bfloat16", "float32"}


def test_export_refuses_what_it_cannot_do(folder, tmp_path):
    found = pretrained.open_folder(folder("llama"))
    params = ours.on_one_device(found)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("")
    with pytest.raises(InputError, match="full: holds something already"):
        export.write_folder(tmp_path / "full", found.config.model, params)
    with pytest.raises(InputError, match="dtype: 'int8' must be one of float32, float16, bfloat16"):
        export.write_folder(tmp_path / "out", found.config.model, params, dtype="int8")
    large = jax.tree.map(lambda x: x * 1e6, params)
    with pytest.raises(
        InputError,
        match=r"embedding: has numbers that float16 does not hold, or that are not finite\n  fix   --dtype=bfloat16",
    ):
        export.write_folder(tmp_path / "half", found.config.model, large, dtype="float16")
    assert not (tmp_path / "half").exists()
    assert not (tmp_path / "out").exists()


def test_a_killed_export_leaves_nothing_that_looks_whole(folder, tmp_path, monkeypatch):
    found = pretrained.open_folder(folder("llama"))
    params = jax.device_get(ours.on_one_device(found))

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(export, "_pieces", killed)
        export.write_folder(tmp_path / "out", found.config.model, params)
    assert not (tmp_path / "out").exists()
    export.write_folder(tmp_path / "out", found.config.model, params)  # the next one begins anew
    assert sorted(path.name for path in tmp_path.iterdir()) == ["llama", "out"]


def test_export_in_another_dtype(folder, tmp_path):
    found = pretrained.open_folder(folder("llama"))
    export.write_folder(tmp_path / "out", found.config.model, ours.on_one_device(found), found.like, "bfloat16")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    again = pretrained.open_folder(tmp_path / "out")
    assert again.config.model.weight_dtype == "bfloat16"
    before, after = ours.tensors(tmp_path / "llama"), ours.tensors(tmp_path / "out")
    assert all(np.array_equal(after[name], before[name].astype(after[name].dtype)) for name in before)
