"""MaxText's own train step, explained: what is predicted of it beside what is predicted of ours and was published.

    VENV/bin/python -m benchmarks.maxtext_explained [--eight_bits] [--row=8] [--layers=2] [--option=NAME=VALUE]

VENV has MaxText, this project, and the compiler of the row's target. `--row` counts the rows of
published/step_times.yaml from 0, or with `--eight_bits` those of published/eight_bits.yaml; the models and chips of
RECIPES are supported. MaxText knows the models by the same names. `--layers` makes a smaller model of the row, which
has no published time. `--option`, which may be repeated, is what the compiler of MaxText's step is told besides what a
run of ours is told.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import gspmd_lm
from benchmarks import measure, step_times
from gspmd_lm.config import core_yaml
from gspmd_lm.hardware.chips import CHIPS
from gspmd_lm.runtime import compiler

POLICIES = {"minimal": "minimal", "minimal flash": "minimal_with_context", "full": "full"}
# Arrays of layers, in the words of rows and of MaxText.
KEPT = {"block_input": "decoder_layer_input", "q": "query_proj", "k": "key_proj", "v": "value_proj",
        "attention_out": "out_proj"}  # fmt: skip
WHERE = {"save": "device", "offload": "offload"}
KERNELS = {"cudnn": "cudnn_flash_jax", "splash": "flash", "xla": "dot_product"}

# What the recipe of a model on a chip told MaxText besides what its row says, by the operands' dtype where they have 8
# bits. Sources: those of the rows.
RECIPES: dict[tuple[str, str, str | None], dict[str, Any]] = {
    ("llama2-7b", "h100", None): {},
    ("deepseek2-16b", "v5p", None): {},
    ("mixtral-8x7b", "v6e", None): {
        "sa_block_q": 2048, "sa_block_q_dkv": 2048, "sa_block_q_dq": 2048, "use_iota_embed": True,
        "megablox": False, "sparse_matmul": False,
    },
    ("gpt3-175b", "v6e", "int8"): {
        "quantization": "int8", "sa_block_q": 1024, "sa_block_q_dkv": 2048, "sa_block_q_dq": 2048,
    },
    ("llama3.1-70b", "tpu7x", "fp8"): {
        "quantization": "fp8_full", "use_qwix_quantization": True,
        "weight_quantization_calibration_method": "fixed,-224,224",
        "act_quantization_calibration_method": "fixed,-224,224",
        "out_proj": "remat", "context": "device", "qkv_proj": "device", "mu_dtype": "bfloat16", "use_iota_embed": True,
        "use_tokamax_splash": True, "sa_use_fused_bwd_kernel": True, "sa_q_layout": "SEQ_MINOR",
        "sa_block_q": 1024, "sa_block_kv": 1024, "sa_block_kv_compute": 512,
        "sa_block_q_dkv": 2048, "sa_block_kv_dkv": 2048, "sa_block_kv_dkv_compute": 256,
    },
}  # fmt: skip


def settings(row: step_times.Row) -> dict[str, Any]:
    """MaxText's words for the model, the batch, the mesh and the recomputation of a row."""
    if isinstance(row.remat, str):
        remat = {"remat_policy": POLICIES[row.remat]}
    else:
        remat = {KEPT[name]: WHERE[how] for how, names in row.remat.items() for name in names}
        remat["remat_policy"] = "custom"
    return {
        "run_name": "explained", "base_output_directory": "/tmp", "skip_jax_distributed_system": True,
        "internal_compile": True, "internal_compile_num_devices": row.devices,
        "hardware": CHIPS[row.chip].platform,
        "model_name": row.model, "override_model_config": True, "base_num_decoder_layers": row.L,
        "max_target_length": row.seq, "per_device_batch_size": row.per_device_batch,
        "dtype": "bfloat16", "weight_dtype": row.weights, "attention": KERNELS[row.attention],
        "capacity_factor": row.capacity_factor or -1.0,
        "dataset_type": "synthetic", "enable_checkpointing": False, **remat,
        **RECIPES[row.model, row.chip, row.matmul_dtype],
        **{f"ici_{axis}_parallelism": size for axis, size in row.mesh.items()},
    }  # fmt: skip


