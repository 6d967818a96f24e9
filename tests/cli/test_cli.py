"""The command line: verbs, flags, exit codes, and that wrong input never shows a traceback."""

import dataclasses
import email
import errno
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from pathlib import Path

import filelock
import pytest

import gspmd_lm
from gspmd_lm import cli, versions
from gspmd_lm.cli import inputs, outputs
from gspmd_lm.data import loader
from gspmd_lm.errors import InputError, RunFailed
from gspmd_lm.runtime import compile_cache

ROOT = Path(__file__).parent.parent.parent

DRY = ("--rules=tp8", "--dry_run")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("trian",),
            f"trian: no such verb (did you mean train?)\n  fix   use one of {', '.join(cli.VERBS)}\n",
        ),
        (("serve",), f"serve: no such verb\n  fix   use one of {', '.join(cli.VERBS)}\n"),
        (("train", "tiny"), "tiny: flags begin with --\n  fix   --config=NAME --rules=NAME, see --help\n"),
        (
            ("keys", "layres"),
            "layres: no key has this in its name or meaning (did you mean layers?)\n  fix   keys shows",
        ),
        (
            ("--set", "layers=3"),
            "configs/tiny.yaml --set layers=3: 1 problem\n  layers: unknown key (did you mean model.layers?)",
        ),
        (("--rules=tp8", "eval"), "eval: the verb comes first\n  fix   python main.py eval --flag=value ...\n"),
        (
            ("--rule=tp8",),
            "--rule: train has no such flag (did you mean --rules?)\n"
            "  fix   python main.py train --help lists the flags\n",
        ),
        (("eval", "--dry-run"), "--dry_run: eval has no such flag: it belongs to train\n"),
        (
            ("--batch=32",),
            "--batch: train has no such flag: it belongs to eval, generate, plan\n  fix   --set data.batch=32\n",
        ),
        (("--remat=block",), "--remat: train has no such flag\n  fix   --set rules.remat=block\n"),
        (("plan", "--lora", "x"), "--lora: plan has no such flag\n  fix   --set model.lora=VALUE\n"),
        (("tp8",), "tp8: no such verb (did you mean --rules=tp8?)\n"),
        (("uva",), "uva: no such verb (did you mean --config=uva?)\n"),
        (
            ("explain", "--rules=tp8", "--target=tpu-v5e-8"),
            "--target=tpu-v5e-8: no target begins with tpu-\n  fix   --target=v5e-8, which is v5e:2x4\n",
        ),
        (
            ("compare", "tp8", "dp8", "--set", "data.batch=8"),
            "compare needs --target\n  fix   compare tp8 dp8 "
            "--set=data.batch=8 --target=v5p:2x2x2 (or cpu:8, h100:8)\n",
        ),
        (
            ("plot", "runs/a", "--html=gs://b/p.html"),
            "--html=gs://b/p.html: must be a path of this machine\n"
            "  fix   copy it from there or to there, or mount the bucket as a file system\n",
        ),
        (("convert", "--from=gs://b/in"), "--from=gs://b/in: must be a path of this machine\n"),
        (
            ("--rules=file:///tp8.yaml",),
            "file:///tp8.yaml: nothing reads addresses that begin with file://\n  fix   give a local path, or gs://\n",
        ),
        (("plot", "foo://runs/a"), "foo://runs/a: nothing reads addresses that begin with foo://\n"),
        (("errors", "foo://runs/a"), "foo://runs/a: nothing reads addresses that begin with foo://\n"),
        (("--steps=many",), "--steps=many: must be a positive integer\n"),
        (("--steps=0",), "--steps=0: must be a positive integer\n"),
        (("--devices=0",), "--devices=0: must be a positive integer\n"),
        (("--dry-run=maybe",), "--dry_run: must be true or false\n"),
        (("plan", "--minutes=x"), "--minutes=x: must be a number\n"),
        (("generate", "--top-k"), "Missing value for flag --top_k\n  fix   python main.py generate --help"),
        (("explain", "--target=cpu:8"), "explain needs --rules\n  fix   explain --rules=fsdp8 --target="),
        (("compare", "--target=cpu:8"), "compare needs --rules\n  fix   compare fsdp8 tp8 --target=cpu:8\n"),
        (("eval",), "--workdir is missing\n  fix   eval --workdir=DIR, the folder of a run that has saved"),
        (("generate",), "--workdir is missing\n  fix   generate --workdir=DIR"),
        (("generate", "--workdir=w"), "w: no checkpoint\n  fix   train there first, or bring one: convert --from=DIR"),
        (("convert", "--workdir=w"), "convert goes one way\n  fix   give either --from=DIR or --to=DIR\n"),
        (("convert", "--workdir=w", "--from=nowhere"), "--from=nowhere: no such folder\n  fix   "),
        (("--rules=", "--dry_run"), "--rules= is empty; a variable that is not set?\n  fix   give a value"),
        (("--config=", "--dry_run"), "--config= is empty; a variable that is not set?\n  fix   "),
        (("eval", "--workdir="), "--workdir= is empty; a variable that is not set?\n  fix   "),
        (("data", "--html="), "--html= is empty; a variable that is not set?\n  fix   "),
        (
            ("--profile=13:10",),
            "--profile=13:10: not two steps, the first before the second\n  fix   --profile=10:13\n",
        ),
        (("--config=tinny",), "tinny: no such file, here or in configs/ (did you mean tiny?)\n"),
        (
            ("--config=Qwen/Qwen3-8B",),
            "Qwen/Qwen3-8B: no such file, here or in configs/\n"
            "  fix   nothing is fetched: hf download Qwen/Qwen3-8B --local-dir=FOLDER, then give FOLDER in its place\n",
        ),
        (
            ("convert", "--workdir=w", "--from=Qwen/Qwen3-8B"),
            "--from=Qwen/Qwen3-8B: no such folder\n  fix   nothing is fetched: hf download Qwen/Qwen3-8B ",
        ),
        (
            ("--dry_run", "--set=data.tokenizer=Qwen/Qwen3-8B", "--set=model.vocab=0"),
            "data.tokenizer: Qwen/Qwen3-8B: no such file\n  fix   nothing is fetched: hf download ",
        ),
        (("--rules=tp9",), "tp9: no such file, here or in rules/ (did you mean tp8?)\n"),
        (("--rules=tp8", "--mesh=tenser=4"), "--mesh=tenser=4: rules/tp8.yaml has no mesh axis 'tenser'"),
        (
            ("--set", "train.step=3"),
            "configs/tiny.yaml --set train.step=3: 1 problem\n  train.step: unknown key (did you mean",
        ),
        (
            ("--set", "train.learning_rate=1e-4"),
            "configs/tiny.yaml --set train.learning_rate=1e-4: 1 problem\n"
            "  train.learning_rate: unknown key (did you mean optimizer.learning_rate?)\n",
        ),
        (
            ("--set", "microbatches=2"),
            "--set microbatches=2: a key of the rules file\n  fix   --set rules.microbatches=2\n",
        ),
        (
            ("--set", "train.remat=block"),
            "--set train.remat=block: a key of the rules file\n  fix   --set rules.remat=block",
        ),
        (
            ("--rules=tp8", "--set", "rules.tensor=4"),
            "--set rules.tensor=4: a rules file has no section tensor\n  fix   --set rules.mesh.tensor=4\n",
        ),
        (("--rules=tp8", "--platform=gpo"), "--platform=gpo: unknown platform (did you mean gpu?)\n"),
        (("--rules=tp8", "--num_processes=2"), "--num_processes given without --coordinator and --process_id\n"),
        (
            ("--rules=tp8", "--set", "model.kv_heads=2"),
            "layers.attention.wk: kv_heads=2 does not divide over tensor=8\n"
            "  rule  rules/tp8.yaml: rules.kv_heads: tensor\n"
            "  fix   --set rules.rules.kv_heads=null (replicates 131.1 kB per device), "
            "or --mesh=tensor=2, with 2 devices\n"
            "  also  layers.attention.wv, k, v\n",
        ),
    ],
)
def test_wrong_input_exits_with_2(run, arguments, message):
    code, out, err = run(*arguments)
    assert code == 2
    assert err.startswith(message)
    assert out == ""


