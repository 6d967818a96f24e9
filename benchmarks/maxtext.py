"""The CPU time of a train step of `bench_4m` beside MaxText's, on 8 simulated devices, both with recomputed layers.

    python -m benchmarks.maxtext --python=VENV/bin/python [--rounds=3]
    python -m benchmarks.maxtext --python=VENV/bin/python --products    # what both spend in XLA's products, from perf

VENV has MaxText and this project, so that both run with the same jax. A step's time is the difference between a long
and a short run of each program, as a user starts it, divided by the steps between them: what happens only once does
not count. The runs take turns, and each program was compiled before them.
"""

import functools
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from benchmarks import measure
from gspmd_lm import config

LAYOUTS = {  # flags of ours, and mesh axes of MaxText's
    "fsdp8": (["--rules=fsdp8"], {"fsdp": 8}),
    "fsdp2_tp4": (["--rules=fsdp2_tp4"], {"fsdp": 2, "tensor": 4}),
    "tp8": (["--rules=tp8", "--set=rules.remat=block"], {"fsdp": 1, "tensor": 8}),
}
SIMULATED = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}  # for MaxText
SHORT, LONG = 5, 30
RATE = 199  # samples a second
COLUMNS = {"layout": "layout", "ours": "ours, CPU ms", "maxtext": "MaxText, CPU ms", "ratio": "ratio",
           "least": "of minima"}  # fmt: skip

Run = Callable[..., float]  # a command, and its environment


def ours(python: str, flags: list[str], steps: int, folder: str) -> list[str]:
    quiet = ["--set=train.trackers=[]", "--set=train.log_every=100", "--set=data.held_out=0"]
    return [python, "main.py", "--config=bench_4m", *flags, *quiet, f"--steps={steps}", f"--workdir={folder}/ours"]


def maxtext(python: str, mesh: dict[str, int], steps: int, folder: str, cache: str) -> list[str]:
    """MaxText's command for the same model, batch and optimizer. It has names of its own for their settings."""
    cfg = config.load("bench_4m")
    model, opt = cfg.model, cfg.optimizer
    settings = {
        "run_name": "bench", "base_output_directory": folder, "hardware": "cpu", "skip_jax_distributed_system": True,
        "base_emb_dim": model.embed, "base_num_query_heads": model.heads, "base_num_kv_heads": model.kv_heads,
        "head_dim": model.head_dim, "base_mlp_dim": model.mlp, "base_num_decoder_layers": model.layers,
        "vocab_size": model.vocab, "max_target_length": cfg.data.seq, "per_device_batch_size": cfg.data.batch / 8,
        "normalization_layer_epsilon": model.norm.eps, "rope_max_timescale": int(model.attention.rope.theta),
        "dtype": model.compute_dtype, "weight_dtype": "float32", "attention": "dot_product", "remat_policy": "full",
        "dataset_type": "synthetic", "enable_dropout": False, "enable_checkpointing": False,
        "adam_b1": opt.b1, "adam_b2": opt.b2, "adam_eps": opt.eps, "adam_weight_decay": opt.weight_decay,
        "gradient_clipping_threshold": opt.clip_norm, "learning_rate": opt.learning_rate,
        "enable_tensorboard": False, "jax_cache_dir": cache, "steps": steps, "log_period": 100,
        **{f"ici_{axis}_parallelism": size for axis, size in mesh.items()},
    }  # fmt: skip
    return [python, "-m", "maxtext.trainers.pre_train.train", *(f"{key}={value}" for key, value in settings.items())]


@contextmanager
def prepared(python: str, layout: str) -> Iterator[dict[str, Callable[[int, Run], float]]]:
    """Both programs, compiled: name -> what runs a command of so many steps, and gives what was measured of it."""
    flags, mesh = LAYOUTS[layout]
    with tempfile.TemporaryDirectory() as cache:

        def run(name: str, steps: int, measured: Run) -> float:
            with tempfile.TemporaryDirectory() as folder:
                if name == "ours":
                    command, environment = ours(python, flags, steps, folder), {"GSPMD_LM_CACHE": f"{cache}/ours"}
                else:
                    command, environment = maxtext(python, mesh, steps, folder, f"{cache}/theirs"), SIMULATED
                return measured(command, **environment)

        programs = {name: functools.partial(run, name) for name in ("ours", "maxtext")}
        for program in programs.values():
            program(SHORT, cpu_s)
        yield programs


def cpu_s(command: list[str], **environment: str) -> float:
    user_s, system_s, _ = measure.taken(command, **environment)
    return user_s + system_s


def products_s(command: list[str], **environment: str) -> float:
    """CPU seconds in XLA's kernels for matrix products, from samples of Linux's `perf`."""
    with tempfile.TemporaryDirectory() as folder:
        file = f"{folder}/perf.data"
        measure.taken(["perf", "record", "-q", "-e", "cpu-clock", "-F", str(RATE), "-o", file, "--", *command],
                      **environment)  # fmt: skip
        script = ["perf", "script", "-i", file, "-F", "ip,sym"]
        symbols = subprocess.run(script, check=True, capture_output=True, text=True).stdout
    if not (count := sum("::dot_" in symbol for symbol in symbols.splitlines())):
        raise SystemExit("perf names no kernel of a product: XLA's have other names now, or its symbols are not there")
    return count / RATE


def compare(python: str, layout: str, rounds: int) -> dict[str, object]:
    """One row of the table: milliseconds of a step."""
    times: dict[str, list[float]] = {"ours": [], "maxtext": []}
    with prepared(python, layout) as programs:
        for _ in range(rounds):
            for name, program in programs.items():
                times[name].append(1e3 * (program(LONG, cpu_s) - program(SHORT, cpu_s)) / (LONG - SHORT))
                print(layout, name, round(times[name][-1]), flush=True)
    middle, least = ({name: of(found) for name, found in times.items()} for of in (statistics.median, min))
    return {
        "layout": layout,
        **{name: round(value) for name, value in middle.items()},
        "ratio": round(middle["ours"] / middle["maxtext"], 2),
        "least": round(least["ours"] / least["maxtext"], 2),
    }


def products(python: str, layout: str, rounds: int) -> dict[str, object]:
    """One row of the table: milliseconds of a step that are spent in products."""
    with prepared(python, layout) as programs:
        found = {name: [program(LONG, products_s) for _ in range(rounds)] for name, program in programs.items()}
    return {"layout": layout, **{name: round(1e3 * statistics.median(of) / LONG) for name, of in found.items()}}


def main() -> None:
    parser = measure.flags(__doc__, writes=False)
    parser.add_argument("--python", required=True, help="the interpreter of an environment with MaxText")
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=LAYOUTS)
    parser.add_argument("--rounds", type=int, default=3)
    either = parser.add_mutually_exclusive_group()
    either.add_argument("--products", action="store_true", help="what both spend in products, from Linux's perf")
    either.add_argument("--write", action="store_true", help="keep the figures in benchmarks/results/")
    options = parser.parse_args()
    of = products if options.products else compare
    rows = [of(options.python, layout, options.rounds) for layout in options.layouts]
    print(measure.markdown(rows, {key: COLUMNS[key] for key in rows[0]}))
    if options.write:
        measure.write("maxtext", rows)


if __name__ == "__main__":
    main()
