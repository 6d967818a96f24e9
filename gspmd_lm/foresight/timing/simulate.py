"""Discrete-event simulation of a compiled schedule: compute in order, and transfers beside it on their links."""

import collections
import dataclasses
import functools
import math
from collections.abc import Sequence

from gspmd_lm.foresight.hlo import HOST_SPACE, MEMORIES, Computation, Instruction, Module
from gspmd_lm.foresight.hlo.work import COLLECTIVES, ENDED, CollectiveOp, rendezvous
from gspmd_lm.foresight.timing import op_time
from gspmd_lm.hardware.chips import Chip
from gspmd_lm.hardware.network import NCCL_CORES, Network
from gspmd_lm.sharding.op_names import SAMPLING

MAX_ITERATIONS = 8  # of a loop that are simulated, unless two of them take equally long before
COMPUTE, HOST, MEMORY = "compute", "host", "memory"
NETWORK = "network"  # the links of collectives of GPUs and CPUs


@dataclasses.dataclass(eq=False)
class Event:
    """A stretch of time on a lane: compute, or a transfer."""

    begin_s: float
    end_s: float
    track: str
    kind: str
    instruction: Instruction
    waits_for: str = ""  # what compute waits for in a transfer: mesh axes, HOST or MEMORY


@dataclasses.dataclass(frozen=True)
class Iteration:
    """The last simulated iteration of a loop whose iterations take equally long."""

    begin_s: float
    seconds: float
    events: tuple[Event, ...]
    loop_s: float  # the seconds of all iterations


# The transfers under way in the value of an instruction: one, those of a tuple's elements, or none.
InFlight = Event | tuple["InFlight", ...] | None


