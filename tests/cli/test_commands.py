"""Every flag of every verb, and every command of the documents, is run on small inputs.

The default run has each flag once. `pytest -m slow` runs each page from top to bottom, in a folder of its own.
"""

import json
import shlex
import subprocess
import sys

import pytest

from gspmd_lm import cli
from gspmd_lm.foresight import compile
from tests import documented
from tests.foresight import calibrated_here
from tests.launched import compiled_here
from tests.quick import QUICK_FLAGS

# One command in each line, in an order in which each finds what it needs. Together they have every flag of every verb
# but those of SEVERAL. Nothing behind a `|` is part of the command: it stands in what the command says.
SHORT = """
train --config=small.yaml --rules=none --train_tokenizer=own.json --set data.tokenizer=bpe:300 --set model.vocab=0 | own.json: 300 tokens
train --config=small.yaml --rules=dp2_tp4 --mesh=data=4,tensor=2 --dry_run | parameters, mesh data=4 x tensor=2
train --config=small.yaml --rules=zero1_8 --dry_run --show=wq --html=d.html | optimizer state: embed/data
calibrate --platform=cpu --devices=8 --out=mine.yaml | wrote mine.yaml: calibrated on 20
train --config=small.yaml --rules=fsdp --mesh=fsdp=2 --platform=cpu --devices=8 --chip=mine.yaml --workdir=runs/a --steps=1 --profile=0:1 --compile_cache=none --set data.held_out=0.0 | calibrated on 20
train --workdir=runs/a --steps=2 --step=1 --elastic | restored step 1 of
data --config=small.yaml --set data.batch=4 --json=l.json --html=l.html | Rows: tokens that are predicted are [[in brackets]]
tokenize --config=small.yaml --set data.source=book.txt --set data.tokenizer=bytes --set data.held_out=0.0 --out=made | train on them: --set data.source=
data --set data.source=made | held-out rows none
plot --workdir=runs/a --html=a.html | a.html
explain --config=small.yaml --rules=fsdp --mesh=fsdp=2 --target=cpu:2 --phase=train --json=e.json --html=e.html --export=step.bin --assume=notice_s=9 --price=v5e=2/1 --set model.mlp=32 | on cpu:2, 2 simulated devices
train --config=small.yaml --rules=fsdp --mesh=fsdp=2 --set model.mlp=32 --executable=step.bin --trust --steps=1 --workdir=runs/b | loaded, not compiled
compare --rules=fsdp --config=small.yaml --mesh=fsdp=2 --target=cpu:2 --phase=train --json=c.json --export=c.bin --html=c.html --assume=away_s=9 --price=v5e=2 --set model.mlp=32 | on cpu:2, 2 simulated devices
explain --program=train.py:step --target=mine:8 --chip=mine.yaml | calibrated on 20
explain fsdp8 dp8 --rows --config=small.yaml --target=cpu:8 --json=r.json --html=r.html | - weights.embed: fsdp
compare dp8 zero1_8 --rows --config=small.yaml --target=v5e:2x4 | + optimizer.embed: data
train --config=small.yaml --rules=fsdp --mesh=fsdp=2 --chip=mine.yaml --steps=3 --profile=1:2 --workdir=runs/c | measured against predicted
errors runs/c --json=k.json | mine: 
plan --config=small.yaml --target=mine:2,h100:1 --chip=mine.yaml --minutes=0.0001 --batch=8:8 --tokens=1e9 --days=99 --price=h100=3/1 --assume=preemptions_per_day=1 --out=p.yaml --json=p.json --html=p.html --set model.mlp=32 | 0 compiled
plan --config=small.yaml --target=mine:2 --chip=mine.yaml --measured=runs/c --minutes=0.0001 | corrected by --measured=runs/c
compare dp8 fsdp8 --rows --config=small.yaml --target=mine:8 --chip=mine.yaml | + weights.embed: fsdp
explore --config=small.yaml --rules=fsdp --mesh=fsdp=2 --target=mine:2 --chip=mine.yaml --set model.mlp=32 --port=0 --open --json=s.json | wrote s.json
plan --config=small.yaml --target=v5e:1x1 --phase=decode --minutes=0.0001 --json=d.json | 0 compiled
explore --program=train.py:step --target=cpu:2 --json=s.json | wrote s.json
convert --from=ODD --workdir=W --rules=dp2_tp4 --mesh=data=1,tensor=8 --platform=cpu --devices=8 --compile_cache=none --ignore=some_feature | ODD: Llama
generate --workdir=W --rules=none --prompt=01 --max_new_tokens=3 --temperature=0.8 --top_k=5 --top_p=0.9 --min_p=0.01 --seed=1 --stop=zz --special | tokens
generate --config=W/config.yaml --workdir=W --rules=dp2_tp4 --mesh=data=1,tensor=2 --platform=cpu --devices=8 --compile_cache=none --set data.seq=32 --prompts=prompts.jsonl --output=out.jsonl --batch=1 --max_new_tokens=3 --chat --step=0 | out.jsonl
eval --config=W/config.yaml --workdir=W --rules=dp2_tp4 --mesh=data=1,tensor=2 --platform=cpu --devices=8 --compile_cache=none --set data.seq=32 --text=book.txt --seq=16 --batch=64 --step=0 | bits per byte
eval --workdir=W --rules=none --continuations=IN.jsonl --output=scores.jsonl | scores.jsonl
convert --config=W/config.yaml --workdir=W --to=OUT --step=0 --dtype=bfloat16 --set data.seq=32 | OUT:
train --config=W/config.yaml --rules=none --set train.init_from=W --set data.source='chats/*.jsonl' --set data.messages_field=messages --set data.batch=2 --set data.seq=64 --set train.trackers=[] --set data.held_out=0.0 --set 'model.lora={rank: 2, alpha: 4, targets: [wq]}' --steps=1 --workdir=tuned | adapters: learning rate
convert --workdir=tuned --to=ADAPTER --adapter --base=DIR | ADAPTER:
launch --place=queued-resource --name=one --elastic --zone=z --project=p --accelerator=v5litepod-8 --runtime_version=v --spot --port=1 --workdir=gs://b/w --train=--config=small.yaml --max_retries=1 --max_hours=1 --max_usd=1 --usd_per_hour=1 --assume=notice_s=9 --autodelete --logs=here --print -- --rules=fsdp8 | --config=small.yaml --rules=fsdp8
launch --place=gke --accelerator=v5litepod-8 --image=i --workdir=gs://b/w --print | image: i
launch --place=slurm --accelerator=h100:2x8 --python=own --time=1:00 --workdir=w --print | SBATCH --time=1:00
launch --processes=2 --workdir=runs/two --print -- --config=small.yaml | --num_processes=2 --process_id=1
logs one.launch --stop --lines=3 | 0 | step 1/1
keys --markdown | | `train.steps` |
keys --schema=rules | "microbatches"
completion bash | complete -o
"""  # noqa: E501
# Flags that start two processes, see tests/runtime/test_processes.py and the page docs/pods.md below.
SEVERAL = {"coordinator", "num_processes", "process_id"}
HELP = {"h", "help", "version"}