HEAVY = ("jax", "jaxlib", "flax", "optax", "orbax", "grain", "tensorstore", "pyarrow", "tokenizers")
# What is told before these are imported: what is wrong with a flag before a config is read, and with a file before jax.
TOLD = {
    (*HEAVY, "numpy", "rich", "pydantic", "yaml"): [
        (("--help",), "usage: "),
        (("--version",), "gspmd_lm "),
        (("explain", "--help"), "python main.py explain: "),
        (("launch", "--help"), "python main.py launch: "),
        (("--confg=tiny",), "--confg: train has no such flag"),
    ],
    (*HEAVY, "numpy", "rich"): [
        (("keys",), "Everything that decides what is computed."),
        (("--config=tinny",), "tinny: no such file"),
        (("--set=train.step=3",), "configs/tiny.yaml --set train.step=3: 1 problem"),
        (("eval", "--rules=tp9"), "tp9: no such file"),
        (("--rules=tp8", "--mesh=tenser=4"), "--mesh=tenser=4: rules/tp8.yaml has no mesh axis"),
        (("convert", "--rules=tp9"), "tp9: no such file"),
        (("explain", "--rules=tp8,tp9", "--target=cpu:8"), "tp9: no such file"),
        (("compare", "tp8", "tp9", "--target=cpu:8"), "tp9: no such file"),
        (("compare", "tp8", "--config=tinny", "--target=cpu:8"), "tinny: no such file"),
    ],
    HEAVY: [
        (("compare", "tp8", "--target=v5q:2x2"), "--target=v5q:2x2: unknown chip"),
        (("plan", "--target=v5q:2x2"), "--target=v5q:2x2: unknown chip"),
    ],
}
# One process runs all commands of a row, since nothing that they may not import is there to be imported.
RUN_ALL = """
import contextlib, io, json, runpy, sys
from gspmd_lm.runtime.quiet import collect_seldom
collect_seldom()
for arguments in json.loads(sys.argv[1]):
    sys.argv = ["main.py", *arguments]
    code = None
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            runpy.run_path("main.py", run_name="__main__")
        except SystemExit as end:
            code = end.code
    print(json.dumps([out.getvalue(), err.getvalue(), code]))
"""


