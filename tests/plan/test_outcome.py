"""What a plan says: the ranking, why the others lost, prices and days, the rules file, the page and the JSON."""

import dataclasses
import io
import itertools
import json
import math
import re
import types
from pathlib import Path

import pytest
from rich.console import Console

from gspmd_lm import cli
from gspmd_lm import config as configs
from gspmd_lm.cli import outputs
from gspmd_lm.cli import plan as verb
from gspmd_lm.config import core_yaml
from gspmd_lm.errors import InputError
from gspmd_lm.hardware import target as targets
from gspmd_lm.hardware.capacity import Assumptions, Price, read_prices
from gspmd_lm.plan import advice, outcome, search, space
from gspmd_lm.plan import candidate as candidates
from gspmd_lm.plan.candidate import Candidate, Plan
from gspmd_lm.plan.estimate import Estimate
from gspmd_lm.sharding import rules_file
from gspmd_lm.show import html as html_of
from gspmd_lm.show import plan as shown
from tests.foresight import sample

TARGET = targets.parse("h100:8")
RAWS = (
    {"mesh": {"fsdp": 8}, "rules": {"batch": "fsdp"}, "weights": {"embed": "fsdp"}, "remat": "block"},
    {"mesh": {"fsdp": 8}, "rules": {"batch": "fsdp"}, "weights": {"embed": "fsdp"}},
    {"mesh": {"tensor": 8}, "rules": {"heads": "tensor", "mlp": "tensor", "residual.seq": "tensor"}},
    {"mesh": {"data": 8}, "rules": {"batch": "data"}, "remat": {"save": ["attention_out"]}},
)
# Seconds of matmuls, attention, other compute, waits by axis; peak bytes of each.
PARTS = (
    (2.0, 0.5, 0.5, {"fsdp": 0.2}, 30e9),
    (1.6, 0.5, 0.6, {"fsdp": 0.6, "data": 0.05}, 50e9),
    (1.5, 0.5, 0.5, {"tensor": 2.0}, 20e9),
    (9.0, 0.5, 0.5, {}, 10e9),
)


def candidate(raw, parts, compiled=True):
    matmul_s, attention_s, other_s, waits, peak = parts
    step_s = matmul_s + attention_s + other_s + sum(waits.values())
    price = Estimate(step_s, matmul_s, attention_s, other_s, waits, 0.0, int(peak))
    prediction = types.SimpleNamespace(
        **vars(price), parts_s=price.parts_s, mfu=1 / step_s, error="8.0% in the mean of 4 runs"
    )
    report = types.SimpleNamespace(
        prediction=prediction,
        memory=types.SimpleNamespace(fits=True, peak_bytes=int(peak)),
        floor=types.SimpleNamespace(compute_s=1.0),
        job=sample.JOB,
    )
    rules = rules_file.from_dict(raw, space.describe(raw)).fill(8)
    return Candidate(raw, rules, price, report if compiled else None, limit_bytes=60_000_000_000)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def planned():
    each = [candidate(raw, parts, n < 3) for n, (raw, parts) in enumerate(zip(RAWS, PARTS, strict=True))]
    plan = Plan(TARGET, "little", 1_000_000, tuple(each), tuple(each[:2]), 4, 3, 61.0, 0.08, each[0])
    return outcome.Outcome(plan, 64, price=Price(3.0), tokens=1e12, days=14.0)


def test_the_ranking_keeps_the_order_of_the_plan(planned):
    lines = planned.lines()
    assert [line.rank for line in lines] == [1, 2, 3, 4]
    assert [line.tied for line in lines] == [True, True, False, False]
    assert lines[0].mfu == lines[0].candidate.report.prediction.mfu
    assert lines[3].mfu == pytest.approx(1 / 10)  # priced alone: the FLOPs are those of the compiled ones
    assert [line.candidate.compiled for line in shown.top_lines(lines)] == [True, True, True]


