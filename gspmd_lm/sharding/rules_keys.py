"""The keys of a rules file, with their types and meanings. `rules_file` reads them and says what is wrong in one."""

import dataclasses
from typing import Annotated, Any, Literal

import pydantic
from pydantic.dataclasses import dataclass

from gspmd_lm.config.types import STRICT, Size
from gspmd_lm.hardware.chips import PLATFORMS
from gspmd_lm.sharding.axes import DECODER
from gspmd_lm.sharding.rules import CONTEXTS, EXPERT_BUFFER, GATHERS, KEEPS, KERNELS, MESH_AXES, SCHEDULES


def _one_of(*words: str) -> Any:
    return pydantic.Field(json_schema_extra={"enum": list(words)})


_ARRAYS, _AXES = "|".join(DECODER.arrays), "|".join(DECODER.axes)
_ROWS: Any = {"anyOf": [{"enum": [*DECODER.axes]}, {"pattern": rf"^([a-z_0-9]+\.)*({_ARRAYS})\.({_AXES})$"}]}
MeshAxis = Annotated[str, _one_of(*MESH_AXES)]
Platform = Annotated[str, _one_of(*PLATFORMS)]
Kernel = Annotated[str, _one_of(*dict.fromkeys(kernel for kernels in KERNELS.values() for kernel in kernels))]
Kept = Annotated[str, _one_of(*DECODER.saveable_names)]
OpenSize = Size | Literal[-1]  # -1: all the devices that are left
Target = MeshAxis | list[MeshAxis] | None
Table = Annotated[dict[str, Target], pydantic.Field(json_schema_extra={"propertyNames": _ROWS})]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RematNames:
    """Arrays of a block that are kept for the backward pass by their names."""

    save: tuple[Kept, ...] = ()  # on the device
    offload: tuple[Kept, ...] = ()  # in the memory of the host


@dataclass(frozen=True, kw_only=True, config=STRICT)
class PipelineKeys:
    """The layers are computed in stages, the pieces into which a row weights: {layers: stage} splits them."""

    microbatches: Size  # how many pieces of the batch go through the stages; a multiple of the stages
    repeats: Size = 1  # how often each goes round
    # Stages gather their weights and sum their gradients in each turn, or once in a step. null decides by memory.
    gather: Annotated[str, _one_of(*GATHERS)] | None = None
    # A stage keeps what remat says of its layers for the backward pass, or only its input.
    keep: Annotated[str, _one_of(*KEEPS)] = KEEPS[0]
    # Microbatches go back after all of them have come through, or each as soon as it can.
    schedule: Annotated[str, _one_of(*SCHEDULES)] = SCHEDULES[0]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RulesFile:
    """Where and how a config is computed. A rules file has these keys, which --set names with rules. before them."""

    mesh: dict[MeshAxis, OpenSize]  # mesh axes with their sizes, the outermost first; one may be -1
    # Logical axes, or those of one array (residual.seq), with the mesh axes that split them. null replicates.
    rules: Table | None = dataclasses.field(default_factory=dict)
    weights: Table | None = dataclasses.field(default_factory=dict)  # rows for weights, over those of rules
    optimizer: Table | None = dataclasses.field(default_factory=dict)  # rows for optimizer state, over both of these
    # What is kept for the backward pass: all, the input of each block, the results of products, or arrays by name.
    remat: Literal["none", "block", "dots"] | RematNames = "none"
    microbatches: Size = 1  # pieces of the batch that are computed one after the other, before one update
    pipeline: PipelineKeys | None = None
    interleave: Size = 1  # parts of a device's rows that each layer computes side by side
    # How many times the mean number of rows a device has room for, where tokens travel to their experts.
    expert_buffer: Annotated[float, pydantic.Field(ge=1)] = EXPERT_BUFFER
    unroll: Size | Literal["all"] | None = None  # layers of the loop that are written out one after the other
    attention: dict[Platform, Kernel] | None = dataclasses.field(default_factory=dict)  # the kernel of a platform
    context: Annotated[str, _one_of(*CONTEXTS)] = CONTEXTS[0]  # how keys reach the queries of a split sequence
    # Options of XLA for the programs of a platform.
    compiler_options: dict[Platform, dict[str, Any] | None] | None = dataclasses.field(default_factory=dict)
    # Into how many slices, or groups of hosts, a mesh axis is cut. auto, or nothing, leaves it to the program.
    dcn: dict[MeshAxis, Size] | Literal["auto"] | None = dataclasses.field(default_factory=dict)
