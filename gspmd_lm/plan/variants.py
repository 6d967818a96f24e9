"""The variants of a mesh and its tables that a plan tries: pipelines of stages, and remat policies.

Pipelines differ in microbatches, repeats, when weights are gathered, and what stages keep. More microbatches and
repeats make the bubble shorter, and smaller products, more exchanges and more gathers make the turns slower. Weights
that are gathered once in a step take memory. Stages that keep their inputs alone, of all microbatches or, one forward
and one backward, of a few, compute their layers once more: they are tried where memory is short. Pipelines are
estimated with `remat: block`, and few of them are tried with other policies.

A remat policy says what is saved, what is offloaded, and what is computed again. It is a knapsack over names. A name
that is kept spares what the backward pass would compute again for it. On the device it takes memory. On the host it
takes time of the link, which costs nothing as long as it hides behind compute. What a name spares depends on what else
is kept. So names are chosen one after the other: each time the one that spares most for the share that it takes of what
is there.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

from gspmd_lm.foresight.graph import OUT, READ
from gspmd_lm.hardware.target import Target
from gspmd_lm.plan.estimate import Estimate, Estimator, RematEstimate
from gspmd_lm.plan.traces import ForwardTrace
from gspmd_lm.program.task import Task
from gspmd_lm.sharding import slices
from gspmd_lm.sharding.rules import Remat, Rules

Pipeline = dict[str, Any]  # as a rules file says it
Estimates = Callable[[Pipeline], Estimate | None]  # None where a check of the rules refuses it

MOST_STAGES = 16
MICROBATCHES = (1, 2, 4, 8)  # times as many as stages
REPEATS = (1, 2, 4)
# The share of a device's memory from which on the inputs of stages are tried to be all that they keep.
SHORT = 0.85
INPUTS_ALONE = ({"keep": "stage"}, {"schedule": "1f1b"})

# Shares of a device's memory that are filled: estimates of memory are up to a sixth too low or too high.
FILLED = (0.85, 0.95, 1.05, 1.15)
HOST_SHARE = 0.7  # the share of the host's memory that may hold activations: loader and checkpoints need some, too
STEP_SHARE = 0.3  # the share of a step in which copies to the host, or those back, hide

Destination = Literal["save", "offload"]


# Pipelines


def stage_counts(task: Task, target: Target) -> list[int]:
    """Into how many stages the layers of a task may be cut. Simulated devices have no times, so no bubbles either."""
    most = math.gcd(layers(task), target.devices) if target.chip else 1
    return [n for n in range(1, min(most, MOST_STAGES) + 1) if most % n == 0]


def layers(task: Task) -> int:
    """How many pieces the layers that can be cut in stages have: one for each turn of their pattern.

    Layers that share their weights cannot be cut, nor can those of two stacks or of several widths.
    """
    model = task.config and task.config.model
    whole = model and (model.shared_layers or model.encoder or model.vision or model.windows)
    cut = model and task.names.stages and not whole
    stacks = model.stacks if model and cut else ()
    return next((stack.scanned_layers // len(stack.kinds) for stack in stacks if stack.name == task.names.stages), 1)


def across(target: Target, outer: int, mesh: Mapping[str, int]) -> list[dict[str, int]]:
    """Which parts of a mesh with stages cross `outer` slices or hosts: the stages, and data for those that are left."""
    stages, data = mesh["stage"], mesh.get("data", 1)
    if outer == 1 or target.platform == "gpu":  # hosts follow the order of devices, in which stages are the outermost
        return [{}] if math.gcd(stages * data, outer) == outer else []
    return slices.find_crossings(mesh, outer)


def pipelines(task: Task, layout: Mapping[str, Any], estimate: Estimates, limit_bytes: float) -> list[Pipeline]:
    """For each way to gather weights, the pipeline of a layout that is estimated to be fastest of those that fit.

    Microbatches are chosen first, then repeats. Where nothing fits, what needs least memory is chosen. If that is more
    than SHORT of the limit, the fastest pipeline of each way to keep inputs alone is another one.
    """
    mesh = layout["mesh"]
    stages, shards = mesh["stage"], math.prod(mesh.get(name, 1) for name in ("data", "fsdp", "expert"))
    assert task.config
    model = task.config.model
    alone = model.experts or model.matmul_dtype or not ("fsdp" in mesh or "optimizer" in layout)

    def best(choices: Iterable[Pipeline]) -> tuple[Estimate, Pipeline] | None:
        estimated = [(found, one) for one in choices if (found := estimate(one))]
        fitting = [(found.step_time_s, n) for n, (found, _) in enumerate(estimated) if found.peak_bytes <= limit_bytes]
        least = [(found.peak_bytes, n) for n, (found, _) in enumerate(estimated)]
        return estimated[min(fitting or least)[1]] if estimated else None

    turn = {} if alone else {"gather": "turn"}
    microbatches = [times * stages for times in MICROBATCHES if task.rows % (times * stages * shards) == 0]
    repeats = [n for n in REPEATS if layers(task) % (stages * n) == 0]
    first = best({"microbatches": n, **turn} for n in microbatches)
    if first is None:
        return []
    found, chosen = best([first[1], *({**first[1], "repeats": n} for n in repeats if n > 1)]) or first
    more: list[Pipeline] = [] if alone else [{**chosen, "gather": "step"}]
    if found.peak_bytes > SHORT * limit_bytes:
        of_kinds = ({**kind, **({} if "schedule" in kind else turn)} for kind in INPUTS_ALONE)
        kinds = (best({"microbatches": n, **kind} for n in microbatches) for kind in of_kinds)
        more += [one[1] for one in kinds if one]
    return [chosen, *more]


# Remat policies


class Names(NamedTuple):
    """The names of activations that a remat policy may save or offload."""

    outputs: tuple[str, ...]  # what matmuls, kernels and collectives make
    inputs: tuple[str, ...]  # what loops carry, which stays on the device unless it is offloaded

    @classmethod
    def from_trace(cls, trace: ForwardTrace, fused: bool, known: tuple[str, ...]) -> "Names":
        """The names of a traced model. `known` are those that its rules files may list."""
        op_graph, graph = trace.op_graph(fused), trace.graph
        nodes = [node for node in graph.nodes if node.checkpoint_name in known and op_graph.in_block(node)]
        inputs = [node.checkpoint_name for node in nodes if node.inputs[0].primitive == "carry"]
        # Arrays that are only placed anew.
        gathered = [matmul.input.array for matmul in graph.matmuls if graph.gathered_from(matmul.input)]
        labels = [node.checkpoint_name for node in nodes if node.checkpoint_name not in (*inputs, *gathered)]
        outputs = [*(name for name in (OUT, *READ) if name in labels), *labels]
        return cls(tuple(dict.fromkeys(outputs)), tuple(dict.fromkeys(inputs)))

    def remat(self, destinations: Mapping[str, Destination]) -> Remat:
        """The policy that keeps names where `destinations` says."""
        names = (*self.inputs, *self.outputs)
        kept = {to: tuple(name for name in names if destinations.get(name) == to) for to in ("save", "offload")}
        return Remat("names", **kept)


def policies(estimator: Estimator, rules: Rules, names: Names) -> Iterator[Remat]:
    """The policies that are worth an estimate for filled and checked `rules`, each once."""
    chip, knapsack = estimator.chip, _Knapsack(estimator, rules, names)
    yield from (Remat(), Remat("dots"), Remat("block"))
    if chip is None:
        remats = [knapsack.filling_policy(math.inf)]
    else:
        limits = [share * chip.usable_hbm_bytes for share in FILLED]
        remats = [knapsack.filling_policy(limit) for limit in limits]
        all_saved = names.remat(dict.fromkeys(names.outputs, "save"))
        if names.inputs and knapsack.estimate(all_saved).peak_bytes > limits[0]:
            host_bytes = HOST_SHARE * chip.host_bytes / chip.devices_per_chip
            remats += [knapsack.filling_policy(limit, host_bytes) for limit in limits]
            remats.append(names.remat(dict.fromkeys(names.inputs, "offload")))
    yield from (remat for remat in dict.fromkeys(remats) if remat.save or remat.offload)


class _Knapsack:
    """The choice of the names that are saved or offloaded under one layout."""

    def __init__(self, estimator: Estimator, rules: Rules, names: Names):
        self.estimator, self.rules, self.names = estimator, rules, names
        self.estimate = functools.cache(functools.partial(estimator.estimate_remat, rules))

    def filling_policy(self, limit_bytes: float, host_bytes: float = 0.0) -> Remat:
        """The policy that fills a device up to `limit_bytes`, and the host's memory for it up to `host_bytes`."""
        names = self.names
        # The first name that is offloaded may slow the whole program, so it is the input, which is largest.
        destinations: dict[str, Destination] = dict.fromkeys(names.inputs, "offload") if host_bytes else {}
        now = self.estimate(names.remat(destinations))
        room_bytes = max(limit_bytes - now.peak_bytes, 1.0)
        link_bytes = 1.0  # what a microbatch can send to the host while its loop computes
        if host_bytes and (chip := self.estimator.chip):
            link_bytes = max(STEP_SHARE / self.rules.microbatches * now.seconds * chip.host_bytes_per_s, 1.0)
        while True:
            best: tuple[float, dict[str, Destination], RematEstimate] | None = None
            for name, destination in itertools.product(names.outputs, ("save", "offload") if host_bytes else ("save",)):
                if name in destinations:
                    continue
                changed: dict[str, Destination] = {**destinations, name: destination}
                then = self.estimate(names.remat(changed))
                spared_s = now.seconds - then.seconds
                more_bytes, sent_bytes = then.device_bytes - now.device_bytes, then.host_bytes - now.host_bytes
                if spared_s <= 0 or then.host_bytes > host_bytes or (more_bytes > 0 and then.peak_bytes > limit_bytes):
                    continue
                taken = max(more_bytes / room_bytes + sent_bytes / link_bytes, 1e-9)
                if best is None or spared_s / taken > best[0]:
                    best = spared_s / taken, changed, then
            if best is None:
                return names.remat(destinations)
            _, destinations, now = best
