"""The time of a collective, from the mesh axes and the physical links over which its groups exchange data.

Formulas, with V the bytes of the whole tensor of one group of n devices and W the bytes/s of one link, one way:

  all-gather, reduce-scatter   V (n-1)/n / (links W); an all-reduce is both, one after the other
  all-to-all                   the bytes that cross the middle of each torus dimension, over the links there
  collective-permute           the bytes on the fullest link of the shortest paths

On a torus a group uses all its dimensions at once, and a ring in both directions. So `links` is 2 for each ring and 1
for each line, whose ends have one neighbour. Source: "How to Scale Your Model", jax-ml.github.io/scaling-book: sections
"Case 2" and "Our final communication primitive" of the chapter on sharding, "How Do Collectives Work on GPUs?" of the
one on GPUs. XLA does the same: its programs say 2DAllGather, StrategyND{colors:3 phases:3}.

A group that crosses slices first exchanges between the slices and then within each. In the first part every device
sends its own share, over its share of the host's network. The latency between slices is not published anywhere, and
is left out. GPUs do both parts at once: NCCL runs rings through all devices of all hosts, one ring for each network
card that a host has for the group. Each ring carries its share of the tensor. A host sends what any device passes on:
all but one of n pieces. NVLink may join fewer GPUs than a host has, such as pairs, or more, such as the 72 of a rack.
Between those of a host that it does not join, each ring goes over the PCIe of one GPU, as it goes over its network card
between hosts.
"""

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence

from gspmd_lm.hardware import measured
from gspmd_lm.hardware.chips import Chip

Groups = tuple[tuple[int, ...], ...]

# The least time of one hop over ICI. Source: scaling-book, sharding, "A note on ICI latency": typically around 1 us.
ICI_HOP_S = 1e-6
# The share of NVLink's bandwidth that NCCL reaches, 370 of 450 GB/s. Source: scaling-book, GPUs, "Empirical
# measurements". Reductions in the switches (NVLS) are left out: there they speed up only all-reduces, by 30%.
NVLINK_SHARE = 0.82
# The same of PCIe between GPUs of a host. It was not measured: it is taken to be that of NVLink.
PEER_SHARE = NVLINK_SHARE
# The share of the network's bandwidth that NCCL reaches between hosts. Source: NVIDIA/nccl, issue 1218: an all-gather
# of 2 GB over 32 hosts of 8 H100 with 400 Gbit/s for each runs at 200 GB/s per host, half of the network. A tenth of
# its time are the latencies below. Two hosts that send many GB reach 0.94: NVIDIA/nccl-tests, issue 290.
NETWORK_SHARE = 0.55
# The cores of a GPU that NCCL's kernels take while a collective runs, one for each channel; as many as in that issue.
NCCL_CORES = 16
# NCCL's own model of a ring, for its three protocols: seconds to begin, seconds per step over NVLink, seconds per step
# over the network, and the share of the bandwidth. NCCL takes the fastest protocol. Source: NVIDIA/nccl,
# src/graph/tuning.cc: baseLat, hwLat, busBw.
NCCL_PROTOCOLS = {
    "Simple": (8.4e-6, 3.4e-6, 9.6e-6, 1.0),
    "LL128": (10.0e-6, 1.9e-6, 4.0e-6, 0.92),
    "LL": (3.6e-6, 0.47e-6, 2.7e-6, 0.25),
}

# How many times the data goes round: an all-reduce is a reduce-scatter and an all-gather.
_RING_PASSES = {"all-gather": 1, "reduce-scatter": 1, "collective-broadcast": 1, "all-reduce": 2}
_ALL_TO_ALL = ("all-to-all", "ragged-all-to-all")


def sent_bytes(kind: str, size_bytes: float, group_size: int) -> float:
    """The bytes that one device sends in a collective of `group_size` devices.

    `size_bytes` is the whole tensor of the group for an all-gather (its result), a reduction (what one device begins
    with) and a broadcast. These go round a ring, so that a device passes on all but one of n pieces. For an all-to-all
    it is what one device holds, of which it keeps one of n pieces. For a permute it is what one device sends.

    Raises: ValueError for another kind.
    """
    if kind == "collective-permute":
        return size_bytes
    if kind not in _RING_PASSES and kind not in _ALL_TO_ALL:
        raise ValueError(f"{kind} is not a collective")
    return _RING_PASSES.get(kind, 1) * size_bytes * (group_size - 1) / group_size