@pytest.mark.parametrize("heavy", TOLD, ids=len)
def test_what_is_told_before_anything_heavy_is_imported(heavy, tmp_path):
    for name in heavy:
        (tmp_path / f"{name}.py").write_text("raise SystemError('imported')")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-c", RUN_ALL, json.dumps([arguments for arguments, _ in TOLD[heavy]])]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    for (arguments, begins), line in zip(TOLD[heavy], done.stdout.splitlines(), strict=True):
        out, err, code = json.loads(line)
        assert (out + err).startswith(begins), arguments
        assert (code or 0) == (0 if {"--help", "--version", "keys"} & {*arguments} else 2)
        assert not out or not err


@pytest.mark.parametrize(
    ("verb", "arguments"),
    [
        ("train", ("--dry-run", "--num-processes=2", "--compile-cache", "a-b", "--set", "a-b=c-d")),
        ("train", ("--dry_run", "--num_processes=2", "--compile_cache=a-b", "--set=a-b=c-d")),
        ("train", ("-dry-run", "--num-processes", "2", "--compile-cache=a-b", "--set", "a-b=c-d")),
    ],
)
def test_dashes_in_names_of_flags(verb, arguments):
    values, rest = cli.parse_flags(cli.VERBS[verb], arguments)
    assert (values.dry_run, values.num_processes, values.compile_cache, values.set, rest) == (
        True, 2, "a-b", ["a-b=c-d"], []
    )  # fmt: skip


def test_every_flag_that_is_a_path_may_begin_in_the_home_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine.yaml").write_text("mesh: {tensor: 8}\n")
    values, _ = cli.parse_flags(
        cli.VERBS["explain"], ["--rules=~/mine", "--json=~/out.json", "--export=x", "--chip=~/my.yaml"]
    )
    assert (values.json, values.export, values.chip) == (f"{tmp_path}/out.json", "x", f"{tmp_path}/my.yaml")
    assert [one.path for one in inputs.layouts(values, [])] == [f"{tmp_path}/mine.yaml"]


def test_no_result_replaces_what_is_read_or_another_result(tmp_path):
    read, link = tmp_path / "read.yaml", tmp_path / "link.yaml"
    read.write_text("mesh: {tensor: 8}\n")
    link.symlink_to(read)
    for wrong in ([str(read)], [str(link)], ["a.json", str(tmp_path / "b"), str(tmp_path / "b")]):
        with pytest.raises(InputError, match="would overwrite a file that is read or written, too"):
            outputs.check_writable(wrong, [str(read), None])
    outputs.check_writable(["a.json", None, "/dev/null", "/dev/null"], [str(read), "gone.yaml"])
    values, _ = cli.parse_flags(cli.VERBS["explain"], [f"--rules={tmp_path / 'read'}", "--chip=none.yaml"])
    assert inputs.read_files(values) == ["configs/tiny.yaml", str(read)]


