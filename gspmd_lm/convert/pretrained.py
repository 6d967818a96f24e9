"""A published model on disk: its config and its weights. Each host reads only what its devices need."""

import dataclasses
import functools
import math
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from gspmd_lm import config
from gspmd_lm.convert import architecture, dequantise, multimodal, safetensors
from gspmd_lm.convert.families import whisper
from gspmd_lm.convert.family import Family
from gspmd_lm.convert.layout import LETTERS, AxisOrder, Tensor, copy_transposed
from gspmd_lm.convert.safetensors import Stored
from gspmd_lm.data.tokenizer import Bytes
from gspmd_lm.errors import InputError
from gspmd_lm.model.addresses import held_layers, inner_stacks
from gspmd_lm.model.families import init
from gspmd_lm.sharding import of_flax
from gspmd_lm.sharding.axes import DECODER
from gspmd_lm.sharding.placement import Named
from gspmd_lm.sharding.quantised import EIGHT_BITS
from gspmd_lm.sharding.shapes import Arrays, arrays
from gspmd_lm.units import plural

BLOCK_BYTES = 32 * 2**20  # mapped at a time, because pages that were read count as memory of the process
_SAMPLED_ROWS = 64
_ALIGNED_BYTES = 64
_LAYER = re.compile(r"\.(\d+)\.")


@dataclasses.dataclass(frozen=True)
class ArrayLocation:
    """One array of our model, and the tensors that hold it."""

    path: str  # "layers.attention.wq"
    weight: str  # within a layer: "attention.wq"
    layers: tuple[int, ...]  # the layers whose weights it holds; () for an array outside the layers
    lead: tuple[int, ...]  # the sizes of its first dimensions, along which tensors are stacked: layers, then experts
    letters: str  # the letters of its other dimensions: "DNH"
    shape: tuple[int, ...]
    dtype: Any
    tensor: Tensor

    def names(self) -> list[str]:
        """The names of the tensors, one for each layer, or for each expert of each layer, or for each stream."""
        several = range(self.lead[-1] if self.tensor.is_one_of_several else 1)
        return [self.tensor.name.format(layer, expert=i, stream=i) for layer in self.layers or ("",) for i in several]


def array_locations(row: Family, model: config.ModelConfig) -> Any:
    """The tree of a model's parameters, with an ArrayLocation for each. Raises InputError if the family lacks one."""
    shapes = _parameters(model)
    held = {
        (weight, tensor.has_experts): tensor
        for tensor in row.tensors
        if tensor.exists_in(model)
        for weight in tensor.weights
    }
    lacking = []

    def locate(leaf: Named, like: Any) -> ArrayLocation | None:
        weight, layers, stacked = _layers(leaf.path, model)
        if not (tensor := held.get((weight, "expert" in leaf.axes))):
            lacking.append(weight)
            return None
        ahead = stacked + tensor.is_one_of_several
        letters = "".join(LETTERS[axis] for axis in leaf.axes[ahead:])
        return ArrayLocation(leaf.path, weight, layers, like.shape[:ahead], letters, like.shape, like.dtype, tensor)

    tree = jax.tree.map(locate, shapes.named_params, shapes.params)
    if lacking:
        raise InputError(f"{row.name} has no tensor for {', '.join(dict.fromkeys(lacking))}")
    return tree


@functools.lru_cache(maxsize=128)
def _parameters(model: config.ModelConfig) -> Arrays:
    """The shapes and names of the parameters, which reading, checking and writing a folder need alike.

    Of weights that will rest in 8 bits, they are those of the weights that these are made of.
    """
    if model.weight_dtype in EIGHT_BITS:
        model = dataclasses.replace(model, weight_dtype="float32")
    return arrays(functools.partial(init, model), DECODER)


def _layers(path: str, model: config.ModelConfig) -> tuple[str, tuple[int, ...], bool]:
    """The name of a parameter within its layer, the layers it holds, and whether they are its first dimension.

    What all layers share has a single tensor, whose name says no layer.
    """
    for module, (layers, stacked, stack) in held_layers(model).items():
        prefix = f"{'.'.join(module)}."
        if path.startswith(prefix):
            shared = inner_stacks(model).get(stack, model).shared_layers
            return ".".join((*stack.split(), path.removeprefix(prefix))), () if shared else layers, stacked
    return path, (), False


