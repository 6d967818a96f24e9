"""Reports made by hand, with figures of the right size: what the terminal and the page are tested on."""

import dataclasses

from gspmd_lm.foresight.bounds import LowerBounds
from gspmd_lm.foresight.collectives import Collective
from gspmd_lm.foresight.memory import Memory, Temporary
from gspmd_lm.foresight.propagation.record import ArrayTransfers
from gspmd_lm.foresight.report import Finding, Report
from gspmd_lm.foresight.table import PlacedArray, PlacedState
from gspmd_lm.foresight.timing.predict import Prediction, Span
from gspmd_lm.foresight.whole_job import Work, predict
from gspmd_lm.hardware.capacity import Assumptions, Price
from gspmd_lm.hardware.network import Network

MB, GB = 10**6, 10**9
ATTENTION, LAYERS, LOSS = "gspmd_lm/model/attention.py", "gspmd_lm/model/layers.py", "gspmd_lm/model/loss.py"


def collective(kind, axis, times, each_mb, phase, op, source, rules, overlapped, dtype="bf16"):
    size = {"fsdp": 16, "tensor": 4}.get(axis, 64)
    return Collective(
        kind=kind, mesh_axes=tuple(axis.split("+")), dtype=dtype, times_per_step=times,
        bytes_per_device_per_step=round(times * each_mb * MB), phase=phase, op=op, source=source, rules=rules,
        overlapped=overlapped, group_size=size, elements=round(each_mb * MB * size / (size - 1) / 2),
        instructions=(f"{kind.split()[-1]}.{times}",), einsum="BTD,DF->BTF" if op.endswith("w_gate") else "",
    )  # fmt: skip


SEQ, EMBED = ("rules.residual.seq",), ("weights.embed",)
COLLECTIVES = (
    collective("windowed all-gather", "tensor", 64, 1610.6, "forward", "layers.mlp.w_gate", f"{LAYERS}:74",
               ("rules.mlp", *SEQ), True),
    collective("windowed all-gather", "tensor", 64, 1610.6, "recomputation", "layers.mlp.w_gate", f"{LAYERS}:74",
               ("rules.mlp", *SEQ), True),
    collective("reduce-scatter", "tensor", 32, 1610.6, "forward", "layers.mlp.w_down", f"{LAYERS}:88",
               ("rules.mlp", *SEQ), False),
    collective("reduce-scatter", "tensor", 32, 1610.6, "backward", "layers.mlp.w_gate", f"{LAYERS}:74",
               ("rules.mlp", *SEQ), False),
    collective("all-gather", "tensor", 32, 1610.6, "backward", "layers.mlp.w_down", f"{LAYERS}:88",
               ("rules.mlp", *SEQ), True),
    collective("reduce-scatter", "tensor", 32, 1610.6, "forward", "layers.attention.wo", f"{ATTENTION}:91",
               ("rules.heads", *SEQ), False),
    collective("all-gather", "tensor", 32, 1610.6, "forward", "layers.attention.wq", f"{ATTENTION}:52",
               ("rules.heads", "rules.kv_heads", *SEQ), True),
    collective("all-gather", "fsdp", 32, 27.5, "forward", "layers.mlp.w_gate", f"{LAYERS}:74", EMBED, True),
    collective("all-gather", "fsdp", 32, 27.5, "forward", "layers.mlp.w_up", f"{LAYERS}:74", EMBED, True),
    collective("all-gather", "fsdp", 32, 27.5, "forward", "layers.mlp.w_down", f"{LAYERS}:88", EMBED, True),
    collective("all-gather", "fsdp", 64, 27.5, "recomputation", "layers.mlp.w_gate", f"{LAYERS}:74", EMBED, True),
    collective("reduce-scatter", "fsdp", 32, 82.6, "backward", "layers.mlp.w_gate", f"{LAYERS}:74", EMBED, True),
    collective("all-reduce", "tensor", 8, 134.2, "forward", "loss.logits", f"{LOSS}:61", ("rules.vocab",), False,
               "f32"),
    collective("all-gather", "fsdp", 1, 246.2, "forward", "unembedding", f"{LOSS}:48", EMBED, False),
    collective("all-to-all", "fsdp", 2, 15.7, "forward", "embedding", f"{LAYERS}:123", EMBED, False),
    collective("all-reduce", "fsdp+tensor", 1, 0.0001, "optimizer", "clip.global_norm",
               "gspmd_lm/train/optimizer.py:40", ("weights.embed", "rules.mlp"), False, "f32"),
)  # fmt: skip


