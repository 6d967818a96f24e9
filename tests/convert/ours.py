"""Our model of a published folder, in the ways that tests run it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from gspmd_lm.convert import pretrained, safetensors
from gspmd_lm.model.loss import logits, losses
from gspmd_lm.model.transformer import decode
from gspmd_lm.sharding import mesh, rules_file
from gspmd_lm.sharding.annotate import placed_by
from gspmd_lm.sharding.placement import MeshPlacement
from gspmd_lm.train import state

EXACT = "model.matmul_precision=highest"


def read(golden, folder, *overrides, dtype="float32"):
    return pretrained.open_folder(golden.folder(folder, dtype), [EXACT, *overrides])


def on_one_device(opened):
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return opened.load(jax.tree.map(lambda place: one, opened.locations))


def placement(model, layout):
    """The placement of a shipped layout; key heads that do not divide over it are replicated, as its error says."""
    rules = rules_file.load(layout).fill(8)
    if model.kv_head_rows % rules.mesh["tensor"]:
        rules = dataclasses.replace(rules, rows=tuple(row for row in rules.rows if row.axis != "kv_heads"))
    return MeshPlacement(rules, mesh.build(rules, jax.devices()[:8]))


def shardings(opened, placed):
    arrays = state.arrays(opened.config)
    return placed.shardings("weights", arrays.named_params, arrays.params)


def compiled(model, params, batch, placed=None, gradients=False):
    """Logits [B, T, V] of a batch of references.py, and with `gradients` the mean loss and its gradients."""
    batch = {name: jnp.asarray(array) for name, array in batch.items()} | {"row": jnp.arange(len(batch["tokens"]))}

    def forward(params, batch):
        x_BTD, table, bias = decode(model, params, batch)
        found = logits(x_BTD, table, bias, model)
        if not gradients:
            return found
        total = losses(x_BTD, table, bias, batch["targets"], model).loss
        return total / (batch["targets"] >= 0).sum(), found

    def run(params, batch):
        with placed_by(placed):
            return (jax.value_and_grad(forward, has_aux=True) if gradients else forward)(params, batch)

    return jax.jit(run).lower(params, batch).compile()(params, batch)


def tensors(folder):
    """The tensors of a folder by name, whole."""
    found = safetensors.stored_tensors(folder)
    return {name: np.array(at.read(at.shape, [slice(None)] * len(at.shape))) for name, at in found.items()}