def step(chosen: Mapping[str, Any], options: Mapping[str, Any], devices: Sequence[Any]) -> Any:
    """MaxText's train step with these settings and compiler options, traced as its own train_compile.py does."""
    from flax.core.spmd import logical_axis_rules
    from jax.sharding import AxisType, Mesh
    from maxtext.configs import pyconfig  # pyright: ignore[reportMissingImports]
    from maxtext.layers import moe  # pyright: ignore[reportMissingImports]
    from maxtext.trainers.pre_train import train, train_compile  # pyright: ignore[reportMissingImports]
    from maxtext.utils import maxtext_utils, sharding  # pyright: ignore[reportMissingImports]

    # Releases after 0.1.0 constrain the numbers of rows here, and XLA then gathers and sorts the choices of the whole
    # batch on each device. The recipe of the only row that calls this is older.
    moe.RoutedMoE.reshape_and_update_weights = weights_of_all
    jax.config.update("jax_default_prng_impl", "unsafe_rbg")
    base = f"{pyconfig.__file__.rpartition('/')[0]}/base.yml"
    config = pyconfig.initialize(["explained", base, *(f"{key}={value}" for key, value in chosen.items())])
    grid = maxtext_utils.create_device_mesh(config, devices)
    mesh = Mesh(grid, config.mesh_axes, axis_types=(AxisType.Auto,) * len(config.mesh_axes))
    arguments, keywords, state_shardings, _, model = train_compile.get_shaped_inputs(mesh, config)
    params, state_shardings = sharding.maybe_update_params_sharding_with_opt(config, state_shardings)
    state_shardings = sharding.build_zero1_input_state_mesh_shardings(config, state_shardings, params)
    function, into, out, static, donated = maxtext_utils.get_functional_train_with_signature(
        train.train_step, sharding.get_input_data_sharding(config, mesh), state_shardings, model, config, params
    )
    with jax.set_mesh(mesh), logical_axis_rules(config.logical_axis_rules):
        jitted = jax.jit(
            function, in_shardings=into, out_shardings=out, static_argnums=static, donate_argnums=donated,
            compiler_options=dict(options),
        )  # fmt: skip
        return jitted.trace(*arguments, **keywords)


def weights_of_all(self: Any, weights_BTk: jax.Array, chosen_BTk: jax.Array, **_more: Any) -> jax.Array:
    """[B, T, E]: the weights of the chosen experts in their places, and zeros."""
    B, T, _ = weights_BTk.shape
    zeros_BTE = jnp.zeros((B, T, self.num_experts), self.dtype)
    return zeros_BTE.at[jnp.arange(B)[:, None, None], jnp.arange(T)[:, None], chosen_BTk].set(weights_BTk)


def main() -> None:
    from benchmarks import maxtext_explained  # the process that compiles imports it by this name

    parser = measure.flags(__doc__, writes=False)
    parser.add_argument("--eight_bits", action="store_true")
    parser.add_argument("--row", type=int, default=8)
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--option", action="append", default=[])
    options = parser.parse_args()
    rows = step_times.rows(step_times.EIGHT_BITS if options.eight_bits else step_times.PUBLISHED)
    known = [number for number, row in enumerate(rows) if (row.model, row.chip, row.matmul_dtype) in RECIPES]
    if options.row not in known:
        parser.error(f"argument --row: {options.row} has no recipe here; choose from {', '.join(map(str, known))}")
    row = rows[options.row]
    if options.layers:
        row = dataclasses.replace(row, L=options.layers)
    rules = row.rules()
    chip = CHIPS[row.chip]
    also = ("offload",) if rules.remat.offload else ()
    asked = compiler.options(chip.platform, rules.compiler_options, rules.path, chip.kinds[0], also)
    if chip.platform == "tpu":  # MaxText sets it for each run
        asked["xla_tpu_spmd_rng_bit_generator_unsafe"] = "true"
    asked |= {name: core_yaml.parse(value, name) for name, _, value in (text.partition("=") for text in options.option)}
    reports = {
        "ours": gspmd_lm.explain(row.config(), rules, row.target),
        "MaxText": gspmd_lm.explain(functools.partial(maxtext_explained.step, settings(row), asked), target=row.target),
    }
    published = {} if options.layers else {"published": f"{row.step_time_s:.3f}"}
    table = [{"program": name, **figures(report), **published} for name, report in reports.items()]
    print(row.name)
    print(measure.markdown(table, {name: name for name in table[0]}))
    print(gspmd_lm.show(reports["MaxText"]))


def figures(report: Any) -> dict[str, str]:
    """The columns of a report."""
    found = report.prediction
    return {
        "peak, GB": f"{report.memory.peak_bytes / 1e9:.1f}",
        "sent, GB": f"{report.sent_bytes / 1e9:.1f}",
        "step, s": f"{found.step_time_s:.3f}",
        "matmuls, s": f"{found.matmul_s:.3f}",
        "attention, s": f"{found.attention_s:.3f}",
        "other, s": f"{found.other_s:.3f}",
        "exposed, s": f"{found.exposed_communication_s:.3f}",
    }


if __name__ == "__main__":
    main()
