"""Cycles of products of few rows in libtpu's schedules: what foresight/timing/few_rows.py rests on.

    python -m benchmarks.few_row_schedules v5e v4

A product of few rows is one loop over windows of its weights. While one window is multiplied, the next one is copied,
so that it takes what its copies take, or its bundles. libtpu's estimate adds both up. A bundle takes a cycle of a core.
"""

import itertools
import math
import re
import sys

from benchmarks.kernel_schedules import TOPOLOGIES, schedules
from gspmd_lm.foresight import hlo
from gspmd_lm.hardware.chips import CHIPS

TOPOLOGIES = TOPOLOGIES | {"v4": "v4:2x2x1"}
ROWS, DTYPES, INNER, COLUMNS, LAYERS = (8, 64), ("int8", "bfloat16"), 8192, 3584, 4
_BUNDLE = re.compile(r"\s*(?:0x[0-9a-f]+|\d+)\s+(?:[A-Z]{2})?\s*:\s*(>?)")


def main(names: list[str]) -> None:
    for (name, dtype, rows), folder in schedules(itertools.product(names or TOPOLOGIES, DTYPES, ROWS), __spec__.name):
        chip, module = CHIPS[name], hlo.parse((folder / "program.txt").read_text())
        product = max(module.operations, key=lambda one: one.flops)
        (schedule,) = (f for f in folder.glob(f"*-{product.name}-*final_bundles.txt") if "analysis" not in f.name)
        lines = [found for line in schedule.read_text().splitlines() if (found := _BUNDLE.match(line))]
        loop, turns = sum(line[1] != "" for line in lines), product.config["window_config"]["iteration_bounds"]
        cycles = loop * math.prod(map(int, turns)) / chip.tensor_cores
        copied = product.moved_bytes["hbm"] / chip.hbm_bytes_per_s * chip.clock_hz
        print(f"{name} {dtype}, {rows} rows: copies {copied:,.0f} cycles, loop {cycles:,.0f}, "
              f"{cycles * chip.tensor_cores / (INNER * COLUMNS / 1024):.2f} for 1,024 numbers and core; "
              f"estimated {product.estimated_cycles:,}")  # fmt: skip


def compile_product(name: str, dtype: str, rows: int) -> str:
    """The program of some layers, each a product of a few rows and a matrix, of which libtpu writes the schedule."""
    import jax
    import jax.numpy as jnp
    from jax.experimental import topologies

    whole_chip = {"chip_config_name": "megacore"} if CHIPS[name].tensor_cores == 2 and name != "tpu7x" else {}
    device = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[name], **whole_chip).devices[0]
    here = jax.sharding.SingleDeviceSharding(device)

    def array(dtype: str, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=here)

    def layer(x_BD: jax.Array, w_DF: jax.Array) -> tuple[jax.Array, None]:
        y_BF = jnp.einsum("BD,DF->BF", x_BD, w_DF.astype(x_BD.dtype))
        return x_BD + jnp.tile(y_BF, (1, -(-INNER // COLUMNS)))[:, :INNER], None

    def layers(x_BD: jax.Array, w_LDF: jax.Array) -> jax.Array:
        return jax.lax.scan(layer, x_BD, w_LDF)[0]

    given = array("bfloat16", rows, INNER), array(dtype, LAYERS, INNER, COLUMNS)
    return jax.jit(layers).lower(*given).compile().as_text() or ""


if __name__ == "__main__":
    if sys.argv[1:2] == ["--compile"]:
        import os

        (folder,) = re.findall(r"--xla_jf_dump_to=(\S+)", os.environ["LIBTPU_INIT_ARGS"])
        text = compile_product(sys.argv[2], sys.argv[3], int(sys.argv[4]))
        with open(f"{folder}/program.txt", "w") as file:
            file.write(text)
    else:
        main(sys.argv[1:])
