"""What a layout sends, and how long compute waits for it: on the links of the real mesh, beside what loops compute."""

import collections
import math
import os
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np

from gspmd_lm.foresight.bounds.transfers import Transfer
from gspmd_lm.hardware import target as targets
from gspmd_lm.hardware.network import Groups, Network
from gspmd_lm.hardware.target import Target
from gspmd_lm.sharding import mesh as meshes
from gspmd_lm.sharding.rules import Rules

# What follows was read from compiled programs (`python -m benchmarks.plan show` sets them beside prices).
#
# The share of a loop's compute behind which what is sent beside it hides: weights in the forward and in the backward
# pass, gradients, and activations in both.
HIDDEN_SHARE = {"tpu": (0.7, 0.7, 0.7, 1.0), "gpu": (0.7, 0.1, 0.7, 0.2)}
# The share that is exposed however long compute takes, of weights in the forward and in the backward pass, and of
# gradients. On GPUs the first weights of a turn are gathered together, and its products wait for them.
LEAST_EXPOSED = {"tpu": (0.3, 0.3, 0.3), "gpu": (0.5, 0.6, 0.1)}
# The same on GPUs of gradients that are also added up between hosts which hold the same weights: those of a layer are
# sent together, late in its turn.
REPLICAS_EXPOSED = 0.55
# The same of gradients that are reduced within slices, or over an axis over which weights are gathered: on a torus of
# two dimensions their reductions end a turn of the loop, and nothing runs beside them.
GRADIENTS_EXPOSED = {2: 1.0, 3: 0.3}
# The same of activations that are reduced, that are gathered where the sequence is split, and that are gathered again
# for what is computed again.
ACTIVATIONS_EXPOSED = {2: (0.6, 0.8, 0.8), 3: (0.7, 0.6, 0.6), 0: (0.3, 0.45, 0.65)}
# The share that is exposed of weights that are gathered across slices, beside which libtpu runs little.
SLICES_EXPOSED = 0.8
# The share that is exposed of what is sent outside of loops.
OUTSIDE_EXPOSED = {"tpu": 1.0, "gpu": 0.8}
_WITHOUT_TPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # as in compile.py
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5p-8",
}


class Overlap:
    """The networks of a target's meshes."""

    def __init__(self, target: Target):
        self.target = target
        self._devices = _devices(target) if target.chip else []
        self._networks: dict[tuple, tuple[Network, dict[str, Groups]]] = {}

    def exposed(
        self, rules: Rules, moves: Iterable[Transfer], loops: tuple[float, float], of_activations: int
    ) -> tuple[dict[str, float], float]:
        """Mesh axes -> the seconds in which compute waits for what is sent over them; and all that sending takes.

        In a loop, weights and gradients travel beside the compute of its turns, on each link for itself: weights in
        both passes, gradients in the backward pass. `loops` are the seconds that loops compute in each of them.
        `of_activations`: which of ACTIVATIONS_EXPOSED holds.
        """
        network, groups = self.network(rules)
        assert network.chip
        platform = network.chip.platform
        moves = list(moves)
        gathered = {name for move in moves if move.kind == "weights" for name in move.axes.split("+")}
        reduced = {name for move in moves if move.kind == "gradients" and move.in_loop for name in move.axes.split("+")}
        replicas = reduced - gathered
        exposed: dict[str, float] = collections.defaultdict(float)
        # Weights forward and backward, gradients, activations: mesh axes -> seconds, and those that nothing hides.
        parts: list[dict[str, float]] = [collections.defaultdict(float) for _ in range(4)]
        surely: list[dict[str, float]] = [collections.defaultdict(float) for _ in range(4)]
        waiting = ACTIVATIONS_EXPOSED[network.chip.torus_dimensions][of_activations]
        total_s = 0.0
        for what, axes, times, looped, size_bytes in _combined(moves):
            pieces, link = len(groups[axes][0]), network.link(groups[axes])
            seconds = times * network.time_s("all-gather", size_bytes * pieces / (pieces - 1), groups[axes])
            total_s += seconds
            if what in ("activations", "keys"):
                _add(parts[3], surely[3], axes, seconds, waiting if what == "activations" else 0.0)
            elif not looped:
                exposed[axes] += OUTSIDE_EXPOSED[platform] * seconds
            elif what == "weights":
                for passed, never in enumerate(LEAST_EXPOSED[platform][:2]):
                    _add(parts[passed], surely[passed], axes, seconds / 2, SLICES_EXPOSED if link == "dcn" else never)
            else:
                never = LEAST_EXPOSED[platform][2]
                if link == "network" and replicas:
                    never = REPLICAS_EXPOSED
                elif platform == "tpu" and (link == "ici" or not gathered.isdisjoint(axes.split("+"))):
                    never = GRADIENTS_EXPOSED[network.chip.torus_dimensions]
                _add(parts[2], surely[2], axes, seconds, never)
        computed_s = (loops[0], loops[1], loops[1], sum(loops))
        for sent, least, share, compute_s in zip(parts, surely, HIDDEN_SHARE[platform], computed_s, strict=True):
            for link in _sharing_links(network, groups, sent):
                seconds = sum(sent[axes] for axes in link)
                waits_s = max(sum(least[axes] for axes in link), seconds - share * compute_s)
                for axes in link:
                    exposed[axes] += waits_s * sent[axes] / seconds if seconds else 0.0
        return {axes: seconds for axes, seconds in exposed.items() if seconds}, total_s

    def network(self, rules: Rules) -> tuple[Network, dict[str, Groups]]:
        """The links of a mesh, and the groups of devices that differ in some of its axes only."""
        key = tuple(rules.mesh.items()), tuple(rules.dcn.items())
        if key not in self._networks:
            places = targets.device_locations(meshes.build(rules, self._devices))
            self._networks[key] = Network(self.target.chip, **places, mesh=rules.mesh), _Groups(rules)
        return self._networks[key]