def test_the_files_that_a_command_writes_are_no_part_of_it():
    given = ["plan", "--out", "a.yaml", "--json=b", "--minutes=3", "-html", "c", "tp8"]
    assert outputs.command_line(given).endswith(" plan --minutes=3 tp8")


@pytest.mark.parametrize(
    "arguments", [("--mesh=data={}", "--dry_run"), ("--profile=1:{}",), ("plan", "--target=cpu:8", "--batch=1:{}")]
)
def test_a_number_of_any_length_is_told(run, arguments):
    code, _, err = run(*(one.format("9" * 5000) for one in arguments))
    assert code == 2 and "  fix   " in err


def test_a_value_may_look_like_a_flag():
    values, rest = cli.parse_flags(
        cli.VERBS["generate"], ["--prompt", "--not-a-flag", "--top-k", "3", "--chat", "--", "--this-one"]
    )
    assert (values.prompt, values.top_k, values.chat, rest) == (["--not-a-flag"], 3, True, ["--this-one"])


def test_layouts_are_those_of_the_flag_and_then_those_without_one():
    values, rest = cli.parse_flags(cli.VERBS["compare"], ["tp8", "--rules=fsdp8,dp8"])
    assert [one.name for one in inputs.layouts(values, rest)] == ["fsdp8", "dp8", "tp8"]


