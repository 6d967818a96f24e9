"""What is wrong with the keys of experts in the section `model` of a config."""

from collections.abc import Mapping
from typing import Any


def problems(model: Any, defaults: Mapping[str, Any]) -> list[str]:
    """What is wrong with the keys of experts, of which `defaults` are those of a model without any."""
    E, k, groups, used = model.experts, model.experts_per_token, model.expert_groups, model.groups_per_token
    if not E:
        set_ = [name for name, default in defaults.items() if getattr(model, name) != default]
        return [f"experts=0, so {', '.join(set_)} would have no effect: set experts"] if set_ else []
    wrong = []
    if not 0 < k <= E:
        wrong.append(f"experts_per_token={k} must be from 1 to experts={E}")
    if model.dense_layers >= model.layers:
        wrong.append(f"dense_layers={model.dense_layers} leaves no layer of layers={model.layers} with experts")
    elif model.dense_layers // model.sparse_step == model.layers // model.sparse_step:
        wrong.append(f"sparse_step={model.sparse_step} leaves no layer of layers={model.layers} with experts")
    if E % groups or used > groups:
        wrong.append(f"expert_groups={groups} must divide experts={E} and be at least groups_per_token={used}")
    elif k > used * (E // groups):
        wrong.append(f"experts_per_token={k} is more than groups_per_token={used} groups of {E // groups} have")
    elif groups > 1 and model.routing == "sigmoid" and E // groups < 2:
        wrong.append(f"expert_groups={groups}: with sigmoid, a group needs at least two of the {E} experts")
    if model.routing == "sparsemixer" and (model.normalized_weights or groups > 1 or model.balance_bias):
        wrong.append("routing: sparsemixer goes with normalized_weights: false, one group, and no bias on scores")
    if model.shared_gate and not model.shared_mlp:
        wrong.append("shared_gate: there are no shared experts: set shared_mlp")
    return wrong
