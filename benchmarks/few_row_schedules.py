"""Cycles of a layer of few rows in libtpu's schedules: what timing/few_rows.py and ON_CHIP_BYTES_PER_CYCLE rest on.

    python -m benchmarks.few_row_schedules v5e v4 v6e

A product of few rows is one loop over windows of its weights. While one window is multiplied, the next one is copied,
so that it takes what its copies take, or its bundles. libtpu's estimate adds both up. A bundle takes a cycle of a core.
Of the other operations, whose arrays lie on the chip, the cycles and the bytes of each cycle are printed.
"""

import itertools
import re
import statistics
import sys

from benchmarks.kernel_schedules import TOPOLOGIES, schedules
from gspmd_lm.foresight import hlo
from gspmd_lm.foresight.timing import few_rows
from gspmd_lm.hardware.chips import CHIPS, Chip

TOPOLOGIES = TOPOLOGIES | {"v4": "v4:2x2x1"}
ROWS, DTYPES, INNER, COLUMNS, LAYERS = (8, 64), ("int8", "bfloat16"), 8192, 3584, 4
LARGE_BYTES = 2**19  # an operation on less is as long as its beginning
_BUNDLE = re.compile(r"\s*(?:0x[0-9a-f]+|\d+)\s+(?:[A-Z]{2})?\s*:\s*(>?)")


def main(names: list[str]) -> None:
    rates, small = [], []
    for (name, dtype, rows), folder in schedules(itertools.product(names or TOPOLOGIES, DTYPES, ROWS), __spec__.name):
        chip, module = CHIPS[name], hlo.parse((folder / "program.txt").read_text())
        print(f"{name} {dtype}, {rows} rows")
        for one in (i for i in module.operations if "iteration_bounds" in i.config.get("window_config", {})):
            (schedule,) = (f for f in folder.glob(f"*-{one.name}-*final_bundles.txt") if "analysis" not in f.name)
            cycles = count_cycles(schedule.read_text(), one, chip)
            if one.flops:
                copied = one.moved_bytes["hbm"] / chip.hbm_bytes_per_s * chip.clock_hz
                print(f"  product: copies {copied:,.0f} cycles, loop {cycles:,.0f}, "
                      f"{cycles * chip.tensor_cores / (INNER * COLUMNS / 1024):.2f} for 1,024 numbers and core; "
                      f"estimated {one.estimated_cycles:,}")  # fmt: skip
            elif one.moved_bytes["chip"] >= LARGE_BYTES:
                rates.append(one.moved_bytes["chip"] / cycles / chip.tensor_cores)
                print(f"  {one.opcode} {one.op_name.rpartition('/')[2]}: {cycles:,.0f} cycles, {rates[-1]:,.0f} bytes "
                      f"in each of a core; estimated {one.estimated_cycles:,}")  # fmt: skip
            else:
                small.append(cycles)
    print(f"median of {len(small)} operations on less: {statistics.median(small):,.0f} cycles")
    print(f"geometric mean of {len(rates)} operations on the chip: {statistics.geometric_mean(rates):,.0f} bytes")


def count_cycles(schedule: str, operation: hlo.Instruction, chip: Chip) -> float:
    """The bundles of a schedule that a core runs. Those of its loop run once for each window of the core."""
    inside = [found[1] != "" for line in schedule.splitlines() if (found := _BUNDLE.match(line))]
    return inside.count(False) + inside.count(True) * few_rows.count_windows(operation, chip)


def compile_product(name: str, dtype: str, rows: int) -> str:
    """The program of some layers, each a product of a few rows and a matrix between what stands there in a decoder."""
    import einops
    import jax
    import jax.numpy as jnp
    from jax.experimental import topologies

    whole_chip = {"chip_config_name": "megacore"} if CHIPS[name].tensor_cores == 2 and name != "tpu7x" else {}
    device = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[name], **whole_chip).devices[0]
    here = jax.sharding.SingleDeviceSharding(device)

    def array(dtype: str, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=here)

    def layer(x_BD: jax.Array, w_DF: jax.Array) -> tuple[jax.Array, None]:
        wide_BD = x_BD.astype("float32")
        scale_B1 = jax.lax.rsqrt(jnp.mean(wide_BD**2, axis=-1, keepdims=True) + 1e-6)
        y_BF = jnp.einsum("BD,DF->BF", (wide_BD * scale_B1).astype(x_BD.dtype), w_DF.astype(x_BD.dtype))
        z_BD = jnp.tile(jax.nn.gelu(y_BF), (1, -(-INNER // COLUMNS)))[:, :INNER]
        z_BNS = jax.nn.softmax(einops.rearrange(z_BD, "B (N S) -> B N S", S=128))
        return x_BD + einops.rearrange(z_BNS, "B N S -> B (N S)"), None

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
