"""The places by their names."""

from gspmd_lm.launch.gke import Gke
from gspmd_lm.launch.job import Job
from gspmd_lm.launch.local import Local
from gspmd_lm.launch.place import Place
from gspmd_lm.launch.slurm import Slurm
from gspmd_lm.launch.tpu import QueuedResource, TpuVm

PLACES = {"local": Local, "tpu-vm": TpuVm, "queued-resource": QueuedResource, "slurm": Slurm, "gke": Gke}


def find(job: Job) -> Place:
    """The place of a job. Raises InputError if its accelerator does not exist."""
    return PLACES[job.place](job)
