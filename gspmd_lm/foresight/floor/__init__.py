"""The least a step could take: compute at peak, memory at full bandwidth, and the bytes this split must move."""

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gspmd_lm.axes import ADAPTED, ADAPTERS
from gspmd_lm.config import Config
from gspmd_lm.foresight.floor.traffic import ACTIVATION_AXES, Traffic, itemsize_of, model_sizes, piece_count
from gspmd_lm.foresight.machine.hardware import Chip
from gspmd_lm.train.metrics import flops_per_token

if TYPE_CHECKING:
    from gspmd_lm.arrays import Arrays
    from gspmd_lm.rules import Rules


@dataclasses.dataclass(frozen=True)
class Floor:
    """Lower bounds for one step on one device."""

    compute_s: float | None  # model FLOPs over peak; None on cpu
    memory_s: float | None  # bytes that must be read and written once over bandwidth; None on cpu
    communication_bytes: int | None  # what one device must send; None where it is not known
    communication_by_axis: Mapping[str, int]  # of one mesh axis, or several at once: fsdp, fsdp+tensor
    flops: float  # of the model, of one device, recomputation not counted
    dtype: str  # in which activations, and weights in use, are counted to be sent


def floor(config: Config, rules: "Rules", arrays: "Arrays", chip: Chip | None) -> Floor:
    """The floor of one train step of `config` under `rules`, filled and checked; `chip` is None for simulated devices.

    Redundant work is not counted: FLOPs are shared out evenly over all devices, however few of them the rules use.
    """
    tokens = config.data.batch * config.data.seq
    per_token = flops_per_token(config.model, arrays.parameter_count, config.data.seq, arrays.trained_count)
    flops = per_token * tokens / rules.devices
    sent = Traffic(config, rules, arrays).sent
    return Floor(
        compute_s=chip and flops / chip.peak_bf16_flops_per_s,
        memory_s=chip and memory_bytes(config, rules, arrays) / chip.hbm_bytes_per_s,
        communication_bytes=round(sum(sent.values())),
        communication_by_axis={axes: round(count) for axes, count in sent.items() if round(count)},
        flops=flops,
        dtype=config.model.compute_dtype,
    )


def least_flops(config: Config, rules: "Rules", arrays: "Arrays") -> float:
    """What matmuls and attention kernels of one device cannot do without in a train step: a check on what is priced.

    Less than the model's FLOPs: attention counts what its mask leaves, and weights only where they are multiplied.
    """
    from gspmd_lm.arrays import pairs

    model, seq = config.model, config.data.seq
    trained = {leaf.path for leaf, _ in pairs(arrays.named_trained, arrays.trained)}
    per_token = 0.0
    for leaf, like in pairs(arrays.named_params, arrays.params):
        name = leaf.path.rpartition(".")[2]
        if name in _MULTIPLIED or (name == "embedding" and model.tied_embeddings):
            # The derivative to the first layer's input is left out where nothing before it is trained.
            needed = 6.0 if leaf.path in trained else 4.0 - 2.0 / model.layers
            per_token += needed * math.prod(like.shape)
    kinds = model.layer_kinds
    seen = sum(min(kind.sliding_window or seq, seq / 2) for kind in kinds) / len(kinds)
    per_token += 12.0 * model.layers * model.heads * model.head_dim * seen
    return per_token * config.data.batch * seq / rules.devices


_MULTIPLIED = (*ADAPTED, *ADAPTERS, "unembedding")


def memory_bytes(config: Config, rules: "Rules", arrays: "Arrays") -> float:
    """The bytes that one device reads and writes in a step if everything else stays on the chip.

    Weights that are trained, gradients and optimizer state are read and written once; weights in use are read forward
    and backward in each microbatch, in the compute dtype; activations kept for the backward pass are written and read.
    """
    from gspmd_lm.arrays import pairs

    def held(table: str, leaf: Any, like: Any, itemsize: int) -> float:
        spec = rules.resolve(table, leaf.path, leaf.axes, like.shape)[0]
        return math.prod(like.shape) * itemsize / piece_count(rules, (name for names in spec for name in names))

    compute_bytes = itemsize_of(config.model.compute_dtype)
    params, optimizer = pairs(arrays.named_params, arrays.params), pairs(arrays.named_optimizer, arrays.optimizer)
    trained = pairs(arrays.named_trained, arrays.trained)
    once = sum(held("weights", *leaf, leaf[1].dtype.itemsize) for leaf in trained)
    once += sum(held("optimizer", *leaf, leaf[1].dtype.itemsize) for leaf in (*trained, *optimizer))
    in_use = sum(held("rules", *leaf, compute_bytes) for leaf in params if not looked_up(config, leaf[0].path))
    return 2 * (once + rules.microbatches * in_use + _kept_bytes(config, rules))


def looked_up(config: Config, path: str) -> bool:
    """Whether only a few rows of a table are read."""
    return path == "position_embedding" or (path == "embedding" and not config.model.tied_embeddings)


def _kept_bytes(config: Config, rules: "Rules") -> float:
    """Activations of all layers and microbatches that a device keeps for the backward pass."""
    remat, names = rules.remat, ["residual"]  # a layer's input, under whatever name
    if remat.policy == "names":
        names += [name for name in (*remat.save, *remat.offload) if name not in ("residual", "layer_input")]
    elif remat.policy != "block":
        inward = ["hidden"] * (2 if config.model.mlp_kind == "gated" else 1)
        names += ["q", "k", "v", "attention_out", *inward]
    sizes = model_sizes(config, config.data.batch)
    total = 0.0
    for name in names:
        axes = ACTIVATION_AXES[name]
        splits = (mesh_axis for axis in axes for mesh_axis in rules.split("rules", name, axis))
        total += math.prod(sizes[axis] for axis in axes) / piece_count(rules, splits)
    return total * config.model.layers * itemsize_of(config.model.compute_dtype)
