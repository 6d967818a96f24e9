"""Fields of a config.json that say which layers have experts, and what experts there are."""

import dataclasses
from typing import Any

from gspmd_lm import config
from gspmd_lm.convert.fields import Values
from gspmd_lm.convert.source import Source


@dataclasses.dataclass(frozen=True)
class DenseLayers:
    """mlp_only_layers: the layers without experts, which must be the first ones."""

    def read(self, source: Source, values: Values) -> None:
        dense = source.get(["mlp_only_layers"], [])
        count = len(dense) if isinstance(dense, list) else 0
        if dense != list(range(count)):
            source.refuse("mlp_only_layers", dense, "are not the first layers: other layers without experts are not "
                          "supported")  # fmt: skip
        values["dense_layers"] = count
        values["sparse_step"] = source.whole(["decoder_sparse_step"], 1, 1)

    def write(self, model: config.Model) -> dict[str, Any]:
        return {"mlp_only_layers": list(range(model.dense_layers)), "decoder_sparse_step": model.sparse_step}


@dataclasses.dataclass(frozen=True)
class SparseLayers:
    """Llama 4's layers with experts: moe_layers, or every interleave_moe_layer_step-th."""

    def read(self, source: Source, values: Values) -> None:
        layers = values["layers"] if isinstance(values["layers"], int) else 1
        step = source.whole(["interleave_moe_layer_step"], 1, 1)
        sparse = source.get(["moe_layers"], list(range(step - 1, layers, step)))
        if isinstance(sparse, list) and sparse and type(sparse[0]) is int:
            step = max(sparse[0] + 1, 1)
        if not sparse or sparse != list(range(step - 1, layers, step)):
            source.refuse("moe_layers", sparse, "are not every n-th layer: other layers with experts are not supported")
        values["sparse_step"] = step

    def write(self, model: config.Model) -> dict[str, Any]:
        step = model.sparse_step
        return {"interleave_moe_layer_step": step, "moe_layers": list(range(step - 1, model.layers, step))}


@dataclasses.dataclass(frozen=True)
class SharedExperts:
    """n_shared_experts: how many experts, each as wide as a routed one, compute every token."""

    def read(self, source: Source, values: Values) -> None:
        values["shared_mlp"] = source.whole(["n_shared_experts"], 1, 0) * values["expert_mlp"]

    def write(self, model: config.Model) -> dict[str, Any]:
        return {"n_shared_experts": model.shared_mlp // model.expert_width}


@dataclasses.dataclass(frozen=True)
class LaterTokens:
    """num_nextn_predict_layers: layers behind the last one that predict later tokens. They are left out."""

    def read(self, source: Source, values: Values) -> None:
        source.whole(["num_nextn_predict_layers", "num_mtp_layers"], 1, 0)

    def write(self, model: config.Model) -> dict[str, Any]:
        return {"num_nextn_predict_layers": 0}