def test_money_and_days_follow_from_tokens_per_second(planned):
    assert planned.tokens_per_s == 1_000_000 / 3.2
    assert planned.days_needed == pytest.approx(1e12 * 3.2e-6 / 86400)
    assert planned.in_time is False
    assert planned.usd == pytest.approx(planned.days_needed * 24 * 8 * 3.0)
    assert planned.lines()[0].usd_per_billion_tokens * 1000 == pytest.approx(planned.usd)
    assert dataclasses.replace(planned, days=38.0).in_time is True
    assert dataclasses.replace(planned, tokens=0.0).in_time is None
    assert "2.65 times the 14 days" in shown.answer(planned)
    assert "take 37.0 days" in shown.answer(planned)
    assert "take under 0.001 days" in shown.answer(dataclasses.replace(planned, tokens=1e5, days=0.0))
    assert "take 0.0037 days" in shown.answer(dataclasses.replace(planned, tokens=1e8, days=0.0))
    assert targets.parse("v5e:2x2").price({"v5e": Price(9.0, 4.0)}) == (9.0, 4.0)
    assert targets.parse("v5e:2x2").price({}) == (1.2, None)
    assert targets.parse("tpu7x:2x2x1").price({}) == targets.parse("cpu:8").price({}) == (None, None)


def test_the_whole_job_is_that_of_the_best_layout_and_of_the_tokens(planned):
    job = planned.job
    assert job.work.steps == math.ceil(1e12 / planned.plan.tokens) and job.on_spot is None
    assert job.on_demand.usd == pytest.approx(job.on_demand.days * 24 * job.work.chips * 3.0)
    assert dataclasses.replace(planned, tokens=0.0).job.work.steps == sample.JOB.work.steps
    on_spot = dataclasses.replace(
        planned, price=Price(3.0, 1.0), assumed=Assumptions(preemptions_per_day=9)
    ).job.on_spot
    assert on_spot.interruptions_per_day == pytest.approx(9, abs=0.1) and on_spot.goodput < job.on_demand.goodput
    estimated = dataclasses.replace(planned.plan.best, report=None)
    plan = dataclasses.replace(planned.plan, best=estimated)
    assert dataclasses.replace(planned, plan=plan).job is None
    *_, section = shown.sections([planned])
    assert section.title == "The whole job" and section.facts[0].value == f"{job.on_demand.goodput:.1%}"


def test_why_a_layout_lost_names_every_part_that_differs(planned):
    assert planned.runner_up() is planned.plan.candidates[1]
    said = planned.why_not(planned.plan.candidates[1])
    assert said == ("4.7% slower, which is within the known error: waiting for fsdp +400 ms, other compute +100 ms, "
                    "waiting for data +50 ms, matmuls -400 ms")  # fmt: skip
    assert planned.why_not(planned.plan.candidates[2]).startswith("40.6% slower: waiting for tensor +2 s")
    assert planned.waits() == "6.2% of the step waiting for fsdp"


def test_what_one_forward_and_one_backward_would_take_is_said_of_pipelines(planned):
    raw = {"mesh": {"stage": 2, "fsdp": 4}, "rules": {"batch": ["stage", "fsdp"]}, "weights": {"layers": "stage"}}
    schedules = ({"gather": "turn"}, {"schedule": "1f1b"})
    stages, one_by_one = (
        candidate({**raw, "pipeline": {"microbatches": 4, **more}}, parts)
        for more, parts in zip(schedules, PARTS[1:3], strict=True)
    )

    def said(best, *others):
        return dataclasses.replace(
            planned, plan=dataclasses.replace(planned.plan, candidates=(best, *others), best=best)
        )

    assert planned.one_by_one() == ""
    assert said(stages).one_by_one().startswith("not tried, since other pipelines leave memory free")
    assert said(stages, one_by_one).one_by_one() == (
        "4.5 s with 20.0 GB, against 3.35 s with 50.0 GB: it pays only where nothing else fits"
    )
    assert said(one_by_one, stages).one_by_one() == "it pays here: no other pipeline that fits is faster"
    assert "1f1b" in dict(shown._notes(said(stages, one_by_one)))


def test_the_front_has_no_layout_that_another_beats_in_both(planned):
    front = outcome.front(planned.lines())
    assert [line.rank for line in front] == [1, 3, 4]
    for a, b in itertools.permutations(planned.lines(), 2):
        if a.step_time_s <= b.step_time_s and a.peak_bytes < b.peak_bytes:
            assert b not in front


