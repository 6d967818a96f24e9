"""Rules files: what they mean, and what each wrong one is told.

The full text of every error stands, under the file that causes it, in golden/rules_errors.txt.
"""

import dataclasses
import re
import textwrap

import pytest
from recorded import same_as_recorded, shapes_once, titles  # noqa: F401  (a fixture)

from gspmd_lm import config
from gspmd_lm.errors import InputError
from gspmd_lm.sharding import placement, rules, rules_file
from gspmd_lm.sharding.problems import Problem, ShardingError, check
from gspmd_lm.train import state
from gspmd_lm.units import human_bytes
from tests.sharding.wrong_rules import DP, TP, WRONG, Case


@pytest.fixture
def read(tmp_path, monkeypatch):
    """The rules of a text, as if it stood in layout.yaml."""
    monkeypatch.chdir(tmp_path)

    def read(text, mesh="", sets=()):
        (tmp_path / "layout.yaml").write_text(text)
        return rules_file.load("layout.yaml", mesh, overrides=sets)

    return read


_outcomes = {}


@pytest.fixture
def resolved(read, shapes_once):  # noqa: F811
    """The warnings about a Case, which is checked once for all tests."""

    def checked(case):
        tiny, layout = config.load("tiny", case.overrides), read(case.text, case.mesh, case.sets).fill(case.devices)
        return state.arrays_and_warnings(tiny, layout, case.platform)[1]

    def resolved(case):
        if case not in _outcomes:
            try:
                _outcomes[case] = checked(case)
            except InputError as error:
                _outcomes[case] = error
        if isinstance(_outcomes[case], InputError):
            raise _outcomes[case]
        return _outcomes[case]

    return resolved


@pytest.mark.parametrize("name", WRONG, scope="module")
def test_wrong_file(name, resolved):
    case = WRONG[name]
    with pytest.raises(InputError) as error:
        resolved(case)
    flags = [f"--set {override}" for override in (*case.overrides, *case.sets)]
    flags += [f"--mesh={case.mesh}"] if case.mesh else []
    causes = case.text + "".join(f"{flag}\n" for flag in flags)
    same_as_recorded("rules_errors.txt", name, f"{textwrap.indent(causes, '    ')}\n{error.value}")


def test_every_recorded_error_has_its_test():
    assert titles("rules_errors.txt") == set(WRONG)


def test_not_utf8(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"# caf\xe9\nmesh: {data: 8}\n")
    with pytest.raises(InputError, match=r"^latin.yaml: not UTF-8 text \(invalid continuation byte at byte 5\)$"):
        rules_file.load("latin.yaml")


def test_missing_file_names_the_nearest():
    with pytest.raises(
        InputError, match=r"^tp9: no such file, here or in rules/ \(did you mean tp8\?\)\n  fix   give a"
    ):
        rules_file.load("tp9")


@pytest.mark.parametrize("name", ["tp8", "tp8.yaml", "rules/tp8.yaml"])
def test_names_are_looked_up_in_rules(name):
    assert rules_file.load(name).path == "rules/tp8.yaml"
    assert rules_file.load(name).name == "tp8"


def test_none_is_one_device():
    assert rules_file.load("none").devices == rules_file.load("single").devices == 1


# What is only a warning


def test_an_axis_that_no_array_of_this_config_has_is_a_warning_for_one_array_too(resolved):
    (warning,) = resolved(Case(DP + "weights: {w_up.expert: data}\n"))
    assert str(warning).startswith("weights.w_up.expert: this config has no expert, so the row does nothing\n")


def test_known_axis_that_this_config_lacks_is_a_warning(resolved):
    (warning,) = resolved(Case(DP + "weights: {rank: data}\n"))
    assert str(warning) == (
        "weights.rank: this config has no rank, so the row does nothing\n"
        "  rule  layout.yaml: weights.rank: data\n"
        "  fix   drop the row"
    )


def test_known_array_that_this_config_lacks_is_a_warning(resolved):
    (warning,) = resolved(Case(DP + "weights: {position_embedding.embed: data}\n"))
    assert "this config has no position_embedding" in warning.message


def test_mesh_axis_that_splits_nothing_is_a_warning(resolved):
    (warning,) = resolved(Case("mesh: {data: 4, tensor: 2}\nrules: {batch: data}\n"))
    assert str(warning) == (
        "mesh: tensor=2 splits nothing, so its devices compute the same 2 times\n"
        "  rule  layout.yaml: mesh.tensor: 2\n"
        "  fix   map an axis to tensor, or drop it"
    )