def timeline():
    """One layer: compute in order, links beside it, and the waits where the schedule has none to hide behind."""
    spans, now = [], 0.0

    def run(part, kind, name, ms, lane="compute", beside=()):
        nonlocal now
        start = now
        now += ms / 1e3
        spans.append(Span(start, now, lane, kind, name, part))
        for link, other, what, other_ms in beside:
            spans.append(Span(start, start + other_ms / 1e3, link, other, what, part))

    fsdp, tensor = "ici fsdp", "ici tensor"
    run("forward", "other", "layers.attention_norm", 1.1, beside=[(fsdp, "all-gather", "layers.attention.wq", 0.5)])
    run("forward", "all-gather", "layers.attention.wq", 4.2, tensor)
    run("forward", "matmul", "layers.attention.wq", 5.6, beside=[(fsdp, "all-gather", "layers.attention.wk", 0.2)])
    run("forward", "matmul", "layers.attention.wk", 1.4, beside=[(fsdp, "all-gather", "layers.attention.wo", 0.5)])
    run("forward", "matmul", "layers.attention.wv", 1.4)
    run("forward", "other", "layers.attention rope", 1.8)
    run(
        "forward",
        "attention",
        "layers.attention splash",
        17.0,
        beside=[(fsdp, "all-gather", "layers.mlp.w_gate", 0.8), ("host", "copy to host", "residual", 12.0)],
    )
    run("forward", "matmul", "layers.attention.wo", 5.6)
    run("forward", "reduce-scatter", "layers.attention.wo", 4.6, tensor)
    run("forward", "other", "layers.mlp_norm", 1.1)
    run(
        "forward",
        "matmul",
        "layers.mlp.w_gate",
        19.5,
        beside=[
            (tensor, "windowed all-gather", "layers.mlp.w_gate", 13.4),
            (fsdp, "all-gather", "layers.mlp.w_up", 0.8),
        ],
    )
    run("forward", "matmul", "layers.mlp.w_up", 19.5, beside=[(fsdp, "all-gather", "layers.mlp.w_down", 0.8)])
    run("forward", "other", "layers.mlp silu", 2.9)
    run("forward", "matmul", "layers.mlp.w_down", 19.5)
    run("forward", "reduce-scatter", "layers.mlp.w_down", 4.6, tensor)
    now = 0.0
    for name, ms in (("layers.attention.wq", 5.6), ("layers.mlp.w_gate", 19.5), ("layers.mlp.w_up", 19.5)):
        run("backward", "matmul", f"{name} (recomputed)", ms, beside=[(fsdp, "all-gather", name, 0.8)])
    run(
        "backward",
        "attention",
        "layers.attention splash (recomputed)",
        17.0,
        beside=[("host", "copy from host", "residual", 12.0)],
    )
    for name, ms in (("layers.mlp.w_down", 39.0), ("layers.mlp.w_up", 39.0), ("layers.mlp.w_gate", 39.0)):
        run(
            "backward",
            "matmul",
            f"{name} gradient",
            ms,
            beside=[(tensor, "all-gather", name, 4.2), (fsdp, "reduce-scatter", name, 1.6)],
        )
    run("backward", "reduce-scatter", "layers.mlp.w_gate", 4.6, tensor)
    run("backward", "other", "layers.mlp_norm gradient", 2.2)
    run("backward", "matmul", "layers.attention.wo gradient", 11.2)
    run("backward", "attention", "layers.attention splash gradient", 39.0)
    run("backward", "matmul", "layers.attention.wq gradient", 16.8, beside=[(fsdp, "reduce-scatter", "wq", 1.0)])
    run("backward", "reduce-scatter", "layers.attention.wq", 4.6, tensor)
    run("backward", "other", "layers.attention_norm gradient", 2.2)
    return tuple(spans)  # fmt: skip


