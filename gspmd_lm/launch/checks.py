"""What is checked before anything costs money: the price, the layout and its memory, and where the data is."""

from collections.abc import Iterator

from gspmd_lm.config import Config
from gspmd_lm.errors import InputError
from gspmd_lm.files import is_remote
from gspmd_lm.foresight import explain
from gspmd_lm.hardware.target import Target
from gspmd_lm.launch.job import Job
from gspmd_lm.plan.estimate import Estimator
from gspmd_lm.sharding.rules import Rules
from gspmd_lm.train import decoder, state
from gspmd_lm.units import human_bytes

SURELY_TOO_MUCH = 1.25  # an estimate this much above what a chip has is no error of the estimate


def price(job: Job) -> float:
    """USD an hour of all chips; 0 where nothing is known. Raises InputError if a budget needs a price."""
    target = job.target
    each = job.usd_per_hour or (target.chip.usd_per_hour if target and target.chip else None)
    if each is None or target is None or target.chip is None:
        if job.max_usd is not None:
            raise InputError(
                f"max_usd: {job.max_usd:g}: the price of {job.accelerator or 'this place'} is not known\n"
                "  fix   add accelerator and usd_per_hour, the price of a chip, or use max_hours"
            )
        return 0.0
    return each * target.chips


def check_layout(config: Config, rules: Rules, target: Target, place_name: str) -> Iterator[str]:
    """Yields what a person should know of the layout on the target.

    Raises InputError if the mesh does not fill the target, if the rules do not fit the model, or if the memory of a
    device is surely too small.
    """
    filled = rules.fill(target.devices, f"an accelerator of {{known}} devices for place {place_name}")
    _, warnings = state.arrays_and_warnings(config, filled, target.platform)
    yield from map(str, warnings)
    if target.chip is None:
        return
    settled = explain.settle_layout(decoder.task(config), rules, target)
    needed, there = Estimator(config, target).estimate(settled).peak_bytes, target.chip.usable_hbm_bytes
    figures = f"{human_bytes(needed)} a device, and {target.chip.name} has {human_bytes(there)}"
    if needed > SURELY_TOO_MUCH * there:
        fix = f"plan --config={config.name} --target={target.text} finds a layout that fits"
        raise InputError(f"{rules.path}: {config.name} needs about {figures}\n  fix   {fix}")
    yield f"memory: about {figures}" + (": this may be too much" if needed > there else "")


def check_data(config: Config) -> Iterator[str]:
    """Yields what must be on each host, because the config names it there."""
    sources = (*config.data.sources, *config.data.held_out_sources)
    names = dict.fromkeys([config.data.tokenizer, *(one.path for one in sources)])
    if local := [name for name in names if name.startswith(("/", "~")) and not is_remote(name)]:
        yield f"{', '.join(local)} must be on each host: launch sends the code and files of this folder alone"