def test_kernels_of_other_platforms_do_not_matter(resolved):
    assert resolved(Case(DP + "attention: {gpu: cudnn, tpu: splash}\n", ("data.seq=96",))) == []


# What rows mean


def spec(found, table, path, axes, shape, itemsize=4):
    result, problems = found.resolve(table, path, axes.split(), shape, itemsize)
    assert problems == []
    return result


def test_axis_with_no_row_is_replicated(read):
    assert spec(read(TP), "rules", "layers.attention.wq", "layers embed heads head_dim", (4, 128, 8, 16)) == (
        (),
        (),
        ("tensor",),
        (),
    )


@pytest.mark.parametrize("order", [("wq.heads: null", "heads: tensor"), ("heads: tensor", "wq.heads: null")])
def test_a_row_that_names_the_array_wins_in_any_order(read, order):
    found = read(f"mesh: {{tensor: 8}}\nrules: {{{', '.join(order)}}}\n")
    assert found.split("rules", "layers.attention.wq", "heads") == ()
    assert found.split("rules", "layers.attention.wo", "heads") == ("tensor",)


def test_the_longest_name_wins(read):
    found = read("mesh: {data: 2, tensor: 4}\nrules: {scale.embed: data, mlp_norm.scale.embed: tensor, embed: null}\n")
    assert found.split("rules", "final_norm.scale", "embed") == ("data",)
    assert found.split("rules", "layers.mlp_norm.scale", "embed") == ("tensor",)
    assert found.split("rules", "layers.mlp.w_up", "embed") == ()


def test_a_row_of_a_weight_places_its_adapter_too(read):
    text = "mesh: {data: 2, tensor: 4}\nrules: {mlp: tensor, layers.mlp.w_up.mlp: null, w_up_b.mlp: data}\n"
    found = read(text + "weights: {w_up.mlp: data, w_up_b.mlp: [data, tensor]}\n")
    for name, splits in {"w_gate_b": ("tensor",), "w_up": (), "w_up_b": ("data",), "w_down_a": ("tensor",)}.items():
        assert found.split("rules", f"layers.mlp.{name}", "mlp") == splits, name
    assert found.split("weights", "layers.mlp.w_up", "mlp") == ("data",)
    assert found.split("weights", "layers.mlp.w_up_b", "mlp") == ("data", "tensor")


def test_a_name_matches_whole_words_only(read):
    found = read("mesh: {tensor: 8}\nrules: {q.heads: tensor}\n")
    assert found.split("rules", "layers.attention.wq", "heads") == ()


def test_finer_tables_refine_coarser_ones(read):
    found = read(
        "mesh: {fsdp: 2, tensor: 4}\nrules: {wq.heads: tensor, embed: null}\n"
        "weights: {embed: fsdp, heads: null}\noptimizer: {embed: null}\n"
    )
    got = {
        table: [found.split(table, "layers.attention.wq", axis) for axis in ("embed", "heads")]
        for table in rules.TABLES
    }
    assert got == {"rules": [(), ("tensor",)], "weights": [("fsdp",), ()], "optimizer": [(), ()]}


def test_values_laid_over_a_file_are_as_if_they_stood_in_it(read):
    """The rest of a key after its table is the row, with its dots. The text has what was laid over the file."""
    text = (
        "mesh: {data: 2, tensor: 8}\nrules: {batch: data, heads: tensor, residual.seq: tensor}\nremat: dots\n"
        "attention: {tpu: splash}\ncompiler_options: {tpu: {xla_a.b: 1}}\n"
    )
    sets = (
        "rules.rules.residual.seq=null", "rules.rules.attention.wq.heads=[data, tensor]", "rules.rules.mlp=tensor",
        "rules.weights.embed=data", "rules.optimizer={mlp: null}", "rules.remat={save: [q]}", "rules.remat.offload=[k]",
        "rules.microbatches=2", "rules.attention.gpu=cudnn", "rules.compiler_options.tpu.xla_a.b=false",
        "rules.compiler_options.gpu.xla_c=1", "rules.dcn.data=2", "rules.mesh.fsdp=2",
    )  # fmt: skip
    whole = (
        "mesh: {data: 2, tensor: 4, fsdp: 2}\n"
        "rules: {batch: data, heads: tensor, residual.seq: null, attention.wq.heads: [data, tensor], mlp: tensor}\n"
        "weights: {embed: data}\noptimizer: {mlp: null}\nremat: {save: [q], offload: [k]}\nmicrobatches: 2\n"
        "attention: {tpu: splash, gpu: cudnn}\ncompiler_options: {tpu: {xla_a.b: false}, gpu: {xla_c: 1}}\n"
        "dcn: {data: 2}\n"
    )
    found, wanted = read(text, "tensor=4", sets), read(whole)
    assert found.problems == wanted.problems == () and found.facts() == wanted.facts()
    again = read(found.text)
    assert again.facts() == wanted.facts() and not again.flags
    first = found.text.partition("\n")[0]
    assert first == " ".join(["# layout.yaml with", *(f"--set {text}" for text in sets), "--mesh=tensor=4"])
    assert read(text).text == text and wanted.text == whole


