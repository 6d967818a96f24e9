"""The train step on one device: processor seconds next to torch in eager mode, and what the compiled program copies.

    python -m benchmarks.one_device [--config=bench_4m] [--rounds=15] [--unroll=1] [--write]
    taskset -c 0 python -m benchmarks.one_device    # one core for both, as torch has one thread
    python -m benchmarks.one_device --alone=25    # our steps alone, for `perf record -g -p PID`

Both run in this process and take turns. torch has one thread; XLA has as many as there are cores. First they must give
the same losses. A program's copies, and what it fills with one value, are counted in its text, loops times their turns.
"""

import importlib
import os
import resource
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from benchmarks import measure
from gspmd_lm import config
from gspmd_lm.foresight import hlo
from gspmd_lm.sharding import rules, rules_file
from gspmd_lm.train import optimizer

STEPS_COMPARED = 5
LOSS_TOLERANCE = 1e-4
COLUMNS = {"cpu_ms": "CPU ms", "torch_cpu_ms": "torch", "ratio": "ratio", "copied_mb": "copied MB",
           "transposed_mb": "transposed MB", "filled_mb": "filled MB", "temporaries_mb": "temporaries MB",
           "loss_difference": "loss difference"}  # fmt: skip


def moved_bytes(text: str) -> dict[str, int]:
    """The bytes per run that a compiled program writes without computing: copies, transposes, arrays of one value."""
    module, found = hlo.parse(text), Counter({"copied": 0, "transposed": 0, "filled": 0})
    for instruction in module.operations:
        done = {i.opcode for i in instruction.inside} or {instruction.opcode}
        done -= {"parameter", "constant", "bitcast", "reshape"}
        kind = {("copy",): "copied", ("copy", "transpose"): "transposed", ("broadcast",): "filled"}.get(
            (*sorted(done),)
        )
        if kind:
            found[kind] += instruction.shape.bytes * instruction.executions
    return dict(found)


def torch_step(cfg: config.Config, params: Any, batch: dict[str, jax.Array]) -> Callable[[], Any]:
    """One train step of the same decoder in plain torch, from copies of `params`. It gives the loss.

    It covers sequential blocks, RMSNorm, gated SiLU, RoPE and as many key heads as heads, as `hand_written` does.
    """
    torch: Any = importlib.import_module("torch")
    functional = torch.nn.functional
    torch.set_num_threads(1)
    model, opt = cfg.model, cfg.optimizer

    def weight(array: Any) -> Any:
        return torch.tensor(np.asarray(array), requires_grad=True)

    outer = {name: weight(params[name]) for name in ("embedding", "unembedding")}
    outer["norm"] = weight(params["final_norm"]["scale"])
    norms = {name: params["layers"][name]["scale"] for name in ("attention_norm", "mlp_norm")}
    stacked = {**params["layers"]["attention"], **params["layers"]["mlp"], **norms}
    layers = [{name: weight(array[i]) for name, array in stacked.items()} for i in range(model.layers)]
    named = [*outer.items(), *(pair for layer in layers for pair in layer.items())]
    groups = [
        {"params": [w for name, w in named if name.endswith("norm") == is_norm], "weight_decay": decay}
        for is_norm, decay in ((True, 0.0), (False, opt.weight_decay))
    ]
    adamw = torch.optim.AdamW(groups, betas=(opt.b1, opt.b2), eps=opt.eps)
    schedule: Any = optimizer.schedule(opt, cfg.train.steps)
    rates = [float(schedule(i)) for i in range(cfg.train.steps)]
    tokens_BT, targets_BT = (torch.tensor(np.asarray(batch[name]), dtype=torch.long) for name in ("tokens", "targets"))
    half = model.head_dim // 2
    turns = model.attention.rope.theta ** (-torch.arange(half) / half)
    angle_1TH = torch.arange(cfg.data.seq)[:, None] * turns
    cos, sin = angle_1TH.cos(), angle_1TH.sin()

    def norm(x_BTD: Any, scale: Any) -> Any:
        return functional.rms_norm(x_BTD, scale.shape, scale, model.norm.eps)

    def rotated(x_BNTH: Any) -> Any:
        first, second = x_BNTH.chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    def block(x_BTD: Any, w: Any) -> Any:
        y_BTD, (B, T, D) = norm(x_BTD, w["attention_norm"]), x_BTD.shape
        flat = (y_BTD @ w[name].reshape(D, D) for name in ("wq", "wk", "wv"))
        q, k, v = (x_BTD.reshape(B, T, model.heads, -1).transpose(1, 2) for x_BTD in flat)
        out = functional.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
        x_BTD = x_BTD + out.transpose(1, 2).reshape(B, T, D) @ w["wo"].reshape(D, D)
        y_BTD = norm(x_BTD, w["mlp_norm"])
        return x_BTD + (functional.silu(y_BTD @ w["w_gate"]) * (y_BTD @ w["w_up"])) @ w["w_down"]

    done = 0

    def step() -> Any:
        nonlocal done
        for group in adamw.param_groups:
            group["lr"] = rates[min(done, len(rates) - 1)]
        adamw.zero_grad()
        x_BTD = outer["embedding"][tokens_BT]
        for layer in layers:
            x_BTD = block(x_BTD, layer)
        logits_BTV = norm(x_BTD, outer["norm"]) @ outer["unembedding"].T
        loss = functional.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_([w for _, w in named], opt.clip_norm)
        adamw.step()
        done += 1
        return loss.item()

    return step