def parsed(arguments):
    """The verb of a command, its flags by name, and what is no flag."""
    verb, rest = (arguments[0], arguments[1:]) if arguments and arguments[0] in cli.VERBS else ("train", arguments)
    values, names = cli.parse_flags(cli.VERBS[verb], rest)
    return verb, {name for name in values if values[name].present}, names


@pytest.fixture
def run(capsys):
    """Runs a command in this process: its exit code, and what it said on both streams."""

    def call(arguments):
        with pytest.raises(SystemExit) as end:
            cli.main(["main.py", *arguments])
        captured = capsys.readouterr()
        return end.value.code, captured.out + captured.err

    return call


def lines():
    return [line.partition(" | ")[::2] for line in SHORT.strip().splitlines()]


def test_every_flag_is_run():
    had = {verb: set(SEVERAL | HELP) for verb in cli.VERBS}
    for command, _ in lines():
        verb, flags, _ = parsed(shlex.split(command))
        had[verb] |= flags
    for verb in cli.VERBS.values():
        assert set(verb.flags()) - had[verb.name] == set(), verb.name


@pytest.mark.long
def test_short_commands(run, tmp_path, monkeypatch):
    monkeypatch.chdir(documented.make_folder(tmp_path / "all"))
    calibrated_here.shorten(monkeypatch)
    monkeypatch.setattr(compile, "_run_compiler", compiled_here)  # what is exported is compiled by another process
    for command, said in lines():
        compiled = QUICK_FLAGS if ".bin" in command else ()  # elsewhere, by a process without the flags of tests
        code, text = run([*shlex.split(command), *compiled])
        assert code == 0 and said in text, f"{command}\n{text}"


