"""Our model of a published folder, in the ways that tests run it."""

import dataclasses
import json
import os

import jax
import numpy as np

from gspmd_lm.convert import export, pretrained, safetensors
from gspmd_lm.model.families import decode
from gspmd_lm.model.loss import logits, losses
from gspmd_lm.sharding import mesh, rules_file
from gspmd_lm.sharding.annotate import placed_by
from gspmd_lm.sharding.placement import MeshPlacement
from gspmd_lm.train import state
from tests.convert import references

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
    batch = {**batch, "row": np.arange(len(batch["tokens"]))}

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


def case_of(architecture, fields, folder):
    """A class of transformers, and a model of it with these fields of its config as a case: config.json, and the shapes
    of its tensors by name.
    """
    import torch
    import transformers

    torch.set_num_threads(1)
    kind = getattr(transformers, architecture)
    kind(kind.config_class(**fields)).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    return kind, {"config": config, "tensors": {name: list(array.shape) for name, array in tensors(folder).items()}}


def folder_of(case, folder):
    """A folder with the config.json of a case, and with weights that depend on their names and shapes alone."""
    weights = {name: references.weight(name, tuple(shape), 0) for name, shape in case["tensors"].items()}
    return references.save(folder, dict(case["config"]), weights)


def by_transformers(kind, folder):
    """The model of a folder, in float32, of which transformers must find every tensor and no other."""
    import torch

    model, report = kind.from_pretrained(
        folder, output_loading_info=True, dtype=torch.float32, attn_implementation="eager"
    )
    assert not any(report.values()), report
    return model.eval().requires_grad_(False)


def recorded(golden, name, case):
    """What golden/`golden`.json has under a name, which is `case` if GSPMD_LM_RECORD=1."""
    golden = references.GOLDEN / f"{golden}.json"
    if os.environ.get("GSPMD_LM_RECORD"):
        known = json.loads(golden.read_text()) if golden.exists() else {}
        golden.write_text(json.dumps(known | {name: case}) + "\n")
    return json.loads(golden.read_text())[name]


def written(opened, folder):
    """Two folders of the weights that were read: one with the config.json that was read, and one with a new one."""
    params = jax.device_get(on_one_device(opened))
    for like in (opened.like, None):
        export.write_folder(folder / f"like {bool(like)}", opened.config.model, params, like)
        yield folder / f"like {bool(like)}"