def _rules(unroll: str) -> rules.Rules:
    return rules_file.load("single", overrides=[f"rules.unroll={unroll}"] if unroll else [])


def alone(name: str, steps: int, unroll: str) -> None:
    """Runs our steps and prints what they took of the CPU and how many pages of memory they got."""
    cfg = config.load(name)
    ours = measure.ours(cfg, _rules(unroll))
    state, batch = ours.start(), ours.place(measure.random_batch(ours.step, jax.random.key(0)))
    used = []
    for turns in (3, steps):
        print(f"process {os.getpid()}: {turns} steps", flush=True)
        before = resource.getrusage(resource.RUSAGE_SELF)
        for _ in range(turns):
            state, metrics = ours.train(state, batch)
            float(metrics["loss"])
        after = resource.getrusage(resource.RUSAGE_SELF)
        used = [(getattr(after, key) - getattr(before, key)) / turns for key in ("ru_utime", "ru_stime", "ru_minflt")]
    user, system, faults = used
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(
        f"a step: user {1e3 * user:.0f} ms, system {1e3 * system:.0f} ms, {faults:.0f} page faults; peak {peak:.2f} GB"
    )


def compare(name: str, rounds: int, unroll: str) -> dict[str, Any]:
    """One row of the table."""
    cfg = config.load(name)
    ours = measure.ours(cfg, _rules(unroll))
    state = ours.start()
    batch = measure.random_batch(ours.step, jax.random.key(0))
    theirs, placed = torch_step(cfg, jax.device_get(state.params), batch), ours.place(batch)

    def run() -> Any:
        nonlocal state
        state, metrics = ours.train(state, placed)
        return metrics["loss"]

    difference = max(abs(float(run()) - theirs()) for _ in range(STEPS_COMPARED))
    if not difference < LOSS_TOLERANCE:
        raise SystemExit(f"the losses differ by {difference:.1e}, so this would compare two different models")
    times = measure.interleaved({"ours": run, "torch": theirs}, rounds, per_round=3)
    moved = moved_bytes(str(ours.train.as_text()))
    cpu = {side: 1e3 * found.cpu_s for side, found in times.items()}
    return {
        "config": name,
        "cpu_ms": round(cpu["ours"], 1),
        "torch_cpu_ms": round(cpu["torch"], 1),
        "ratio": round(cpu["ours"] / cpu["torch"], 3),
        **{f"{kind}_mb": round(size / 1e6, 1) for kind, size in moved.items()},
        "temporaries_mb": round(ours.train.memory_analysis().temp_size_in_bytes / 1e6, 1),
        "loss_difference": float(f"{difference:.1e}"),
    }


def main() -> None:
    parser = measure.flags(__doc__)
    parser.add_argument("--config", default="bench_4m")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--alone", type=int, default=0, help="run so many of our steps, without torch")
    parser.add_argument("--unroll", default="", help="layers that are written out: all or a number, as in a rules file")
    options = parser.parse_args()
    measure.simulate(1)
    if options.alone:
        return alone(options.config, options.alone, options.unroll)
    row = compare(options.config, options.rounds, options.unroll)
    print(measure.markdown([row], COLUMNS))
    if options.write:
        measure.write(f"one_device_{options.config}", [row])


if __name__ == "__main__":
    main()
