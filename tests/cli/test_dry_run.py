"""--dry_run, with what flags set in the config and in the rules file."""

import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
DRY = ("--rules=tp8", "--dry_run")


def test_dry_run(run):
    code, out, err = run("--rules=fsdp2_tp4.yaml", "--dry_run")
    assert (code, err) == (0, "")
    assert "layers.attention.wq" in out and "embed/fsdp heads/tensor" in out
    assert "tiny under fsdp2_tp4: 920,704 parameters, mesh fsdp=2 tensor=4".replace(" tensor", " x tensor") in out
    for total in ("weights", "optimizer", "gradients", "sum"):
        assert f"\n  {total} " in out
    assert "\ndata: the standard library's " in out and " rows for training, by the first " in out


def test_arrays_are_drawn_without_a_compiler(run, tmp_path):
    page = tmp_path / "page.html"
    wrong = "--set=data.source=nowhere"
    code, out, err = run("--rules=fsdp2_tp4", "--dry_run", "--show=wq, residual", f"--html={page}", wrong)
    assert (code, err) == (0, "")
    assert "layers.attention.wq  layers 4" in out and "│  0 4  │" in out and "remat block" in out
    assert "bytes per device" not in out and 'class="blocks"' in page.read_text()
    assert "\nwarning: data: data.source: nowhere matches no file" in out, "nothing of the layout depends on it"
    assert "<dt>warning</dt><dd>data: data.source: nowhere matches no file" in page.read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--show=wq",), "--show=wq: a run has no such output\n  fix   add --dry_run, or drop it"),
        (("--html=a.html",), "--html=a.html: a run has no such output\n  fix   add --dry_run, or drop it"),
        (("--dry_run", "--show=residul"), "--show=residul: no array is named residul (did you mean residual?)"),
        (("--dry_run", "--html=nowhere/a.html"), "nowhere/a.html: there is no folder nowhere"),
    ],
)
def test_pictures_that_cannot_be_drawn(run, arguments, message):
    code, _, err = run("--rules=tp8", *arguments)
    assert code == 2 and err.startswith(message)


def test_devices_are_counted_and_not_started(run):
    """Thousands of simulated devices take minutes to start. A dry run needs none of them."""
    many = ("--set=data.batch=16384", "--set=rules.weights.embed=null", "--devices=16384")
    code, out, err = run("--rules=fsdp", *many, "--dry_run")
    assert (code, err) == (0, "") and "mesh fsdp=16384" in out
    assert re.search(r"^tokens +batch seq +16384 x 128 +batch/fsdp +512$", out, re.M)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--rules=dp8", "--mesh=data=10000000000"), "mesh: its sizes multiply to more than 262,144 devices"),
        (("--rules=fsdp", "--devices=99999999999"), "--devices=99999999999: there are no more than 262,144 devices"),
    ],
)
def test_more_devices_than_there_can_be_are_refused_at_once(run, arguments, message):
    code, out, err = run(*arguments, "--dry_run")
    assert (code, out) == (2, "") and err.startswith(message) and "\n  fix   " in err


def test_dry_run_takes_a_size_from_mesh(run):
    code, out, _ = run("--rules=dp2_tp4", "--mesh=data=4,tensor=2", "--dry_run")
    assert code == 0
    assert "mesh data=4 x tensor=2" in out


@pytest.mark.parametrize("flag", ["--mesh=data=4,tensor=2", "--set=rules.mesh.data=4", "--set=rules.mesh={data: 4}"])
def test_a_flag_sets_a_size_of_the_mesh(run, flag):
    rest = [] if "tensor" in flag else ["--set", "rules.mesh.tensor=2"]
    code, out, _ = run("--rules=dp2_tp4", flag, *rest, "--dry-run")
    assert code == 0 and "mesh data=4 x tensor=2" in out


