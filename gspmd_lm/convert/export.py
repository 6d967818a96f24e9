"""A model of ours as a folder that transformers loads, written tensor by tensor."""

import functools
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from gspmd_lm import config
from gspmd_lm.config import InputError
from gspmd_lm.convert import architecture, safetensors
from gspmd_lm.convert.layout import Tensor
from gspmd_lm.convert.pretrained import Place, places

Held = list[tuple[Place, Any, int | None]]  # what a tensor is made of: places, arrays, which entry of a stacked one


def write(
    folder: Path,
    model: config.Model,
    params: Any,
    like: Mapping[str, Any] | None = None,
    dtype: str | None = None,
    beside: Sequence[Path] = (),
    file_bytes: int = safetensors.FILE_BYTES,
) -> None:
    """Writes config.json and the weights of a model, without its padding, to a folder that must not hold anything.

    Every process calls this; the first one writes, one tensor at a time. The folder appears when it is complete.

    params: the tree of parameters, jax or numpy arrays. like: the config.json that the model came with, whose other
    fields are kept. dtype: of all tensors, float32, bfloat16 or float16; None means that of `like`, or else of the
    model's weights. beside: files to be copied into the folder, such as those of the tokenizer.

    Raises InputError where the folder holds something, or no family of transformers can express the model.
    """
    row, fields = architecture.describe(model, like)
    dtype = dtype or fields.get("torch_dtype") or fields.get("dtype") or model.weight_dtype
    if dtype not in safetensors.WEIGHT_DTYPES:
        raise InputError(f"dtype: {dtype!r} must be one of {', '.join(safetensors.WEIGHT_DTYPES)}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder}: holds something already\n  fix   give the name of a new folder")
    fields.pop("dtype", None)
    fields["torch_dtype"] = dtype  # both versions of transformers read this name
    tensors = _tensors(places(row, model), params)
    kind = safetensors.WEIGHT_DTYPES[dtype]
    shapes = {name: tensor.shape(model) for name, (tensor, _) in tensors.items()}
    sizes = {name: int(np.prod(shape)) * np.dtype(safetensors.DTYPES[kind]).itemsize for name, shape in shapes.items()}
    files = safetensors.plan(sizes, file_bytes)
    writes = jax.process_index() == 0
    partial = folder.with_name(f"{folder.name}.partial")
    if writes:
        if partial.exists():  # of an export that was killed
            shutil.rmtree(partial)
        partial.mkdir(parents=True)
        (partial / architecture.CONFIG).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
        for path in beside:
            shutil.copy(path, partial / path.name)
        if len(files) > 1:
            (partial / safetensors.INDEX).write_text(safetensors.index(files, sum(sizes.values())), encoding="utf-8")
    for file_name, names in files.items():
        head = safetensors.start({name: (kind, shapes[name]) for name in names})
        _write_file(partial / file_name if writes else None, head, [tensors[name] for name in names], model, kind)
    if writes:
        os.replace(partial, folder)
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("convert.export")


def _tensors(tree: Any, params: Any) -> dict[str, tuple[Tensor, Held]]:
    """The tensors to be written, and what each is made of."""
    paired = jax.tree.leaves(jax.tree.map(lambda place, array: (place, array), tree, params), is_leaf=_is_pair)
    found: dict[str, tuple[Tensor, Held]] = {}
    for place, array in paired:
        assert array.shape == place.shape, (place.path, array.shape, place.shape)
        for i, name in enumerate(place.names()):
            found.setdefault(name, (place.tensor, []))[1].append((place, array, i if place.stacked else None))
    return found


def _is_pair(node: Any) -> bool:
    return isinstance(node, tuple)


def _write_file(
    path: Path | None, head: bytes, tensors: Sequence[tuple[Tensor, Held]], model: config.Model, kind: str
) -> None:
    """One file; without a path nothing is written, but what other processes gather is sent."""
    file: BinaryIO | None = open(path, "wb") if path else None  # noqa: SIM115  # closed below, where there is one
    try:
        if file:
            file.write(head)
        for tensor, held in tensors:
            view = np.empty(tensor.view(model) if file else (), safetensors.DTYPES[kind])
            for place, array, entry in held:
                whole = _on_host(array, entry, file is not None)
                if whole is not None:
                    tensor.rows(place.weight, place.letters, model).place(view, whole)
            if file:
                file.write(view.reshape(-1).view(np.uint8).data)
    finally:
        if file:
            file.close()


def _on_host(array: Any, entry: int | None, wanted: bool) -> np.ndarray | None:
    """An array, or one entry of a stacked one, as every process must ask for it; None where it is not wanted."""
    if isinstance(array, np.ndarray):
        return array if entry is None else array[entry]
    where = array.sharding
    if isinstance(where, NamedSharding):
        where = NamedSharding(where.mesh, PartitionSpec())
    gathered = _gather(where)(array, entry) if entry is None else _gather(where)(array, jnp.int32(entry))
    return np.asarray(gathered.addressable_data(0)) if wanted else None


@functools.cache
def _gather(where: jax.sharding.Sharding) -> Callable[..., jax.Array]:
    def entry_of(array: jax.Array, entry: jax.Array | None) -> jax.Array:
        return array if entry is None else jax.lax.dynamic_index_in_dim(array, entry, keepdims=False)

    return jax.jit(entry_of, out_shardings=where)
