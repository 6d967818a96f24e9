"""Compiler options, what a compiler refuses, and the memory that is free."""

import importlib.util
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from gspmd_lm.errors import InputError
from gspmd_lm.runtime import compiler, host
from gspmd_lm.sharding import rules_file
from tests.launched import launch, output


def test_rules_lie_over_the_defaults_and_null_removes_one():
    rows = {"gpu": {"xla_gpu_enable_latency_hiding_scheduler": None, "xla_x": 3}, "cpu": {"xla_y": 1}}
    options = compiler.options("gpu", rows, "rules/x.yaml")
    expected = dict(compiler.DEFAULT_OPTIONS["gpu"], xla_x=3)
    del expected["xla_gpu_enable_latency_hiding_scheduler"]
    assert options == expected


def test_libtpu_gets_text():
    options = compiler.options("tpu", {"tpu": {"a": False, "b": 98304, "c": "AUTO"}}, "rules/x.yaml")
    assert (options["a"], options["b"], options["c"]) == ("false", "98304", "AUTO")
    assert options["xla_tpu_enable_latency_hiding_scheduler"] == "true"
    assert all(isinstance(value, str) for value in options.values())


def test_some_defaults_are_for_a_torus_of_three_dimensions():
    flat, torus = (set(compiler.options("tpu", {}, "-", kind)) for kind in ("TPU v5 lite", "TPU v5"))
    assert torus - flat == set(compiler.DEFAULT_OPTIONS["tpu 3d"])
    assert flat == {*compiler.DEFAULT_OPTIONS["tpu"], *compiler.DEFAULT_OPTIONS["tpu fusion"]}


@pytest.mark.parametrize(
    ("libtpu", "kinds"),
    [("0.0.42.1", ["TPU v5 lite", "TPU v5", "TPU v6 lite"]), ("0.0.50.1", ["TPU v5 lite"]), ("0.1.0", ["TPU v5 lite"])],
)
def test_options_that_newer_compilers_refuse_are_left_out_there(libtpu, kinds, monkeypatch):
    monkeypatch.setattr(compiler.versions, "installed_versions", lambda names: {"libtpu": libtpu})
    fusion = set(compiler.DEFAULT_OPTIONS["tpu fusion"])
    found = {kind: fusion & set(compiler.options("tpu", {}, "-", kind)) for kind in
             ("TPU v5 lite", "TPU v5", "TPU v6 lite")}  # fmt: skip
    assert found == {kind: fusion if kind in kinds else set() for kind in found}


def test_a_value_that_is_no_scalar():
    with pytest.raises(InputError, match=r"rules/x.yaml: compiler_options.cpu.xla_a: \[1\] is not a single value"):
        compiler.options("cpu", {"cpu": {"xla_a": [1]}}, "rules/x.yaml")


@pytest.mark.parametrize(
    "platform, row, error",
    [
        ("cpu", {"xla_foo": True}, "^rules/x.yaml: compiler_options.cpu.xla_foo: the compiler has no such option\n"),
        ("gpu", {"xla_gpu_enable_latency_hiding": True}, "did you mean xla_gpu_enable_latency_hiding_scheduler"),
        (
            "cpu",
            {"xla_cpu_enable_fast_math": "perhaps"},
            "xla_cpu_enable_fast_math: 'perhaps' is not a valid bool value",
        ),
        ("cpu", {"xla_cpu_parallel_codegen_split_count": 1.5}, "split_count: 1.5 is not a valid int32 value"),
    ],
)
def test_an_option_the_compiler_refuses(platform, row, error):
    lowered = jax.jit(lambda x: x + 1).lower(jnp.ones(3))
    options = compiler.options(platform, {platform: row}, "rules/x.yaml")
    with pytest.raises(InputError, match=f"{error}(.|\n)*  fix   "):
        compiler.compile(lowered, options, platform, "rules/x.yaml")


def test_a_quoted_value_of_a_default_is_not_taken_for_the_default():
    lowered = jax.jit(lambda x: x + 1).lower(jnp.ones(3))
    rows = {"gpu": {"xla_gpu_enable_latency_hiding_scheduler": "true"}}
    with pytest.raises(InputError, match=r"scheduler: 'true' is not a valid bool value\n.*without quotes"):
        compiler.compile(lowered, compiler.options("gpu", rows, "rules/x.yaml"), "gpu", "rules/x.yaml")