@pytest.mark.long
def test_the_written_file_is_the_layout(planned):
    config = configs.load("tiny")
    raws = [*RAWS, *(raw for raw, _ in space.Space(config, targets.parse("2@v6e:1x1")).fill_layouts())]
    assert len(raws) > 40
    for raw in raws:
        assert core_yaml.parse(candidates.yaml(raw), "file") == raw
    first, *_ = candidates.rules_file(
        planned.plan, planned.plan.best, "python main.py plan --target=h100:8"
    ).splitlines()
    assert first.startswith(
        "# fsdp 8, remat block, found by: python main.py plan --target=h100:8 (predicted: 3.2 s a step"
    )
    assert first.endswith("error of predictions: 8.0% in the mean of 4 runs)")


def test_the_command_in_a_file_says_nothing_of_files():
    given = ["plan", "--config=tiny", "--out=a.yaml", "--html=b", "-json=c", "--set=data.batch=8"]
    assert outputs.command_line(given) == "python main.py plan --config=tiny --set=data.batch=8"


def test_json_has_the_documented_keys_and_no_others(planned):
    told = json.loads(json.dumps(outcome.to_json([planned])))
    assert told["best"]["rules"] == RAWS[0] and told["best"]["step_time_s"] == pytest.approx(3.2)
    assert [one["compiled"] for one in told["candidates"]] == [True, True, True, False]
    assert len(told["ties"]) == 2
    keys = {*told, *(f"candidates[].{key}" for key in told["candidates"][0])}
    document = (Path(__file__).parents[2] / "docs/plan.md").read_text()
    assert set(re.findall(r"^\| `(\S+)` \|", document, re.M)) == keys
    assert isinstance(outcome.to_json([planned, planned]), list)


def test_the_error_of_prices_is_said_with_what_it_rests_on(planned):
    def error(**changes):
        return shown.estimate_error(dataclasses.replace(planned.plan, **changes))

    assert error(estimate_error=0.031) == "corrected estimates missed the layouts compiled here by 3.1% in the mean"
    assert error().endswith("estimates missed 32 compiled layouts of h100, one host, by 4.4%")
    assert error(target=targets.parse("2@v6e:2x4")).endswith("15 compiled layouts of v6e, several slices, by 5.9%")
    assert (
        error(target=targets.parse("v4:4x4x4")) == "no estimates were compared with compiled layouts of v4, one slice"
    )
    assert error(target=targets.parse("cpu:8")) == ""


def test_nothing_fits_is_said_only_where_all_are_known_not_to(planned):
    def shown_text(**changes):
        nothing = dataclasses.replace(planned.plan, best=None, nearest=planned.plan.candidates[2], **changes)
        console = Console(width=140, record=True, file=io.StringIO())
        none = dataclasses.replace(planned, plan=nothing)
        shown.show([none], console, shown.fixes(None, ()))
        text = console.export_text()
        page = shown.page([none], shown.fixes(None, ()), "")
        assert "no larger target that was tried is large enough either" in text and "is large enough either" in page
        return text

    assert "nothing that was compiled fits: tensor 8" in shown_text()  # one of them was only priced
    failed = tuple(dataclasses.replace(one, report=None, failure="no") for one in planned.plan.candidates)
    assert "  nothing fits: tensor 8" in shown_text(candidates=failed)
    hurried = shown_text(candidates=failed, left_out=41, tables=42, stopped="the 0.2 minutes are over")
    assert "  nothing was found that fits: tensor 8" in hurried and "Nothing fits" not in hurried
    assert "the 0.2 minutes are over" in hurried


@pytest.mark.parametrize(("span", "message"), [
    ("8:999999999999999999999", r"--batch=8:9{21}: 1 problem\n  data.batch: must be at most 2147483647, got 21474836"),
    (f"{10**30}:{10**30}", "data.batch: must be at most 2147483647"),
    ("8:4", "not two sizes"),
    ("²:4", "not two sizes"),
])  # fmt: skip
def test_batches_that_cannot_be_are_named(span, message):
    with pytest.raises(InputError, match=rf"(?s){message}.*\n  fix   --batch=128:1024"):
        verb._batches(configs.load("tiny"), span)