def _sharing_links(network: Network, groups: Mapping[str, Groups], sent: Iterable[str]) -> list[list[str]]:
    """Mesh axes that share links: on a torus those that overlap, elsewhere all that leave a device the same way."""
    found: list[list[str]] = []
    for axes in sent:
        own = set(axes.split("+")) if network.link(groups[axes]) == "ici" else {"network"}
        for link in found:
            others = {name for other in link for name in (
                other.split("+") if network.link(groups[other]) == "ici" else ["network"])}  # fmt: skip
            if own & others:
                link.append(axes)
                break
        else:
            found.append([axes])
    return found


def _add(sent: dict[str, float], surely: dict[str, float], axes: str, seconds: float, share: float) -> None:
    sent[axes] += seconds
    surely[axes] += share * seconds


def _combined(moves: Iterable[Transfer]) -> Iterable[tuple[str, str, int, bool, float]]:
    """What is sent, and the bytes each time. What a turn of a loop sends of weights, or of gradients, goes at once.

    Weights that are gathered for both passes are sent twice a turn.
    """
    joined: dict[tuple[str, str, int, bool], float] = collections.defaultdict(float)
    for move in moves:
        if move.kind in ("activations", "keys"):
            yield move.kind, move.axes, move.times_per_step, move.in_loop, move.bytes
        else:
            joined[move.kind, move.axes, move.times_per_step, move.in_loop] += move.bytes
    for (what, axes, times, looped), size_bytes in joined.items():
        passes = 2 if what == "weights" and looped else 1
        yield what, axes, times * passes, looped, size_bytes / passes


def _devices(target: Target) -> list[Any]:
    """The compile-only devices of a target, which no program is compiled for here: they know where they are.

    libtpu looks for the machine that it is on and complains where there is none, unless it is told one. jax's plugin
    for GPUs is refused on a machine without a GPU, unless jax is told to use the CPU.
    """
    told = {name: value for name, value in _WITHOUT_TPU.items() if name not in os.environ}
    os.environ.update(told)
    platforms: Any = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]
    jax.config.update("jax_platforms", "cpu")
    try:
        return targets.devices(target)
    finally:
        jax.config.update("jax_platforms", platforms)
        for name in told:
            del os.environ[name]


class _Groups(dict[str, Groups]):
    """Mesh axes, such as fsdp+tensor -> the groups of devices that differ in these axes only."""

    def __init__(self, rules: Rules):
        self.mesh = dict(rules.mesh)

    def __missing__(self, axes: str) -> Groups:
        own = [n for n, name in enumerate(self.mesh) if name in axes.split("+")]
        devices = np.arange(math.prod(self.mesh.values())).reshape(*self.mesh.values())
        ordered = np.moveaxis(devices, own, range(-len(own), 0))
        self[axes] = tuple(map(tuple, ordered.reshape(-1, math.prod(ordered.shape[-len(own) :])).tolist()))
        return self[axes]
