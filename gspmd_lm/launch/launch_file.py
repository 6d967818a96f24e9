"""Reads a launch file, and checks that it says all that its place needs. Flags of the command line are laid over it."""

import dataclasses
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import pydantic
from etils import epath

from gspmd_lm import files
from gspmd_lm.config import core_yaml, paths
from gspmd_lm.config.types import STRICT, explain_problem
from gspmd_lm.errors import InputError
from gspmd_lm.hardware import capacity
from gspmd_lm.launch.job import ABOUT, Job

_JOB = pydantic.TypeAdapter(pydantic.with_config(STRICT)(Job))


def read(path: str | None, flags: Mapping[str, Any], more: Sequence[str] = ()) -> Job:
    """The job of a launch file, with the values of `flags` laid over it and `more` flags of train behind its own.

    Raises:
        InputError: every key that does not exist or has a wrong value, in one message.
    """
    raw: Any = {}
    if path is not None:
        raw = core_yaml.parse(paths.read_text(files.expand_user(path)), path)
        if not isinstance(raw, dict):
            raise InputError(f"{path}: not a mapping\n  fix   write lines such as place: queued-resource")
    try:
        job = _JOB.validate_json(json.dumps(raw | dict(flags)))
    except pydantic.ValidationError as error:
        lines = [line for problem in error.errors() for line in explain_problem(problem, Job)]
        raise InputError("\n".join([f"{path or 'launch'}: wrong keys", *lines])) from error
    train = " ".join(filter(None, (job.train.strip(), shlex.join(more))))
    last = job.workdir.rstrip("/").rpartition("/")[2]
    name = job.name or re.sub(r"[^a-z0-9]+", "-", last.lower()).strip("-")
    return dataclasses.replace(job, train=train, name=name, logs=job.logs or f"runs/{name}.launch")


def find_logs(place: str) -> epath.Path:
    """The folder of logs that a launch file means, or a workdir, or that is named itself. It may be remote.

    Raises InputError if there is none.
    """
    if place.endswith((".yaml", ".yml")):
        tried = [read(place, {}).logs]
    else:
        whole = place.rstrip("/")
        beside, default = [whole, f"{whole}.launch"], [f"runs/{whole.rpartition('/')[2]}.launch"]
        tried = [*default, *beside] if files.is_remote(whole) else [*beside, *default]
    for name in dict.fromkeys(tried):
        folder = files.open_path(name)
        if folder.is_dir() and any(one.name.isdecimal() or one.suffix == ".log" for one in folder.iterdir()):
            return folder
    raise InputError(
        f"{place}: no logs of a launch in {' or '.join(dict.fromkeys(tried))}\n"
        "  fix   name the launch file, its workdir or the folder of its logs"
    )


def check(job: Job, needed: Sequence[str]) -> None:
    """Raises InputError for keys that the place needs and the job lacks, all in one message, and for wrong values."""
    if missing := [key for key in ("workdir", *needed) if not getattr(job, key)]:
        lines = [f"  {key:16} {ABOUT[key]}" for key in missing]
        fix = f"add them to the launch file, or give {' '.join(f'--{key}=...' for key in missing)}"
        raise InputError("\n".join([f"place {job.place}: {', '.join(missing)} missing", *lines, f"  fix   {fix}"]))
    if not re.fullmatch(r"[a-z]([a-z0-9-]{0,60}[a-z0-9])?", job.name):
        raise InputError(
            f"name: {job.name!r} is no name of a slice or job\n"
            "  fix   begin with a letter, then use small letters, digits and -, such as --name=llama3-8b"
        )
    if not re.fullmatch(r"([0-9]+-)?[0-9]+(:[0-9]+){0,2}", job.time):
        raise InputError(
            f"time: {job.time!r} is no time limit of Slurm\n  fix   write 08:00:00, or 2-00:00:00 with days"
        )
    capacity.read_assumptions(job.assume, "assume: ")
    for word in job.arguments:
        if word.lstrip("-").partition("=")[0] == "workdir":
            raise InputError(f"train: {word}: the workdir is a key of the launch file\n  fix   move it to workdir")
