"""Cycles of splash attention's compiled schedules: `splash` of gspmd_lm/hardware/chips/*.yaml, anew.

    python -m benchmarks.kernel_schedules v6e v5p

libtpu writes down the schedule of each kernel when it compiles it, which needs no TPU. A kernel is one loop over its
grid; within it stand, each behind a branch, what a visited block needs and what the first and the last step of a row
of blocks need. A bundle takes a cycle; what waits for a matrix unit takes longer, so that a visited block counts at
least the cycles that its multiply-adds keep the units busy.
"""

import functools
import itertools
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
HEADS, BLOCKS = (64, 128, 256), (256, 512, 1024)
MATMULS = {"fwd": 2, "dkv": 5}
UNIT = {"v5e": (128, 4), "v5p": (128, 4), "v6e": (256, 4), "tpu7x": (256, 4)}  # width, rows a cycle of a core

_BUNDLE = re.compile(r"\s*(?:0x[0-9a-f]+|\d+)\s+(?:[A-Z]{2})?\s*:\s*(>*)\s*\{")
_BRANCH = re.compile(r"sbr\.rel \([^)]*\) target = \$region(\d+)")
_REGION = re.compile(r"Start(?:/End empty)? region (\d+)")
_USES = re.compile(r"\d+( \d+){9}\s*$")
_DELAY = 5  # a branch and the bundles that run behind it


def main(chips: list[str]) -> None:
    for (chip, head, block), folder in schedules(itertools.product(chips or TOPOLOGIES, HEADS, BLOCKS), __spec__.name):
        for kernel in MATMULS:
            visited, step, row = read(folder, kernel)
            width, units = UNIT[chip]
            least = busy(kernel, head, block, width, units)
            print(f"{chip} head {head} block {block} {kernel}: visited {visited}, units busy {least}, "
                  f"step {step}, row {row}")  # fmt: skip


def schedules(cases: Iterable[tuple[Any, ...]], module: str) -> Iterator[tuple[tuple[Any, ...], Path]]:
    """Each case, and the folder of what libtpu writes when `module`, run with --compile and the case, compiles it.

    Says why a case cannot be compiled, and leaves it out.
    """
    for case in cases:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", module, "--compile", *map(str, case)]
            flags = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
            wanted = {"LIBTPU_INIT_ARGS": flags, "TPU_SKIP_MDS_QUERY": "1", "JAX_PLATFORMS": "cpu",
                      "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}  # fmt: skip
            done = subprocess.run(command, env=os.environ | wanted, capture_output=True, text=True)
            if done.returncode:
                print(f"{' '.join(map(str, case))}: {done.stderr.strip().splitlines()[-1][:100]}")
            else:
                yield case, Path(folder)


def busy(kernel: str, head: int, block: int, width: int, units: int) -> int:
    """Cycles that one visited block keeps the matrix units: one row a cycle, heads filled up to their width."""
    filled = -(-head // width) * width
    return MATMULS[kernel] * block * (block // width) * (filled // width) // units


def read(folder: Path, kernel: str) -> tuple[int, int, int]:
    """(bundles of a visited block, of each step besides, of the first and last step of a row besides)."""
    (schedule,) = (f for f in folder.glob(f"*splash_mha_{kernel}*-final_bundles.txt") if "analysis" not in f.name)
    (used,) = folder.glob(f"*splash_mha_{kernel}*final_hlo-static-per-bundle-utilization.txt")
    bundles = [line for line in schedule.read_text().splitlines() if _BUNDLE.match(line)]
    matrix_ops = [int(line.split()[0]) for line in used.read_text().splitlines() if _USES.match(line)]
    starts: dict[str, int] = {}
    for n, line in enumerate(bundles):
        for region in _REGION.findall(line):
            starts.setdefault(region, n)
    branches = ((n + _DELAY, starts.get(r, 0)) for n, line in enumerate(bundles) for r in _BRANCH.findall(line))
    regions = [(low, high) for low, high in branches if high > low]
    inner = [a for a in regions if not any(a != b and a[0] <= b[0] and b[1] <= a[1] for b in regions)]
    visited = [high - low for low, high in inner if sum(matrix_ops[low:high])]
    row = sum(high - low for low, high in inner) - sum(visited)
    loop = sum(_BUNDLE.match(line).group(1) != "" for line in bundles)  # type: ignore[union-attr]
    return sum(visited), loop - sum(visited) - row, row


def compile_kernel(chip: str, head: int, block: int) -> None:
    import jax
    import jax.numpy as jnp
    from jax.experimental import topologies
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    device = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[chip]).devices[0]
    heads, key_heads, seq = 8, 2, 8192
    sizes = splash.BlockSizes(
        block_q=block, block_kv=block, block_kv_compute=block,
        block_q_dkv=block, block_kv_dkv=block, block_kv_dkv_compute=block, use_fused_bwd_kernel=True,
    )  # fmt: skip
    mask = masks.MultiHeadMask([masks.CausalMask((seq, seq))] * heads)
    kernel = jax.vmap(splash.make_splash_mha(mask, block_sizes=sizes, head_shards=1, q_seq_shards=1))
    here = jax.sharding.SingleDeviceSharding(device)
    array = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16, sharding=here)
    q, k = array((2, heads, seq, head)), array((2, key_heads, seq, head))
    jax.jit(lambda q, k, v, out: jax.vjp(kernel, q, k, v)[1](out)).lower(q, k, k, q).compile()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--compile"]:
        compile_kernel(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    else:
        main(sys.argv[1:])
