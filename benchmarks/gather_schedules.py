"""Cycles of gathers, sorts and sums over few rows in libtpu's schedules: what foresight/timing/gathers.py holds.

    python -m benchmarks.gather_schedules v6e v5p

libtpu writes down the schedule of each fusion when it compiles it, which needs no TPU; a bundle takes a cycle. A gather
is one loop, whose iterations each take 128 rows: it begins their copies, then takes them out of their tiles, then
stores them and waits. Sorts have no loop, or one over rows that are sorted alike. A table of 128 rows stays on the chip
while rows are looked up in it, or added to it, 512 of them in an iteration.
"""

import itertools
import re
import sys
from pathlib import Path

from benchmarks.kernel_schedules import TOPOLOGIES, schedules

_BUNDLE = re.compile(r"\n\s*(?=(?:0x[0-9a-f]+|\d+)\s+(?:[A-Z]{2})?\s*:)")
_BOUNDS = re.compile(r"iteration_bounds: \(([\d, ]+)\)")
CASES = (
    "gather bfloat16 2048",
    "gather bfloat16 4096",
    "gather float32 4096",
    "sort 8192",
    "sort 65536",
    "sum 2",
    "sum 4",
    "lookup 2880",
    "add 2880",
)


def main(chips: list[str]) -> None:
    for (chip, case), folder in schedules(itertools.product(chips or ["v6e", "v5p"], CASES), __spec__.name):
        for schedule in sorted(folder.glob("*-final_bundles.txt")):
            if "analysis" not in schedule.name and any(
                word in schedule.name for word in ("gather", "sort", "reduce", "scatter")
            ):
                print(f"{chip} {case}: {read(schedule)}")


def read(schedule: Path) -> str:
    """The bundles of a fusion's schedule, of which its loop runs as often as its copies have windows."""
    text = schedule.read_text()
    bundles = _BUNDLE.split(text)[1:]
    copies = [n for n, bundle in enumerate(bundles) if "dma.hbm_to_vmem" in bundle]
    begins = next((n for n, bundle in enumerate(bundles) if re.match(r"\S+\s+LB:", bundle)), 0)
    looped = next((n for n, bundle in enumerate(bundles) if n > begins and "sbr.rel (!" in bundle), len(bundles))
    name = re.sub(r"^\d+-|-\d+-final_bundles.txt$", "", schedule.name)
    found = f"{name} has {len(bundles)} bundles, its loop {looped - begins}"
    if "gather" in name and copies:
        found += f"; it begins {len(copies)} copies in {copies[-1] - copies[0]}"
    return f"{found}; windows {sorted(set(_BOUNDS.findall(text)))}"


def compile_case(chip: str, kind: str, *sizes: str) -> None:
    import jax
    import jax.numpy as jnp
    from jax.experimental import topologies

    device = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[chip]).devices[0]
    here = jax.sharding.SingleDeviceSharding(device)

    def array(dtype: str, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=here)

    if kind == "gather":
        dtype, width = sizes
        table, at = array(dtype, 32768, int(width)), array("int32", 65536)
        jax.jit(lambda table, at: table.at[at].get(mode="promise_in_bounds")).lower(table, at).compile()
    elif kind in ("lookup", "add"):
        rows, width = 65536, int(sizes[0])
        table, at, found = array("bfloat16", 128, width), array("int32", rows), array("bfloat16", rows, width)
        if kind == "lookup":
            jax.jit(lambda table, at: table[at]).lower(table, at).compile()
        else:
            jax.jit(lambda at, dy: jax.vjp(lambda b: b[at], jnp.zeros_like(dy[:128]))[1](dy)).lower(at, found).compile()
    elif kind == "sort":
        jax.jit(jnp.argsort).lower(array("int32", int(sizes[0]))).compile()
    else:
        few, rows, width = int(sizes[0]), 8192, 4096

        def summed(y_ND: jax.Array, w_nk: jax.Array) -> jax.Array:
            return (y_ND.reshape(rows, few, width).astype("float32") * w_nk[..., None]).sum(1).astype("bfloat16")

        jax.jit(summed).lower(array("bfloat16", rows * few, width), array("float32", rows, few)).compile()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--compile"]:
        compile_case(sys.argv[2], *sys.argv[3].split())
    else:
        main(sys.argv[1:])