@dataclasses.dataclass(frozen=True)
class Pretrained:
    """A model whose folder was checked. Its weights have not been read yet."""

    config: config.Config
    family: Family
    like: Mapping[str, Any]  # its config.json, with the true dtype of its weights
    tokenizer: Path | None
    files: Mapping[str, Stored]  # the tensors, by the family's names
    locations: Any  # the tree of parameters, with an ArrayLocation for each
    left_out: int = 0  # tensors of other parts than the text
    notes: Sequence[str] = ()  # sentences about what its config.json says and the settings do not
    new: Sequence[str] = ()  # the paths of weights that no file has: those of another head, drawn from train.seed

    @property
    def reads_text(self) -> bool:
        """Whether there is a tokenizer: the folder's, one that was named, or bytes for a model of bytes."""
        named = self.config.data.tokenizer != Bytes.fingerprint
        return named or self.tokenizer is not None or self.config.model.vocab == Bytes.vocab_size

    @functools.cached_property
    def _new_weights(self) -> Mapping[str, np.ndarray]:
        """The values of the new weights."""
        draw = functools.partial(of_flax.draw_params, functools.partial(init, self.config.model), self.new)
        return jax.device_get(jax.jit(draw)(jax.random.key(self.config.train.seed)))

    def load(self, shardings: Any, dtypes: Any = None) -> Any:
        """The parameters, or those in a part of their tree, placed as a tree of shardings says, and cast as a tree of
        dtypes says if there is one.

        Each process reads the parts that its devices hold, one part at a time. The host holds nothing but these parts
        and the part that is being read.
        """
        locations = _part(self.locations, shardings)
        if dtypes is not None:
            locations = jax.tree.map(
                lambda location, dtype: dataclasses.replace(location, dtype=dtype), locations, dtypes
            )
        return jax.tree.map(self._array, locations, shardings)

    def _array(self, location: ArrayLocation, sharding: jax.sharding.Sharding) -> jax.Array:
        devices: dict[tuple[tuple[int, int], ...], list[Any]] = {}
        for device, index in sharding.addressable_devices_indices_map(location.shape).items():
            index = index or (slice(None),) * len(location.shape)
            part = tuple(at.indices(size)[:2] for at, size in zip(index, location.shape, strict=True))
            devices.setdefault(part, []).append(device)
        shards = [shard for part, holders in devices.items() for shard in self._put(location, part, holders, sharding)]
        return jax.make_array_from_single_device_arrays(location.shape, sharding, shards)

    def _put(
        self, location: ArrayLocation, part: Any, holders: list[Any], sharding: jax.sharding.Sharding
    ) -> list[jax.Array]:
        """A part of an array on each device that holds it. The copy on the host is dropped."""
        on_host = self.part(location, tuple(slice(*at) for at in part))
        kind = sharding.memory_kind
        return jax.block_until_ready(
            [jax.device_put(on_host, SingleDeviceSharding(device, memory_kind=kind)) for device in holders]
        )

    def part(self, location: ArrayLocation, index: tuple[slice, ...]) -> np.ndarray:
        """A slice of one of our arrays, read from the files; padding is zero."""
        if location.path in self.new:
            return np.asarray(self._new_weights[location.path][index], location.dtype)
        model, tensor = self.config.model, location.tensor
        if not location.shape:
            return np.asarray(self.files[tensor.name].read((), ()), location.dtype)
        rows = tensor.rows(location.weight, location.letters, model)
        shape = tuple(at.stop - at.start for at in index)
        whole = _zeros(shape, location.dtype)
        ahead = len(location.lead)
        names = np.array(location.names()).reshape(location.lead)[index[:ahead]]
        for name, one in zip(names.ravel(), whole.reshape(names.size, *shape[ahead:]), strict=True):
            self._fill(one, self.files[str(name)], rows, index[ahead:], tensor.view(model))
        return whole

    def _fill(self, out: np.ndarray, stored: Stored, rows: AxisOrder, index: tuple[slice, ...], view: tuple[int, ...]):
        take, into = rows.pick(index)
        theirs = out[into].transpose(rows.order)  # in the tensor's order of dimensions
        step = max(BLOCK_BYTES * view[0] // stored.bytes, 1)
        for start in range(0, len(theirs), step):
            copy_transposed(theirs[start : start + step], stored.read(view, [_rows(take[0], start, step), *take[1:]]))


def _part(tree: Any, like: Any) -> Any:
    """The part of nested dicts that has the keys of `like`."""
    return {name: _part(tree[name], one) for name, one in like.items()} if isinstance(like, dict) else tree


def _zeros(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Zeros that begin where XLA on a CPU wants arrays to begin: a device on the CPU takes them without a copy."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    room = np.zeros(size + _ALIGNED_BYTES, np.uint8)
    start = -room.ctypes.data % _ALIGNED_BYTES
    return room[start : start + size].view(dtype).reshape(shape)


def _rows(take: slice | np.ndarray, start: int, count: int) -> slice | np.ndarray:
    """The rows of `take` from number `start` on, `count` of them."""
    if isinstance(take, slice):
        step = take.step or 1
        return slice(take.start + start * step, min(take.start + (start + count) * step, take.stop), step)
    return take[start : start + count]


def open_folder(
    folder: Path, overrides: Sequence[str] = (), ignored: Collection[str] = (), fix: str = "{flags}"
) -> Pretrained:
    """The model of a folder that transformers wrote, checked against its files.

    overrides: section.key=value. ignored: fields of config.json that may be set although their meaning is not known.
    fix: what to do about such a field, with the flags of `convert` that name it.
    Raises an InputError that lists every field of config.json that is not supported, or every tensor that is
    unexpected, missing or of another shape; or that names a file that cannot be read.
    """
    try:
        return _read(folder, overrides, ignored, fix)
    except OSError as error:
        raise InputError(
            f"{error.filename or folder}: cannot be read ({error.strerror})\n  fix   make it readable, then try again"
        ) from error


def _read(folder: Path, overrides: Sequence[str], ignored: Collection[str], fix: str) -> Pretrained:
    whole, place = architecture.read_config_json(folder), str(folder / architecture.CONFIG)
    text = multimodal.text_config(whole, place)
    raw, quantised = dequantise.split_config(text, place)
    row = architecture.family_of(raw, place, architecture.asked_objective(overrides, place))
    architecture.check_ignored(row, raw, place, ignored)
    values = architecture.model_settings(row, raw, place, ignored, fix)
    every = stored = safetensors.stored_tensors(folder)
    if text is not whole:
        stored = multimodal.text_tensors(stored)
    left_out = len(every) - len(stored)
    if quantised:
        stored = dequantise.dequantise_tensors(stored, quantised, str(folder))
    with_unused, stored = len(stored), multimodal.without_unused(stored, raw)
    stored, of_other_heads = _head_tensors(row, stored)
    tokenizer = folder / architecture.TOKENIZER
    weights = [where for name, where in stored.items() if not row.is_no_weight(name) and not row.keeps_float32(name)]
    dtypes = {where.dtype for where in weights if where.dtype in safetensors.DTYPES}
    names = {short: name for name, short in safetensors.WEIGHT_DTYPES.items()}
    source_dtype = names[dtypes.pop()] if len(dtypes) == 1 else "float32"
    values |= {
        "weight_dtype": "bfloat16" if source_dtype == "bfloat16" else "float32",
        "compute_dtype": "float32" if source_dtype == "float32" else "bfloat16",
    }
    notes = [*architecture.notes(row, raw), *(dequantise.notes(stored, quantised) if quantised else [])]
    run_config = architecture.run_config(folder.resolve().name, tokenizer, values, overrides, place, notes)
    _check_sizes(place, row, run_config.model, stored)
    tree = array_locations(row, run_config.model)
    leaves = jax.tree.leaves(tree)
    new = _new_paths(row, raw, leaves, stored)
    files = _check_leaves(folder, row, run_config.model, [leaf for leaf in leaves if leaf.path not in new], stored)
    like = {name: value for name, value in raw.items() if name not in ("dtype", "torch_dtype")}
    like["torch_dtype"] = source_dtype
    if text is not whole:
        like["architectures"] = [row.architecture]
    if len(stored) < with_unused and raw.get(multimodal.LATER_TOKENS):
        like[multimodal.LATER_TOKENS] = 0
    left_out += with_unused - len(stored) - len(of_other_heads)
    notes += whisper.first_token_notes(run_config.model)
    if of_other_heads:
        notes.append(f"left out, as tensors of another head: {', '.join(of_other_heads)}")
    there = tokenizer if tokenizer.is_file() else None
    return Pretrained(run_config, row, like, there, files, tree, left_out, notes, new)


def _head_tensors(row: Family, stored: Mapping[str, Stored]) -> tuple[dict[str, Stored], list[str]]:
    """The tensors without those of heads that the row does not have, under today's names; and the names left out."""
    stored = {new if (new := row.todays_name(name)) == name or new not in stored else name: where
              for name, where in stored.items()}  # fmt: skip
    known = {tensor.name for tensor in row.tensors} | row.twice.keys()
    others = [name for name in stored if row.is_head_tensor(name) and not {name, row.prefix + name} & known]
    return {name: where for name, where in stored.items() if name not in others}, others


def _new_paths(
    row: Family, raw: Mapping[str, Any], leaves: list[ArrayLocation], stored: Mapping[str, Stored]
) -> list[str]:
    """The paths of the weights of the row's head that the files lack, if config.json does not say that they have it."""
    classes = raw.get("architectures")
    if isinstance(classes, list) and row.architecture in classes:
        return []
    have = stored.keys() | {row.prefix + name for name in stored}
    return [leaf.path for leaf in leaves if row.is_head_tensor(leaf.tensor.name) and not have & {*leaf.names()}]


def _check_sizes(place: str, row: Family, model: config.ModelConfig, stored: Mapping[str, Stored]) -> None:
    """Raises InputError if the files are too small for the config.

    This comes first, because finding the shapes of all weights takes longer the deeper the model is.
    """
    held = sum(math.prod(where.shape) for where in stored.values())
    shapes = {tensor.name: tensor.shape(model) for tensor in row.tensors if tensor.exists_in(model)}
    lines = [f"  {name} should be {_times(shape)}" for name, shape in shapes.items() if math.prod(shape) > held]
    if model.layers > len(stored) and not model.shared_layers:
        lines.append(f"  there should be {model.layers:,} layers")
    if lines:
        raise InputError(
            f"{place}: the files hold {held:,} numbers in {len(stored):,} tensors, which is not enough\n"
            + "\n".join([*lines, "  fix   fetch the folder again: its config.json is of another model"])
        )


def _check_leaves(
    folder: Path, row: Family, model: config.ModelConfig, leaves: list[ArrayLocation], stored: Mapping[str, Stored]
) -> dict[str, Stored]:
    """The tensors by the family's names. Raises InputError if they are not exactly those of the model."""
    wanted = {name: location.tensor.shape(model) for location in leaves for name in location.names()}
    files, unexpected, copies = {}, [], []
    heads = [tensor.name for tensor in row.tensors if tensor.weights == ("unembedding",) and model.embedding.tied]
    for published, where in stored.items():
        name = published if published in wanted or row.prefix + published not in wanted else row.prefix + published
        if name in wanted and name not in files:
            files[name] = where
        elif published in heads or {published, row.prefix + published} & {*row.copies}:
            copies.append(published)
        elif not row.is_no_weight(published) and published not in row.twice:
            unexpected.append(published)
    known = ", ".join(safetensors.DTYPES)
    wrong = {
        "unexpected": dict.fromkeys(unexpected, ""),
        "missing": {name: "" for name in wanted if name not in files},
        "misshapen": {
            name: f" is {_times(where.shape)}, not {_times(wanted[name])}"
            for name, where in files.items()
            if where.shape != wanted[name]
        },
        "no number": {
            name: f" is {where.dtype}; supported are {known}"
            for name, where in files.items()
            if where.dtype not in safetensors.DTYPES
        },
    }
    lines = [f"  {kind:13}{line}" for kind, remarks in wrong.items() for line in _by_layer(remarks)]
    if not lines:
        embedding = next((location.tensor.name for location in leaves if location.path == "embedding"), "")
        untie = f"{embedding}; set tie_word_embeddings to false in config.json"
        equal = [(copy, embedding, untie) for copy in copies]
        equal += [(copy, name, name) for copy, name in row.twice.items() if copy in stored and name in files]
        lines = [
            f"  unexpected   {copy}: not equal to {said}"
            for copy, name, said in equal
            if not _alike(stored[copy], files[name])
        ]
    if lines:
        count = plural(len(lines), "kind")
        raise InputError(
            f"{folder}: {count} of tensors that do not fit {row.name} as config.json has it\n" + "\n".join(lines)
        )
    return files


def _alike(a: Stored, b: Stored) -> bool:
    """Whether two arrays have the same shape, and the same values in some of their rows."""
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    rows = np.unique(np.linspace(0, a.shape[0] - 1, _SAMPLED_ROWS).astype(int))
    index = (rows, *(slice(None) for _ in a.shape[1:]))
    return np.array_equal(a.read(a.shape, index), b.read(b.shape, index))


def _by_layer(names: Mapping[str, str]) -> list[str]:
    """The lines of a message about tensors. Names that differ only in their layer share a line."""
    grouped: dict[tuple[str, str], list[str]] = {}
    for name, remark in names.items():
        grouped.setdefault((_LAYER.sub(".{}.", name), remark), []).append(name)
    return [
        f"{alike[0]}{remark}" if len(alike) == 1 else f"{name}{remark} ({len(alike)} of them)"
        for (name, remark), alike in grouped.items()
    ]


def _times(shape: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, shape))}]"
