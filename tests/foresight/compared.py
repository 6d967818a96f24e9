"""Programs beside what is read of them: the floor of each, and the bytes that its compiled program sends.

`python -m tests.foresight.compared TARGET FIRST LAST` compiles the random programs of these seeds for a target, and
`python -m tests.foresight.compared TARGET NAME ...` those of `sharded_programs`. A line of JSON comes for each.
"""

import dataclasses
import json
import os
import sys

ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "CUDA_VISIBLE_DEVICES": "",
    "JAX_ENABLE_COMPILATION_CACHE": "false",
}  # fmt: skip


def compared(function, text):
    """What is known of a program for a target: a function from devices to a traced step."""
    import jax

    from gspmd_lm.foresight import any_step, collectives, hlo
    from gspmd_lm.foresight.explain import NO_RULES
    from gspmd_lm.foresight.graph import DataflowGraph
    from gspmd_lm.hardware import target as targets
    from gspmd_lm.hardware.network import Network
    from gspmd_lm.units import bits
    from tests.foresight import counted_text
    from tests.quick import QUICK

    target = targets.parse(text)
    devices = targets.devices(target)
    built = any_step.build(any_step.Program(function), devices)
    reading = built.read()
    options = {"cpu": QUICK, "gpu": {"xla_gpu_autotune_level": 0, "xla_backend_optimization_level": 0}, "tpu": {}}
    program = built.lowered.compile(compiler_options=options[target.platform]).as_text()
    places = targets.device_locations(built.mesh)
    where = Network(target.chip, places["coords"], places["slices"], places["hosts"], dict(built.mesh.shape))
    rules, graph = (
        dataclasses.replace(NO_RULES, mesh=dict(built.mesh.shape)),
        DataflowGraph(jax.make_jaxpr(lambda: ())(), ()),
    )
    module = hlo.parse(program)
    moved = collectives.find(module, rules, {}, where, graph)
    return {
        "floor": reading.communication_bytes,
        "floor_as_float32": reading.bytes_if_wider(4),
        "estimated_because": reading.estimated_because,
        "sent": sum(one.bytes_per_device_per_step for one in moved),
        "sent_as_float32": sum(one.bytes_per_device_per_step * max(1.0, 32 / (bits(one.dtype) or 32)) for one in moved),
        "counted": counted_text.sent_bytes(program),
        "model_flops": reading.model_flops / target.devices,
        "compiled_flops": sum(one.flops * one.executions for one in module.operations),
    }


def main(target, *asked):
    os.environ.update(ENVIRONMENT)
    from gspmd_lm.runtime import startup
    from tests.foresight import random_programs

    startup.start(platform="cpu", simulated_devices=8)
    if asked[0].isdigit():
        functions = {
            str(seed): lambda devices, seed=seed: random_programs.program(seed, devices)
            for seed in range(int(asked[0]), int(asked[1]))
        }
    else:
        from tests.foresight import sharded_programs

        functions = {name: getattr(sharded_programs, name) for name in asked}
    for name, function in functions.items():
        print(json.dumps({"name": name, **compared(function, target)}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
