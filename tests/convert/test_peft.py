"""Adapters in PEFT's format: the same change of each published tensor as merging them, and what PEFT computes."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict

from gspmd_lm import cli
from gspmd_lm.config import Encoder, Frames, Lora, ModelConfig, from_values, with_values
from gspmd_lm.convert import export
from gspmd_lm.errors import InputError
from gspmd_lm.model import lora
from gspmd_lm.train import state
from tests.convert import ours, references
from tests.courses import weights
from tests.data import conversations
from tests.quick import QUICK_FLAGS

ATTENTION, PLAIN = ("wq", "wk", "wv", "wo"), ("w_up", "w_down")
GATED = ("w_gate", *PLAIN)


def adapted(base, targets, rank=3, alpha=6.0):
    """Settings and parameters of a published model with adapters that have learned something."""
    settings = Lora(rank=rank, alpha=alpha, targets=targets)
    config = dataclasses.replace(base.config, model=dataclasses.replace(base.config.model, lora=settings))
    rng = np.random.default_rng(0)
    abstract = flatten_dict(lora.adapters(state.arrays(config).params))
    drawn = {path: (0.3 * rng.standard_normal(x.shape)).astype(x.dtype) for path, x in sorted(abstract.items())}
    return config.model, lora.join_trees(jax.device_get(ours.on_one_device(base)), unflatten_dict(drawn))


@pytest.mark.parametrize(
    ("name", "targets", "overrides", "modules"),
    [
        ("llama", (*ATTENTION, *GATED), (), "down_proj gate_proj k_proj o_proj q_proj up_proj v_proj"),
        ("llama3", ATTENTION, ("model.padded_heads=12",), "k_proj o_proj q_proj v_proj"),
        ("gemma3", ("wq", "wv"), (), "q_proj v_proj"),  # layers in a pattern, and a remainder
        ("phi3", ("wq", "wv", *GATED), (), "down_proj gate_up_proj qkv_proj"),
        ("glm4", ("wq", "wk", "w_up"), (), "gate_up_proj k_proj q_proj"),  # interleaved rope
        ("gpt2", ("wk", "wv", "wo"), (), "attn.c_proj c_attn"),  # not transposed; the MLP has a c_proj too
        ("gpt2", (*ATTENTION, *PLAIN), (), "c_attn c_fc c_proj"),
        ("falcon-40b", ATTENTION, (), "dense query_key_value"),  # heads of queries, keys and values in turns
    ],
)
def test_adapters_change_each_tensor_as_merging_does(name, targets, overrides, modules, tmp_path):
    golden = references.load(name)
    found = ours.read(golden, tmp_path / name, *overrides)
    model, params = adapted(found, targets)
    export.write_adapter(tmp_path / "adapter", model, params, "base", found.like)
    about = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert about["target_modules"] == modules.split() and about["base_model_name_or_path"] == "base"
    assert about["fan_in_fan_out"] == (name == "gpt2")

    (tmp_path / "adapter" / "adapter_model.safetensors").rename(tmp_path / "adapter" / "model.safetensors")
    matrices = ours.tensors(tmp_path / "adapter")
    merged, plain = (
        jax.jit(lambda params: lora.merge_adapters(params, model)[0])(params),
        lora.merge_adapters({}, model)[1],
    )
    export.write_folder(tmp_path / "merged", plain, jax.device_get(merged), found.like)
    before, after = ours.tensors(tmp_path / name), ours.tensors(tmp_path / "merged")
    changed = set()
    for tensor, weight in before.items():
        prefix = f"base_model.model.{tensor.removesuffix('.weight')}.lora_"
        want = after[tensor].astype(np.float32) - weight
        if f"{prefix}A.weight" not in matrices:
            assert not want.any(), tensor
            continue
        a, b = matrices.pop(f"{prefix}A.weight"), matrices.pop(f"{prefix}B.weight")
        last = tensor.removesuffix(".weight").rpartition(".")[2]
        rank = about["rank_pattern"].get(last, about["r"])
        assert a.shape[0] == b.shape[1] == rank, tensor
        scale = about["alpha_pattern"].get(last, about["lora_alpha"]) / rank
        got = scale * b.astype(np.float64) @ a
        np.testing.assert_allclose(got.T if about["fan_in_fan_out"] else got, want, rtol=0, atol=1e-5)
        changed.add(last)
    assert not matrices and changed == {module.rpartition(".")[2] for module in about["target_modules"]}


def test_what_is_refused(tmp_path):
    found = ours.read(references.load("llama"), tmp_path / "llama")
    with pytest.raises(InputError, match="no adapters"):
        export.write_adapter(tmp_path / "adapter", found.config.model, {})
    model, params = adapted(found, ("wq",))
    with pytest.raises(InputError, match="holds something already"):
        export.write_adapter(tmp_path / "llama", model, params)
    mixture = with_values(
        model, {"experts.count": 4, "experts.per_token": 2, "lora": Lora(targets=("wq", "w_up", "w_down"))}
    )
    with pytest.raises(
        InputError, match=r"experts \(w_up, w_down\) cannot be .* PEFT[^`]*without --adapter, which merges"
    ):
        export.family_and_model(tmp_path / "adapter", mixture)


@pytest.mark.parametrize(
    ("settings", "task"),
    [
        ({}, "CAUSAL_LM"),
        ({"attention.mask": "full"}, None),  # BERT generates nothing, as PEFT's class of decoders asks it to
        ({"encoder": Encoder()}, "SEQ_2_SEQ_LM"),
        ({"encoder": Encoder(), "frames": Frames()}, None),
    ],
)
def test_an_adapter_names_a_class_of_peft_that_loads_it(settings, task):
    sizes = dict.fromkeys(("layers", "embed", "heads", "kv_heads", "head_dim", "mlp", "vocab", "context"), 2)
    assert export._task_type(from_values(ModelConfig, sizes | settings)) == task


@pytest.mark.parametrize(
    ("name", "tensors"),
    [
        ("mixtral", {"w_gate": ("block_sparse_moe.experts.2.w1.weight", np.transpose),
                     "w_down": ("block_sparse_moe.experts.2.w2.weight", np.transpose)}),
        pytest.param("gpt-oss", {"w_gate": ("mlp.experts.gate_up_proj", lambda w: w[2, :, ::2]),
                                 "w_down": ("mlp.experts.down_proj", lambda w: w[2])}, marks=pytest.mark.long),
    ],
)  # fmt: skip
def test_adapters_of_experts_are_merged_into_what_is_written(name, tensors, tmp_path):
    """Of expert 2 in layer 1."""
    found = ours.read(references.load(name), tmp_path / name)
    model, params = adapted(found, ("w_gate", "w_down"))
    merged, plain = (
        jax.jit(lambda params: lora.merge_adapters(params, model)[0])(params),
        lora.merge_adapters({}, model)[1],
    )
    export.write_folder(tmp_path / "merged", plain, jax.device_get(merged), found.like)
    before, after = ours.tensors(tmp_path / name), ours.tensors(tmp_path / "merged")
    layers = params["layers"]  # layer 1 is the second of one stack, or the first of the second stack
    mlp, at = (layers["mlp"], 1) if name == "mixtral" else (layers["block_1"]["mlp"], 0)
    for weight, (tensor, view) in tensors.items():
        added = model.lora.scale * np.matmul(mlp[f"{weight}_a"][at, 2], mlp[f"{weight}_b"][at, 2], dtype=np.float64)
        changed = after[f"model.layers.1.{tensor}"].astype(np.float64) - before[f"model.layers.1.{tensor}"]
        np.testing.assert_allclose(view(changed), added, rtol=0, atol=1e-5)


@pytest.mark.parity
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.* is deprecated:FutureWarning")  # peft 0.21.2
@pytest.mark.parametrize(
    ("name", "targets"),
    [("llama", (*ATTENTION, *GATED)), ("phi3", ("wq", "wv", *GATED)), ("gpt2", ("wk", "wo")), ("gptj", ATTENTION)],
)
def test_peft_computes_the_same_logits(name, targets, tmp_path):
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    golden = references.load(name)
    found = ours.read(golden, tmp_path / name)
    model, params = adapted(found, targets)
    export.write_adapter(tmp_path / "adapter", model, params, str(tmp_path / name), found.like)

    reference = AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32, attn_implementation="eager")
    loaded = PeftModel.from_pretrained(reference, tmp_path / "adapter").eval()
    tokens = np.random.default_rng(1).integers(3, model.vocab, (2, 12))
    with torch.no_grad():
        want = loaded(input_ids=torch.tensor(tokens)).logits.numpy()
    batch = {"tokens": tokens.astype(np.int32), "positions": np.tile(np.arange(12, dtype=np.int32), (2, 1))}
    got = np.asarray(ours.compiled(model, params, batch))
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)
    plain = np.asarray(ours.compiled(lora.merge_adapters({}, model)[1], lora.weights(params), batch))
    assert np.abs(got - plain).max() > 0.01


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A published folder with a tokenizer, and a LoRA run that began from it, exported twice: in full, as an adapter.

    Every step is a command.
    """
    folder = tmp_path_factory.mktemp("lora")
    published, base, tuned, full, adapter = (folder / name for name in ("hub", "base", "tuned", "full", "adapter"))
    model = ModelConfig(
        layers=2, embed=32, heads=4, kv_heads=2, head_dim=8, mlp=64, vocab=272, context=64, compute_dtype="float32"
    )  # fmt: skip
    export.write_folder(published, model, jax.device_get(weights(model)))
    conversations.write_tokenizer(published, conversations.CHATML)
    chats = [{"messages": conversations.turns(f"{n}+{n}?", str(2 * n))} for n in range(64)]
    (folder / "chats.jsonl").write_text("".join(f"{json.dumps(chat)}\n" for chat in chats))
    sets = ["data.messages_field=messages", f"data.source={folder / 'chats.jsonl'}", "data.seq=64", "data.batch=2",
            "data.held_out=0.0", f"train.init_from={base}", "train.steps=2", "train.trackers=[]",
            "optimizer.learning_rate=0.1", "model.lora={rank: 4, alpha: 32, targets: [wq, wv, w_up]}"]  # fmt: skip
    place = "--rules=single", "--compile_cache=none", *QUICK_FLAGS
    for command in (
        ["convert", f"--from={published}", f"--workdir={base}"],
        ["train", f"--config={base / 'config.yaml'}", f"--workdir={tuned}", *(f"--set={one}" for one in sets)],
        ["convert", f"--workdir={tuned}", f"--to={full}"],
        ["convert", f"--workdir={tuned}", f"--to={adapter}", "--adapter", f"--base={published}"],
    ):
        with pytest.raises(SystemExit) as end:
            cli.main(["main.py", *command, *place])
        assert end.value.code == 0, command
    return published, full, adapter


