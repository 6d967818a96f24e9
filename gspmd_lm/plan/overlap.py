"""The exposed communication of a layout: what does not hide behind the compute of loops, on the links of the mesh."""

import collections
import dataclasses
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from gspmd_lm.foresight.propagation import Transfer
from gspmd_lm.hardware import target as targets
from gspmd_lm.hardware.chips import CHIPS, NO_CUDA
from gspmd_lm.hardware.network import Groups, Network, sent_bytes
from gspmd_lm.hardware.target import Target
from gspmd_lm.plan.operations import Offloaded
from gspmd_lm.plan.transfers import EstimatedTransfer
from gspmd_lm.runtime import quiet
from gspmd_lm.sharding import mesh as meshes
from gspmd_lm.sharding.rules import Rules

# What follows was read from compiled programs (`python -m benchmarks.plan show` sets them beside estimates).
#
# The share of a loop's compute behind which communication hides: of weights in the forward and in the backward pass, of
# gradients, and of activations in both.
HIDDEN_SHARE = {"tpu": (0.7, 0.7, 0.7, 1.0), "gpu": (0.7, 0.1, 0.7, 0.2), "cpu": (0.0, 0.0, 0.0, 0.0)}
# The share that is exposed however long compute takes, of weights in the forward and in the backward pass, and of
# gradients. On GPUs the first weights of an iteration are gathered together, and its matmuls wait for them.
LEAST_EXPOSED = {"tpu": (0.3, 0.3, 0.3), "gpu": (0.5, 0.6, 0.1), "cpu": (1.0, 1.0, 1.0)}
# The same on GPUs of gradients that are also added up between hosts which hold the same weights: those of a layer are
# sent together, late in its iteration.
REPLICAS_EXPOSED = 0.55
# The same of gradients that are reduced within slices, or over an axis over which weights are gathered: on a torus of
# two dimensions their reductions end an iteration of the loop, and nothing runs beside them.
GRADIENTS_EXPOSED = {2: 1.0, 3: 0.3}
# The same of activations that are reduced, that are gathered where the sequence is split, and that are gathered again
# for recomputation.
ACTIVATIONS_EXPOSED = {2: (0.6, 0.8, 0.8), 3: (0.7, 0.6, 0.6), 0: (0.3, 0.45, 0.65)}
# The share that is exposed of weights that are gathered across slices, beside which libtpu runs little.
SLICES_EXPOSED = 0.8
# The share that is exposed of what is sent outside of loops.
OUTSIDE_EXPOSED = {"tpu": 1.0, "gpu": 0.8, "cpu": 1.0}
# The share of the compute of loops, forward and backward, behind which copies to and from the host hide. libtpu begins
# the copies of one iteration with the next, and waits for them before it computes the first of their arrays anew.
HOST_HIDDEN_SHARE = {"tpu": (0.5, 0.8), "gpu": (0.8, 0.8), "cpu": (0.0, 0.0)}
# How many copies XLA's scheduler for GPUs has under way at most.
COPIES_UNDER_WAY = 2
_HOST_OF_TPU = {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_ACCELERATOR_TYPE": "v5p-8"}


class Overlap:
    """The exposed communication of layouts on one target, whose networks it keeps by mesh."""

    def __init__(self, target: Target):
        self.target = target
        # Compile-only devices; none of a target without links, such as simulated devices.
        self.devices = _devices(target) if target.chip and target.platform != "cpu" else []
        self._networks: dict[tuple, tuple[Network, dict[str, Groups]]] = {}

    def exposed_seconds(
        self,
        rules: Rules,
        transfers: Iterable[EstimatedTransfer],
        passes_s: tuple[float, float],
        gathers_of_activations: int,
    ) -> tuple[dict[str, float], float]:
        """Mesh axes -> the seconds of exposed communication; and the seconds of all communication.

        In a loop, weights and gradients are sent beside the compute of its iterations, on each link for itself: weights
        in both passes, gradients in the backward pass. `passes_s` are the seconds of compute of loops in each pass.
        `gathers_of_activations`: which entry of ACTIVATIONS_EXPOSED holds.
        """
        network, groups = self.network(rules)
        assert network.chip
        platform = network.chip.platform
        transfers = list(transfers)
        gathered = {name for move in transfers if move.kind == "weights" for name in move.axes.split("+")}
        reduced = {
            name for move in transfers if move.kind == "gradients" and move.in_loop for name in move.axes.split("+")
        }
        replicas = reduced - gathered
        exposed: dict[str, float] = collections.defaultdict(float)
        # Mesh axes -> seconds: of weights forward, of weights backward, of gradients and of activations. The second
        # list has the seconds that are exposed however long compute takes.
        sent_s: list[dict[str, float]] = [collections.defaultdict(float) for _ in range(4)]
        least_exposed_s: list[dict[str, float]] = [collections.defaultdict(float) for _ in range(4)]
        activation_share = ACTIVATIONS_EXPOSED[network.chip.torus_dimensions][gathers_of_activations]
        total_s = 0.0
        for kind, axes, times, in_loop, size_bytes in _combine(transfers):
            link = network.link(groups[axes])
            whole_bytes = size_bytes / sent_bytes("all-gather", 1, len(groups[axes][0]))
            if kind in ("stages", "waiting"):
                seconds = times * network.time_s("collective-permute", size_bytes, _neighbours(groups[axes]))
            else:
                seconds = times * network.time_s("all-gather", whole_bytes, groups[axes])
            total_s += seconds
            # A turn ends with the rows of stages, and the next one begins with what they bring. What is sent between
            # hosts or slices does not hide behind a loop, such as that over the layers of a turn.
            if kind == "stages" or (kind == "waiting" and link in ("network", "dcn")):
                exposed[axes] += seconds
                continue
            if kind in ("activations", "keys", "waiting"):
                _add(sent_s[3], least_exposed_s[3], axes, seconds, activation_share if kind == "activations" else 0.0)
            elif not in_loop:
                exposed[axes] += OUTSIDE_EXPOSED[platform] * seconds
            elif kind == "weights":
                for n, least_share in enumerate(LEAST_EXPOSED[platform][:2]):
                    least_share = SLICES_EXPOSED if link == "dcn" else least_share
                    _add(sent_s[n], least_exposed_s[n], axes, seconds / 2, least_share)
            else:
                least_share = LEAST_EXPOSED[platform][2]
                if link == "network" and replicas:
                    least_share = REPLICAS_EXPOSED
                elif platform == "tpu" and (link == "ici" or not gathered.isdisjoint(axes.split("+"))):
                    least_share = GRADIENTS_EXPOSED[network.chip.torus_dimensions]
                _add(sent_s[2], least_exposed_s[2], axes, seconds, least_share)
        hiding_s = (passes_s[0], passes_s[1], passes_s[1], sum(passes_s))
        for sent, least, share, compute_s in zip(
            sent_s, least_exposed_s, HIDDEN_SHARE[platform], hiding_s, strict=True
        ):
            for link in _sharing_links(network, groups, sent):
                seconds = sum(sent[axes] for axes in link)
                link_exposed_s = max(sum(least[axes] for axes in link), seconds - share * compute_s)
                for axes in link:
                    exposed[axes] += link_exposed_s * sent[axes] / seconds if seconds else 0.0
        return {axes: seconds for axes, seconds in exposed.items() if seconds}, total_s

    def exposed_host_copy_s(
        self,
        loops: Sequence[Offloaded],
        sizes: Sequence[Sequence[float]],
        remaining_s: Sequence[Sequence[float]],
        passes_s: tuple[float, float],
        computes_again: bool,
    ) -> float:
        """The exposed seconds of copies to the host in the forward pass, and from the host in the backward pass.

        sizes: the bytes that one device copies of each array of each loop in a step, one way.
        remaining_s: of each of these arrays, the compute that the iterations have left when they have made it.
        computes_again: whether the backward pass computes matmuls again.

        Copies that take longer than compute are exposed. On GPUs an iteration ends when its copies to the host have
        ended, so an array's copy hides behind what is left to compute when the array has been made. An iteration also
        waits where it could go on. To the host, as many copies as can be under way hide behind the matmuls at its end,
        and that of what it is given behind those at its beginning; it waits for the others one after the other. They
        are of the arrays that are made last, because the scheduler works from the end to the beginning. From the host,
        an iteration begins with the copy of the array that was made last. It waits for it if more arrays are copied
        than can be under way, or if it begins with what is computed again.
        """
        chip = self.target.chip
        assert chip
        total_s = forward_s = backward_s = 0.0
        forward_share, backward_share = HOST_HIDDEN_SHARE[chip.platform]
        for loop, sizes_of_loop, remaining_of_loop_s in zip(loops, sizes, remaining_s, strict=True):
            seconds = [size / chip.host_bytes_per_s for size in sizes_of_loop]
            total_s += sum(seconds)
            if chip.gpu:
                waits_s = sum(seconds[COPIES_UNDER_WAY + loop.begins_with_input :])
                left_s = [
                    sum(seconds[n:]) - forward_share * compute_s for n, compute_s in enumerate(remaining_of_loop_s)
                ]
                forward_s += max(waits_s, *left_s)
                backward_s += seconds[-1] if computes_again or len(seconds) > COPIES_UNDER_WAY else 0.0
        forward_s = max(forward_s, total_s - forward_share * passes_s[0])
        return forward_s + max(backward_s, total_s - backward_share * passes_s[1])

    def locations(self, rules: Rules) -> dict[str, Any]:
        """The numbers, coordinates, slices and hosts of the devices of a mesh, in its order.

        Devices without links of their own, such as simulated ones, stand in one host.
        """
        if self.devices:
            return targets.numbered_locations(meshes.build(rules, self.devices))
        ids, alike = tuple(range(rules.devices)), (0,) * rules.devices
        hosts = self.target.simulated_hosts if self.target.platform == "cpu" else alike
        return {"ids": ids, "coords": tuple((n,) for n in ids), "slices": alike, "hosts": hosts}

    def network(self, rules: Rules) -> tuple[Network, dict[str, Groups]]:
        """The links of a mesh, and the groups of devices that differ in some of its axes only."""
        key = tuple(rules.mesh.items()), tuple(rules.dcn.items())
        if key not in self._networks:
            locations = self.locations(rules)
            del locations["ids"]
            self._networks[key] = Network(self.target.chip, **locations, mesh=rules.mesh), _Groups(rules)
        return self._networks[key]

    def transfer_s(self, rules: Rules, one: Transfer) -> float:
        """The seconds of a traced transfer, sent once, on the links of its mesh axes."""
        network, groups = self.network(rules)
        devices = groups[one.mesh_axes]
        if one.kind == "collective-permute":
            return network.time_s(one.kind, one.bytes, _neighbours(devices))
        return network.time_s(one.kind, one.bytes / sent_bytes(one.kind, 1.0, len(devices[0])), devices)


def _sharing_links(network: Network, groups: Mapping[str, Groups], sent: Iterable[str]) -> list[list[str]]:
    """Groups of mesh axes that share links: on a torus those with a common axis, elsewhere all on one network."""
    links: list[tuple[set[str], list[str]]] = []
    for axes in sent:
        names = set(axes.split("+")) if network.link(groups[axes]) == "ici" else {"network"}
        for names_on_link, link in links:
            if names & names_on_link:
                names_on_link |= names
                link.append(axes)
                break
        else:
            links.append((names, [axes]))
    return [link for _, link in links]


def _neighbours(groups: Groups) -> Groups:
    """The pairs of devices of which the first one sends to the second, which is the next of its group."""
    return tuple(pair for group in groups for pair in zip(group, (*group[1:], group[0]), strict=True))


def _add(sent_s: dict[str, float], least_exposed_s: dict[str, float], axes: str, seconds: float, share: float) -> None:
    sent_s[axes] += seconds
    least_exposed_s[axes] += share * seconds


def _combine(transfers: Iterable[EstimatedTransfer]) -> Iterable[tuple[str, str, int, bool, float]]:
    """Kind, mesh axes, times, whether in a loop, and bytes of each transfer. An iteration sends its weights together.

    Weights that are gathered for both passes are sent twice in an iteration.
    """
    total_bytes: dict[tuple[str, str, int, bool], float] = collections.defaultdict(float)
    for transfer in transfers:
        if transfer.kind in ("activations", "keys", "stages", "waiting"):
            yield transfer.kind, transfer.axes, transfer.times_per_step, transfer.in_loop, transfer.bytes
        else:
            total_bytes[transfer.kind, transfer.axes, transfer.times_per_step, transfer.in_loop] += transfer.bytes
    for (kind, axes, times, in_loop), size_bytes in total_bytes.items():
        passes = 2 if kind == "weights" and in_loop else 1
        yield kind, axes, times * passes, in_loop, size_bytes / passes


def _devices(target: Target) -> list[Any]:
    """The compile-only devices of a target, of which only the locations are asked.

    libtpu looks for the machine that it is on and complains where there is none, unless it is told one. jax's plugin
    for GPUs is refused on a machine without a GPU, unless jax is told to use the CPU.
    """
    if target.chip and target.chip.gpu and target.chip.gpu.compute_capability == NO_CUDA:
        target = dataclasses.replace(target, chip=CHIPS["h100"])  # any GPU of NVIDIA's stands at the same places
    wanted = quiet.WITHOUT_TPU | _HOST_OF_TPU
    added = {name: value for name, value in wanted.items() if name not in os.environ}
    os.environ.update(added)
    platforms: Any = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]
    jax.config.update("jax_platforms", "cpu")
    try:
        return targets.devices(target)
    finally:
        jax.config.update("jax_platforms", platforms)
        for name in added:
            del os.environ[name]


class _Groups(dict[str, Groups]):
    """Mesh axes, such as fsdp+tensor -> the groups of devices that differ in these axes only."""

    def __init__(self, rules: Rules):
        self.mesh = dict(rules.mesh)

    def __missing__(self, axes: str) -> Groups:
        positions = [n for n, name in enumerate(self.mesh) if name in axes.split("+")]
        devices = np.arange(math.prod(self.mesh.values())).reshape(*self.mesh.values())
        ordered = np.moveaxis(devices, positions, range(-len(positions), 0))
        self[axes] = tuple(map(tuple, ordered.reshape(-1, math.prod(ordered.shape[-len(positions) :])).tolist()))
        return self[axes]
