"""Writes adapters as a folder that PEFT loads: adapter_config.json and adapter_model.safetensors."""

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict
from jax.experimental import multihost_utils

from gspmd_lm import config, files
from gspmd_lm.convert import architecture, safetensors
from gspmd_lm.convert.families import Family
from gspmd_lm.convert.layout import AxisOrder, Tensor
from gspmd_lm.convert.pretrained import ArrayLocation, array_locations
from gspmd_lm.errors import InputError
from gspmd_lm.model import lora

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."  # the prefix of PEFT's names: the adapted model, and in it the original one

# Where a weight is, and the two matrices of its adapter in one layer.
Member = tuple[ArrayLocation, np.ndarray, np.ndarray]


def write_adapter(
    folder: Path, model: config.ModelConfig, params: Any, base_name: str = "", like: Mapping[str, Any] | None = None
) -> None:
    """Writes the adapters of `params`, without padding, to a folder that must not hold anything, in float32.

    Every process calls this, and the first one writes. base_name: the base model that PEFT loads by default. like: the
    config.json that the base model came with, which decides its family.

    If a family keeps several weights in one tensor, their adapters become one adapter of a higher rank that computes
    the same: the `a` side by side, the `b` in blocks. Raises InputError if there are no adapters, if experts have some,
    if the folder holds something, or if no family of transformers can express the model.
    """
    row, plain = family_and_model(folder, model, like)
    assert model.lora
    modules = _modules(array_locations(row, plain), lora.adapters(params), model.lora)
    tensors = {}
    for name, members in modules.items():
        a, b = _matrices(members, model)
        tensors[f"{_PREFIX}{name}.lora_A.weight"], tensors[f"{_PREFIX}{name}.lora_B.weight"] = a, b
    if jax.process_index() == 0:
        description = json.dumps(_description(row, modules, model, base_name), indent=2)
        with files.appearing(folder) as made:
            (made / CONFIG).write_text(description + "\n", encoding="utf-8")
            with open(made / WEIGHTS, "wb") as file:
                file.write(safetensors.header_bytes({name: ("F32", tensor.shape) for name, tensor in tensors.items()}))
                for tensor in tensors.values():
                    file.write(np.ascontiguousarray(tensor, np.float32).data)


def family_and_model(
    folder: Path, model: config.ModelConfig, like: Mapping[str, Any] | None = None
) -> tuple[Family, config.ModelConfig]:
    """The family and the model that the adapters belong to. Raises InputError as `write_adapter` does.

    No weights are needed.
    """
    if model.lora is None:
        raise InputError("the model has no adapters (model.lora)\n  fix   convert --to=DIR without --adapter")
    of_experts = [name for name in model.lora.targets if name.startswith("w_") and model.experts]
    if of_experts:
        raise InputError(
            f"--adapter: adapters of experts ({', '.join(of_experts)}) cannot be written for PEFT, which has them for "
            "modules of one matrix each\n  fix   convert --to=DIR without --adapter, which merges them into the weights"
        )
    safetensors.check_new(folder)
    _, plain = lora.merged({}, model)
    row, _ = architecture.describe(plain, like)
    return row, plain


def _modules(tree: Any, adapters: Any, settings: config.Lora) -> dict[str, list[Member]]:
    """The modules of transformers ("model.layers.0.self_attn.q_proj"), each with the adapters of its weights."""
    modules: dict[str, list[Member]] = {}
    flat: dict[tuple[str, ...], Any] = flatten_dict(adapters)
    locations: dict[tuple[str, ...], Any] = flatten_dict(tree)
    for path, location in locations.items():
        *module, name = path
        if name not in settings.targets:
            continue
        a, b = (_numpy_copy(flat[*module, f"{name}_{part}"]) for part in "ab")
        for i, tensor in enumerate(location.names()):
            member = (location, a[i], b[i]) if location.lead else (location, a, b)
            modules.setdefault(_module(tensor), []).append(member)
    return dict(sorted(modules.items()))


def _numpy_copy(array: Any) -> np.ndarray:
    if jax.process_count() > 1:
        array = multihost_utils.process_allgather(array, tiled=True)
    return np.asarray(array, np.float32)


def _module(tensor: str) -> str:
    return tensor.removesuffix(".weight")


def _matrices(members: Sequence[Member], model: config.ModelConfig) -> tuple[np.ndarray, np.ndarray]:
    """lora_A [rank, inputs] and lora_B [outputs, rank] of a module. The ranks of its members follow one another."""
    rank = members[0][1].shape[-1]
    parts: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
    for location, a, b in members:
        rows, read = location.tensor.rows(location.weight, location.letters, model), a.ndim - 1
        view = location.tensor.view(model)
        sides = (range(read), a), (range(read, len(rows.along)), np.moveaxis(b, 0, -1))
        for part, (axes, matrix) in zip(parts, sides, strict=True):
            sizes = [size for size, axis in zip(view, rows.order, strict=True) if axis in axes]
            whole = np.zeros((*sizes, rank), np.float32)
            _side(rows, axes, rank).write_into(whole, matrix)
            part.append(whole.reshape(-1, rank))
    return np.concatenate(parts[0], -1).T, np.concatenate(parts[1], -1)


def _side(rows: AxisOrder, axes: range, rank: int) -> AxisOrder:
    """Where some of a weight's axes are in its tensor, followed by the rank."""
    along = (*(rows.along[axis] for axis in axes), np.arange(rank))
    return AxisOrder(along, (*(axis - axes.start for axis in rows.order if axis in axes), len(axes)))


def _description(
    row: Family, modules: Mapping[str, list[Member]], model: config.ModelConfig, base: str
) -> dict[str, Any]:
    """The fields of adapter_config.json."""
    assert model.lora
    members = {group[0][0].tensor: group for group in modules.values()}
    names = {tensor: _name(tensor, row, members) for tensor in members}
    rank, alpha = model.lora.rank, model.lora.alpha
    alpha = int(alpha) if alpha.is_integer() else alpha
    fused = {names[tensor]: len(group) for tensor, group in members.items() if len(group) > 1}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base or None,
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": {name: count * rank for name, count in fused.items()},
        "alpha_pattern": {name: count * alpha for name, count in fused.items()},  # alpha / rank stays the same
        "target_modules": sorted(set(names.values())),
        "fan_in_fan_out": all(_inputs_first(group[0], model) for group in members.values()),
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }


def _inputs_first(member: Member, model: config.ModelConfig) -> bool:
    """Whether a published weight is [inputs, outputs], as in GPT-2's Conv1D."""
    location, a, _ = member
    return location.tensor.rows(location.weight, location.letters, model).order[0] < a.ndim - 1


def _name(tensor: Tensor, row: Family, adapted: Collection[Tensor]) -> str:
    """The shortest end of a module's name that no module without an adapter shares."""
    within = _module(tensor.name).rpartition("{}.")[2]
    last = within.rpartition(".")[2]
    others = (_module(other.name) for other in row.tensors if other not in adapted)
    return within if any(name.endswith(f".{last}") for name in others) else last