@pytest.mark.long
def test_an_adapter_is_exported_on_the_command_line(exported):
    published, full, adapter = exported
    assert {path.name for path in adapter.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    about = json.loads((adapter / "adapter_config.json").read_text())
    assert about["base_model_name_or_path"] == str(published) and about["r"] == 4
    assert (full / "tokenizer.json").read_bytes() == (published / "tokenizer.json").read_bytes()
    before, after = ours.tensors(published), ours.tensors(full)
    assert {name.split(".")[-2] for name in after if (before[name] != after[name]).any()} == {
        "q_proj", "v_proj", "up_proj"
    }  # fmt: skip


@pytest.mark.parity
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.* is deprecated:FutureWarning")  # peft 0.21.2
def test_peft_computes_with_it_what_the_full_export_computes(exported):
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    published, full, adapter = exported
    torch.set_num_threads(1)
    base, merged = (AutoModelForCausalLM.from_pretrained(at, dtype=torch.float32) for at in (published, full))
    tokens = torch.tensor(np.random.default_rng(1).integers(3, 265, (2, 12)))
    with torch.no_grad():
        plain, want = base(input_ids=tokens).logits, merged(input_ids=tokens).logits
        got = PeftModel.from_pretrained(base, adapter).eval()(input_ids=tokens).logits
    np.testing.assert_allclose(got.numpy(), want.numpy(), rtol=0, atol=1e-4)
    assert (want - plain).abs().max() > 0.01
