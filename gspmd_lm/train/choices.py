"""Choices that rules leave open: the attention kernel, and when the stages of a pipeline gather their weights.

Stages gather once in a step where there is memory for it, else in each turn. The choice depends on the config, the
rules and the kind of device alone, so that it is the same in a run, in `explain` and in `plan`.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp

from gspmd_lm.config import Config
from gspmd_lm.hardware.chips import Processor
from gspmd_lm.program import supported
from gspmd_lm.program.task import Task
from gspmd_lm.sharding.rules import GATHERS, Rules
from gspmd_lm.sharding.shapes import pairs, place_array
from gspmd_lm.train import decoder, state
from gspmd_lm.units import human_bytes

# The share of a device's memory that may be counted for. What is not counted needs the rest: the layer at work, the
# logits, buffers of collectives.
COUNTED_SHARE = 0.75
_FLOAT32_BYTES = 4
_INPUT, _LAYER_INPUT = "residual", "layer_input"  # the same array, which remat knows by another name
TURN, STEP = GATHERS


def settle_rules(config: Config | Task, rules: Rules, on: Processor) -> Rules:
    """Filled `rules` with all that they leave open for a train step; those of a model of one's own stay as they are."""
    task = decoder.task(config)
    if not task.config:
        return rules
    rules = supported.settle_rules(rules, task.config, on, state.attention_pass(task.config))
    if not rules.pipeline or rules.pipeline.gather:
        return rules
    chosen = gather_choice(task, rules, on).partition(",")[0] or TURN
    return dataclasses.replace(rules, pipeline=dataclasses.replace(rules.pipeline, chosen=chosen))


def gather_choice(task: Task, rules: Rules, on: Processor) -> str:
    """When stages gather their weights under filled rules that leave it open, and why. '' where nothing is chosen.

    Simulated devices have no limit of memory, so their stages gather in each turn.
    """
    pipeline, config = rules.pipeline, task.config
    if not pipeline or pipeline.gather or config is None or on.platform == "cpu" or not _is_sent_in_turns(task, rules):
        return ""
    if any(not problem.warning for problem in supported.pipeline_problems(config, rules)):
        return ""
    place = rules.place("pipeline", pipeline.plain)
    if pipeline.schedule == "1f1b":
        return f"{TURN}, since schedule: 1f1b does not go with {STEP}"
    if problems := supported.gather_problems(config.model, rules, place):
        return f"{TURN}, since {problems[0].message.rpartition(f'{STEP}: ')[2]}"
    chip = on.chip
    if chip is None:
        return f"{TURN}, since the memory of {on.name} is not known"
    more_bytes, all_bytes = _count_held_bytes(task, rules)
    of = f"{human_bytes(round(all_bytes))} of {human_bytes(chip.usable_hbm_bytes)}"
    if all_bytes <= COUNTED_SHARE * chip.usable_hbm_bytes:
        return f"{STEP}, which holds {human_bytes(round(more_bytes))} more: {of} are counted"
    return f"{TURN}, since with {STEP} {of} are counted, more than {COUNTED_SHARE:.0%}"


def _is_sent_in_turns(task: Task, rules: Rules) -> bool:
    """Whether stages that gather in each turn send weights or their gradients in each of them."""
    within, arrays = rules.within_stage, task.weights
    tokens = {name for axis in ("batch", "seq") for name in within.split("rules", "block_input", axis)}
    return bool(rules.stages) and (
        not tokens <= {*rules.replicas}
        or any(
            place_array(within, "weights", leaf, like)[0] != place_array(within, "rules", leaf, like)[0]
            for leaf, like in pairs(arrays.named_params, arrays.params)
            if leaf.path.partition(".")[0] == rules.vocabulary.stages
        )
    )


def _count_held_bytes(task: Task, rules: Rules) -> tuple[float, float]:
    """The bytes that a device holds besides if its stage gathers once, and all bytes that are counted then.

    Counted are weights, gradients and optimizer state, the weights of the stage in use and the sums of their gradients,
    and what the layers of the stage keep in all turns.
    """
    arrays, pipeline = state.arrays(task), rules.pipeline
    assert pipeline and task.config
    trees = {
        "params": pairs(arrays.named_params, arrays.params),
        "trained": pairs(arrays.named_trained, arrays.trained),
        "optimizer": pairs(arrays.named_optimizer, arrays.optimizer),
    }

    def held_bytes(table: str, tree: str, itemsize: int = 0, of_stages: bool = False) -> float:
        stages = rules.vocabulary.stages
        leaves = (one for one in trees[tree] if not of_stages or one[0].path.partition(".")[0] == stages)
        return sum(place_array(rules, table, *leaf, itemsize)[1] for leaf in leaves)

    itemsize = jnp.dtype(task.compute_dtype).itemsize
    more = held_bytes("rules", "params", itemsize, True) + held_bytes("rules", "trained", _FLOAT32_BYTES, True)
    whole = held_bytes("weights", "params") + held_bytes("optimizer", "optimizer") + held_bytes("optimizer", "trained")
    if rules.microbatches > 1:
        whole += held_bytes("optimizer", "trained", _FLOAT32_BYTES)
    recorder, within = state.record_arrays(task, arrays, rules.microbatches, rules), rules.within_stage
    stack = next(stack for stack in task.config.model.stacks if stack.name == rules.vocabulary.stages)
    layers, turns = stack.scanned_layers / rules.num_shards(rules.stages) / pipeline.repeats, rules.turns[1]

    def kept_bytes(name: str, like: Any) -> float:
        """The bytes of an activation of one microbatch on a device of a stage."""
        array = _INPUT if name == _LAYER_INPUT else name
        spec = within.resolve("rules", array, recorder.arrays[array][0], like.shape)[0]
        shards = within.num_shards(axis for split in spec for axis in split)
        return math.prod(like.shape) * like.dtype.itemsize / pipeline.microbatches / shards

    # A layer keeps each array that `remat` saves by name. Without such names, it keeps what has a name once, and with
    # remat: none about as much besides that has none.
    remat, named = rules.remat, list(_named_activations(recorder.program.jaxpr, within_loop=False))
    row, saved = kept_bytes(_LAYER_INPUT, dict(named)[_LAYER_INPUT]), remat.save
    if remat.policy in ("none", "dots"):
        named = [*dict(named).items()]
        saved = [name for name, _ in named if name in recorder.arrays and name in rules.vocabulary.saveable_names]
    factor = (1 + (remat.policy == "none")) / len(stack.kinds)
    layer = row + factor * sum(kept_bytes(name, like) for name, like in named if name in saved)
    activations = turns * row + layers * layer if pipeline.keeps_inputs else turns * layers * layer
    return more, whole + more + activations


def _named_activations(jaxpr: Any, within_loop: bool) -> Iterator[tuple[str, Any]]:
    """The names that a remat policy meets in the loop over layers, with shapes and dtypes of what they name."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "name" and within_loop:
            yield eqn.params["name"], eqn.outvars[0].aval
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(inner, "jaxpr", inner)  # of a closed one; from jax 0.12 on, it is itself
                if hasattr(inner, "eqns"):
                    yield from _named_activations(inner, within_loop or eqn.primitive.name == "scan")
