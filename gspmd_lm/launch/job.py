"""What a launch file says: what is trained, where, and what it may cost. `launch_file` reads and checks it.

Flags are made of the keys, so nothing heavy is imported here.
"""

import dataclasses
import shlex
from typing import Annotated, Literal, get_type_hints

from annotated_types import Ge, Gt, Le

from gspmd_lm.errors import InputError
from gspmd_lm.hardware import target as targets
from gspmd_lm.hardware.target import Target

Size = Annotated[int, Ge(1)]
Positive = Annotated[float, Gt(0)]
PlaceName = Literal["local", "tpu-vm", "queued-resource", "slurm", "gke"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """The keys of a launch file. Each is a flag of `launch` too, whose help is the text in the type of the key."""

    place: Annotated[PlaceName, "Where the run is started: local, tpu-vm, queued-resource, slurm or gke."] = "local"
    workdir: Annotated[str, "The folder of the run: gs://bucket/path, or one that all hosts see."] = ""
    train: Annotated[str, "What is trained: the flags of train, without --workdir. More flags may follow after --."] = (
        ""
    )
    name: Annotated[str, "The name of the slice or job. The default is the last part of the workdir."] = ""
    accelerator: Annotated[str, "The slice or the GPUs, such as v5litepod-256, v5e:16x16 or h100:2x8."] = ""
    project: Annotated[str, "The project at Google Cloud. The default is that of gcloud."] = ""
    zone: Annotated[str, "The zone at Google Cloud, such as us-west4-a."] = ""
    runtime_version: Annotated[str, "The image of the TPU hosts. The default follows from the accelerator."] = ""
    spot: Annotated[bool, "Ask for capacity that may be preempted."] = False
    port: Annotated[Size, Le(65535), "The port of the first TPU host at which all hosts meet."] = 8482
    processes: Annotated[Size, "How many processes share this machine, where the place is local."] = 1
    image: Annotated[str, "The container image with this package in it, where the place is gke."] = ""
    python: Annotated[str, "The Python that every node sees, where the place is slurm."] = ".venv/bin/python"
    time: Annotated[str, "The time limit of one job, where the place is slurm."] = "08:00:00"
    elastic: Annotated[
        bool, "Go on with fewer slices or nodes where not all can be had, and with other rules (train --elastic)."
    ] = False
    max_retries: Annotated[int, Ge(0), "How often the run is started again."] = 100
    max_hours: Annotated[Positive | None, "Stop the run after this many hours. The default is no limit."] = None
    max_usd: Annotated[
        Positive | None, "Stop the run when the accelerator has cost so much. The default is no limit."
    ] = None
    usd_per_hour: Annotated[Positive | None, "The price of a chip. The default is the public price on demand."] = None
    assume: Annotated[str, "What is known of the job: preemptions_per_day=4,storage_gb_per_s=2, as explain has it."] = (
        ""
    )
    autodelete: Annotated[bool, "Give the slice back at the end, if launch created it."] = False
    logs: Annotated[str, "The folder of the logs of all processes. The default is runs/NAME.launch."] = ""

    @property
    def arguments(self) -> list[str]:
        """The flags of train."""
        try:
            return [*shlex.split(self.train), *(["--elastic"] if self.elastic else ())]
        except ValueError as error:
            raise InputError(f"train: {self.train}: {error}\n  fix   close the quotation marks") from error

    @property
    def target(self) -> Target | None:
        """The hardware that `accelerator` names; None if it is empty. Raises InputError for an unknown one."""
        try:
            return targets.parse(self.accelerator) if self.accelerator else None
        except InputError as error:
            raise InputError(str(error).replace("--target=", "accelerator: ")) from error


KEYS = {field.name: field for field in dataclasses.fields(Job)}
ABOUT: dict[str, str] = {key: hint.__metadata__[-1] for key, hint in get_type_hints(Job, include_extras=True).items()}