def weight(path, axes, shape, pieces, **split):
    def spec(table):
        return tuple(tuple(table[axis].split("+")) if axis in table else () for axis in axes.split())

    in_use = {axis: over for axis, over in split.items() if axis != "embed"}
    elements = 1
    for size in shape:
        elements *= size
    held = elements * 4 // pieces
    state = PlacedState(spec(split), 2 * held)
    return PlacedArray(path, tuple(axes.split()), shape, spec(split), spec(in_use), held, "float32", state)


def activation(name, axes, shape, pieces, itemsize=2, **split):
    spec = tuple((split[axis],) if axis in split else () for axis in axes.split())
    elements = 1
    for size in shape:
        elements *= size
    return PlacedArray(name, tuple(axes.split()), shape, None, spec, elements * itemsize // pieces, "bfloat16")


ARRAYS = (
    weight("embedding", "vocab embed", (128256, 4096), 64, vocab="tensor", embed="fsdp"),
    weight("final_norm.scale", "embed", (4096,), 16, embed="fsdp"),
    weight("layers.attention.wk", "layers embed kv_heads head_dim", (32, 4096, 8, 128), 64, embed="fsdp",
           kv_heads="tensor"),
    weight("layers.attention.wo", "layers heads head_dim embed", (32, 32, 128, 4096), 64, embed="fsdp",
           heads="tensor"),
    weight("layers.attention.wq", "layers embed heads head_dim", (32, 4096, 32, 128), 64, embed="fsdp",
           heads="tensor"),
    weight("layers.attention.wv", "layers embed kv_heads head_dim", (32, 4096, 8, 128), 64, embed="fsdp",
           kv_heads="tensor"),
    weight("layers.attention_norm.scale", "layers embed", (32, 4096), 16, embed="fsdp"),
    weight("layers.mlp.w_down", "layers mlp embed", (32, 14336, 4096), 64, mlp="tensor", embed="fsdp"),
    weight("layers.mlp.w_gate", "layers embed mlp", (32, 4096, 14336), 64, mlp="tensor", embed="fsdp"),
    weight("layers.mlp.w_up", "layers embed mlp", (32, 4096, 14336), 64, mlp="tensor", embed="fsdp"),
    weight("layers.mlp_norm.scale", "layers embed", (32, 4096), 16, embed="fsdp"),
    weight("unembedding", "vocab embed", (128256, 4096), 64, vocab="tensor", embed="fsdp"),
    activation("tokens", "batch seq", (512, 8192), 16, 4, batch="fsdp"),
    activation("residual", "batch seq embed", (512, 8192, 4096), 64, batch="fsdp", seq="tensor"),
    activation("block_input", "batch seq embed", (512, 8192, 4096), 16, batch="fsdp"),
    activation("q", "batch seq heads head_dim", (512, 8192, 32, 128), 64, batch="fsdp", heads="tensor"),
    activation("k", "batch kv_seq kv_heads head_dim", (512, 8192, 8, 128), 64, batch="fsdp", kv_heads="tensor"),
    activation("hidden", "batch seq mlp", (512, 8192, 14336), 64, batch="fsdp", mlp="tensor"),
    activation("logits", "batch seq vocab", (512, 1024, 128256), 64, 4, batch="fsdp", vocab="tensor"),
)  # fmt: skip

WARNINGS = (
    Finding("slow_link", "61% of the time over ici tensor is exposed: 32 reduce-scatters of 1.6 GB wait for it",
            "split less over tensor: mesh: {fsdp: 32, tensor: 2}"),
    Finding("above_floor", "tensor moves 1.31x of what this split needs: the recomputation gathers block_input again",
            "save it: remat: {save: [block_input]}"),
    Finding("resharding", "an all-to-all over fsdp that no row asked for: embedding, gspmd_lm/model/layers.py:123",
            "15.7 MB twice a step is cheaper than gathering the table; nothing to do"),
    Finding("replicated", "layers.attention_norm.scale is whole on each of tensor=4",
            "it has 131,072 elements; nothing to do"),
    Finding("padding", "vocab=128256 splits into 32064 rows, which the chip pads to 32128 (+0.2%)",
            "set model.padded_vocab=128512"),
)  # fmt: skip

PREDICTION = Prediction(
    step_time_s=14.92, matmul_s=9.24, attention_s=2.34, other_s=0.86, exposed_communication_s=2.27,
    exposed_by_axis={"tensor": 2.15, "fsdp": 0.12}, exposed_host_copy_s=0.21, communication_s=5.61, mfu=0.522,
    tokens_per_s_per_device=4392.0,
    basis="the compiler's cycles for fusions, FLOPs and bytes for splash attention, a torus of 90 GB/s links",
    error="6.1% in the mean of 9 published step times",
    timeline=timeline(), unpriced={"custom-call Mystery at layers.mlp": 0.004, "sort": 0.001}, unpriced_share=0.005,
    missing_flops_share=0.0,
    fusions=(("layers.mlp.w_gate gradient", 1.25), ("layers.mlp.w_up gradient", 1.25)),
)  # fmt: skip

JOB = predict(
    Work(steps=100_000, step_time_s=14.92, compile_s=41.3, chips=64, hosts=16, checkpoint_bytes=96 * GB,
         restored_bytes=6 * GB, state_bytes=1506 * MB, copied_bytes=1506 * MB, host_bytes_per_s=16e9, rows_per_s=2.14,
         read_bytes_per_s=175_000.0, checkpoint_minutes=10.0, checkpoint_every=0),
    Assumptions(preemptions_per_day=4), Price(4.2, 1.9),
)  # fmt: skip

LLAMA = Report(
    target="v5p:4x4x4", chip="TPU v5p", devices=64, config="llama3_8b", rules="rules/fsdp_tp.yaml", phase="train",
    mesh={"fsdp": 16, "tensor": 4}, parameters=8_030_261_248, active_parameters=8_030_261_248, tokens=512 * 8192,
    memory=Memory(
        weights_bytes=502 * MB, optimizer_bytes=1004 * MB, batch_bytes=6 * MB, temporaries_bytes=41_870 * MB,
        peak_bytes=43_120 * MB, limit_bytes=102 * GB, host_bytes=17_180 * MB, fits=True,
        largest=(
            Temporary(17_180 * MB, "bf16[32,32,2048,4096]", ("layers", "batch", "seq", "embed"), f"{LAYERS}:41",
                      "layers.residual scan"),
            Temporary(4_203 * MB, "f32[32,1024,32064]", ("batch", "seq", "vocab"), f"{LOSS}:61", "loss.logits"),
            Temporary(1_879 * MB, "bf16[32,8192,3584]", ("batch", "seq", "mlp"), f"{LAYERS}:83",
                      "layers.mlp.hidden mul"),
        ),
    ),
    collectives=COLLECTIVES, prediction=PREDICTION, no_prediction="",
    floor=LowerBounds(compute_s=7.79, memory_s=0.21, communication_bytes=420 * GB,
                communication_by_axis={"fsdp": 10 * GB, "tensor": 410 * GB}, flops=3.576e15, dtype="bfloat16",
                by_array=(ArrayTransfers("residual", "forward", "tensor", "all-gather", 64, 410 * GB),)),
    warnings=WARNINGS, compile_s=41.3, job=JOB,
    versions={"jax": "0.10.2", "jaxlib": "0.10.2", "libtpu": "0.0.42.1",
              "xla_tpu_enable_async_collective_fusion": "true"},
    arrays=ARRAYS,
)  # fmt: skip


def only_fsdp(array):
    """The same array when tensor is gone from the mesh and its rows from the rules."""

    def spec(split):
        return tuple(tuple(name for name in names if name != "tensor") for names in split)

    at_rest = None if array.at_rest is None else spec(array.at_rest)
    return dataclasses.replace(array, at_rest=at_rest, in_use=spec(array.in_use))


FSDP = dataclasses.replace(
    LLAMA, rules="rules/fsdp.yaml", mesh={"fsdp": 64}, warnings=WARNINGS[3:],
    memory=dataclasses.replace(LLAMA.memory, temporaries_bytes=58_300 * MB, peak_bytes=59_800 * MB),
    collectives=tuple(found for found in COLLECTIVES if found.mesh_axes == ("fsdp",)),
    prediction=dataclasses.replace(
        PREDICTION, step_time_s=13.14, exposed_communication_s=0.49, exposed_by_axis={"fsdp": 0.49},
        communication_s=1.9, mfu=0.593, tokens_per_s_per_device=4987.0,
        timeline=tuple(span for span in PREDICTION.timeline if span.lane != "ici tensor"),
    ),
    floor=dataclasses.replace(LLAMA.floor, communication_bytes=6 * GB, communication_by_axis={"fsdp": 6 * GB}),
    arrays=tuple(map(only_fsdp, ARRAYS)),
)  # fmt: skip

REFUSED = dataclasses.replace(
    LLAMA, target="v5e:2x4", chip="TPU v5e", devices=8, rules="rules/tp8.yaml", mesh={"tensor": 8},
    memory=Memory(
        weights_bytes=4_015 * MB, optimizer_bytes=8_030 * MB, batch_bytes=6 * MB, temporaries_bytes=218_400 * MB,
        peak_bytes=230_451 * MB, limit_bytes=16_909 * MB, host_bytes=0, fits=False, largest=LLAMA.memory.largest,
        refusal="Ran out of memory in memory space hbm. Used 214.62G of 15.75G hbm. Exceeded hbm capacity by 198.87G.",
    ),
    collectives=(), prediction=None, job=None, no_prediction="the compiler refused the program for memory",
    warnings=(Finding("does_not_fit", "temporaries alone take 12.9 times the memory of a device",
                      "set remat: block and microbatches: 16, or take more devices"),),
    compile_s=1.2,
    arrays=(activation("residual", "batch seq embed", (512, 8192, 4096), 1),),
)  # fmt: skip

CPU = dataclasses.replace(
    LLAMA, target="cpu:8", chip="", devices=8, config="tiny", rules="rules/fsdp2_tp4.yaml",
    mesh={"fsdp": 2, "tensor": 4}, parameters=1_049_728, active_parameters=1_049_728, tokens=16 * 128,
    memory=Memory(
        weights_bytes=525 * 10**3, optimizer_bytes=1050 * 10**3, batch_bytes=25 * 10**3,
        temporaries_bytes=9_410 * 10**3, peak_bytes=10_700 * 10**3, limit_bytes=None, host_bytes=0, fits=True,
        largest=LLAMA.memory.largest[1:2],
    ),
    collectives=tuple(
        dataclasses.replace(found, bytes_per_device_per_step=found.bytes_per_device_per_step // 10**5, dtype="f32")
        for found in COLLECTIVES[2:7]
    ),
    prediction=None, job=None, no_prediction="cpu:8 stands for no hardware: memory and collectives only",
    floor=LowerBounds(None, None, 2 * MB, {"fsdp": MB, "tensor": MB}, 1.6e9, "float32"), warnings=(), compile_s=2.4,
    versions={"jax": "0.10.2", "jaxlib": "0.10.2"},
    arrays=(
        weight("layers.mlp.w_up", "layers embed mlp", (4, 128, 512), 8, mlp="tensor", embed="fsdp"),
        activation("residual", "batch seq embed", (16, 128, 128), 8, batch="fsdp", seq="tensor"),
    ),
)  # fmt: skip

# Many devices, three mesh axes, an axis split over two of them, and text that a page must not take for markup.
HOSTILE = "<script>document.title = 'mine'</script>&\"'[bold]</script><!--"
SLICES = dataclasses.replace(
    LLAMA, target="2@v6e:16x16", chip="TPU v6e", devices=512, config=HOSTILE, rules=f"rules/{HOSTILE}.yaml",
    mesh={"data": 2, "fsdp": 64, "tensor": 4}, versions={"jax": HOSTILE},
    arrays=(
        ARRAYS[8],
        dataclasses.replace(ARRAYS[3], path=HOSTILE, at_rest=((), ("tensor",), (), ("data", "fsdp"))),
    ),
    collectives=tuple(
        dataclasses.replace(found, op=HOSTILE, source=HOSTILE, einsum=HOSTILE, link="dcn") for found in COLLECTIVES[:3]
    ),
    prediction=dataclasses.replace(
        PREDICTION, basis=HOSTILE, timeline=(Span(0, 1, HOSTILE, HOSTILE, HOSTILE, "forward"),)
    ),
    warnings=(Finding(HOSTILE, HOSTILE, HOSTILE),),
)  # fmt: skip


def network(chip, coords, slices, hosts, mesh_shape, mesh_axes):
    """A Network from any sequences."""
    mesh = dict(zip(mesh_axes, mesh_shape, strict=True))
    return Network(chip, tuple(map(tuple, coords)), tuple(slices), tuple(hosts), mesh)
