"""A launch file: what is trained, where, and what it may cost. Flags of the command line are laid over it."""

import dataclasses
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import pydantic
from pydantic.dataclasses import dataclass

from gspmd_lm.config import core_yaml, paths
from gspmd_lm.config.types import STRICT, Count, Positive, Size, explain_problem
from gspmd_lm.errors import InputError
from gspmd_lm.hardware import target as targets
from gspmd_lm.hardware.target import Target

PlaceName = Literal["local", "tpu-vm", "queued-resource", "slurm", "gke"]


def _key(default: Any, about: str) -> Any:
    return dataclasses.field(default=default, metadata={"about": about})


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Job:
    """The keys of a launch file. Each is a flag of `launch` too, and `about` in its metadata is the flag's help."""

    place: PlaceName = _key("local", "Where the run is started: local, tpu-vm, queued-resource, slurm or gke.")
    workdir: str = _key("", "The folder of the run: gs://bucket/path, or one that all hosts see.")
    train: str = _key("", "What is trained: the flags of train, without --workdir. More flags may follow after --.")
    name: str = _key("", "The name of the slice or job. The default is the last part of the workdir.")
    accelerator: str = _key("", "The slice or the GPUs, such as v5litepod-256, v5e:16x16 or h100:2x8.")
    project: str = _key("", "The project at Google Cloud. The default is that of gcloud.")
    zone: str = _key("", "The zone at Google Cloud, such as us-west4-a.")
    runtime_version: str = _key("", "The image of the TPU hosts. The default follows from the accelerator.")
    spot: bool = _key(False, "Ask for capacity that may be preempted.")
    port: Size = _key(8482, "The port of the first TPU host at which all hosts meet.")
    processes: Size = _key(1, "How many processes share this machine, where the place is local.")
    image: str = _key("", "The container image with this package in it, where the place is gke.")
    python: str = _key(".venv/bin/python", "The Python that every node sees, where the place is slurm.")
    time: str = _key("08:00:00", "The time limit of one job, where the place is slurm.")
    max_retries: Count = _key(100, "How often the run is started again.")
    max_hours: Positive | None = _key(None, "Stop the run after this many hours. The default is no limit.")
    max_usd: Positive | None = _key(
        None, "Stop the run when the accelerator has cost so much. The default is no limit."
    )
    usd_per_hour: Positive | None = _key(None, "The price of a chip. The default is the public price on demand.")
    autodelete: bool = _key(False, "Give the slice back at the end, if launch created it.")
    logs: str = _key("", "The folder of the logs of all processes. The default is runs/NAME.launch.")

    @property
    def arguments(self) -> list[str]:
        """The flags of train."""
        try:
            return shlex.split(self.train)
        except ValueError as error:
            raise InputError(f"train: {self.train}: {error}\n  fix   close the quotation marks") from error

    @property
    def target(self) -> Target | None:
        """The hardware that `accelerator` names; None if it names none. Raises InputError if there is none of it."""
        try:
            return targets.parse(self.accelerator) if self.accelerator else None
        except InputError as error:
            raise InputError(str(error).replace("--target=", "accelerator: ")) from error


KEYS = {field.name: field for field in dataclasses.fields(Job)}


def read(path: str | None, flags: Mapping[str, Any], more: Sequence[str] = ()) -> Job:
    """The job of a launch file, with the values of `flags` laid over it and `more` flags of train behind its own.

    Raises:
        InputError: every key that does not exist or has a wrong value, in one message.
    """
    raw: Any = {}
    if path is not None:
        raw = core_yaml.parse(paths.read_text(Path(path).expanduser()), path)
        if not isinstance(raw, dict):
            raise InputError(f"{path}: not a mapping\n  fix   write lines such as place: queued-resource")
    try:
        job = pydantic.TypeAdapter(Job).validate_json(json.dumps(raw | dict(flags)))
    except pydantic.ValidationError as error:
        lines = [line for problem in error.errors() for line in explain_problem(problem, Job)]
        raise InputError("\n".join([f"{path or 'launch'}: wrong keys", *lines])) from error
    train = " ".join(filter(None, (job.train.strip(), shlex.join(more))))
    last = job.workdir.rstrip("/").rpartition("/")[2]
    name = job.name or re.sub(r"[^a-z0-9]+", "-", last.lower()).strip("-")
    return dataclasses.replace(job, train=train, name=name, logs=job.logs or f"runs/{name}.launch")


def check(job: Job, needed: Sequence[str]) -> None:
    """Raises InputError for keys that the place needs and the job lacks, all in one message, and for a bad name."""
    if missing := [key for key in ("workdir", *needed) if not getattr(job, key)]:
        lines = [f"  {key:16} {KEYS[key].metadata['about']}" for key in missing]
        fix = f"add them to the launch file, or give {' '.join(f'--{key}=...' for key in missing)}"
        raise InputError("\n".join([f"place {job.place}: {', '.join(missing)} missing", *lines, f"  fix   {fix}"]))
    if not re.fullmatch(r"[a-z]([a-z0-9-]{0,60}[a-z0-9])?", job.name):
        raise InputError(
            f"name: {job.name!r} is no name of a slice or job\n"
            "  fix   begin with a letter, then use small letters, digits and -, such as --name=llama3-8b"
        )
    for word in job.arguments:
        if word.lstrip("-").partition("=")[0] == "workdir":
            raise InputError(f"train: {word}: the workdir is a key of the launch file\n  fix   move it to workdir")
