"""Compiling for targets: in another process, kept by content, with errors that reach the user."""

import dataclasses
import os
import shutil

import jax
import pytest

from gspmd_lm import files
from gspmd_lm.errors import InputError, RunFailed
from gspmd_lm.foresight import compile, target_answers
from gspmd_lm.hardware import target
from gspmd_lm.sharding.problems import ShardingError
from gspmd_lm.train import state, step


@pytest.mark.long
@pytest.mark.usefixtures("another_process")
def test_a_program_is_compiled_once(request_of, cache, monkeypatch):
    before = dict(os.environ)
    wanted, said = request_of("fsdp8", attention={"cpu": "xla"}), []
    (first,) = compile.programs([wanted], said.append, str(cache))
    assert dict(os.environ) == before
    assert first.text.startswith("HloModule jit__train") and not first.refusal
    assert first.state_bytes["optimizer"] >= 2 * first.state_bytes["weights"] > 0
    assert first.memory["argument_size_in_bytes"] >= sum(first.state_bytes.values())
    assert len(first.coords) == len(first.slices) == len(first.hosts) == 8
    monkeypatch.setattr(compile.subprocess, "run", None)  # whoever calls it fails
    said.clear()
    again = compile.programs([wanted, wanted], said.append, str(cache))
    assert again == [first, first] and not said


@pytest.mark.parametrize(
    ("target", "texts"),
    [
        ("v5e:2x4", ["estimated_cycles"]),
        pytest.param("h100:8", ["known_trip_count", "__cudnn$fmhaSoftmaxBackward"], marks=pytest.mark.slow),
    ],
)
def test_accelerators_are_compiled_for_without_one(in_bfloat16, cache, target, texts):
    """By default, test_any_step.py has a step that is compiled for a GPU, and the next test cuDNN's attention."""
    (program,) = compile.programs([in_bfloat16(target)], cache=str(cache))
    assert all(text in program.text for text in texts)
    assert "num_partitions=8" in program.text
    assert program.memory["temp_size_in_bytes"] > 0


@pytest.mark.long
def test_cudnn_is_asked_for_without_cudnn_or_a_gpu(in_bfloat16):
    """Its attention is the default of a GPU in bfloat16."""
    request = in_bfloat16("h100:8")
    arrays, _ = state.arrays_and_warnings(request.config, request.rules, "gpu")
    devices = target.devices(request.target)
    with target_answers.target_answers(request.target, devices):
        text = step.build_step(request.config, request.rules, arrays, devices).lower_train().as_text()
    assert "__cudnn$fmhaSoftmax(" in text and "__cudnn$fmhaSoftmaxBackward(" in text


def test_what_decides_a_program_decides_its_key(request_of):
    base = request_of("fsdp8")
    same = dataclasses.replace(base.rules, path="elsewhere.yaml", text="# a comment")
    assert dataclasses.replace(base, rules=same).key() == base.key()
    deeper = dataclasses.replace(base.config, name="deeper", model=dataclasses.replace(base.config.model, layers=3))
    others = [
        request_of("fsdp8", microbatches=2),
        request_of("fsdp8", rows=base.rules.rows[1:]),
        request_of("tp8"),
        request_of("fsdp8", "v5e:2x4"),
        dataclasses.replace(base, config=deeper),
    ]
    with jax.default_matmul_precision("highest"):
        others.append(request_of("fsdp8"))
    assert len({base.key(), *(other.key() for other in others)}) == 1 + len(others)
    square = request_of("dp2_tp4")
    swapped = dataclasses.replace(square.rules, mesh=dict(reversed(square.rules.mesh.items())))
    assert dataclasses.replace(square, rules=swapped).key() != square.key()  # the order of the mesh is device order


@pytest.mark.parametrize("harm", ["cut", "flipped", "gone", "facts", "manifest"])
def test_an_entry_that_is_damaged_is_said_and_made_anew(request_of, cache, tmp_path, monkeypatch, harm):
    wanted, said = request_of("fsdp8"), []
    (first,) = compile.programs([wanted], cache=str(cache))
    folder = tmp_path / wanted.key()
    shutil.copytree(cache / wanted.key(), folder)
    program = folder / "program.txt.gz"
    if harm == "cut":
        program.write_bytes(program.read_bytes()[:-10])
    elif harm == "flipped":
        content = bytearray(program.read_bytes())
        content[len(content) // 2] ^= 1
        program.write_bytes(content)
    elif harm == "gone":
        program.unlink()
    elif harm == "facts":
        (folder / "facts.json").write_text((folder / "facts.json").read_text().replace("0", "1", 1))
    else:
        (folder / "sha256.json").unlink()
    monkeypatch.setattr(compile, "_run_compiler", lambda request, into: copied(cache / wanted.key(), into))
    (second,) = compile.programs([wanted], said.append, str(tmp_path))
    assert "is damaged" in said[0] and "compiling" in said[1]
    assert (second.text, second.memory) == (first.text, first.memory)
    assert compile.programs([wanted], said.append, str(tmp_path)) == [second] and len(said) == 3


def copied(source, folder):
    """What the compiler leaves, without compiling again."""
    for file in source.iterdir():
        if file.name != "sha256.json":
            shutil.copyfile(file, folder / file.name)


@pytest.mark.long
@pytest.mark.usefixtures("another_process")
def test_errors_of_the_other_process_reach_the_user(request_of, tmp_path):
    options = {"cpu": {"xla_cpu_no_such_option": True}}
    with pytest.raises(InputError, match=r"compiler_options\.cpu\.xla_cpu_no_such_option"):
        compile.programs([request_of("fsdp8", compiler_options=options)], cache=str(tmp_path))
    assert not list(tmp_path.iterdir())  # nothing half done is left


@pytest.mark.slow
def test_errors_of_its_rules_do_too(request_of, tmp_path):
    with pytest.raises(ShardingError, match="the devices are 2 slices, the rules say 4"):
        whole = dict.fromkeys(("cpu", "gpu", "tpu"), "xla")
        compile.programs([request_of("fsdp", "2@v5e:2x2", attention=whole, dcn={"fsdp": 4})], cache=str(tmp_path))
    assert not list(tmp_path.iterdir())  # nothing half done is left


@pytest.mark.usefixtures("another_process")
def test_a_compiler_that_dies_is_reported(request_of, tmp_path, monkeypatch):
    monkeypatch.setattr(compile.sys, "executable", "/bin/false")
    with pytest.raises(RunFailed, match="fsdp8 for cpu:8: the compiler failed"):
        compile.programs([request_of("fsdp8")], cache=str(tmp_path))


def test_old_entries_go_when_the_folder_is_full(tmp_path):
    for age, name in enumerate(("newest", "kept", "oldest")):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "program.txt.gz").write_bytes(b"x" * 100)
        os.utime(folder, (1000 - age, 1000 - age))
    files.trim(tmp_path.iterdir(), 250, keep={"kept": None})
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["kept", "newest"]


def test_the_gpus_of_a_host_share_its_network(request_of):
    dgx, cloud, half = (target.parse(f"h100:{text}") for text in ("2x8", "2x8/800", "2x4/1600"))
    assert [found.chip.network_bytes_per_s for found in (dgx, cloud, half)] == [50e9, 12.5e9, 50e9]
    assert target.parse("h100:16/800").chip == cloud.chip
    keys = {request_of("fsdp8", f"h100:8{network}").key() for network in ("", "/800", "/3200")}
    assert len(keys) == 1 and keys != {request_of("fsdp8", "h200:8").key()}  # compiled once for all networks
