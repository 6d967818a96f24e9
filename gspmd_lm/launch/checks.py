"""Checks before anything costs money: the price, the layout and its memory, and where the data is."""

import glob
import math
from collections.abc import Iterator

from gspmd_lm import files
from gspmd_lm.config import Config
from gspmd_lm.errors import InputError
from gspmd_lm.files import is_remote
from gspmd_lm.foresight import explain, whole_job
from gspmd_lm.foresight.whole_job import Work
from gspmd_lm.hardware import capacity
from gspmd_lm.hardware.capacity import Price
from gspmd_lm.hardware.target import Target
from gspmd_lm.launch import archive, bucket
from gspmd_lm.launch.job import Job
from gspmd_lm.launch.place import Place
from gspmd_lm.plan.estimate import Estimator
from gspmd_lm.sharding.rules import Rules
from gspmd_lm.show import whole_job as shown
from gspmd_lm.train import decoder, state
from gspmd_lm.units import human_bytes, plural

_MADE = ("stdlib", "random", "bytes", "bpe")  # data and tokenizers that a run makes itself
SURELY_TOO_MUCH = 1.25  # an estimate this much above what a chip has is no error of the estimate


def price(job: Job) -> float:
    """USD an hour of all chips; 0 where nothing is known. Raises InputError if a budget needs a price."""
    target = job.target
    usd = (job.usd_per_hour or target.price({}).on_demand) if target else None
    if target is None or target.chip is None or usd is None:
        if job.max_usd is not None:
            raise InputError(
                f"max_usd: {job.max_usd:g}: the price of {job.accelerator or 'this place'} is not known\n"
                "  fix   add accelerator and usd_per_hour, the price of a chip, or use max_hours"
            )
        return 0.0
    return usd * target.chips


def check_layout(config: Config, rules: Rules, target: Target, job: Job) -> Iterator[str]:
    """Yields what a person should know of the layout on the target, and of the whole job.

    Raises InputError if the mesh does not fill the target, if the rules do not fit the model, or if the memory of a
    device is surely too small.
    """
    filled = rules.fill(target.devices, f"an accelerator of {{known}} devices for place {job.place}")
    arrays, warnings = state.arrays_and_warnings(config, filled, target.platform)
    yield from map(str, warnings)
    if target.chip is None:
        return
    settled = explain.settle_layout(decoder.task(config), rules, target)
    estimator = Estimator(config, target)
    estimate, there = estimator.estimate(settled), target.chip.usable_hbm_bytes
    needed = estimate.peak_bytes
    figures = f"{human_bytes(needed)} a device, and {target.chip.name} has {human_bytes(there)}"
    if needed > SURELY_TOO_MUCH * there:
        fix = f"plan --config={config.name} --target={target.text} finds a layout that fits"
        raise InputError(f"{rules.path}: {config.name} needs about {figures}\n  fix   {fix}")
    yield f"memory: about {figures}" + (": this may be too much" if needed > there else "")
    parts = estimator.memory_parts(settled)
    work = whole_job.describe_work(
        decoder.task(config), settled, arrays, target, estimate.step_time_s, parts["weights"] + parts["optimizer"]
    )
    if work:
        yield from _job_lines(work, job)


def _job_lines(work: Work, job: Job) -> Iterator[str]:
    """The time and price that a job is expected to take, its checkpoints, and a budget that it will pass."""
    assert job.target
    assumed = capacity.read_assumptions(job.assume, "assume: ")
    known = job.target.price({})
    price = Price(known.on_demand, job.usd_per_hour) if job.spot else Price(job.usd_per_hour or known.on_demand)
    found = whole_job.predict(work, assumed, price)
    course = (job.spot and found.on_spot) or found.on_demand
    yield f"job: about {shown.course_words(course)} for {plural(work.steps, 'step')}"
    if job.spot and not found.on_spot:
        yield "job: this is without preemptions, since assume does not say preemptions_per_day"
    yield f"checkpoints: {shown.checkpoint_words(found)}"
    hours = math.inf if course.days is None else 24 * course.days
    if job.max_hours is not None and hours > job.max_hours:
        yield f"max_hours: {job.max_hours:g} h end before the job does"
    if job.max_usd is not None and course.usd is not None and course.usd > job.max_usd:
        yield f"max_usd: {job.max_usd:,.2f} are spent before the job ends"


def check_data(config: Config, place: Place) -> Iterator[str]:
    """Yields what could not be looked up of the data and the tokenizer that a config names.

    Raises InputError for what is not there, and for files of this machine where the hosts have disks of their own.
    """
    data = config.data
    names = {one.path: "data.held_out" for one in data.held_out_sources}
    names |= {one.path: "data.source" for one in data.sources} | {data.tokenizer: "data.tokenizer"}
    sent = archive.own_files(place.job)
    for name, key in names.items():
        if name.partition(":")[0] in _MADE or name in sent:
            continue
        if name.startswith("gs://") and "gcloud" in place.tools:
            bucket.check_there(key, name)
        elif is_remote(name):
            yield f"{key}: {name} was not looked up"
        elif place.sees_this_folder:
            if not glob.glob(str(files.expand_user(name))):
                raise InputError(
                    f"{key}: {name}: there is no such file or folder\n  fix   --set {key}=... names another"
                )
        elif place.is_rented:
            raise InputError(
                f"{key}: {name}: is not on the hosts of a new slice, to which launch sends the code and the tokenizer, "
                "config and rules that the flags of train name in this folder\n"
                f"  fix   gcloud storage cp --recursive {name} gs://BUCKET/data, then --set {key}=gs://BUCKET/data"
            )
        else:
            yield f"{key}: {name} must be on each host: launch does not send it"