def test_several_mesh_axes_and_sizes_of_one(read):
    found = read("mesh: {data: 1, fsdp: 2, tensor: 4}\nrules: {batch: [data, fsdp, tensor]}\n")
    assert found.split("rules", "tokens", "batch") == ("fsdp", "tensor")


def test_a_mesh_axis_of_size_one_may_stand_twice_in_an_array(read):
    found = read("mesh: {tensor: 1}\nrules: {heads: tensor, embed: tensor}\n")
    assert spec(found, "rules", "layers.attention.wq", "embed heads", (128, 8)) == ((), ())


def test_an_activation_of_size_one_is_never_split_but_a_weight_is_an_error(read):
    found = read("mesh: {tensor: 8}\nrules: {seq: tensor, kv_heads: tensor}\n")
    assert spec(found, "rules", "residual", "batch seq embed", (16, 1, 128), itemsize=0) == ((), (), ())
    assert found.resolve("rules", "layers.attention.wk", ("kv_heads",), (1,), 4)[1]


def test_mesh_override(read):
    assert read("mesh: {fsdp: -1, tensor: 4}\n", "tensor=2").fill(8).mesh == {"fsdp": 4, "tensor": 2}
    assert read("mesh: {fsdp: 2, tensor: 4}\n", "tensor=2,fsdp=-1").fill(8).mesh == {"fsdp": 4, "tensor": 2}


def test_fill(read):
    open_mesh = read("mesh: {fsdp: -1, tensor: 4}\n")
    assert open_mesh.devices == -1
    assert open_mesh.fill(256).mesh == {"fsdp": 64, "tensor": 4}
    assert open_mesh.fill(256).problems == ()
    assert read("mesh: {data: 8}\ndcn: {data: 2}\n").fill(8).dcn == {"data": 2}


def test_the_rest_of_a_file(read):
    found = read(
        DP + "remat: {save: [q, k], offload: [residual]}\nmicrobatches: 4\nattention: {gpu: cudnn}\n"
        "compiler_options: {gpu: {xla_gpu_enable_latency_hiding_scheduler: false}}\n"
    )
    assert found.problems == ()
    assert found.remat == rules.Remat("names", ("q", "k"), ("residual",))
    assert found.microbatches == 4
    assert found.attention == {"gpu": "cudnn"}
    assert found.compiler_options == {"gpu": {"xla_gpu_enable_latency_hiding_scheduler": False}}


@pytest.mark.parametrize(("schedule", "others"), [("gpipe", 3), ("1f1b", 6)])
def test_a_stage_waits_for_those_around_it(read, schedule, others):
    """Before its first rows and after its last ones; with gradients that go back as soon as they can, twice."""
    found = read(
        f"mesh: {{stage: 4}}\nweights: {{layers: stage}}\npipeline: {{microbatches: 8, schedule: {schedule}}}\n"
    )
    assert (found.stages, found.turns) == (("stage",), (8, 8 + others))


@pytest.mark.parametrize(
    ("text", "replicas"),
    [
        ("mesh: {data: 8}\nrules: {batch: data}\n", ("data",)),
        ("mesh: {data: 2, fsdp: 4}\nrules: {batch: [data, fsdp]}\nweights: {embed: fsdp}\n", ()),
        ("mesh: {data: 2, fsdp: 4}\nrules: {batch: [data, fsdp]}\n", ("data", "fsdp")),
        (
            "mesh: {stage: 2, data: 2, fsdp: 2}\nrules: {batch: [data, fsdp]}\nweights: {layers: stage, embed: fsdp}\n"
            "pipeline: {microbatches: 4}\n",
            ("data",),
        ),
        ("mesh: {data: 8}\nrules: {batch: data}\noptimizer: {embed: data}\n", ()),
        ("mesh: {data: 8}\nrules: {batch: data, logits.batch: null}\n", ()),
        ("mesh: {data: 1, tensor: 8}\nrules: {batch: data, heads: tensor}\n", ()),
        ("mesh: {tensor: 8}\nrules: {heads: tensor}\n", ()),
    ],
)
def test_replicas_differ_in_the_batch_alone(read, text, replicas):
    assert read(text).replicas == replicas


