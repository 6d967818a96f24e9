"""Writes a model as a folder that transformers loads, tensor by tensor, or its adapters as one that PEFT loads."""

import contextlib
import functools
import json
import math
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from gspmd_lm import config, files
from gspmd_lm.convert import architecture, safetensors
from gspmd_lm.convert.family import Family
from gspmd_lm.convert.layout import AxisOrder, Tensor
from gspmd_lm.convert.pretrained import ArrayLocation, array_locations
from gspmd_lm.convert.sidecars import CARD, FORMER_CARD
from gspmd_lm.errors import InputError
from gspmd_lm.model import lora

GATHERED_BYTES = 64 * 2**20  # gathered at a time from an array that is spread over hosts
# The origin of a tensor: locations, arrays, and the entry of an array of several layers or experts
Held = list[tuple[ArrayLocation, Any, tuple[int, ...]]]
ADAPTER_WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."  # the prefix of PEFT's names: the adapted model, and in it the original one
# Where a weight is, and the two matrices of its adapter in one layer.
Member = tuple[ArrayLocation, np.ndarray, np.ndarray]


def write_folder(
    folder: Path,
    model: config.ModelConfig,
    params: Any,
    like: Mapping[str, Any] | None = None,
    dtype: str | None = None,
    sidecars: Mapping[str, Path | bytes] | None = None,
    ends: Sequence[int] = (),
    card: Callable[[str, int, str], str] | None = None,
    file_bytes: int = safetensors.FILE_BYTES,
) -> None:
    """Writes config.json and the weights of a model, without its padding, to a folder that must not hold anything.

    Every process calls this; the first one writes, one tensor at a time. The folder appears when it is complete.

    params: the tree of parameters, jax or numpy arrays. like: the config.json that the model came with, whose other
    fields are kept. dtype: float32, bfloat16 or float16, for all tensors but those that a family has in float32; None
    means the dtype of `like`, or else of the model's weights. sidecars: name -> a file to copy into the folder, such as
    one of the tokenizer, or its content. ends: the ids that end a text, if `like` does not say them. card: the model
    card for a family, a number of parameters and a dtype.

    Raises InputError if the folder holds something, or no family of transformers can express the model.
    """
    row, fields = family_and_config(folder, model, like, dtype)
    tensors = _tensors(array_locations(row, model), params)
    kind = safetensors.WEIGHT_DTYPES[fields["torch_dtype"]]
    shapes = {name: tensor.shape(model) for name, (tensor, _) in tensors.items()}
    if ends and row.parts:  # of the part that reads texts, where one token ends each
        fields = row.nest(row.flatten(fields) | {f"{row.parts[0]}.eos_token_id": ends[0]})
    elif ends:
        fields["eos_token_id"] = ends[0] if len(ends) == 1 else list(ends)
    kinds = {name: "F32" if tensor.float32 else kind for name, (tensor, _) in tensors.items()}
    numbers = {name: np.dtype(safetensors.DTYPES[kind]) for name, kind in kinds.items()}
    sizes = {name: int(np.prod(shape)) * numbers[name].itemsize for name, shape in shapes.items()}
    plan = safetensors.split_into_files(sizes, file_bytes)
    with files.appearing(folder) if jax.process_index() == 0 else contextlib.nullcontext() as made:
        if made:
            (made / architecture.CONFIG).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
            for name, held in (sidecars or {}).items():
                (made / name).parent.mkdir(parents=True, exist_ok=True)
                if isinstance(held, bytes):
                    (made / name).write_bytes(held)
                else:
                    shutil.copy(held, made / name)
            if card:
                if (made / CARD).exists():  # the one that came with the weights; an older one is no longer of use
                    (made / CARD).replace(made / FORMER_CARD)
                count = sum(math.prod(shape) for shape in shapes.values())
                (made / CARD).write_text(card(row.name, count, fields["torch_dtype"]), encoding="utf-8")
            if len(plan) > 1:
                index = safetensors.index_text(plan, sum(sizes.values()))
                (made / safetensors.INDEX).write_text(index, encoding="utf-8")
        for file_name, names in plan.items():
            head = safetensors.header_bytes({name: (kinds[name], shapes[name]) for name in names})
            held = [(*tensors[name], numbers[name]) for name in names]
            _write_file(made and made / file_name, head, held, model)
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("convert.export")


def family_and_config(
    folder: Path, model: config.ModelConfig, like: Mapping[str, Any] | None, dtype: str | None
) -> tuple[Family, dict[str, Any]]:
    """The family and the config.json that `write_folder` writes. Raises InputError as it does."""
    safetensors.check_new(folder)
    row, fields = architecture.describe(model, like)
    dtype = dtype or fields.get("torch_dtype") or fields.get("dtype") or model.weight_dtype
    if dtype not in safetensors.WEIGHT_DTYPES:
        raise InputError(f"dtype: {dtype!r} must be one of {', '.join(safetensors.WEIGHT_DTYPES)}")
    fields.pop("dtype", None)
    fields["torch_dtype"] = dtype  # both versions of transformers read this name
    return row, fields