def test_the_terminal_and_the_page_show_the_same_layouts(planned):
    console = Console(width=140, record=True, file=io.StringIO(), highlight=False)
    shown.show([planned], console)
    printed = console.export_text()
    html = html_of.sections([*shown.sections([planned]), *shown._memory(planned)])
    for line in shown.top_lines(planned.lines()):
        for cell in shown.cells(planned, line).values():
            assert cell in html
            assert cell in printed
    assert html.count('class="dot"') == 4 - 1  # one is more than three times as slow as the best
    assert "limit" in html


def test_targets_are_compared_by_what_their_tokens_cost(planned):
    dear = dataclasses.replace(planned, price=Price(30.0), days=0.0)
    cheap = dataclasses.replace(planned, days=0.0)
    late = dataclasses.replace(planned, price=Price(0.1))
    nothing = dataclasses.replace(planned, plan=dataclasses.replace(planned.plan, best=None, candidates=()), days=0.0)
    assert shown.rank([late, nothing, dear, cheap]) == [cheap, dear, nothing, late]
    assert shown.target_row(nothing)["layout"] == "nothing fits"
    assert list(shown.target_row(nothing).values()).count("-") == 6
    hurried = dataclasses.replace(nothing, plan=dataclasses.replace(nothing.plan, late=True))
    assert shown.target_row(hurried)["layout"] == "nothing was found that fits"


@pytest.mark.parametrize("text", ["v5e:2x4", "2@v6e:4x4", "v5p:2x2x1", "v5p:4x4x4", "h100:8", "h100:2x8/800"])
def test_larger_targets_grow_and_keep_the_chip(text):
    start = targets.parse(text)
    larger = list(itertools.islice(targets.larger(start), 4))
    sizes = [start.devices, *(one.devices for one in larger)]
    assert len(larger) > 1 and sizes == sorted(sizes)
    assert all(one.chip == start.chip and one.slices == start.slices for one in larger if text != "h100:8")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "plan needs --target"),
        (("--target=v5x:4x4",), "unknown chip"),
        (("--target=h100:8", "--batch=8"), "--batch=128:1024"),
        (("--target=h100:8", "--batch=16:8"), "the smaller first"),
        (("--target=h100:8", "--price=h10=1"), "not a chip and its price"),
        (("--target=h100:8", "--price=h100=free"), "'free' is not a price"),
        (("--target=h100:8", "--price=h100=-1"), "is not a price"),
        (("--target=h100:8", "--days=3"), "days for how many tokens?"),
        (("--target=h100:8", "--minutes=0"), "must be a finite number above 0"),
        (("--target=h100:8", "--out=nowhere/mine.yaml"), "there is no folder nowhere"),
        (("--target=cpu:8,h100:8",), "no times to compare"),
        (("--target=cpu:8", "--tokens=1e9"), "have no times"),
        (("--target=h100:8", "extra"), "flags begin with --"),
    ],
)
def test_wrong_flags_are_told_with_a_fix(flags, message, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["main.py", "plan", *flags])
    error = capsys.readouterr().err
    assert end.value.code == 2
    assert message in error and "\n  fix   " in error


def test_a_chip_that_a_file_describes_has_the_price_that_is_given(tmp_path):
    (tmp_path / "my.yaml").write_text("name: my\nlike: h100\nhbm_bytes: [94 GB, sheet]\n")
    target = targets.parse(targets.with_chip("my:8", str(tmp_path / "my.yaml")))
    assert target.price(read_prices(["my=7/3"], [target.chip])) == Price(7.0, 3.0)
    with pytest.raises(InputError, match=r"--price=me=7: not a chip and its price\n  fix   .*, v6e, my$"):
        read_prices(["me=7"], [None, target.chip])


def test_chips_that_would_do_are_counted(planned):
    assert planned.chips_in_time == 22  # 2.65 times 8
    assert shown.enough(planned) == "22 chips (h100:3x8)"
    assert "; 22 chips (h100:3x8) would do if each chip stayed as fast" in shown.answer(planned)
    assert dataclasses.replace(planned, days=38.0).chips_in_time is None
    for text, larger in (("v5e:4x4", "v5e:8x8"), ("tpu7x:2x2x2", "tpu7x:2x4x4"), ("h100:2x4/800", "h100:6x4/800")):
        target = targets.parse(text)
        one = dataclasses.replace(planned, plan=dataclasses.replace(planned.plan, target=target))
        assert shown.enough(one) == f"{one.chips_in_time} chips ({larger})"
    assert targets.with_chips(targets.parse("v5e:4x4"), 257) is None