# What is checked again where arrays are placed


def test_an_array_that_only_the_rules_make_is_checked_too(read):
    import jax

    from gspmd_lm.sharding import mesh

    found = read("mesh: {tensor: 8}\nrules: {heads: tensor, kv_seq: tensor}\n").fill(8)
    place = placement.MeshPlacement(found, mesh.build(found, jax.devices()))
    with pytest.raises(ShardingError, match="k: tensor would split both kv_seq and heads"):
        place.sharding("rules", "k", ("batch", "kv_seq", "heads", "head_dim"), (16, 256, 8, 16))


# The message


def test_alike_problems_are_folded_and_their_bytes_added():
    def problem(path, replicated_bytes):
        return Problem(f"{path}: heads=6 is odd", "x.yaml: rules.heads: tensor", "set it to null", "", replicated_bytes)

    with pytest.raises(ShardingError) as error:
        check([problem("wq", 1_000_000), problem("wo", 500_000), problem("wq", 2_000_000), problem("q", 0)])
    assert str(error.value) == (
        "wq: heads=6 is odd\n  rule  x.yaml: rules.heads: tensor\n"
        "  fix   set it to null (replicates 1.5 MB per device)\n  also  wo, q"
    )


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1200, "1.2 kB"), (36_864, "36.9 kB"), (1.5e9, "1.5 GB"), (2e15, "2000.0 TB")],
)
def test_human_bytes(count, text):
    assert human_bytes(count) == text


FLAG = re.compile(r"--set ([a-z_.]+=(?:\[[^\]]*\]|\{[^}]*\}|[^\sA-Z,]+))|--mesh=(\w+=\d+)(?:, with (\d+) device)?")


def with_flag(case, flag):
    """The case with a printed flag laid over it. A `--set` of the same key, or a wrong one, is replaced."""
    set_, mesh, devices = flag.groups()
    if mesh:
        axis = mesh.partition("=")[0]
        sets = tuple(one for one in case.sets if not one.startswith(f"rules.mesh.{axis}="))
        return dataclasses.replace(case, mesh=mesh, sets=sets, devices=int(devices or case.devices))
    if not set_.startswith("rules."):
        return dataclasses.replace(case, overrides=(*case.overrides, set_))
    wrong = [one for one in case.sets if one.partition("=")[0] == set_.partition("=")[0]]
    wrong += [one for one in case.sets if one.partition(".")[2] == set_.split(".", 2)[-1]]  # it lacks its table
    return dataclasses.replace(case, sets=(*(one for one in case.sets if one not in wrong), set_))


def problems_of(case, resolved):
    """First line of each problem -> its fix."""
    try:
        resolved(case)
    except InputError as error:
        parts = re.split(r"\n(?=\S)", str(error))
        return {part.partition("\n")[0]: "".join(re.findall(r"^  fix   (.*)", part, re.M)) for part in parts}
    return {}


# Beside the test above of the same name, so that traces of its config are at hand.
@pytest.mark.parametrize("name", [name for name in WRONG if name != "everything at once"], scope="module")
def test_a_printed_flag_mends_the_problem_that_it_stands_under_and_makes_no_other(name, resolved):
    before = problems_of(WRONG[name], resolved)
    for message, fix in before.items():
        for alternative in re.split(r", or (?=--)", fix.partition("such as")[0]):
            case = WRONG[name]
            for flag in FLAG.finditer(alternative):
                case = with_flag(case, flag)
            after = problems_of(case, resolved)
            if case != WRONG[name]:
                assert message not in after, f"{alternative} does not mend: {message}"
                assert set(after) <= set(before), f"{alternative} leads to: {set(after) - set(before)}"


def test_the_split_of_an_array_in_words():
    spec = (), ("data", "fsdp"), ("tensor",)
    assert rules.describe_split(("layers", "embed", "mlp"), spec) == "embed/data+fsdp mlp/tensor"
    assert rules.describe_split(("embed",), ((),)) == "replicated"
