"""Targets such as v5p:4x4x4, 2@v6e:16x16, h100:4x8, h100:4x8/800 or cpu:8, and compile-only jax devices of them.

Google Cloud's names of TPU slices, such as v5p-128 or v5litepod-16, are targets too. So are chips of one's own: my:8 is
a target if my.yaml in the working folder describes a chip, and folder/my.yaml:8 names the file itself.
"""

import dataclasses
import importlib.util
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gspmd_lm import versions
from gspmd_lm.errors import InputError, did_you_mean
from gspmd_lm.hardware.capacity import Price
from gspmd_lm.hardware.chips import CHIPS, NO_CUDA, Chip, Processor, chip_of, gpu_target_config, platform_of, reading

# Topologies that Google rents out. Sources: Cloud TPU documentation, per-version pages.
_FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")  # v5e, v6e: parts of one 16 x 16 pod
_FLAT_OF = {
    "v2": ("2x2", "4x4", "8x8", "8x16", "16x16"),
    "v3": ("2x2", "4x4", "8x8", "8x16", "16x16", "16x32", "32x32"),
}
# v4, v5p, tpu7x: smaller than a 4 x 4 x 4 cube; larger slices are made of cubes.
_SMALL_CUBOIDS = ("2x2x1", "2x2x2", "2x2x4", "2x4x4")
_CUBE = 4
_CUBOIDS = ("4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16", "8x16x16", "16x16x16")  # of the larger ones, cubes doubled
# How many such cubes a slice has at most. Source: Cloud TPU documentation, per-version pages, read in 2026: a v4 pod
# has 4096 chips, the largest v5p slice 6144 (16x16x24), a tpu7x pod 9216.
_MOST_CUBES = {"v4": 64, "v5p": 96, "tpu7x": 144}
_LONGEST = 256  # chips along a dimension of a slice that Google Cloud has a name for
_CHIPS_PER_HOST = 4  # of a TPU slice of several hosts
MOST_DEVICES = 2**18  # more than the largest cluster that is known, of 200,000; jax makes an object of each
# The words in the name of a GPU that tell the boards of one chip apart. Their clocks, memory and links differ.
_BOARD = re.compile(r"(?i)\b(?:\d+GB|PCIe|NVL|SXM\d?|MIG|Laptop)\b")
_WHOLE = "[1-9][0-9]{0,17}"  # a whole number, which Python can read
_GBPS = range(10, 12_801)  # that the network of a host may have
_EXAMPLES = "cpu:8, v5e:4x4, v5p:4x4x4, v5p-128, 2@v6e:16x16, h100:8, h100:4x8 or h100:4x8/800"


