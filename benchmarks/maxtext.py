"""The CPU time of a train step of `bench_4m` beside MaxText's, on 8 simulated devices, both with recomputed layers.

    python -m benchmarks.maxtext --python=VENV/bin/python [--rounds=3]

VENV has MaxText and this project, so that both run with the same jax. A step's time is the difference between a long
and a short run of each program, as a user starts it, divided by the steps between them: what happens only once does
not count. The runs take turns, and each program was compiled before them.
"""

import argparse
import statistics
import tempfile

from benchmarks import measure
from gspmd_lm import config

LAYOUTS = {  # flags of ours, and mesh axes of MaxText's
    "fsdp8": (["--rules=fsdp8"], {"fsdp": 8}),
    "fsdp2_tp4": (["--rules=fsdp2_tp4"], {"fsdp": 2, "tensor": 4}),
    "tp8": (["--rules=tp8", "--set=rules.remat=block"], {"fsdp": 1, "tensor": 8}),
}
SIMULATED = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}  # for MaxText
SHORT, LONG = 5, 30
COLUMNS = {"layout": "layout", "ours": "ours, CPU ms", "maxtext": "MaxText, CPU ms", "ratio": "ratio",
           "least": "of minima"}  # fmt: skip


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
        "normalization_layer_epsilon": model.norm_eps, "rope_max_timescale": int(model.rope_theta),
        "dtype": model.compute_dtype, "weight_dtype": "float32", "attention": "dot_product", "remat_policy": "full",
        "dataset_type": "synthetic", "enable_dropout": False, "enable_checkpointing": False,
        "adam_b1": opt.b1, "adam_b2": opt.b2, "adam_eps": opt.eps, "adam_weight_decay": opt.weight_decay,
        "gradient_clipping_threshold": opt.clip_norm, "learning_rate": opt.learning_rate,
        "enable_tensorboard": False, "jax_cache_dir": cache, "steps": steps, "log_period": 100,
        **{f"ici_{axis}_parallelism": size for axis, size in mesh.items()},
    }  # fmt: skip
    return [python, "-m", "maxtext.trainers.pre_train.train", *(f"{key}={value}" for key, value in settings.items())]


def compare(python: str, layout: str, rounds: int) -> dict[str, object]:
    """One row of the table: milliseconds of a step."""
    flags, mesh = LAYOUTS[layout]
    times: dict[str, list[float]] = {"ours": [], "maxtext": []}
    with tempfile.TemporaryDirectory() as cache:

        def run(name: str, steps: int) -> float:
            with tempfile.TemporaryDirectory() as folder:
                if name == "ours":
                    command, environment = ours(python, flags, steps, folder), {"GSPMD_LM_CACHE": f"{cache}/ours"}
                else:
                    command, environment = maxtext(python, mesh, steps, folder, f"{cache}/theirs"), SIMULATED
                user_s, system_s, _ = measure.taken(command, **environment)
                return user_s + system_s

        for name in times:
            run(name, SHORT)
        for _ in range(rounds):
            for name in times:
                times[name].append(1e3 * (run(name, LONG) - run(name, SHORT)) / (LONG - SHORT))
                print(layout, name, round(times[name][-1]), flush=True)
    middle, least = ({name: of(found) for name, found in times.items()} for of in (statistics.median, min))
    return {
        "layout": layout,
        **{name: round(value) for name, value in middle.items()},
        "ratio": round(middle["ours"] / middle["maxtext"], 2),
        "least": round(least["ours"] / least["maxtext"], 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, help="the interpreter of an environment with MaxText")
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=LAYOUTS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="keep the figures in benchmarks/results/")
    options = parser.parse_args()
    rows = [compare(options.python, layout, options.rounds) for layout in options.layouts]
    print(measure.markdown(rows, COLUMNS))
    if options.write:
        measure.write("maxtext", rows)


if __name__ == "__main__":
    main()