@dataclasses.dataclass(frozen=True)
class Dimension:
    """The part of one torus dimension that a group covers."""

    chips: int
    ring: bool  # whether it closes; a ring is used in both directions
    stride: int  # hops between neighbours, which is also how many groups share each link

    @property
    def links(self) -> float:
        """How many links per chip one group has for itself, each direction counted."""
        return (2 if self.ring else 1) / self.stride

    @property
    def hops(self) -> int:
        """How many hops the data of one chip has to go."""
        return self.stride * (self.chips // 2 if self.ring else self.chips - 1)


@dataclasses.dataclass(frozen=True)
class Route:
    """The connections of one group of devices."""

    size: int  # devices
    outer: int  # how many slices, or hosts of GPUs, it crosses
    per_chip: int = 1  # how many of its devices are on each chip
    dimensions: tuple[Dimension, ...] = ()  # the torus within a slice; () on GPU
    islands: int = 1  # how many groups of GPUs that NVLink joins it has in each host

    @property
    def inner(self) -> int:
        """How many of its devices are in one slice or host."""
        return self.size // self.outer


@dataclasses.dataclass(frozen=True)
class Network:
    """The devices of one program. Entry k of coords, slices and hosts belongs to partition k, mesh.devices.flat[k]."""

    chip: Chip | None  # None: simulated devices, which have mesh axes but no times
    coords: tuple[tuple[int, ...], ...]  # the place of each device's chip in its slice; any value on GPU
    slices: tuple[int, ...]
    hosts: tuple[int, ...]
    mesh: Mapping[str, int]

    @functools.cached_property
    def axes(self) -> Callable[[Groups], tuple[str, ...]]:
        """A function of groups: the mesh axes along which devices of one group differ, in the mesh's order."""
        return functools.cache(self._axes)

    def outer(self, group: Sequence[int]) -> int:
        """How many slices of TPUs, or hosts of others, a group of devices crosses. NVLink may join several to one."""
        return self._route(group).outer

    def link(self, groups: Groups) -> str:
        """The slowest link in use: ici, die, dcn, nvlink, pcie, memory or network; '' without a chip or an exchange."""
        routes = self._routes(groups)
        if self.chip is None or all(route.size == 1 for route in routes):
            return ""
        crosses = any(route.outer > 1 for route in routes)
        if self.chip.platform == "cpu":
            return "network" if crosses else "memory"
        if self.chip.platform == "gpu":
            return "network" if crosses else "pcie" if any(route.islands > 1 for route in routes) else "nvlink"
        if crosses:
            return "dcn"
        return "ici" if any(route.dimensions for route in routes) else "die"

    def track(self, groups: Groups) -> str:
        """The lane of a collective in a timeline: 'ici fsdp', 'dcn data', 'nvlink tensor' or 'ici fsdp+tensor'."""
        return f"{self.link(groups)} {'+'.join(self.axes(groups))}".strip()

    def time_s(self, kind: str, size_bytes: float, groups: Groups) -> float:
        """The seconds of one collective, those of its slowest group.

        `size_bytes` is that of `sent_bytes`. The groups of a permute are (source, target) pairs.

        Raises: ValueError for another kind.
        """
        if self.chip is None:
            raise ValueError("simulated devices have no times")
        return self.chip.slowdowns.get(self.link(groups), 1.0) * self._time_s(self.chip, kind, size_bytes, groups)

    def _time_s(self, chip: Chip, kind: str, size_bytes: float, groups: Groups) -> float:
        """The seconds of one collective, as the figures of the chip but its slowdowns say."""
        if seconds := self._measured_s(chip, kind, size_bytes, groups):
            return seconds
        if chip.platform == "cpu":  # of which nothing like it was measured: the bytes alone
            crosses = any(self.hosts[a] != self.hosts[b] for group in groups for a, b in itertools.pairwise(group))
            sent = sent_bytes(kind, size_bytes, max(map(len, groups)))
            return sent / (chip.network_bytes_per_s if crosses else chip.hbm_bytes_per_s)
        if kind == "collective-permute":
            return self._permute_s(chip, size_bytes, groups)
        if kind not in _RING_PASSES and kind not in _ALL_TO_ALL:
            raise ValueError(f"{kind} is not a collective")
        routes = [route for route in self._routes(groups) if route.size > 1]
        if chip.platform == "gpu":
            times = (_gpu_s(chip, kind, size_bytes, route) for route in routes)
        elif kind in _ALL_TO_ALL:
            times = (self._exchange_s(chip, size_bytes, route) for route in routes)
        else:
            times = (_RING_PASSES[kind] * self._gather_s(chip, size_bytes, route) for route in routes)
        return max(times, default=0.0)

    def _measured_s(self, chip: Chip, kind: str, size_bytes: float, groups: Groups) -> float:
        """The seconds of a collective of its slowest group, as measured of the chip; 0 if nothing alike was."""
        if not chip.collective_times:
            return 0.0
        routes = [route for route in self._routes(groups) if route.size > 1]
        kind = "all-to-all" if kind in _ALL_TO_ALL else "all-gather" if kind == "collective-broadcast" else kind
        sizes = [(route.size, route.outer) for route in routes]
        if kind == "collective-permute":
            sizes = [(2, max(map(self.outer, groups), default=1))]
        return max((measured.collective_s(chip, kind, size_bytes, *size) for size in sizes), default=0.0)

    def _gather_s(self, chip: Chip, whole_bytes: float, route: Route) -> float:
        """The seconds of one pass of a TPU collective in which a device needs, or gives, all but its own share."""
        chips = route.inner // route.per_chip
        between_s = sent_bytes("all-gather", whole_bytes / route.inner, route.outer) / self._dcn_bytes_per_s(chip)
        ici_s = die_s = 0.0
        if chips > 1:
            links = sum(dimension.links for dimension in route.dimensions)
            ici_s = sent_bytes("all-gather", whole_bytes, chips) / (links * self._ici_bytes_per_s(chip, route))
        if route.per_chip > 1:
            die_s = sent_bytes("all-gather", whole_bytes, route.per_chip) / chip.die_link_bytes_per_s
        return between_s + max(ici_s, die_s, self._latency_s(route))

    def _exchange_s(self, chip: Chip, held_bytes: float, route: Route) -> float:
        """The seconds of an all-to-all on TPU: each device sends an equal part of its data to every other device."""
        between_s = sent_bytes("all-to-all", held_bytes, route.outer) / self._dcn_bytes_per_s(chip)
        within_bytes = held_bytes / route.outer * route.inner  # what all devices of a group in one slice hold
        chips, link_bytes_per_s = route.inner // route.per_chip, self._ici_bytes_per_s(chip, route)
        crossings_s = [self._latency_s(route)]
        for dimension in route.dimensions:
            near = dimension.chips // 2
            crossing_bytes = within_bytes * near * (dimension.chips - near) / dimension.chips**2
            crossings_s.append(crossing_bytes / (chips / dimension.chips * dimension.links * link_bytes_per_s))
        if route.per_chip > 1:
            crossings_s.append(within_bytes / chips / 4 / chip.die_link_bytes_per_s)
        return between_s + max(crossings_s)

    def _permute_s(self, chip: Chip, size_bytes: float, pairs: Groups) -> float:
        """The seconds of a permute, which its fullest link or its longest path needs."""
        s_per_byte, longest, crosses = self._permute_load(pairs)
        if chip.platform == "gpu" and s_per_byte:
            return _nccl_s(s_per_byte * size_bytes, int(not crosses), int(crosses))
        return max(s_per_byte * size_bytes, longest * ICI_HOP_S)

    @functools.cached_property
    def _permute_load(self) -> Callable[[Groups], tuple[float, int, bool]]:
        return functools.cache(self._find_permute_load)

    def _find_permute_load(self, pairs: Groups) -> tuple[float, int, bool]:
        """The load of a permute, whatever its size. Each pair takes a shortest path, dimension by dimension.

        Gives the seconds that the fullest link needs for each byte that a pair sends (0 if nothing is sent), the hops
        of the longest path, and whether any pair crosses the network.
        """
        assert self.chip
        chip, gpu, dcn_bytes_per_s = self.chip, self.chip.platform == "gpu", self._dcn_bytes_per_s(self.chip)
        devices, outside = collections.Counter(self.hosts), self._outsides if gpu else self.slices
        loads: collections.Counter[tuple] = collections.Counter()  # kind, bytes/s and place of a link -> its pairs
        longest = 0
        for source, target in pairs:
            if source == target:
                continue
            if outside[source] != outside[target]:
                # The chips of a host share its network. Each GPU has a port of its own.
                host = self.hosts[source]
                port = (dcn_bytes_per_s, source) if gpu else (dcn_bytes_per_s * devices[host], host)
                loads["network", *port] += 1
            elif gpu and self._islands[source] != self._islands[target]:
                loads["pcie", PEER_SHARE * chip.peer_bytes_per_s, source] += 1
            elif gpu:
                loads["nvlink", NVLINK_SHARE * chip.nvlink_bytes_per_s, source] += 1
            elif self.coords[source] == self.coords[target]:
                loads["die", chip.die_link_bytes_per_s, source] += 1
            else:
                path = self._path(self.coords[source], self.coords[target])
                loads.update(("ici", chip.ici_link_bytes_per_s, self.slices[source], *hop) for hop in path)
                longest = max(longest, len(path))
        slowest = max((load / speed for (_, speed, *_), load in loads.items()), default=0.0)
        return slowest, longest, any(link[0] == "network" for link in loads)

    def _path(self, start: Sequence[int], end: Sequence[int]) -> list[tuple]:
        """The links of a shortest path, each (from, to)."""
        place, path = list(start), []
        for axis, size in enumerate(self._torus):
            ahead = (end[axis] - place[axis]) % size
            forward = ahead <= size - ahead if self._rings[axis] else end[axis] > place[axis]
            while place[axis] != end[axis]:
                before = tuple(place)
                place[axis] = (place[axis] + (1 if forward else -1)) % size
                path.append((before, tuple(place)))
        return path

    def _latency_s(self, route: Route) -> float:
        return ICI_HOP_S * sum(dimension.hops for dimension in route.dimensions)

    def _ici_bytes_per_s(self, chip: Chip, route: Route) -> float:
        """A group's share of one ICI link, which devices of the same chips in other groups use too."""
        return chip.ici_link_bytes_per_s * route.per_chip / self._devices_on_a_chip

    def _dcn_bytes_per_s(self, chip: Chip) -> float:
        share = NETWORK_SHARE if chip.platform == "gpu" else 1.0
        return share * chip.network_bytes_per_s / self._devices_on_a_chip

    @functools.cached_property
    def _devices_on_a_chip(self) -> int:
        if self.chip is None or self.chip.platform == "gpu":
            return 1
        return max(collections.Counter(zip(self.slices, self.coords, strict=True)).values())

    @functools.cached_property
    def _torus(self) -> tuple[int, ...]:
        """How many chips a slice has along each dimension."""
        return tuple(max(places) + 1 for places in zip(*self.coords, strict=True))

    @functools.cached_property
    def _rings(self) -> tuple[bool, ...]:
        """Whether each dimension is a ring. A flat torus has a third coordinate that is always 0."""
        assert self.chip
        used = self._torus[: self.chip.torus_dimensions]
        return self.chip.wraps(used) + (False,) * (len(self._torus) - len(used))

    @functools.cached_property
    def _mesh_coordinates(self) -> tuple[tuple[int, ...], ...]:
        """The mesh coordinates of each partition."""
        return tuple(itertools.product(*map(range, self.mesh.values())))

    def _axes(self, groups: Groups) -> tuple[str, ...]:
        varying = set()
        for group in groups:
            columns = zip(*(self._mesh_coordinates[k] for k in group), strict=True)
            varying |= {name for name, places in zip(self.mesh, columns, strict=False) if len(set(places)) > 1}
        return tuple(name for name in self.mesh if name in varying)

    @functools.cached_property
    def _routes(self) -> Callable[[Groups], tuple[Route, ...]]:
        """A function of groups: their different routes."""
        return functools.cache(lambda groups: tuple(dict.fromkeys(map(self._route, groups))))

    def _route(self, group: Sequence[int]) -> Route:
        if self.chip is None:
            return Route(len(group), 1)
        if self.chip.platform == "cpu":
            return Route(len(group), len({self.hosts[k] for k in group}))
        if self.chip.platform == "gpu":
            outer = len({self._outsides[k] for k in group})
            return Route(len(group), outer, islands=len({self._islands[k] for k in group}) // outer)
        outer = len({self.slices[k] for k in group})
        coords = [self.coords[k] for k in group if self.slices[k] == self.slices[group[0]]]
        chips = list(dict.fromkeys(coords))
        return Route(len(group), outer, len(coords) // len(chips), self._dimensions(chips))

    @functools.cached_property
    def _islands(self) -> tuple[tuple[int, int], ...]:
        """The group of GPUs that NVLink joins, of each partition: a host, or several, and its number in the host."""
        assert self.chip
        chip, before = self.chip, collections.Counter[int]()
        each = (chip.nvlink_gpus or chip.gpus_per_host) if chip.nvlink_bytes_per_s else 1
        islands: dict[int, tuple[int, int]] = {}
        for k in sorted(range(len(self.hosts)), key=lambda k: self.coords[k]):
            host = self.hosts[k]
            islands[k] = (host // max(1, each // chip.gpus_per_host), before[host] // min(each, chip.gpus_per_host))
            before[host] += 1
        return tuple(islands[k] for k in range(len(self.hosts)))

    @functools.cached_property
    def _outsides(self) -> tuple[int, ...]:
        """Of each partition, the hosts that NVLink joins: its own alone, or several."""
        return tuple(hosts for hosts, _ in self._islands)

    def _dimensions(self, chips: list[tuple[int, ...]]) -> tuple[Dimension, ...]:
        """The torus dimensions of a box of chips. Another shape counts as a line through the chips in their order."""
        columns = [sorted(set(column)) for column in zip(*chips, strict=True)]
        if len(chips) > 1 and math.prod(map(len, columns)) != len(chips):
            return (Dimension(len(chips), False, max(len(self._path(*two)) for two in itertools.pairwise(chips))),)
        dimensions = []
        for places, size, wraps in zip(columns, self._torus, self._rings, strict=True):
            if len(places) > 1:
                stride = max(after - before for before, after in itertools.pairwise(places))
                dimensions.append(Dimension(len(places), wraps and stride * len(places) == size, stride))
        return tuple(dimensions)


def _gpu_s(chip: Chip, kind: str, size_bytes: float, route: Route) -> float:
    """The seconds of a collective of GPUs: NVLink within a host and network ports between hosts work at once."""
    size, outer, inner, islands = route.size, route.outer, route.inner, route.islands
    joined = inner // islands  # by NVLink
    if kind in _ALL_TO_ALL:
        passes, steps = 1, 1
        within_bytes, between_bytes = size_bytes * (joined - 1) / size, size_bytes * (size - inner) / size
        peer_bytes = size_bytes * (inner - joined) / size
    else:
        passes = _RING_PASSES[kind]
        steps = passes * (size - 1)
        within_bytes = sent_bytes("all-gather", size_bytes, size) if joined > 1 else 0.0
        peer_bytes = sent_bytes("all-gather", size_bytes / joined, size) if islands > 1 else 0.0
        within_bytes -= peer_bytes * (joined > 1)  # where a ring leaves the GPUs that NVLink joins
        between_bytes = sent_bytes("all-gather", size_bytes / inner, size) if outer > 1 else 0.0
    nvlink_s = within_bytes / (NVLINK_SHARE * chip.nvlink_bytes_per_s) if within_bytes else 0.0
    peer_s = peer_bytes / (PEER_SHARE * chip.peer_bytes_per_s) if peer_bytes else 0.0
    across = min(steps, passes * (outer - 1))
    network_s = between_bytes / (NETWORK_SHARE * chip.network_bytes_per_s)
    return _nccl_s(passes * max(nvlink_s, peer_s, network_s), steps - across, across)


def _nccl_s(transfer_s: float, steps: int, network_steps: int) -> float:
    """The seconds that NCCL expects of its fastest protocol."""
    return min(
        begin_s + steps * step_s + network_steps * network_step_s + transfer_s / share
        for begin_s, step_s, network_step_s, share in NCCL_PROTOCOLS.values()
    )