@dataclasses.dataclass(frozen=True)
class Target:
    """The hardware that a layout is explained for."""

    text: str  # as the user wrote it, but for names of Google Cloud, which become the topology that they mean
    platform: str  # cpu, gpu or tpu
    chip: Chip | None  # None: cpu. Its network is the one that the text names.
    topology: tuple[int, ...]  # chips per dimension of a slice; hosts x GPUs; simulated devices
    slices: int = 1

    @property
    def chips(self) -> int:
        """The number of chips in all slices, as they are rented; of cpu, its devices."""
        return self.slices * math.prod(self.topology)

    @property
    def devices(self) -> int:
        """How many jax devices the target has; a tpu7x chip is two."""
        return self.chips * (self.chip.devices_per_chip if self.chip else 1)

    def usd_per_billion(self, per_s: float, usd_per_chip_hour: float) -> float:
        """The price of a billion tokens, or rows, on a target that computes `per_s` of them in a second."""
        return 1e9 / per_s / 3600 * self.chips * usd_per_chip_hour

    @property
    def hosts(self) -> int:
        """How many hosts there are. A host of TPUs has four chips, as jax's topologies have it, or a whole slice."""
        if self.platform != "tpu":
            return self.topology[0] if len(self.topology) > 1 else 1
        return self.slices * max(1, math.prod(self.topology) // _CHIPS_PER_HOST)

    def price(self, given: Mapping[str, Price]) -> Price:
        """The price of a chip: the one that is given for it, else the lowest public one on demand."""
        if self.chip is None:
            return Price()
        return given.get(self.chip.name, Price(self.chip.usd_per_hour))

    @property
    def simulated_hosts(self) -> tuple[int, ...]:
        """The host of each device of a CPU target, whose compile-only devices are all of this process."""
        return tuple(k // self.topology[-1] for k in range(self.devices))

    @property
    def processor(self) -> Processor:
        """What decides which kernels the target can run."""
        gpu = self.chip and self.chip.gpu
        capability = gpu.compute_capability if gpu else ()
        return Processor(self.platform, self.chip.name if self.chip else self.platform, capability, self.chip)

    @property
    def hardware(self) -> str:
        """The text without the speed of the network, on which no compiled program depends."""
        return _without_network(self.text)[0]

    @property
    def chip_text(self) -> str:
        """What the text has before the topology: h100, or 2@v6e, or the file that describes a chip."""
        return self.hardware.rpartition(":")[0]


def _without_network(text: str) -> tuple[str, str, str]:
    """The parts of a target before, at and after the slash of a network. The path of a file may have slashes too."""
    path, ending, after = text.partition(reading.ENDING)
    hardware, slash, network = (after if ending else text).partition("/")
    return (path + ending if ending else "") + hardware, slash, network


def parse(text: str) -> Target:
    """The target that a text names. Raises InputError for a chip or a topology that does not exist."""
    target = _parse_name(text)
    if target.devices > MOST_DEVICES:
        raise InputError(
            f"--target={text}: {target.devices:,} devices, and a target has at most {MOST_DEVICES:,}\n"
            f"  fix   fewer {'slices' if target.platform == 'tpu' else 'devices'}"
        )
    return target


def _parse_name(text: str) -> Target:
    place = f"--target={text}"
    hardware, slash, network = _without_network(text)
    slices, at, rest = hardware.rpartition("@")
    if rest.startswith("tpu-"):
        plain = f"{slices}{at}{rest.removeprefix('tpu-')}"
        raise InputError(
            f"{place}: no target begins with tpu-\n  fix   --target={plain}, which is {_parse_name(plain).text}"
        )
    if cloud_name := re.fullmatch(r"([a-z]\w*)-([0-9]{1,18})", rest):
        rest = _topology_of_cloud_name(place, *cloud_name.groups())
        text = f"{slices}{at}{rest}"
    name, colon, size = rest.partition(":")
    chip = None if name == "cpu" else _find_chip(name, place)
    if not colon or not re.fullmatch(rf"{_WHOLE}(x{_WHOLE})*", size) or (at and not re.fullmatch(_WHOLE, slices)):
        raise InputError(f"{place}: no such form\n  fix   write it like {_EXAMPLES}")
    dimensions = tuple(map(int, size.split("x")))
    if slash and (chip is None or chip.platform != "gpu"):
        raise InputError(f"{place}: only hosts of GPUs differ in their networks\n  fix   --target={hardware}")
    if chip is None or chip.platform != "tpu":
        if at:
            raise InputError(f"{place}: only TPUs have slices\n  fix   write hosts x devices, such as h100:4x8")
        target = _without_torus(place, text, name, chip, dimensions)
        return _with_network(place, target, network) if slash else target
    wrong = _no_such_topology(chip, dimensions)
    if wrong:
        raise InputError(f"{place}: {name} has no topology {size}\n  fix   {wrong}")
    return Target(text, "tpu", chip, dimensions, int(slices or 1))


def _find_chip(name: str, place: str) -> Chip:
    """The chip of the table, or of a file of one's own, with a name. Raises InputError if there is none."""
    if name in CHIPS:
        return CHIPS[name]
    if name.endswith(reading.ENDING):
        return read_own_chip(name)
    if re.fullmatch(r"[\w.-]+", name) and Path(file := f"{name}{reading.ENDING}").is_file():
        return read_own_chip(file)
    known = ("cpu", *CHIPS)
    raise InputError(
        f"{place}: unknown chip {name!r}{did_you_mean(name, known)}\n"
        f"  fix   use one of {', '.join(known)}, or describe it in {name or 'my'}{reading.ENDING} (docs/foresight.md)"
    )


def read_own_chip(file: str) -> Chip:
    """The chip that a file of a user describes. Raises InputError if it is wrong, or has the name of a known chip."""
    chip = reading.read_chip(Path(file), file)
    chip = chip if chip.note else dataclasses.replace(chip, note=f"never compared with a measured step; as {file} says")
    if chip.name in (*CHIPS, "cpu"):
        raise InputError(f"{file}: name: {chip.name}: a chip of the table has this name\n  fix   name: my_{chip.name}")
    return chip


def with_chip(text: str, chip_file: str) -> str:
    """The targets of a text, with a file in place of the name of the chip that it describes: folder/my.yaml:8 for my:8.

    There are commas between the targets. Raises InputError if none of them names that chip.
    """
    name = read_own_chip(chip_file).name
    changed = ",".join(re.sub(rf"^(\d+@)?{re.escape(name)}(?=:)", rf"\g<1>{chip_file}", one) for one in text.split(","))
    if changed == text:
        raise InputError(
            f"--target={text}: --chip={chip_file} describes {name}\n  fix   --target={name}:8, or drop --chip"
        )
    return changed


def cloud_names(chip: Chip) -> dict[int, str]:
    """The number in Google Cloud's name of each slice of a TPU -> its topology.

    The number counts TensorCores. v2, v3, v4, v5p and tpu7x have two in a chip. Of several shapes with as many cubes, a
    name means the one nearest to a cube.
    """
    sizes = [*_flat(chip)] if chip.torus_dimensions == 2 else [*_SMALL_CUBOIDS]
    for cubes in range(1, _MOST_CUBES.get(chip.name, 0) + 1):
        whole = [
            (a, b, cubes // (a * b))
            for a in range(1, cubes + 1)
            for b in range(a, cubes // a + 1)
            if cubes % (a * b) == 0 and cubes // (a * b) >= b
        ]
        sides = [side * _CUBE for side in min(whole, key=sum)]
        if sides[-1] <= _LONGEST:
            sizes.append("x".join(map(str, sides)))
    return {_chips(size) * _cores(chip): size for size in sizes}


def _cores(chip: Chip) -> int:
    """The TensorCores of a chip, which Google Cloud's names count."""
    return chip.tensor_cores * chip.devices_per_chip


def _flat(chip: Chip) -> tuple[str, ...]:
    """The topologies of a chip whose slices have two dimensions."""
    return _FLAT_OF.get(chip.compiler_name, _FLAT)


def _chips(size: str) -> int:
    return math.prod(map(int, size.split("x")))


def _topology_of_cloud_name(place: str, name: str, number: str) -> str:
    """The target that Google Cloud's name of a slice means: v5p:4x4x4 for v5p-128."""
    chip = CHIPS.get("v5e" if name == "v5litepod" else name)
    tpus = {"v5litepod", *(known for known, one in CHIPS.items() if one.platform == "tpu")}
    if chip is None or chip.platform != "tpu":
        raise InputError(
            f"{place}: Google Cloud has no TPU slices named {name}-N{did_you_mean(name, tpus)}\n"
            f"  fix   write it like {_EXAMPLES}"
        )
    names = cloud_names(chip)
    if int(number) not in names:
        near = sorted(sorted(names, key=lambda known: abs(known - int(number)))[:4])
        unit = "TensorCores, of which a chip has two" if _cores(chip) == 2 else "chips"
        offered = ", ".join(f"{name}-{known} ({names[known]})" for known in near)
        raise InputError(f"{place}: Google Cloud has no slice of {number} {unit}\n  fix   the nearest are {offered}")
    return f"{chip.name}:{names[int(number)]}"


def _without_torus(place: str, text: str, name: str, chip: Chip | None, dimensions: tuple[int, ...]) -> Target:
    """The CPU or GPU target of a number of devices, or of hosts x devices."""
    if chip is None or chip.platform == "cpu":
        if len(dimensions) > (2 if chip else 1):
            raise InputError(f"{place}: devices of a CPU have no topology\n  fix   {name}:{math.prod(dimensions)}")
        return Target(text, "cpu", chip, dimensions)
    most = chip.gpus_per_host
    hosts, per_host = dimensions if len(dimensions) == 2 else (1, dimensions[0])
    if len(dimensions) == 1 and per_host > most and per_host % most == 0:
        hosts, per_host = per_host // most, most
    if len(dimensions) > 2 or per_host > most:
        raise InputError(
            f"{place}: a host has at most {most} GPUs\n  fix   {name}:{most}, or hosts x GPUs: {name}:4x{most}"
        )
    return _gpu_target(text, chip, hosts, per_host)


def _gpu_target(text: str, chip: Chip, hosts: int, per_host: int) -> Target:
    """The target of GPUs. One alone does not slow down: what it reaches was measured on one."""
    alone = hosts * per_host == 1
    return Target(text, "gpu", dataclasses.replace(chip, matmul_slowdown=1.0) if alone else chip, (hosts, per_host))


def _with_network(place: str, target: Target, network: str) -> Target:
    """The target of GPUs whose hosts each have a network of so many Gbit/s, which their GPUs share."""
    if not re.fullmatch(_WHOLE, network) or int(network) not in _GBPS:
        raise InputError(
            f"{place}: a network of {network!r} Gbit/s per host\n"
            f"  fix   write a whole number from {_GBPS[0]} to {_GBPS[-1]}, such as {target.hardware}/800"
        )
    assert target.chip
    each_bytes_per_s = int(network) * 1e9 / 8 / target.topology[1]
    return dataclasses.replace(target, chip=dataclasses.replace(target.chip, network_bytes_per_s=each_bytes_per_s))


def _no_such_topology(chip: Chip, dimensions: tuple[int, ...]) -> str:
    """The fix for a topology that does not exist; '' for one that exists."""
    size = "x".join(map(str, dimensions))
    if chip.torus_dimensions == 2:
        return "" if size in _flat(chip) else f"use one of {', '.join(_flat(chip))}"
    cubes = f"one of {', '.join(_SMALL_CUBOIDS)}, or three multiples of {_CUBE} in ascending order such as 4x4x8"
    ascending = "x".join(map(str, sorted(dimensions)))
    if size in _SMALL_CUBOIDS:
        return ""
    if len(dimensions) != 3 or any(n % _CUBE for n in dimensions):
        return f"use {cubes}"
    if size != ascending:
        return f"use {ascending}"
    most = _MOST_CUBES.get(chip.compiler_name, math.inf) * _CUBE**3
    return "" if math.prod(dimensions) <= most else f"use at most {most:,} chips; 2@{chip.name}:4x4x4 are two slices"


def larger(target: Target) -> Iterator[Target]:
    """Targets of the same chip with more and more devices, which are rented out in these shapes."""
    chip = target.chip
    assert chip
    sizes: Iterable[str] = _flat(chip) if chip.torus_dimensions == 2 else (*_SMALL_CUBOIDS, *_CUBOIDS)
    if chip.platform == "cpu":
        sizes = map(str, range(target.devices + 1, MOST_DEVICES + 1))
    if chip.platform == "gpu":
        hosts, per_host = target.topology
        sizes = (f"{hosts * 2**n}x{per_host}" for n in range(1, (MOST_DEVICES // (hosts * per_host)).bit_length()))
    larger_ones = (size for size in sizes if _chips(size) > math.prod(target.topology))
    return (_resize(target, size) for size in larger_ones)


def _resize(target: Target, size: str) -> Target:
    """The target with as many of the same chips as `size` says, and with what a run has measured of them."""
    (_, slash, network), chip = _without_network(target.text), target.chip
    other = parse(f"{target.chip_text}:{size}{slash}{network}")
    assert chip and other.chip
    return dataclasses.replace(other, chip=dataclasses.replace(other.chip, slowdowns=chip.slowdowns, note=chip.note))


def with_chips(target: Target, chips: int) -> Target | None:
    """The smallest larger target of the same chip that has at least so many chips; None if none is rented out."""
    chip = target.chip
    assert chip
    if chip.platform == "gpu":
        _, per_host = target.topology
        hosts = -(-chips // per_host)
        return _resize(target, f"{hosts}x{per_host}") if hosts * per_host <= MOST_DEVICES else None
    return next((one for one in larger(target) if one.devices >= chips * chip.devices_per_chip), None)


def from_devices(devices: Sequence[Any], chip_file: str = "") -> Target:
    """The target that real or simulated `devices` form. Its chip is None if theirs is not known.

    chip_file: the file that describes their chip; "": the table does. Raises InputError if it describes others.
    """
    first, count = devices[0], len(devices)
    chip = read_own_chip(chip_file) if chip_file else chip_of(first.device_kind)
    platform = platform_of(first)
    if chip_file and chip and chip.platform != platform:
        raise InputError(
            f"--chip={chip_file}: describes a {chip.platform}, and the devices here are {platform}s\n"
            f"  fix   {versions.program()} calibrate --out=my.yaml measures them"
        )
    if chip and platform == "gpu" and not chip_file:
        chip = _with_note_of_board(chip, first.device_kind)
    if chip and platform == "gpu" and (limit_bytes := _limit_bytes(devices)):
        chip = dataclasses.replace(chip, usable_hbm_bytes=limit_bytes)
    if chip is None or chip.platform == "cpu":
        hosts = len({device.process_index for device in devices}) if chip else 1
        topology = (hosts, count // hosts) if hosts > 1 else (count,)
        size = "x".join(map(str, topology))
        return Target(f"{chip_file or platform}:{size}", platform, chip, topology)
    name = chip_file or chip.name
    if chip.platform == "gpu":
        hosts = len({device.process_index for device in devices})
        return _gpu_target(f"{name}:{hosts}x{count // hosts}", chip, hosts, count // hosts)
    slices = len({getattr(device, "slice_index", None) or 0 for device in devices})
    corners = zip(*(device.coords for device in devices), strict=True)
    topology = tuple(max(along) - min(along) + 1 for along in corners)[: chip.torus_dimensions]
    text = f"{name}:{'x'.join(map(str, topology))}"
    return Target(f"{slices}@{text}" if slices > 1 else text, "tpu", chip, topology, slices)


def _with_note_of_board(chip: Chip, device_kind: str) -> Chip:
    """The chip, with a note if `device_kind` names another board of it than the one whose figures are in the table."""
    described = chip.gpu.description if chip.gpu else ""
    here, known = ({word.lower() for word in _BOARD.findall(name)} for name in (device_kind, described))
    if here <= known:
        return chip
    note = f"never compared with a measured step; figures of {described}, and this is {device_kind}"
    return dataclasses.replace(chip, note=f"{note}: {versions.program()} calibrate measures it")


def _limit_bytes(devices: Sequence[Any]) -> int | None:
    """The memory of a GPU that jax has taken for this process, or None."""
    import jax

    local_device = next((device for device in devices if device.process_index == jax.process_index()), None)
    return (local_device.memory_stats() or {}).get("bytes_limit") if local_device else None


def device_locations(mesh: Any) -> dict[str, Any]:
    """Where the devices of a jax mesh are, in their order: the coordinates of their chips, their slices and hosts."""
    devices = list(mesh.devices.flat)
    return {
        "coords": tuple(tuple(getattr(device, "coords", None) or (device.id,)) for device in devices),
        "slices": tuple(getattr(device, "slice_index", None) or 0 for device in devices),
        "hosts": tuple(device.process_index for device in devices),
    }


def numbered_locations(mesh: Any) -> dict[str, Any]:
    """Where the devices of a jax mesh are, with their numbers."""
    return {"ids": tuple(device.id for device in mesh.devices.flat), **device_locations(mesh)}


def local_partitions(mesh: Any) -> dict[int, int]:
    """The number of each device of a jax mesh that this process has, as the process counts -> its place in the mesh."""
    import jax

    here = jax.process_index()
    return {one.local_hardware_id: at for at, one in enumerate(mesh.devices.flat) if one.process_index == here}


def devices(target: Target) -> list[Any]:
    """The compile-only jax devices of a target. For cpu, jax must already simulate them.

    Raises InputError if the compiler for the target is not installed.
    """
    import jax
    from jax.experimental import topologies

    if target.platform == "cpu":
        return jax.devices("cpu")[: target.devices]
    needed = {"tpu": "libtpu", "gpu": versions.cuda_plugin().replace("-", "_")}[target.platform]
    if importlib.util.find_spec(needed) is None:
        raise InputError(
            f"--target={target.text}: compiling for it needs {needed}, which is not installed\n"
            "  fix   pip install 'gspmd_lm[foresight]'"
        )
    assert target.chip is not None
    if target.platform == "gpu":
        if target.chip.gpu and target.chip.gpu.compute_capability == NO_CUDA:
            raise InputError(
                f"--target={target.text}: XLA's compiler for {target.chip.kinds[0]} is not supported\n"
                "  fix   compare A B --rows estimates two layouts without a compiler"
            )
        hosts, per_host = target.topology
        topology = topologies.get_topology_desc(
            platform="cuda", target_config=gpu_target_config(target.chip), topology=f"1x{hosts}x{per_host}"
        )
    else:
        size = "x".join(map(str, target.topology))
        more: dict[str, Any] = {"num_slices": target.slices} if target.slices > 1 else {}
        if size == "1x1":
            more["chips_per_host_bounds"] = [1, 1, 1]
        if target.chip.compiler_name == "v4":
            more["chip_config_name"] = "megacore"  # a chip is one device, as on a TPU VM
        topology = topologies.get_topology_desc(
            platform="tpu", topology_name=f"{target.chip.compiler_name}:{size}", **more
        )
    return list(topology.devices)
