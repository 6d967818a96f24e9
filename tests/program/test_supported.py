"""Which attention kernel computes a pass, and what is said of it."""

import dataclasses

import pytest

from gspmd_lm import config as configs
from gspmd_lm.config import core_yaml, with_values
from gspmd_lm.hardware import target
from gspmd_lm.hardware.chips import CHIPS, Processor
from gspmd_lm.program import supported
from gspmd_lm.program.supported import Pass
from gspmd_lm.sharding import rules_file
from gspmd_lm.sharding.problems import ShardingError
from gspmd_lm.sharding.rules import KERNELS

H100, A100, V5P = (target.parse(text).processor for text in ("h100:8", "a100:8", "v5p:2x2x2"))
LLAMA = configs.load("llama3_8b", ["data.batch=8", "data.seq=2048"])
FSDP = "mesh: {fsdp: 8}\nrules: {batch: fsdp}\nweights: {embed: fsdp}\n"
CONTEXT = "mesh: {context: 8}\nrules: {seq: context}\n"


def choice(text, on, config=LLAMA, asked=Pass(2048)):  # noqa: B008
    """The kernel of settled rules, and what is said of it."""
    path = "layout.yaml"
    loaded = rules_file.from_dict(core_yaml.parse(text, path), path)
    rules = supported.settle_rules(loaded, config, on, asked)
    assert supported.settle_rules(rules, config, on, asked) == rules
    return rules.kernel(on.platform), supported.kernel_choice(rules, config, on, asked)


def model(**changes):
    return dataclasses.replace(LLAMA, model=with_values(LLAMA.model, changes))


BERT = configs.load("llama3_8b", ["objective=masked", "model.attention.mask=full", "data.packing=documents"])


@pytest.mark.parametrize(
    ("text", "on", "config", "kernel", "message"),
    [
        (FSDP, H100, LLAMA, "cudnn", "cudnn"),
        (FSDP, V5P, LLAMA, "splash", "splash"),
        (FSDP, Processor("cpu", "cpu"), LLAMA, "xla", ""),
        (FSDP, Processor("gpu", "Tesla V100", (7, 0)), LLAMA, "xla",
         "xla, since cudnn on Tesla V100 does not support compute capability 7.0 (only 8.0 and newer)"),
        (FSDP, Processor("gpu", "Some New GPU"), LLAMA, "cudnn", "cudnn"),
        (FSDP, H100, model(positions="alibi"), "xla",
         "xla, since cudnn on h100 does not support model.positions: alibi"),
        (FSDP, V5P, model(**{"attention.relative_positions": configs.RelativePositions()}), "xla",
         "xla, since splash on v5p does not support model.attention.relative_positions"),
        (FSDP, H100, BERT, "cudnn", "cudnn"),
        (FSDP, A100, BERT, "xla", "xla, since cudnn on a100 does not support data.packing: documents on compute "
         "capability 8.0 (only 9.0 and newer)"),
        (CONTEXT, V5P, BERT, "splash", "splash"),
        (CONTEXT, V5P, LLAMA, "splash", "splash"),
        (CONTEXT, H100, LLAMA, "xla", "xla, since cudnn on h100 does not support context: gather (only ring and "
         "ulysses); fix --set rules.context=ring"),
        (CONTEXT + "context: ring\n", H100, LLAMA, "cudnn", "cudnn"),
        (FSDP + "attention: {gpu: xla, tpu: splash}\n", H100, LLAMA, "xla",
         "xla, as layout.yaml: attention.gpu: xla says; cudnn can do it too"),
        (FSDP + "attention: {gpu: xla}\n", V5P, LLAMA, "splash", "splash"),  # another platform is left to itself
    ],
)  # fmt: skip
def test_the_fastest_kernel_of_a_chip_that_can_is_chosen_and_said(text, on, config, kernel, message):
    asked = Pass(2048, segments=config.data.packing == "documents")
    assert choice(text, on, config, asked) == (kernel, message)


def test_what_would_let_a_faster_kernel_is_printed_only_if_it_does(monkeypatch):
    def whole_rows(kernel, cfg, *, seq, segments, capability):
        return "data.packing: documents" if kernel == "cudnn" and segments else None

    monkeypatch.setattr(supported, "unsupported_setting", whole_rows)
    packed, fix = Pass(2048, segments=True), "; fix --set data.packing=stream"
    kernel, said = choice(FSDP, H100, asked=packed)
    assert (kernel, said) == ("xla", f"xla, since cudnn on h100 does not support data.packing: documents{fix}")
    data = dataclasses.replace(LLAMA.data, packing="documents", messages_field="messages")
    chats = dataclasses.replace(LLAMA, data=data)
    assert fix not in choice(FSDP, H100, chats, packed)[1]  # conversations cannot be packed otherwise
    # A window does not go with a ring.
    assert "fix" not in choice(CONTEXT, H100, model(**{"attention.window": 64}))[1]
    said = choice(FSDP, H100, asked=Pass(2048, padded=True))[1]
    assert said.endswith("does not support prompts that are padded on the left")


def test_a_kernel_that_is_asked_for_by_name_is_an_error_on_a_gpu_that_is_too_old():
    with pytest.raises(ShardingError, match=r"cudnn on T4 cannot do compute capability 7\.5 (.|\n)*attention=null"):
        choice(FSDP + "attention: {gpu: cudnn}\n", Processor("gpu", "T4", (7, 5)))


def test_every_chip_has_a_fused_kernel_but_gpus_that_are_older_than_cudnn_attention():
    without = set()
    for name, chip in CHIPS.items():
        on = dataclasses.replace(target.parse("cpu:8"), platform=chip.platform, chip=chip).processor
        kernel = choice(FSDP, on)[0]
        assert kernel in (KERNELS[chip.platform][0], "xla") and KERNELS[chip.platform][0] != "xla"
        without |= {name} if kernel == "xla" else set()
    assert without == {"t4", "v100", "mi300x"}


def test_experts_that_no_kernel_computes_are_a_warning():
    mixture = configs.load("tiny_experts")
    rules = rules_file.load("expert4").fill(8)

    def warnings(platform, **changes):
        config = dataclasses.replace(mixture, model=with_values(mixture.model, changes))
        return [one.message for one in supported.layer_problems(config, rules, platform, Pass(128)) if one.warning]

    (loop,) = warnings("gpu", compute_dtype="float32")
    assert "since the kernel for GPUs does not support model.compute_dtype: float32" in loop
    assert (
        "matrices of 64 x 100 on a device"
        in warnings("gpu", compute_dtype="bfloat16", embed=64, **{"experts.mlp": 100})[0]
    )
    assert warnings("gpu", compute_dtype="bfloat16") == warnings("tpu", compute_dtype="float32") == []