def test_how_much_was_searched_is_said(planned):
    def one(**changes):
        return dataclasses.replace(planned, plan=dataclasses.replace(planned.plan, **changes))

    assert planned.searched == "full"
    assert one(late=True, tables=17).searched == "all meshes, 3 compiled"
    cut = one(late=True, left_out=106, tables=111, stopped="the 15 minutes are over", notes=("attention: xla",))
    assert cut.searched == "5 of 111 meshes, 3 compiled"
    console = Console(width=200, record=True, file=io.StringIO(), highlight=False)
    shown.show([planned, cut], console)
    text = re.sub(r"\s+", " ", console.export_text())
    assert "5 of 111 meshes, 3 compiled" in text and "full" in text
    assert "3 compiled in 61 s; the 15 minutes are over; attention: xla; 1.00 T tokens take" in text


def test_programs_that_are_in_no_ranking_are_named(planned):
    best, second, *rest = planned.plan.candidates
    memory = types.SimpleNamespace(fits=False, peak_bytes=70_000_000_000)
    large = dataclasses.replace(second, report=types.SimpleNamespace(prediction=None, memory=memory))
    failed = dataclasses.replace(best, report=None, failure="the compiler failed")
    dropped = dataclasses.replace(best, report=None, failure=candidates.HOPELESS)
    plan = dataclasses.replace(planned.plan, candidates=(best, *rest, large, failed, dropped), ties=(best,))
    assert outcome.not_ranked(planned.plan) == ""
    said = "2 that were compiled: fsdp 8, no remat needs 70.0 GB, at fsdp 8, remat block the compiler failed"
    assert outcome.not_ranked(plan) == said
    console = Console(width=140, record=True, file=io.StringIO(), highlight=False)
    shown.show([dataclasses.replace(planned, plan=plan)], console)
    assert said in console.export_text()


def run(*flags):
    with pytest.raises(SystemExit) as end:
        cli.main(["main.py", "plan", *flags])
    return end.value.code


def test_each_target_gets_a_rules_file(planned, monkeypatch, tmp_path, capsys):
    """Beside the file of the best one. They are the layouts of their plans."""
    asked = {}

    def plans(cases, *, minutes, **more):
        asked.update(minutes=minutes, cases=[(config.data.batch, target.text) for config, target in cases])
        return [dataclasses.replace(planned.plan, target=target, best=None if target.chip.name == "h200" else
                planned.plan.candidates[target.chip.name == "v5e"]) for _, target in cases]  # fmt: skip

    monkeypatch.setattr(search, "plans", plans)
    monkeypatch.setattr(advice, "changes", lambda *_: [])
    out, places = tmp_path / "mine.yaml", "--target=h100:8,v5e:4x4,h200:2x8/800"
    assert run(places, "--minutes=12", f"--out={out}") == 0
    assert asked == {"minutes": 12, "cases": [(16, "h100:8"), (16, "v5e:4x4"), (16, "h200:2x8/800")]}
    found = {path.name: core_yaml.parse(path.read_text(), "file") for path in tmp_path.iterdir()}
    assert found == {"mine.yaml": RAWS[1], "mine-v5e-4x4.yaml": RAWS[1], "mine-h100-8.yaml": RAWS[0]}
    assert f"wrote {tmp_path}/mine-h100-8.yaml, for h100:8\n" in capsys.readouterr().out
    assert run("--target=h100:8", "--batch=16:32", f"--out={out}", "--tokens=1e12", "--days=14") == 1
    assert "\n  fix   22 chips (h100:3x8), more --days, or fewer --tokens\n" in capsys.readouterr().err
    assert {path.name for path in tmp_path.glob("*h100*")} == {"mine-h100-8.yaml", "mine-h100-8-16.yaml",
                                                               "mine-h100-8-32.yaml"}  # fmt: skip
