"""The layout of a run that goes on with another number of devices. Its batch and the order of its rows stay."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from gspmd_lm import config as configs
from gspmd_lm.config import Config
from gspmd_lm.errors import InputError
from gspmd_lm.foresight.explain import settle_layout
from gspmd_lm.hardware.target import Target
from gspmd_lm.plan import candidate, search
from gspmd_lm.plan.estimate import Estimator
from gspmd_lm.sharding import rules_file
from gspmd_lm.sharding.rules import Row, Rules, describe_mesh, divisors
from gspmd_lm.sharding.slices import choose_crossing
from gspmd_lm.units import human_bytes, plural

REPLICAS = "data"  # the mesh axis that is added where the others cannot have more devices
OUTER = (REPLICAS, "fsdp")  # mesh axes that may become larger; the others only become smaller
MOST_CHECKED = 64  # layouts that are checked
MOST_ESTIMATED = 16  # layouts that pass the check and whose memory is estimated
PLAN_MINUTES = 3.0  # of the search where none of them fits, for which all devices wait
MOST_PADDING = 1 / 8  # of a batch, which a search adds so that it may split the batch further


class Layout(NamedTuple):
    """Rules for all devices, and the rows of a batch with those that have no targets."""

    rules: Rules  # filled
    rows: int


class Adapted(NamedTuple):
    """What a run goes on with."""

    rules: Rules
    config: Config
    change: str  # what was changed, in words; "" where nothing was


def adapt(config: Config, rules: Rules, began_on: int, target: Target, say: Callable[[str], None]) -> Adapted:
    """The rules and the config with which a run goes on with the devices of a target.

    The batch keeps its rows. `data.padded_batch` adds rows without targets where the devices do not divide it. Where no
    layout like that of `rules` fits, the search of `plan` looks for another one.

    rules: those with which the run began, unfilled. began_on: the number of devices that it had then. say: is told of
    the progress of a search.

    Raises InputError if no layout fits.
    """
    begun = _fill_as_begun(rules, began_on)
    if begun.problems:
        return Adapted(rules, config, "")  # the check of the rules raises them
    layouts = find_layouts(rules, began_on, config.data.batch, target.devices, target.slices)
    if same := begun.devices == target.devices:
        layouts = itertools.chain([Layout(begun, config.data.rows)], layouts)
    fits, reasons, estimated = functools.partial(_refusal, config, target, {}), list[str](), 0
    for number, layout in enumerate(itertools.islice(layouts, MOST_CHECKED)):
        reason, needs_memory = fits(layout)
        if not reason and same and not number:
            return Adapted(rules, config, "")
        reasons.append(reason)
        estimated += needs_memory
        if not reason:
            change = _describe_change(begun, layout, config)
            return Adapted(_as_file(rules, layout.rules), with_rows(config, layout.rows), change)
        if estimated == MOST_ESTIMATED:
            break
    if same:  # the check of the rules says more about what is wrong with them
        return Adapted(rules, config, "")
    say(f"no layout like {rules.label} fits on {target.text}, so another one is searched for")
    return _search(config, rules, target, next(iter(reasons), ""), say)


def find_layouts(rules: Rules, began_on: int, batch: int, devices: int, slices: int = 1) -> Iterator[Layout]:
    """Yields layouts of `devices` that are like those of a run, the best first. Nothing is checked.

    A step takes as long as its rows, those without targets included. So the fewest rows come first. Then come sizes of
    -1 that are filled, inner mesh axes that are reduced least, and weights that are split as finely as before.
    Microbatches are chosen so that a device has no more rows at a time than it had when the run began.

    rules: those of the run, unfilled. began_on: its devices then, for a size of -1. batch: rows that have targets.
    slices: of TPUs, between which the network is slow.
    """
    begun = _fill_as_begun(rules, began_on)
    filled, base = rules.fill(devices).mesh, _free_replicas(begun)
    most = math.ceil(batch / (_pieces(begun) * begun.microbatches))
    found = []
    for mesh in _meshes(base.mesh, devices):
        if slices > 1 and not choose_crossing(mesh, slices):
            continue
        changed = _with_mesh(begun if mesh == filled else base, mesh)
        inner = math.prod(size / mesh.get(name, 1) for name, size in base.mesh.items() if name not in OUTER)
        fsdp = math.log(mesh.get("fsdp", 1) / base.mesh.get("fsdp", 1))
        for microbatches in {math.ceil(batch / (_pieces(changed) * rows)) for rows in range(1, most + 1)}:
            unit = _pieces(changed) * microbatches
            order = math.ceil(batch / unit) * unit, mesh != filled, inner, abs(fsdp), microbatches
            found.append((order, len(found), changed))
    for (rows, *_, microbatches), _, changed in sorted(found, key=lambda one: one[:2]):
        yield Layout(dataclasses.replace(changed, microbatches=int(microbatches)), int(rows))


def with_rows(config: Config, rows: int) -> Config:
    """The config whose batches are filled up to so many rows. Raises InputError where that would change the loss."""
    data = {**configs.to_dict(config)["data"], "padded_batch": rows if rows != config.data.batch else 0}
    return configs.from_dict({**configs.to_dict(config), "data": data}, f"config {config.name}")


def _fill_as_begun(rules: Rules, began_on: int) -> Rules:
    """Rules filled for the number of devices that a run began on, or for fewer that the other sizes divide."""
    known = math.prod(size for size in rules.mesh.values() if size > 0)
    return rules.fill(rules.devices if rules.devices > 0 else known * max(1, began_on // known))


def _pieces(rules: Rules) -> int:
    """Into how many pieces of equal size the rows of a microbatch are cut under filled rules."""
    over = [name for name in rules.split("rules", "", rules.vocabulary.rows) if name not in rules.stages]
    return rules.num_shards(over) * (rules.pipeline.microbatches if rules.pipeline else 1) * rules.interleave


def _meshes(mesh: Mapping[str, int], devices: int) -> Iterator[dict[str, int]]:
    """Each mesh of so many devices that has the axes of a mesh, and replicas if it had none. Only outer axes grow."""
    names = [*([] if REPLICAS in mesh else [REPLICAS]), *mesh]
    choices = [[n for n in divisors(devices) if name in OUTER or n <= mesh[name]] for name in names]
    for sizes in itertools.product(*choices):
        if math.prod(sizes) == devices:
            yield {name: n for name, n in zip(names, sizes, strict=True) if n > 1 or name in mesh}


def _free_replicas(rules: Rules) -> Rules:
    """Rules in which the axis of replicas splits the batch alone. What else it splits is given to fsdp, if that is
    free."""
    uses = any(REPLICAS in row.mesh_axes for row in rules.rows if row.axis != rules.vocabulary.rows)
    if not uses or "fsdp" in rules.mesh:
        return rules

    def rename(names: Sequence[str]) -> tuple[str, ...]:
        return tuple("fsdp" if name == REPLICAS else name for name in names)

    mesh = dict(zip(rename([*rules.mesh]), rules.mesh.values(), strict=True))
    rows = tuple(dataclasses.replace(row, mesh_axes=rename(row.mesh_axes)) for row in rules.rows)
    return dataclasses.replace(rules, mesh=mesh, rows=rows)


def _with_mesh(rules: Rules, mesh: Mapping[str, int]) -> Rules:
    """Rules with another mesh, of which a new axis of replicas splits the batch. Stages that are one are no stages."""
    batch, rows, pipeline = rules.vocabulary.rows, rules.rows, rules.pipeline
    if REPLICAS in mesh and REPLICAS not in rules.mesh:
        has_row = any(row.key == f"rules.{batch}" for row in rows)
        rows = rows if has_row else (*rows, Row("", "rules", "", batch, ()))
        rows = tuple(
            dataclasses.replace(row, mesh_axes=(REPLICAS, *row.mesh_axes)) if row.axis == batch else row for row in rows
        )
    stages = rules.stages
    if stages and math.prod(mesh[name] for name in stages) == 1:
        mesh, pipeline = {name: size for name, size in mesh.items() if name not in stages}, None
        rows = tuple(
            dataclasses.replace(row, mesh_axes=tuple(name for name in row.mesh_axes if name not in stages))
            for row in rows
            if row.axis != rules.vocabulary.stages
        )
    return dataclasses.replace(rules, mesh=dict(mesh), rows=rows, pipeline=pipeline, dcn={}, problems=())


def _refusal(config: Config, target: Target, known: dict[int, Estimator], layout: Layout) -> tuple[str, bool]:
    """Why a layout does not fit, '' if it does; and whether its memory was estimated. known: by rows of a batch."""
    rules, rows = layout
    if rows not in known:
        try:
            known[rows] = Estimator(with_rows(config, rows), target)
        except InputError as error:
            return str(error), False
    estimator = known[rows]
    traces = estimator.traces
    settled = settle_layout(traces.task, rules, target)
    if problems := traces.problems(settled, target.platform):
        return problems[0].message, False
    if target.chip is None:
        return "", False
    needed, there = estimator.estimate(settled).peak_bytes, target.chip.usable_hbm_bytes
    refusal = f"{_describe_mesh(rules.mesh)} with {plural(rules.microbatches, 'microbatch')} needs about "
    refusal += f"{human_bytes(needed)} a device, and {target.chip.name} has {human_bytes(there)}"
    return refusal if needed > there else "", True


def _search(config: Config, rules: Rules, target: Target, reason: str, say: Callable[[str], None]) -> Adapted:
    """The best layout that the search of `plan` finds. reason: why no layout like that of `rules` fits."""
    batch, shards = config.data.batch, divisors(target.devices)
    padded = (-(-batch // count) * count for count in reversed(shards))
    rows = next(rows for rows in padded if rows <= (1 + MOST_PADDING) * batch)
    wrong = f"--elastic: no layout of {config.name} fits on {target.text}, where {rules.label} does not: {reason}"
    fix = f"\n  fix   give --rules for {plural(target.devices, 'device')}, or go on with more; nothing was changed"
    try:
        changed = with_rows(config, rows)
        plan = search.plan(changed, target, minutes=PLAN_MINUTES, say=say, rank_by=search.ranking(target))
    except InputError as error:
        raise InputError(f"{wrong}\n{str(error).partition('  fix ')[0].rstrip()}{fix}") from error
    if plan.best is None:
        raise InputError(f"{wrong}{fix}")
    layout = Layout(plan.best.rules, rows)
    return Adapted(_as_file(rules, layout.rules), changed, _describe_change(rules, layout, config))


def _as_file(given: Rules, rules: Rules) -> Rules:
    """The rules that are read from the text of a file which says the same as filled `rules`, without idle mesh axes."""
    name = f"{given.label} on {plural(rules.devices, 'device')}"
    mesh = {name: size for name, size in rules.mesh.items() if size > 1 or rules.devices == 1}
    rows = (
        dataclasses.replace(row, mesh_axes=tuple(name for name in row.mesh_axes if name in mesh)) for row in rules.rows
    )
    raw = rules_file.to_dict(dataclasses.replace(rules, mesh=mesh, rows=tuple(rows)))
    return rules_file.from_text(f"# {name}, as --elastic chose it.\n{candidate.yaml(raw)}", name)


def _describe_mesh(mesh: Mapping[str, int]) -> str:
    used = {name: size for name, size in mesh.items() if size > 1}
    return describe_mesh(used or mesh)


def _describe_change(before: Rules, layout: Layout, config: Config) -> str:
    """What a run goes on with, in words. before: the rules with which it began."""
    rules, batch = layout.rules, config.data.batch
    microbatches = f", microbatches={rules.microbatches}" * (rules.microbatches != before.microbatches)
    padding = f" and {layout.rows - batch:,} without targets" if layout.rows > batch else ""
    return (
        f"{plural(rules.devices, 'device')}: mesh {_describe_mesh(rules.mesh)}{microbatches}, in place of "
        f"{_describe_mesh(before.mesh)}; a step has the same {batch:,} rows{padding}"
    )