def test_the_package_is_a_command():
    command = [sys.executable, "-m", "gspmd_lm", "--version"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    installed = importlib.metadata.version("jax")
    wanted = f"gspmd_lm {gspmd_lm.__version__}, jax {installed}, Python {platform.python_version()}\n"
    assert (done.returncode, done.stdout, done.stderr) == (0, wanted, "")


def test_every_problem_of_a_rules_file_in_one_message(run, tmp_path):
    (tmp_path / "x.yaml").write_text(
        "mesh: {tensor: 8}\nrules: {heds: tensor, batch: tensr, q.mlp: tensor}\nramat: block\n"
    )
    code, _, err = run(f"--rules={tmp_path / 'x.yaml'}")
    assert code == 2
    assert err.count("  rule  ") == err.count("  fix   ") == 4


@pytest.mark.parametrize(
    ("arguments", "flags"),
    [
        (
            ("--help",),
            ("train ", "eval ", "--config", "--rules", "--workdir", "--steps", "--set", "--dry_run", "--help"),
        ),
        (("train", "--help"), ("--steps", "--dry_run", "--profile", "--train_tokenizer")),
        (("eval", "-h"), ("--step ", "--workdir")),
    ],
)
def test_help(run, arguments, flags):
    code, out, err = run(*arguments)
    assert (code, err) == (0, "")
    for flag in flags:
        assert flag in out
    assert all(len(line) <= 120 for line in out.splitlines())


@pytest.mark.parametrize("verb", cli.VERBS)
def test_help_is_made_of_sentences(run, verb):
    flags_of, examples = run(verb, "--help")[1].strip().split("\n\nIn the name of a flag, - and _ are the same.\n\n")
    title, *flags = re.split(r"^  --\w+ +|^\w[^:\n]*:$", flags_of, flags=re.M)
    assert flags and title.startswith(f"python main.py {verb}: ")
    about = re.findall(r"^      (.+)$", examples, re.M)
    for text in (title.split(": ", 1)[1].strip(), *filter(None, map(str.strip, flags)), *about):
        assert re.match("[A-Z]", text) and re.search(r"(\.|=\.\.\.)$", text) and ";\n" not in text, text


@pytest.mark.parametrize("verb", cli.VERBS)
def test_the_examples_of_the_help_are_commands(run, verb, monkeypatch):
    """Their flags, configs and rules files exist."""
    examples = re.findall(r"^  python main.py ?(.*)$", run(verb, "--help")[1].split("Examples:")[1], re.M)
    assert len(examples) == len(cli.VERBS[verb].examples) > 0
    for example in examples:
        arguments = shlex.split(example)
        assert (arguments[:1] == [verb]) == (verb != "train")
        values, rest = cli.parse_flags(cli.VERBS[verb], arguments[verb != "train" :])
        if verb in ("explain", "compare"):
            assert inputs.layouts(values, rest) or (ROOT / values.program.partition(":")[0]).is_file()
        if "config" in values and verb != "convert":
            assert inputs.read_config(values)


def test_help_of_a_verb_shows_only_its_flags(run):
    assert "--dry_run" not in run("eval", "--help")[1]
    assert "--dry_run" in run("train", "--help")[1]


def test_a_workdir_that_cannot_be_made(run, tmp_path, monkeypatch):
    monkeypatch.setattr(compile_cache, "enable", lambda directory: compile_cache.CompileCache(None))
    monkeypatch.setenv("GSPMD_LM_CACHE", str(tmp_path / "cache"))
    (tmp_path / "file").write_text("")
    code, _, err = run("--config=uva", "--rules=tp8", f"--workdir={tmp_path / 'file' / 'run'}")
    assert code == 2
    assert err == f"{tmp_path / 'file' / 'run'}: cannot be written (Not a directory)\n  fix   --workdir=DIR\n"


@pytest.fixture
def before_data(monkeypatch, tmp_path):
    """Fails where rows are asked for: what is wrong with the place of a run is to be told before."""
    monkeypatch.setenv("GSPMD_LM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(loader, "open_loaders", lambda *_: pytest.fail("the data was read"))


@pytest.mark.usefixtures("before_data")
def test_a_workdir_that_is_a_dangling_link(run, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    code, _, err = run("--config=uva", "--rules=tp8", f"--workdir={tmp_path / 'link'}", "--compile_cache=none")
    assert code == 2
    assert f"/link: a symbolic link to {tmp_path / 'gone'}, which is not there\n  fix   make that folder\n" in err
    assert not (tmp_path / "gone").exists()


@pytest.mark.usefixtures("before_data")
@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_a_workdir_that_is_read_only(run, tmp_path, monkeypatch, number):
    """As the system says it, which lets the user root write wherever a disk can be written to."""

    def refuse(*_, **__):
        raise OSError(number, os.strerror(number))

    workdir = tmp_path / "run"
    workdir.mkdir()
    flags = "--config=uva", "--rules=tp8", f"--workdir={workdir}", "--compile_cache=none"
    monkeypatch.setattr(filelock.FileLock, "acquire", refuse)
    said = f"{workdir}: cannot be written in ({os.strerror(number)})\n  fix   --workdir=DIR\n"
    code, _, err = run(*flags)
    assert (code, err) == (2, said) and list(workdir.iterdir()) == []


@pytest.mark.usefixtures("before_data")
def test_a_tracker_that_is_not_installed(run, tmp_path, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "wandb" else find(name, *more))
    code, _, err = run("--config=uva", "--rules=tp8", "--set=train.trackers=[wandb]", f"--workdir={tmp_path / 'run'}")
    assert code == 2 and err.startswith("train.trackers: wandb needs the package wandb, which is not installed\n  fix")
    assert not (tmp_path / "run").exists()


def test_a_failure_of_the_program_shows_where(capsys, monkeypatch):
    def fail(*_):
        raise ZeroDivisionError("ours")

    monkeypatch.setitem(cli.VERBS, "train", dataclasses.replace(cli.VERBS["train"], run=fail))
    with pytest.raises(SystemExit) as end:
        cli.main(["main.py"])
    assert end.value.code == 1
    assert "ZeroDivisionError: ours" in capsys.readouterr().err


def test_a_run_that_fails_says_why_and_exits_with_1(run, monkeypatch):
    def fail(*_):
        raise RunFailed("step 7: not finite\n  fix   lower it")

    monkeypatch.setitem(cli.VERBS, "train", dataclasses.replace(cli.VERBS["train"], run=fail))
    assert run() == (1, "", "step 7: not finite\n  fix   lower it\n")


@pytest.mark.parametrize(
    ("started", "program"),
    [
        ("/there/main.py", "python main.py"),
        ("/bin/gspmd-lm", "gspmd-lm"),
        (f"{ROOT}/gspmd_lm/__main__.py", "python -m gspmd_lm"),
        ("/bin/pytest", "python main.py"),
    ],
)
def test_messages_name_the_program_as_it_was_started(run, monkeypatch, started, program):
    monkeypatch.setattr(sys, "argv", [started])
    assert f"fix   {program} train --help lists" in run("--rule=tp8")[2]
    assert f"usage: {program} [VERB]" in run("--help")[1] and "(docs/foresight.md)" in run("explain", "--help")[1]
    assert f"\n  {program} compare fsdp8 tp8 " in run("compare", "--help")[1]


def test_messages_of_an_installed_program_name_pages_that_its_user_can_open(run, monkeypatch, tmp_path):
    monkeypatch.setattr(versions, "PACKAGE", tmp_path / "gspmd_lm")
    monkeypatch.setattr(importlib.metadata, "metadata", lambda _: email.message_from_string(
        "Project-URL: Documentation, https://pages\nProject-URL: Homepage, https://there/"
    ))  # fmt: skip
    out = run("explain", "--help")[1]
    assert "gspmd-lm explain: " in out and "(https://there/blob/main/docs/foresight.md)" in re.sub(r"\s+", " ", out)
    assert versions.with_documents("see docs/plan.md") == "see https://there/blob/main/docs/plan.md"


def test_the_documents_that_the_package_names_are_there():
    named = {name for file in (ROOT / "gspmd_lm").rglob("*.py") for name in
             re.findall(r"\bdocs/\w+\.md", file.read_text())}  # fmt: skip
    assert len(named) > 5 and [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_without_its_dependencies_the_program_says_what_to_type():
    """`-S` hides all installed packages."""
    ended = subprocess.run([sys.executable, "-S", "main.py"], cwd=ROOT, capture_output=True, text=True,
                           env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"})  # fmt: skip
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr == "absl is not installed\n  fix   python -m pip install -e . in the folder of main.py\n"


@pytest.mark.parametrize(
    ("line", "replaced", "found"),
    [
        ("gspmd-lm exp", "exp", ["explain ", "explore "]),
        ("gspmd-lm --wor", "--wor", ["--workdir="]),
        ("gspmd-lm eval --dry", "--dry", []),
        ("gspmd-lm train --dry", "--dry", ["--dry_run "]),
        ("gspmd-lm --rules=zero1", "zero1", ["zero1_8 "]),
        ("gspmd-lm --rules=zero1", "--rules=zero1", ["--rules=zero1_8 "]),
        ("gspmd-lm --rules zero1", "zero1", ["zero1_8 "]),
        ("gspmd-lm explain --rules=tp8,cp8_r", "tp8,cp8_r", ["tp8,cp8_ring "]),
        ("gspmd-lm compare tp8 zero1", "zero1", ["zero1_8 "]),
        ("gspmd-lm --platform=", "", ["cpu ", "gpu ", "tpu "]),
        ("gspmd-lm --set optimizer.lea", "optimizer.lea", ["optimizer.learning_rate="]),
        ("gspmd-lm --set=rules.expert", "rules.expert", ["rules.expert_buffer="]),
        ("gspmd-lm eval --workdir=", "", []),
        ('gspmd-lm generate --prompt="a b', "a b", []),
    ],
)
def test_what_a_shell_may_complete(run, monkeypatch, line, replaced, found):
    monkeypatch.setenv("COMP_LINE", f"{line} and what stands behind the cursor")
    monkeypatch.setenv("COMP_POINT", str(len(line)))
    assert run("completion", "--", "gspmd-lm", replaced, "") == (0, "\n".join(found) + "\n", "")


def test_all_verbs_are_offered(run, monkeypatch):
    monkeypatch.setenv("COMP_LINE", "gspmd-lm ")
    assert run("completion", "--", "gspmd-lm", "", "")[1].split() == [*cli.VERBS]


def test_bash_takes_the_script(run):
    _, script, _ = run("completion", "bash")
    done = subprocess.run(["bash", "-c", f"{script}\ncomplete -p gspmd-lm"], capture_output=True, text=True, check=True)
    assert done.stdout == script
    assert run("completion")[2] == "completion: for which shell?\n  fix   gspmd-lm completion bash, zsh or fish\n"


def test_an_interrupt_has_its_own_code(monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setitem(cli.VERBS, "train", dataclasses.replace(cli.VERBS["train"], run=interrupt))
    with pytest.raises(SystemExit) as end:
        cli.main(["main.py"])
    assert end.value.code == 130


@pytest.mark.long
def test_a_pod_in_seconds_on_a_laptop():
    """512 devices are simulated, none of 405B weights is allocated; nothing but the table is printed."""
    environment = {key: value for key, value in os.environ.items() if key not in ("PJRT_NPROC", "NPROC", "XLA_FLAGS")}
    done = subprocess.run(
        [sys.executable, "main.py", "--config=llama3_405b", "--rules=fsdp_tp", "--devices=512", "--dry_run"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "405,853,388,800 parameters, mesh fsdp=128 x tensor=4" in done.stdout
