"""What a published mixture of experts took longer because its tokens went through one-hot products: docs/validation.md.

    python -m benchmarks.one_hot_experts [--row 50] [--layers 4]

Such a layer (arXiv 2006.16668) multiplies tokens with a mask into a buffer, which has a fixed capacity for each expert.
It computes all places of the buffer, and multiplies the results with the mask again. The layer is compiled for one
chip: forward, once more, and backward. What it takes is compared with what the experts of this project take in the
program of the row. Both are taken without collectives and without what moves weights, and priced alike. Nothing is
fitted.
"""

import dataclasses
import os
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies

from benchmarks import foresight, measure, step_times
from gspmd_lm.foresight import hlo
from gspmd_lm.foresight.timing import op_time
from gspmd_lm.foresight.timing.simulate import Simulation
from gspmd_lm.hardware.chips import Chip
from gspmd_lm.hardware.network import Network
from gspmd_lm.model.moe import Experts

_OF_WEIGHTS = ("sharding_constraint", "/optimizer.layers", "/sum.")  # in the names of what moves weights and gradients


def main() -> None:
    parser = measure.flags(__doc__, writes=False)
    parser.add_argument("--row", type=int, default=50, help="a published row whose experts have a capacity")
    parser.add_argument("--layers", type=int, default=4, help="of the program of this project; all layers are alike")
    arguments = parser.parse_args()
    row = step_times.rows()[arguments.row]
    module, chip, _ = foresight.program(dataclasses.replace(row, L=arguments.layers))
    ours_s, one_hot_s = sorted_s(module, chip) / arguments.layers, masked_s(row, chip)
    print(f"a layer of experts takes {ours_s * 1e3:.1f} ms here, and {one_hot_s * 1e3:.1f} ms with one-hot products")
    print(f"{row.L} layers take {row.L * (one_hot_s - ours_s):.3f} s longer")


def sorted_s(module: hlo.Module, chip: Chip) -> float:
    """The seconds of the experts of all layers in a program of this project, on one device."""
    return sum(
        one.executions * op_time.op_time(one, chip).seconds
        for one in module.operations
        if one.loops and "/layers/mlp/" in one.op_name and not (one.phase or one.collectives)
        and ("/grouped/" in one.op_name or not any(part in one.op_name for part in _OF_WEIGHTS))
    )  # fmt: skip


def masked_s(row: step_times.Row, chip: Chip) -> float:
    """The seconds of the experts of one layer with one-hot products, on one device, where they are computed again."""
    os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    jax.config.update("jax_platforms", "cpu")
    model = row.config().model
    E, k, D, F = model.experts, model.experts_per_token, model.embed, model.expert_width
    B, T, C = round(row.per_device_batch), row.seq, Experts(model).capacity(row.seq)

    def experts(x_BTD: jax.Array, router_DE: jax.Array, gate_EDF: jax.Array, up_EDF: jax.Array, down_EFD: jax.Array):
        scores_BTE = jax.nn.softmax(jnp.einsum("BTD,DE->BTE", x_BTD, router_DE).astype(jnp.float32))
        weights_BTk, chosen_BTk = jax.lax.top_k(scores_BTE, k)
        weights_BTk /= weights_BTk.sum(-1, keepdims=True)
        at_BTkE = jax.nn.one_hot(chosen_BTk, E, dtype=jnp.int32)
        in_turn_BnE = at_BTkE.swapaxes(1, 2).reshape(B, k * T, E)  # all first choices come before any second one
        place_BTkE = (jnp.cumsum(in_turn_BnE, 1) * in_turn_BnE).reshape(B, k, T, E).swapaxes(1, 2)
        at_BTkE *= (place_BTkE > 0) & (place_BTkE <= C)
        weights_BTE = (at_BTkE * weights_BTk[..., None]).sum(2).astype(x_BTD.dtype)
        mask_BTEC = jax.nn.one_hot((place_BTkE * at_BTkE).sum(2) - 1, C, dtype=x_BTD.dtype)
        buffer_EBCD = jnp.einsum("BTD,BTEC->EBCD", x_BTD, mask_BTEC)
        hidden_EBCF = jax.nn.silu(jnp.einsum("EBCD,EDF->EBCF", buffer_EBCD, gate_EDF))
        hidden_EBCF *= jnp.einsum("EBCD,EDF->EBCF", buffer_EBCD, up_EDF)
        y_EBCD = jnp.einsum("EBCF,EFD->EBCD", hidden_EBCF, down_EFD)
        return jnp.einsum("EBCD,BTEC->BTD", y_EBCD, mask_BTEC * weights_BTE[..., None])

    def trained(dy_BTD: jax.Array, *arguments: jax.Array) -> Any:
        y_BTD = experts(*arguments)
        arguments = jax.lax.optimization_barrier(arguments)  # so that the layer is computed again
        return y_BTD, jax.vjp(jax.checkpoint(experts), *arguments)[1](dy_BTD)

    topology = {"chips_per_host_bounds": (1, 1, 1), "num_slices": 1}
    shape = "x".join("1" * chip.torus_dimensions)
    device = topologies.get_topology_desc(platform="tpu", topology_name=f"{chip.name}:{shape}", **topology).devices[0]
    here = jax.sharding.SingleDeviceSharding(device)
    sizes = (B, T, D), (B, T, D), (D, E), (E, D, F), (E, D, F), (E, F, D)
    arguments = [jax.ShapeDtypeStruct(size, jnp.bfloat16, sharding=here) for size in sizes]
    given, limit = row.rules().compiler_options.get("tpu", {}), "xla_tpu_scoped_vmem_limit_kib"
    options: dict[str, str | bool] = {limit: str(given[limit])} if limit in given else {}
    text = jax.jit(trained).lower(*arguments).compile(compiler_options=options).as_text()
    assert text
    network = Network(chip, ((0,) * chip.torus_dimensions,), (0,), (0,), {"data": 1})
    return Simulation(hlo.parse(text), chip, network).clock_s


if __name__ == "__main__":
    main()