# The commands of the documents

ALL = documented.commands()
OF_MAIN = [command for command in ALL if command.is_of_main]
# What a page takes for granted, in the words of its own commands.
BEFORE = {
    "docs/foresight.md": ["explain --config=small.yaml --rules=fsdp --mesh=fsdp=2 --target=cpu:2 --export=PATH"],
    "docs/monitoring.md": [f"--config=small.yaml --rules=none --workdir={name} --steps=1" for name in
                           ("RUN", "RUN2", "runs/a")],
}  # fmt: skip
# The README and docs/rules_reference.md show what is said of these.
REFUSED = "--rules=tp8.yaml --set=model.kv_heads=2", "--config=gpt2_124m --rules=tp8 --dry_run"
CONFIGS = {"deepseek_v3": "experts.yaml", "mixtral_8x7b": "experts.yaml", "qwen3_235b_a22b": "experts.yaml",
           "tiny_experts": "experts.yaml", "t5_11b": "examples/pronunciation.yaml"}  # fmt: skip
# Data that a page has another program write, of packages that are not installed here.
NOT_HERE = "digits/train", "scenes/train", "FOLDER/train "
SHIPPED = {path.stem for path in (documented.ROOT / "configs").glob("*.yaml")}
VALUES = {
    "devices": "8", "rules=NAME": "tp8", "rules=FILE": "mine.yaml", "data.batch": "8", "data.seq": "32",
    "data.seq=64": "16",
    "train.eval_every": "1", "train.trackers": "[tensorboard]", "data.tokenizer=bpe:4096": "bpe:300",
    "data.source=stdlib:pairs": "pairs.jsonl",
    "max_new_tokens": "4", "minutes": "0.0001", "WORD": "batch", "FILE.yaml": "jobs/queued_resource.yaml",
    "config=MODEL": "small.yaml", "rules.pipeline.microbatches": "2",
}  # fmt: skip


def small(arguments):
    """The arguments of a command of the documents with small values in place of large ones.

    Other values are files of `documented.make_folder`.
    """
    verb, flags, _ = parsed(arguments)
    if arguments == [verb]:
        return None  # the name of a verb
    if verb == "launch":  # it would ask for what is not here
        return ["launch", "--print", *(VALUES.get(one, one) for one in arguments[1:])]
    if verb == "logs":
        return ["logs", "one.launch", "--stop"]  # which else goes on until it is interrupted
    joined = shlex.split(" ".join(map(shlex.quote, arguments)).replace("--set ", "--set="))
    found = [_small(verb, "dry_run" in flags, one) for one in joined]
    if verb == "plan":
        found.append("--minutes=0.0001")
    if verb == "explore":  # which serves a page until it is interrupted
        found.append("--json=state.json")
    if verb == "train" and "config" not in flags and "dry_run" not in flags:
        found.append("--config=small.yaml")
    if verb == "explain" and "program" not in flags:
        found += ["--rules=fsdp8"] * ("rules" not in flags) + ["--target=cpu:8"] * ("target" not in flags)
    own_config = any(one.startswith("--config=") and one != "--config=small.yaml" for one in found)
    if own_config and verb == "train" and "dry_run" not in flags and "steps" not in flags:
        found.append("--steps=1")
    if "executable" in flags:
        found += ["--rules=fsdp", "--mesh=fsdp=2", "--steps=1"]
    return found