class Simulation:
    """One simulated run of a compiled program. It runs when it is made."""

    def __init__(self, module: Module, chip: Chip, network: Network):
        self.module, self.chip, self.network = module, chip, network
        self.clock_s = 0.0
        self.compute_s: collections.defaultdict[str, float] = collections.defaultdict(float)  # matmul, attention, other
        self.exposed_s: collections.defaultdict[str, float] = collections.defaultdict(float)  # mesh axes, or HOST
        self.link_s: collections.defaultdict[str, float] = collections.defaultdict(float)  # link -> of its collectives
        self.iterations: dict[Instruction, Iteration] = {}
        self.branches: dict[Instruction, Computation] = {}  # conditional -> its branch that runs
        self._free_at_s: dict[str, float] = {}  # link -> the time from which it is free
        self._events: list[Event] = []
        self._in_flight: dict[str, Event] = {}  # chain_id, or rendezvous between slices -> the transfer under way
        self.op_time = functools.cache(self._op_time)  # in the instance, so that it goes with the module
        self.run(module.entry, ())

    def run(self, computation: Computation, parameters: Sequence[InFlight]) -> InFlight:
        """The value of a computation's root, after its instructions have run and the clock has moved on."""
        values: dict[Instruction, InFlight] = {}
        for instruction in computation.instructions.values():
            operands = [values[operand] for operand in instruction.operands]
            if instruction.opcode == "parameter":
                value = parameters[instruction.index] if instruction.index < len(parameters) else None
            else:
                value = self._instruction(instruction, operands)
            values[instruction] = value
        return values[computation.root]

    @property
    def communication_s(self) -> float:
        """The seconds of all collectives, exposed or not."""
        return sum(self.link_s.values())

    @property
    def operations(self) -> list[Instruction]:
        """The operations that ran: of the branches of a conditional, those of one."""
        left_out = {
            one
            for conditional, chosen in self.branches.items()
            for body in conditional.bodies
            if body is not chosen
            for one in body.operations
        }
        return [one for one in self.module.operations if one not in left_out]

    def _instruction(self, instruction: Instruction, operands: list[InFlight]) -> InFlight:
        opcode = instruction.opcode
        if opcode == "tuple":
            return tuple(operands) if any(value is not None for value in operands) else None
        if opcode == "get-tuple-element":
            return operands[0][instruction.index] if isinstance(operands[0], tuple) else operands[0]
        if opcode in ("bitcast", "optimization-barrier") or instruction.phase == "-update":
            return operands[0]
        if opcode == "while":
            return self._loop(instruction, operands[0])
        if opcode == "call":
            return self.run(instruction.bodies[0], operands)
        if opcode == "conditional":
            return self._conditional(instruction, operands)
        if opcode in ("send", "recv"):
            return self._send_or_receive(instruction)
        if instruction.phase == "-start":
            return self._start(instruction)
        if instruction.phase == "-done":
            self._wait(operands[0])
            return None
        self._synchronous(instruction)
        return None

    def _op_time(self, instruction: Instruction) -> op_time.OpTime:
        """The time of an instruction's compute. Transfers compute nothing."""
        if instruction.phase == "-start" and not (instruction.collectives or instruction.copies or instruction.bodies):
            return dataclasses.replace(op_time.NO_TIME, unknown=instruction.opcode)
        if instruction.base in COLLECTIVES or instruction.opcode in ("send", "recv") or instruction.phase:
            return op_time.NO_TIME
        time = op_time.op_time(instruction, self.chip)
        if slowdown := self.chip.slowdowns.get(time.kind):
            time = dataclasses.replace(time, seconds=slowdown * time.seconds)
        if instruction.opcode == "fusion" and time.kind == "other" and instruction.collectives:
            return dataclasses.replace(time, seconds=0.0)  # its time is that of the exchange
        return time

    def _synchronous(self, instruction: Instruction) -> None:
        """Runs compute, a collective that blocks, or a TPU fusion with one or both of them."""
        if instruction.opcode == "fusion" or instruction.base in COLLECTIVES:
            for ended in instruction.carried_collectives[ENDED]:
                self._wait(self._in_flight.pop(ended.chain_id, None))
            for op in instruction.collectives:
                transfer = self._start_collective(op)
                if op.asynchronous and transfer:
                    self._in_flight[op.instruction.chain_id] = transfer
                else:
                    self._wait(transfer)
        time = self.op_time(instruction)
        if time.seconds:
            self._compute(self._beside_collectives(time.seconds), time.kind, instruction)

    def _compute(self, seconds: float, kind: str, instruction: Instruction) -> None:
        """Moves the clock by the compute of an instruction."""
        self._events.append(Event(self.clock_s, self.clock_s + seconds, COMPUTE, kind, instruction))
        self.clock_s += seconds
        self.compute_s[kind] += seconds

    def _beside_collectives(self, seconds: float) -> float:
        """The seconds of compute that starts now: on a GPU, the kernels of collectives take some cores away from it."""
        if self.chip.gpu is None:
            return seconds
        cores = self.chip.gpu.core_count
        left = 1 - min(NCCL_CORES, cores // 2) / cores  # of a GPU with few cores, they take half
        slowed_s = min(seconds / left, max(0.0, self._free_at_s.get(NETWORK, 0.0) - self.clock_s))
        return seconds + slowed_s * (1 - left)

    def _start(self, instruction: Instruction) -> InFlight:
        if instruction.base in COLLECTIVES:
            return tuple(self._start_collective(exchange) for exchange in instruction.collectives)
        if instruction.copies:
            return self._copy(instruction)
        started: list[InFlight] = []
        beside_s = 0.0  # the compute of a computation that runs on another core
        for body in instruction.bodies:
            for inner in body.operations:  # also what a SparseCore hands on to its tiles
                started += [self._start_collective(exchange) for exchange in inner.collectives]
                beside_s += self.op_time(inner).seconds
        if beside_s:
            started.append(self._transfer(beside_s, [instruction.thread], MEMORY, "other", instruction, MEMORY))
        return tuple(started)

    def _start_collective(self, op: CollectiveOp) -> Event | None:
        axes, link = self.network.axes(op.groups), self.network.link(op.groups)
        if not axes:
            return None
        # On a torus different mesh axes have different links. Others are between the two devices of a chip, and between
        # the hosts of slices. In any other network all collectives share one link.
        links = [link] if link in ("die", "dcn") else [NETWORK]
        links = [f"{link} {axis}" for axis in axes] if link == "ici" else links
        # CPUs send the tensors of a collective one after another.
        sizes = op.tensor_bytes if self.chip.platform == "cpu" else (op.size_bytes,)
        seconds = sum(self.network.time_s(op.kind, size_bytes, op.groups) for size_bytes in sizes)
        self.link_s[link] += seconds
        lane = self.network.track(op.groups)
        return self._transfer(seconds, links, lane, op.kind, op.scheduled, "+".join(axes))

    def _copy(self, instruction: Instruction) -> Event | None:
        """The transfer of a copy beside compute: to or from the host, or into the memory on the chip."""
        operands = [operand.shape.arrays[0] for operand in instruction.operands]
        updates = instruction.copies == "dynamic-update-slice"
        results = [array for array in instruction.shape.arrays if array.dimensions]
        touched = [array for array in (*operands, *results) if array.dimensions]
        moved_bytes = min((a.padded_bytes for a in touched if a.memory_space in MEMORIES), default=0)
        from_host = operands[0].memory_space == HOST_SPACE and not updates
        to_host = not from_host and any(array.memory_space == HOST_SPACE for array in (operands[0], *results))
        if from_host or to_host:
            direction = "copy from host" if from_host else "copy to host"
            seconds = moved_bytes / self.chip.host_bytes_per_s
            return self._transfer(seconds, [direction], HOST, direction, instruction, HOST)
        seconds = moved_bytes / op_time.hbm_bytes_per_s(self.chip)
        if self.chip.gpu:  # no copy beside compute: XLA puts it among the kernels, and it reads and writes
            self._compute(2 * seconds + op_time.kernel_gap_s(self.chip), "other", instruction)
            return None
        return self._transfer(seconds, [MEMORY], MEMORY, "copy", instruction, MEMORY)

    def _send_or_receive(self, instruction: Instruction) -> InFlight:
        """The transfer that a send begins. Between slices, the matching receive waits for it."""
        meeting = rendezvous(instruction)
        if instruction.opcode == "recv":
            return self._in_flight.pop(meeting, None)
        for op in instruction.collectives:
            transfer = self._start_collective(op)
            if self.chip.gpu:  # the end of the send is waited for
                return transfer
            if transfer:
                self._in_flight[meeting] = transfer
        return None

    def _transfer(
        self, seconds: float, links: Sequence[str], track: str, kind: str, instruction: Instruction, waits_for: str
    ) -> Event:
        """A new transfer. It begins when all the links that it needs are free: first come, first served."""
        begin_s = max([self.clock_s, *(self._free_at_s.get(link, 0.0) for link in links)])
        for link in links:
            self._free_at_s[link] = begin_s + seconds
        event = Event(begin_s, begin_s + seconds, track, kind, instruction, waits_for)
        self._events.append(event)
        return event

    def _wait(self, value: InFlight) -> None:
        if isinstance(value, tuple):
            for part in value:
                self._wait(part)
        elif value and value.end_s > self.clock_s:
            if value.waits_for == MEMORY:
                self.compute_s["other"] += value.end_s - self.clock_s
            else:
                self.exposed_s[value.waits_for] += value.end_s - self.clock_s
            self.clock_s = value.end_s

    def _conditional(self, instruction: Instruction, operands: list[InFlight]) -> InFlight:
        """Runs the branch that computes longest; of the choice of a token, the shortest: by default it is greedy."""
        bodies = instruction.bodies
        if instruction not in self.branches:
            costs = [math.fsum(i.executions * self.op_time(i).seconds for i in body.operations) for body in bodies]
            wanted = min if SAMPLING in instruction.name_in_model.owners else max
            self.branches[instruction] = bodies[costs.index(wanted(costs))]
        chosen = self.branches[instruction]
        number = bodies.index(chosen)
        return self.run(chosen, operands[1 + number : 2 + number])

    def _loop(self, loop: Instruction, value: InFlight) -> InFlight:
        """Simulates iterations of a loop until two take equally long, then adds the others at once."""
        condition, body = loop.bodies
        trip_count = loop.trip_count
        iterations = 1 if trip_count is None else trip_count
        if self.chip.gpu and "known_trip_count" not in loop.config:
            self._compute((iterations + 1) * op_time.HOST_DECISION_S, "other", loop)
        loop_began_s, took_s, steady = self.clock_s, math.inf, False
        for iteration in range(min(iterations, MAX_ITERATIONS)):
            before = _Snapshot(self)
            value = self.run(body, [value])
            self.run(condition, [value])
            steady = math.isclose(before.took_s(self), took_s, rel_tol=1e-6, abs_tol=1e-9)
            took_s = before.took_s(self)
            if steady or iteration == min(iterations, MAX_ITERATIONS) - 1:
                events = tuple(dataclasses.replace(p) for p in self._events if p.end_s > before.clock_s)
                before.repeat(self, iterations - iteration - 1)
                self.iterations[loop] = Iteration(before.clock_s, took_s, events, self.clock_s - loop_began_s)
                break
        return value


class _Snapshot:
    """The state of a simulation before an iteration, with which the iteration can be repeated."""

    def __init__(self, simulation: Simulation):
        self.clock_s = simulation.clock_s
        self._first = len(simulation._events)
        self._sums = [sums.copy() for sums in self._sums_of(simulation)]
        self._free_at_s = dict(simulation._free_at_s)

    @staticmethod
    def _sums_of(simulation: Simulation) -> tuple[collections.defaultdict[str, float], ...]:
        return simulation.compute_s, simulation.exposed_s, simulation.link_s

    def took_s(self, simulation: Simulation) -> float:
        return simulation.clock_s - self.clock_s

    def repeat(self, simulation: Simulation, iterations: int) -> None:
        """Repeats the iteration `iterations` times: all clocks move on, also of links and transfers under way."""
        shift_s = iterations * self.took_s(simulation)
        for now, before in zip(self._sums_of(simulation), self._sums, strict=True):
            for name in now:
                now[name] += iterations * (now[name] - before.get(name, 0.0))
        for link, free_s in simulation._free_at_s.items():
            if free_s != self._free_at_s.get(link):
                simulation._free_at_s[link] = free_s + shift_s
        for event in simulation._events[self._first :]:
            if event.end_s > simulation.clock_s:
                event.begin_s += shift_s
                event.end_s += shift_s
        simulation.clock_s += shift_s