def test_a_default_that_a_newer_compiler_refuses_says_how_to_go_on(monkeypatch):
    monkeypatch.setitem(compiler.DEFAULT_OPTIONS, "cpu", {"xla_bygone": True})
    lowered = jax.jit(lambda x: x + 1).lower(jnp.ones(3))
    with pytest.raises(InputError, match=r"xla_bygone: this default(.|\n)*xla_bygone: null to compiler_options.cpu"):
        compiler.compile(lowered, compiler.options("cpu", {}, "rules/x.yaml"), "cpu", "rules/x.yaml")


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_the_defaults_are_options_of_the_compiler(platform):
    """XLA has one list of options for the CPU and the GPU, so this needs no GPU."""
    lowered = jax.jit(lambda x: x * 2).lower(jnp.ones(3))
    compiled = compiler.compile(lowered, compiler.options(platform, {}, "-"), platform, "-")
    assert compiled(jnp.ones(3)).tolist() == [2, 2, 2]


@pytest.mark.long
@pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="needs libtpu, which compiles without a TPU")
def test_the_defaults_are_options_of_libtpu():
    env = {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    out, _ = output(
        launch(
            """
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from gspmd_lm.runtime import compiler
from gspmd_lm.sharding import rules_file
from gspmd_lm.errors import InputError
devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices
sharding = NamedSharding(Mesh(np.array(devices), ("data",)), P("data"))
lowered = jax.jit(lambda x: x.sum()).lower(jax.ShapeDtypeStruct((8,), jnp.float32, sharding=sharding))
compiler.compile(lowered, compiler.options("tpu", {}, "-"), "tpu", "-")
for row in {"xla_foo": True}, {"xla_tpu_scoped_vmem_limit_kib": "many"}:
    try:
        compiler.compile(lowered, compiler.options("tpu", {"tpu": row}, "r"), "tpu", "r")
    except InputError as error:
        print(str(error).splitlines()[0])
""",
            **env,
        )
    )
    assert out.splitlines() == [
        "r: compiler_options.tpu.xla_foo: the compiler has no such option",
        "r: compiler_options.tpu.xla_tpu_scoped_vmem_limit_kib: 'many' cannot be read.",
    ]


def test_arrays_that_devices_cannot_hold_are_refused_by_counting(monkeypatch):
    held, real = {"weights": 3 * 10**9, "batch": 10**3}, SimpleNamespace(platform="tpu", process_index=0)
    real.memory_stats = lambda: {"bytes_limit": 3 * 10**9}
    for free in 24_000_008_000, None:
        monkeypatch.setattr(host, "free_bytes", lambda free=free: free)
        compiler.check_held(held, jax.devices())
    monkeypatch.setattr(host, "free_bytes", lambda: 24_000_007_999)
    with pytest.raises(InputError, match=r"^8 simulated devices share the memory of .*, which has 24 GB free"):
        compiler.check_held(held, jax.devices())
    compiler.check_held({"weights": 3 * 10**9}, [real] * 4)
    with pytest.raises(InputError, match=r"^each device has 3 GB: 3 GB are needed before .* \(weights 3 GB\)\n  fix"):
        compiler.check_held(held, [real] * 4)


def test_only_training_on_gpus_gives_up_matmuls_that_read_a_slice_of_a_stack():
    rules = rules_file.from_dict({"mesh": {"data": 8}}, "here")
    name = "xla_gpu_enable_dynamic_slice_fusion"
    assert compiler.options("gpu", {}, "here", also=rules.program_kinds)[name] is False
    assert name not in compiler.options("gpu", {}, "here")


def test_gpu_programs_that_offload_may_overlap_although_memory_seems_full():
    """XLA's scheduler counts what lies in the host's memory as memory of the GPU."""
    name = "xla_gpu_memory_limit_slop_factor"
    factors = []
    for remat in {"save": ["q"]}, {"offload": ["q"]}:
        rules = rules_file.from_dict({"mesh": {"data": 8}, "remat": remat}, "here")
        factors.append(compiler.options("gpu", {}, rules.path, also=rules.program_kinds)[name])
    assert factors == [115, 1000]
    assert name not in compiler.options("tpu", {}, "here", also=("offload",))


def test_two_parts_of_a_layer_alone_have_an_option_with_which_libtpu_cannot_compile_four():
    name, parts = "xla_tpu_enable_async_collective_fusion_with_mosaic_custom_call", (1, 2, 4)
    rules = [rules_file.from_dict({"mesh": {"data": 8}, "interleave": count}, "here") for count in parts]
    found = [compiler.options("tpu", {}, "here", also=one.program_kinds).get(name) for one in rules]
    assert found == [None, "true", None]