def test_set_lays_rows_over_the_rules(run):
    _, before, _ = run("--rules=tp8", "--dry-run")
    (table,) = re.findall(r"^weights  .*?(?=^\.\.\.$)", (ROOT / "docs/rules.md").read_text(), re.M | re.S)
    assert before.startswith(table)
    kept = run("--rules=tp8", "--dry-run", "--set=rules.rules.wo.heads=null", "--set=model.layers=2")[1]
    assert re.search(r"layers.attention.wo .*heads/tensor", before)
    assert not re.search(r"layers.attention.wo .*heads/tensor", kept) and "layers.attention.wo" in kept
    assert re.search(r"layers.attention.wq .*heads/tensor", kept)


SETS = re.findall(r"^python main.py (.*--set '?rules.*--dry-run)$", (ROOT / "docs/rules.md").read_text(), re.M)


@pytest.mark.parametrize("command", SETS)
def test_rules_that_a_flag_sets_as_the_page_shows(run, command):
    code, out, err = run(*shlex.split(command))
    assert (code, err) == (0, "") and "bytes per device" in out


def test_the_page_shows_rules_that_a_flag_sets():
    assert len(SETS) == 5


@pytest.mark.parametrize(
    "wrong",
    [
        ("--rules=tp8", "--set=model.kv_heads=2"),
        ("--rules=tp8", "--set=model.padded_vocab=0"),
        ("--rules=tp8", "--set=rules.rules.residual.seq=tensor", "--set=data.seq=100"),
    ],
)
def test_the_flags_of_a_fix_mend_what_is_wrong(run, wrong):
    """Each flag that a message names is given by itself, or all of those that several problems need."""
    code, _, err = run(*wrong, "--dry-run")
    assert code == 2
    first = [f"--set={flag}" for flag in re.findall(r"(?:fix   |, or )--set (rules\.[\w.=]+)", err)]
    assert first and run(*wrong, *first, "--dry-run")[0] == 0
    for flag in re.findall(r", or --set (model\.[\w.=]+), which pads the table$", err, re.M):
        assert run(*wrong, f"--set={flag}", "--dry-run")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--rules=tp8", "--set=rules.rules.hed=dp"), "rules.hed: unknown axis hed (did you mean heads?)\n  rule  "),
        (("compare", "tp8", "dp8", "--target=cpu:8", "--set=rules.remt=block"), "--set rules.remt=block: a rules file"),
        (("generate", "--rules=tp8", "--set=rules.remt=block"), "--set rules.remt=block: a rules file has no section"),
        (("convert", "--rules=tp8", "--set=rules.remt=block"), "--set rules.remt=block: a rules file has no section"),
        (("plan", "--target=cpu:8", "--set=rules.remat=block"), "--set rules.remat=block: a plan chooses the rules\n"),
        (("--rules=plan", "--set=rules.remat=block"), "--set rules.remat=block: a plan chooses the rules\n  fix"),
    ],
)  # fmt: skip
def test_rules_that_a_flag_sets_wrongly(run, arguments, message):
    code, out, err = run(*arguments)
    assert (code, out) == (2, "") and err.startswith(message)


def test_dry_run_shows_warnings(run, tmp_path):
    (tmp_path / "x.yaml").write_text("mesh: {data: 8}\nrules: {batch: data, rank: data}\n")
    code, out, _ = run(f"--rules={tmp_path / 'x.yaml'}", "--dry_run")
    assert code == 0
    assert out.startswith("warning: rules.rank: this config has no rank, so the row does nothing\n")


def test_the_files_of_a_run_are_its_defaults(run, tmp_path):
    (tmp_path / "config.yaml").write_text((ROOT / "configs" / "bench_4m.yaml").read_text() + "name: before\n")
    (tmp_path / "rules.yaml").write_text((ROOT / "rules" / "tp8.yaml").read_text())
    code, out, _ = run(f"--workdir={tmp_path}", "--dry_run")
    assert code == 0
    assert f"before under {tmp_path / 'rules.yaml'}" in out
