"""Prefill and decode tokens/s on the CPU, one device, next to transformers' generate where torch is installed.

    python -m benchmarks.generation [--rounds=5] [--new=64] [--model=gpt2,mixture] [--write]

Random weights in float32, of GPT-2's size or of a small Mixtral (8 experts, 2 for each token), greedy, prompts of 64
tokens, as many threads as there are cores. The two take turns in one process, so that whatever else the machine does
befalls both; ratios are of medians. CPU seconds are of all threads, for prompt and new tokens together.
"""

import importlib
import importlib.util
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import numpy as np

from benchmarks import measure
from gspmd_lm import config as configs
from gspmd_lm.config import nest
from gspmd_lm.data.tokenizer import Bytes
from gspmd_lm.infer import generate
from gspmd_lm.model.families import init
from gspmd_lm.runtime import host
from gspmd_lm.sharding import rules_file

PROMPT = 64
GPT2 = {
    "layers": 12, "embed": 768, "heads": 12, "kv_heads": 12, "head_dim": 64, "mlp": 3072, "vocab": 50257,
    "context": 1024, "norm.kind": "layernorm", "norm.bias": True, "norm.eps": 1e-5, "feed_forward.kind": "plain",
    "feed_forward.activation": "gelu_tanh", "positions": "learned", "attention.qkv_bias": True,
    "attention.out_bias": True, "feed_forward.bias": True,
    "embedding.tied": True, "compute_dtype": "float32",
}  # fmt: skip
MIXTURE = {
    "layers": 8, "embed": 512, "heads": 8, "kv_heads": 4, "head_dim": 64, "mlp": 1024, "vocab": 32000, "context": 1024,
    "experts.count": 8, "experts.per_token": 2, "compute_dtype": "float32",
}  # fmt: skip
MODELS = {"gpt2": GPT2, "mixture": MIXTURE}
MIXTRAL = {  # the mixture, in transformers' words
    field: MIXTURE[key]
    for field, key in {
        "num_hidden_layers": "layers", "hidden_size": "embed", "num_attention_heads": "heads",
        "num_key_value_heads": "kv_heads", "intermediate_size": "mlp", "vocab_size": "vocab",
        "num_local_experts": "experts.count", "num_experts_per_tok": "experts.per_token",
        "max_position_embeddings": "context",
    }.items()
}  # fmt: skip


class Times(NamedTuple):
    """Of one call: seconds to the first token, from it to the last, and of CPU time in all."""

    prefill_s: float
    decode_s: float
    cpu_s: float


Run = Callable[[], Times]


def ours(name: str, prompts: np.ndarray, new: int) -> Run:
    """Our generator."""
    cfg = configs.from_dict({"name": name, "model": nest(MODELS[name]), "train": {"steps": 1}}, "benchmark")
    rules, rows = rules_file.load("single"), prompts.tolist()
    built, _ = generate.programs_for(cfg, rules, jax.devices()[:1], "cpu", rows, new_tokens=new, batch=len(rows))
    shardings = jax.tree.map(lambda like: like.sharding, built.abstract_params)
    start = jax.jit(lambda: nn.unbox(init(cfg.model, jax.random.key(0))), out_shardings=shardings)
    generator = generate.Generator(built, start(), Bytes())

    def run() -> Times:
        generator.figures = generate.Figures(built.cache_bytes_per_device)
        began = time.process_time()
        generator.results(rows, new_tokens=new, ends=())
        return Times(generator.figures.prefill_s, generator.figures.decode_s, time.process_time() - began)

    return run


def theirs(name: str, prompts: np.ndarray, new: int) -> Run:
    """transformers' generate."""
    torch: Any = importlib.import_module("torch")  # of .[parity], which may not be installed
    transformers: Any = importlib.import_module("transformers")
    torch.set_num_threads(host.count_cpus())
    torch.manual_seed(0)
    if name == "gpt2":
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=GPT2["vocab"])).eval()
    else:
        model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**MIXTRAL)).eval()
    model.generation_config.eos_token_id = None
    ids = torch.from_numpy(prompts)
    ticks: list[float] = []

    class Clock(transformers.StoppingCriteria):
        """Notes when each token was there, and stops nothing."""

        def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
            ticks.append(time.perf_counter())
            return torch.zeros(len(input_ids), dtype=torch.bool)

    def run() -> Times:
        ticks.clear()
        began, used = time.perf_counter(), time.process_time()
        with torch.no_grad():
            made = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, pad_token_id=0,
                stopping_criteria=transformers.StoppingCriteriaList([Clock()]),
            )  # fmt: skip
        assert len(ticks) == new and made.shape[1] == PROMPT + new
        return Times(ticks[0] - began, ticks[-1] - ticks[0], time.process_time() - used)

    return run


def compared(name: str, batch: int, rounds: int, new: int) -> list[dict[str, Any]]:
    """One row per side: tokens/s of the medians over the rounds."""
    prompts = np.random.default_rng(0).integers(0, MODELS[name]["vocab"], (batch, PROMPT))
    sides = {"gspmd_lm": ours(name, prompts, new)}
    if importlib.util.find_spec("torch") and importlib.util.find_spec("transformers"):
        sides["transformers"] = theirs(name, prompts, new)
    taken: dict[str, list[Times]] = {side: [] for side in sides}
    for turn in range(rounds + 1):
        for side, run in sides.items():
            times = run()
            if turn:  # the first round warms up
                taken[side].append(times)
    rows = []
    for side, times in taken.items():
        prefill_s, decode_s, cpu_s = (statistics.median(column) for column in zip(*times, strict=True))
        rows.append({"model": name, "side": side, "batch": batch, "prompt": PROMPT, "new": new, "rounds": rounds,
                     "prefill_tokens_per_s": round(batch * PROMPT / prefill_s, 1),
                     "cpu_s": round(cpu_s, 2),
                     "decode_tokens_per_s": round(batch * (new - 1) / decode_s, 1),
                     "decode_step_ms": [round(1e3 * one.decode_s / (new - 1), 1) for one in times]})  # fmt: skip
    for row in rows[1:]:
        row["decode_ratio"] = round(rows[0]["decode_tokens_per_s"] / row["decode_tokens_per_s"], 2)
        row["cpu_ratio"] = round(rows[0]["cpu_s"] / row["cpu_s"], 2)
        row["prefill_ratio"] = round(rows[0]["prefill_tokens_per_s"] / row["prefill_tokens_per_s"], 2)
    return rows


def main() -> None:
    parser = measure.flags(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--model", default="gpt2,mixture")
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    rows = []
    for name in options.model.split(","):
        for batch in (1, 8):
            for row in compared(name, batch, options.rounds, options.new):
                print(row, flush=True)
                rows.append(row)
    if options.write:
        measure.keep("generation", rows, "model", "side", "batch")


if __name__ == "__main__":
    main()