def _tensors(tree: Any, params: Any) -> dict[str, tuple[Tensor, Held]]:
    """The tensors to write, and the origin of each."""
    tensors: dict[str, tuple[Tensor, Held]] = {}
    for location, array in zip(jax.tree.leaves(tree), jax.tree.leaves(params), strict=True):
        assert array.shape == location.shape, (location.path, array.shape, location.shape)
        for i, name in enumerate(location.names()):
            entry = tuple(map(int, np.unravel_index(i, location.lead))) if location.lead else ()
            tensors.setdefault(name, (location.tensor, []))[1].append((location, array, entry))
    return tensors


def _write_file(
    path: Path | None, head: bytes, tensors: Sequence[tuple[Tensor, Held, np.dtype]], model: config.ModelConfig
) -> None:
    """Writes one file. Without a path it only takes part in what other processes gather."""
    if path is None:
        for _, held, _ in tensors:
            for _, array, entry in held:
                for _ in _pieces(array, entry):
                    pass
        return
    with open(path, "wb") as file:
        file.write(head)
        for tensor, held, dtype in tensors:
            file.write(_bytes(tensor, held, model, dtype).data)


def _bytes(tensor: Tensor, held: Held, model: config.ModelConfig, dtype: Any) -> np.ndarray:
    """The bytes of a tensor, in its dtype. Raises InputError if float16 cannot hold one of its numbers."""
    view = np.empty(tensor.view(model), dtype)
    for location, array, entry in held:
        rows = tensor.rows(location.weight, location.letters, model)
        for index, piece in _pieces(array, entry):
            with np.errstate(over="ignore"):  # the check below reports it
                rows.write_into(view, np.asarray(piece), index)
    if dtype == np.float16 and not np.isfinite(view).all():
        weights = ", ".join(dict.fromkeys(location.path for location, *_ in held))
        raise InputError(
            f"{weights}: has numbers that float16 does not hold, or that are not finite\n"
            "  fix   --dtype=bfloat16, or float32"
        )
    return view.reshape(-1).view(np.uint8)


def _pieces(array: Any, entry: tuple[int, ...]) -> Iterator[tuple[tuple[slice, ...], Any]]:
    """The pieces of an entry of an array, with () of all of it: each with its index, one at a time on this host.

    If an array is spread over several processes, every process must ask for all its pieces.
    """
    shape = array.shape[len(entry) :]
    if isinstance(array, np.ndarray):
        yield tuple(slice(0, size) for size in shape), array[entry]
    elif not array.shape:
        yield (), array.addressable_data(0)
    elif array.is_fully_addressable:
        for shard in array.addressable_shards:
            index = tuple(slice(*at.indices(size)[:2]) for at, size in zip(shard.index, array.shape, strict=True))
            within = all(at.start <= e < at.stop for e, at in zip(entry, index, strict=False))
            if shard.replica_id or not within:
                continue
            # numpy sees a CPU's array where it is. Of an accelerator's array, an entry is cut out before it is copied.
            held = np.asarray(shard.data) if shard.device.platform == "cpu" else shard.data
            at = tuple(e - part.start for e, part in zip(entry, index, strict=False))
            yield index[len(entry) :], held[at] if at else held
    else:
        row_bytes = max(int(np.prod(shape[1:])) * array.dtype.itemsize, 1)
        step = min(max(GATHERED_BYTES // row_bytes, 1), shape[0])
        gather = _gather(array.sharding, step)
        for start in range(0, shape[0], step):
            start = min(start, shape[0] - step)  # the last piece may overlap the previous one
            index = (slice(start, start + step), *(slice(0, size) for size in shape[1:]))
            yield index, gather(array, start, entry).addressable_data(0)


@functools.cache
def _gather(where: Any, rows: int) -> Callable[..., jax.Array]:
    """A function that brings some rows of an array to every device."""

    def piece(array: jax.Array, start: int, entry: tuple[int, ...]) -> jax.Array:
        for at in entry:
            array = jax.lax.dynamic_index_in_dim(array, at, keepdims=False)
        return jax.lax.dynamic_slice_in_dim(array, start, rows)

    return jax.jit(piece, out_shardings=NamedSharding(where.mesh, PartitionSpec()))


# Adapters


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
            (made / architecture.ADAPTER_CONFIG).write_text(description + "\n", encoding="utf-8")
            with open(made / ADAPTER_WEIGHTS, "wb") as file:
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
    _, plain = lora.merge_adapters({}, model)
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
        "task_type": _task_type(model),
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


def _task_type(model: config.ModelConfig) -> str | None:
    """PEFT's class for a model. null is the one that passes any inputs on, such as those of a Whisper or a BERT."""
    if model.encoder and not model.frames:
        return "SEQ_2_SEQ_LM"
    return "CAUSAL_LM" if config.objective_of(model) == "causal" else None


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