def _small(verb, dry, argument):
    if not argument.startswith("-"):
        return VALUES.get(argument, argument)
    name, equals, value = argument.removeprefix("--set=").removeprefix("--").partition("=")
    before = argument[: len(argument) - len(name + equals + value)]
    if name == "config" and value in SHIPPED and not dry:
        value = CONFIGS.get(value, "small.yaml")
    elif name == "target":
        value = (
            value
            if value.startswith("my:")
            else "cpu:8"
            if verb != "plan"
            else "v5e:1x1,h100:1"
            if "," in value
            else "v5e:1x1"
        )
    elif name in ("steps", "train.steps"):
        value = str(max(1, int(value) // 100))  # so that a later command of the page goes on
    value = VALUES.get(f"{name}={value}", VALUES.get(name, value))
    return f"{before}{name}{equals}{value}"


SEQUENCES = documented.sequences(OF_MAIN)


def test_commands_of_documents_are_found_and_have_flags_that_exist():
    assert len(OF_MAIN) > 100 and {"README.md", "docs/plan.md", "configs/uva.yaml"} <= {one.page for one in OF_MAIN}
    for command in OF_MAIN:
        made = small(command.arguments)
        assert made is None or parsed(command.arguments)[1] <= parsed(made)[1], command


@pytest.mark.slow
@pytest.mark.parametrize("sequence", SEQUENCES, ids=[f"{one[0].page}-{n}" for n, one in enumerate(SEQUENCES)])
def test_commands_of_a_page(run, tmp_path, monkeypatch, sequence):
    """From top to bottom; a page begins anew where it converts a folder. Two processes are in test_processes.py."""
    page = sequence[0].page
    monkeypatch.chdir(documented.make_folder(tmp_path / "all"))
    if page.endswith("families.md") or page.startswith("examples/"):
        pytest.importorskip("PIL.Image")
        documented.add_models(tmp_path / "all")
    commands = [shlex.split(text) for text in BEFORE.get(page, ())]
    commands += [made for command in sequence if (made := small(command.arguments))]
    for arguments in commands:
        given = shlex.join(arguments)
        if not any(f"--{flag}=" in given for flag in SEVERAL) and not any(data in given for data in NOT_HERE):
            code, text = run(arguments)
            assert code == (2 if any(one in given for one in REFUSED) else 0), f"{given}\n{text}"


# Benchmarks and examples take minutes, or hardware: what their flags are is asked, and they end there.
ASK = """
import argparse, importlib.util, json, runpy, sys
sys.path.insert(0, "examples")
class Asked(Exception): pass
parse = argparse.ArgumentParser.parse_args
def asked(self, *given):
    parse(self, *given)
    raise Asked
argparse.ArgumentParser.parse_args = asked
for module, name, arguments in json.loads(sys.argv[1]):
    sys.argv = [name, *arguments]
    source = open(importlib.util.find_spec(name).origin if module else name).read()
    if "parse_args" in source:
        try:
            runpy.run_module(name, run_name="__main__") if module else runpy.run_path(name, run_name="__main__")
        except Asked:
            continue
        raise SystemExit(f"{name} asked for no flags")
"""


@pytest.mark.slow
def test_other_programs_have_the_flags_that_documents_give_them():
    given = []
    for command in ALL:
        words = command.text.split()
        if not command.is_of_main and "KIND" not in command.text:
            given.append((words[1] == "-m", words[2] if words[1] == "-m" else words[1], _behind(command, words[1])))
    assert len(given) > 30
    done = subprocess.run([sys.executable, "-c", ASK, json.dumps(given)], cwd=documented.ROOT, capture_output=True,
                          text=True)  # fmt: skip
    assert done.returncode == 0, done.stderr


def _behind(command, word):
    """The arguments behind the name of a module or file."""
    return shlex.split(command.text, comments=True)[3 if word == "-m" else 2 :]
