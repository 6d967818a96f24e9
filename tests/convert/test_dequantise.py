"""Quantised folders are read as the floats that they stand for. The tensors here are packed number by number."""

import json
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

from gspmd_lm.convert import dequantise, pretrained, safetensors
from gspmd_lm.errors import InputError
from tests.convert import ours, references

KINDS = safetensors.WEIGHT_DTYPES | {"int32": "I32", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"}
GROUP = 16
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
FLOATS = {"quant_method": "compressed-tensors", "format": "float-quantized",
          "config_groups": {"a": {"weights": {"type": "float", "num_bits": 8, "strategy": "channel"}}}}  # fmt: skip


def rng_of(name):
    return np.random.default_rng(list(name.encode()))


def packed(numbers, bits, order=None):
    """Numbers along the last axis, so many in each 32-bit word, the first in its lowest bits; AWQ has another order."""
    count = 32 // bits
    order = order or range(count)
    words = np.zeros((*numbers.shape[:-1], numbers.shape[-1] // count), np.uint64)
    for place, column in enumerate(order):
        words |= numbers[..., column::count].astype(np.uint64) << np.uint64(bits * place)
    return words.astype(np.uint32).view(np.int32)


def drawn(name, shape, bits):
    """Whole numbers [inputs, outputs] with a zero point and a scale for each group of inputs and output."""
    (outputs, inputs), rng = shape, rng_of(name)
    numbers = rng.integers(0, 2**bits, (inputs, outputs))
    zeros = rng.integers(1, 2**bits, (inputs // GROUP, outputs))
    scales = (rng.random((inputs // GROUP, outputs)) / 2**bits).astype(np.float16)
    return numbers, zeros, scales


def floats(numbers, zeros, scales, group):
    """The weight [outputs, inputs], one input at a time."""
    rows = [(numbers[i] - zeros[g]).astype(np.float32) * scales[g].astype(np.float32) for i, g in enumerate(group)]
    return np.stack(rows, 1)


def awq(name, shape, about):
    numbers, zeros, scales = drawn(name, shape, 4)
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    parts = {"qweight": packed(numbers, 4, order), "qzeros": packed(zeros, 4, order), "scales": scales}
    return parts, floats(numbers, zeros, scales, np.arange(shape[1]) // GROUP)


def gptq(name, shape, about):
    bits = about["bits"]
    numbers, zeros, scales = drawn(name, shape, bits)
    group = np.arange(shape[1]) // GROUP
    if about["desc_act"]:
        group = rng_of(name).permutation(group)
    less = 0 if "gptq_v2" in about.values() else 1
    parts = {"qweight": packed(numbers.T, bits).T, "qzeros": packed(zeros - less, bits), "scales": scales,
             "g_idx": group.astype(np.int32)}  # fmt: skip
    return parts, floats(numbers, zeros, scales, group)


def float8(name, shape, about):
    """`weight` and its scales: of blocks of 16 x 24, of rows, or one."""
    rng, block = rng_of(name), about.get("weight_block_size")
    weight = rng.normal(size=shape).astype(ml_dtypes.float8_e4m3fn)
    if block:
        scale = rng.random((-(-shape[0] // block[0]), -(-shape[1] // block[1]))).astype(np.float32)
        each = np.kron(scale, np.ones(block, np.float32))[: shape[0], : shape[1]]
        return {"weight": weight, "weight_scale_inv": scale}, weight.astype(np.float32) * each
    scale = rng.random((shape[0], 1) if about is FLOATS else ()).astype(ml_dtypes.bfloat16)
    more = {"input_scale": np.ones(1, np.float32)} if about is not FLOATS else {}
    return {"weight": weight, "weight_scale": scale, **more}, weight.astype(np.float32) * scale.astype(np.float32)


def write(folder, config, tensors):
    folder.mkdir(parents=True)
    tensors = {name: np.asarray(array, order="C") for name, array in tensors.items()}
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, array in tensors.items():
        entries[name] = {
            "dtype": KINDS[array.dtype.name],
            "shape": array.shape,
            "data_offsets": [at, at + array.nbytes],
        }
        at += array.nbytes
    header = json.dumps(entries).encode()
    data = b"".join(array.tobytes() for array in tensors.values())
    (folder / safetensors.SINGLE).write_bytes(len(header).to_bytes(8, "little") + header + data)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def folders(tmp_path, case, make, about, change=lambda tensors: None):
    """A quantised folder, and the same model in floats. Embeddings, norms and the last layer are not quantised."""
    golden = references.load(case)
    other, plain, quantised = ml_dtypes.bfloat16 if make is float8 else np.float16, {}, {}
    for name, shape in golden.tensors.items():
        if "_proj." in name:
            parts, plain[name] = make(name, shape, about)
            quantised |= {name.replace("weight", part): array for part, array in parts.items()}
        else:
            quantised[name] = references.weight(name, shape, 0).astype(other)
            plain[name] = quantised[name].astype(np.float32)
    change(quantised)
    config = golden.about["config"]
    return (
        write(tmp_path / "quantised", config | {"quantization_config": about}, quantised),
        write(tmp_path / "plain", config, plain),
    )


@pytest.mark.parametrize(
    ("case", "make", "about", "message"),
    [
        ("llama", awq, AWQ, "AWQ, 4 bits"),
        ("qwen3", gptq, GPTQ, "GPTQ, 4 bits"),
        ("llama", gptq, GPTQ | {"bits": 8, "desc_act": True, "format": "gptq_v2"}, "GPTQ, 8 bits"),
        ("llama", gptq, GPTQ | {"checkpoint_format": "gptq_v2", "desc_act": True}, "GPTQ, 4 bits"),
        ("qwen3", float8, FP8 | {"weight_block_size": [16, 24]}, "float8"),
        ("llama", float8, FP8, "float8"),
        ("llama", float8, FLOATS, "float8"),
    ],
)
def test_weights_are_those_of_the_floats_bit_for_bit(tmp_path, monkeypatch, case, make, about, message):
    monkeypatch.setattr(pretrained, "BLOCK_BYTES", 1000)  # a few rows at a time
    as_floats = ["model.weight_dtype=float32"]
    quantised, plain = (pretrained.open_folder(folder, as_floats) for folder in folders(tmp_path, case, make, about))
    assert quantised.notes == [f"14 quantised tensors ({message}) are read as the floats that they stand for"]
    assert quantised.left_out == 0 and "quantization_config" not in quantised.like
    assert quantised.config.model.compute_dtype == "bfloat16"
    found, wanted = ours.on_one_device(quantised), ours.on_one_device(plain)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    whole = next(where for where in quantised.files.values() if isinstance(where, dequantise.Dequantised))
    for first in (slice(3, 29, 7), np.array([9, 2, 30]), slice(0, 0)):  # rows of any kind
        view = whole.shape
        assert np.array_equal(
            whole.read(view, (first, slice(1, 9))), whole.read(view, [slice(0, view[0])] * 2)[first, 1:9]
        )


@pytest.mark.parametrize(
    ("about", "message"),
    [
        (AWQ | {"bits": 3}, "bits: 3 of AWQ are not supported, only 4"),
        (AWQ | {"version": "gemv"}, "version: 'gemv' of AWQ is not supported, only gemm"),
        (AWQ | {"version": None, "format": "gemv"}, "format: 'gemv' of AWQ is not supported, only gemm"),
        (AWQ | {"zero_point": False}, "zero_point: AWQ without zero points is not supported"),
        (GPTQ | {"bits": 3}, "bits: 3 of GPTQ are not supported, only 4 and 8"),
        (GPTQ | {"bits": [4]}, "bits: [4] of GPTQ are not supported"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format: 'marlin' is not supported"),
        (GPTQ | {"dynamic": {"-:lm_head": {}}}, "dynamic: settings for each module are not supported"),
        (FP8 | {"fmt": "e3m4"}, "fmt: 'e3m4' is not supported"),
        (FLOATS | {"config_groups": {"a": {"weights": {"type": "int", "num_bits": 4}}}}, "only weights of type float"),
        (FLOATS | {"config_groups": {"a": {"weights": None}}}, "only weights of type float and"),
        (FLOATS | {"config_groups": [1]}, "only weights of type float and"),
        (FLOATS | {"transform_config": {"config_groups": {"v": {}}}}, "transform_config: rotations of what"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quant_method: 'bitsandbytes' is not supported; supp"),
        ({"quant_method": ["awq"]}, "quant_method: ['awq'] is not supported"),
        ({"bits": 4}, "quant_method: None is not supported"),
        ([1], "quantization_config: [1] is not an object"),
    ],
)  # fmt: skip
def test_other_ways_to_quantise_are_refused_with_a_way_out(tmp_path, about, message):
    folder = references.load("llama").folder(tmp_path / "a")
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": about}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError) as error:
        pretrained.open_folder(folder)
    assert f"{folder / 'config.json'}: quantization_config: " in str(error.value) and message in str(error.value)
    assert "\n  fix   " in str(error.value)


NAME, NONE = "model.layers.0.mlp.up_proj", np.zeros((0, 64), np.int32)


@pytest.mark.parametrize(
    ("make", "about", "change", "message"),
    [
        (awq, AWQ, lambda held: held.pop(f"{NAME}.scales"), f"{NAME} has no scales"),
        (awq, AWQ, lambda held: held.update({f"{NAME}.qzeros": np.zeros((2, 7), np.int32)}), f"{NAME}: quantization_"),
        (awq, AWQ, lambda held: held.update({f"{NAME}.scales": np.zeros(8, np.float16)}), "scales F16 [8]"),
        (awq, AWQ, lambda held: held.update({f"{NAME}.qweight": np.int32(3)}), "qweight I32 []"),
        (gptq, GPTQ, lambda held: held.update({f"{NAME}.qweight": np.int32(3)}), "qweight I32 []"),
        (
            gptq,
            GPTQ,
            lambda held: held.update({f"{NAME}.qweight": NONE, f"{NAME}.g_idx": NONE[:, 0]}),
            "qweight I32 [0",
        ),
        (gptq, GPTQ | {"bits": 8}, lambda held: held.update({f"{NAME}.g_idx": np.zeros(3, np.int32)}), "g_idx I32 [3]"),
        (gptq, GPTQ, lambda held: held.update({f"{NAME}.g_idx": np.full(32, 9, np.int32)}), "g_idx I32 [32]"),
        (gptq, GPTQ, lambda held: held.update({f"{NAME}.qweight": np.zeros((4, 64), np.float32)}), "qweight F32"),
        (float8, FP8, lambda held: held.update({f"{NAME}.weight_scale": np.ones(5, np.float32)}), "scales F32 [5]"),
        (float8, FP8, lambda held: held.pop(f"{NAME}.weight_scale"), f"{NAME}.weight is F8_E4M3; supported are F32"),
    ],
)
def test_parts_that_do_not_fit_are_named(tmp_path, make, about, change, message):
    quantised, _ = folders(tmp_path, "llama", make, about, change)
    with pytest.raises(InputError) as error:
        pretrained.open_folder(quantised)
    assert message in str(error.value)


def test_experts_in_one_float8_tensor_have_blocks_each(tmp_path):
    weight = rng_of("experts").normal(size=(3, 40, 50)).astype(ml_dtypes.float8_e4m3fn)
    scale = rng_of("scales").random((3, 3, 3)).astype(np.float32)
    write(tmp_path / "a", {}, {"experts.up": weight, "experts.up_scale_inv": scale})
    about = FP8 | {"weight_block_size": [16, 24]}
    (found,) = dequantise.dequantise_tensors(safetensors.stored_tensors(tmp_path / "a"), about, "a").values()
    each = np.stack([np.kron(one, np.ones((16, 24), np.float32))[:40, :50] for one in scale])
    wanted = weight.astype(np.float32) * each
    assert found.shape == wanted.shape
    np.testing.assert_array_equal(found.read(found.shape, [slice(1, 3), slice(5, 9), slice(None)]), wanted[1:3, 5:9])
