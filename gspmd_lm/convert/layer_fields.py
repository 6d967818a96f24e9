"""Fields of a config.json that have an entry for each layer."""

import dataclasses
from typing import Any

from gspmd_lm import config
from gspmd_lm.convert.fields import Values
from gspmd_lm.convert.source import Source


@dataclasses.dataclass(frozen=True)
class EachLayer:
    """A field with a number for all layers, or a list with one for each, which must be equal."""

    name: str
    setting: str
    default: int

    def read(self, source: Source, values: Values) -> None:
        given = source.get([self.name], self.default)
        each = given if isinstance(given, list) and given else [given]
        if isinstance(given, list) and (len(given) != values["layers"] or any(one != given[0] for one in given)):
            source.refuse(self.name, given, f"is not one number, or {values['layers']} that are equal")
        values[self.setting] = source.checked(self.name, each[0])

    def write(self, model: config.Model) -> dict[str, Any]:
        return {self.name: [getattr(model, self.setting)] * model.layers}


@dataclasses.dataclass(frozen=True)
class SparseActivation:
    """activation_sparsity_pattern: a number for each layer, one and the same for the first ones, then 0."""

    def read(self, source: Source, values: Values) -> None:
        layers, name = values["layers"] if isinstance(values["layers"], int) else 1, "activation_sparsity_pattern"
        usual = [0.95 if i < 10 < layers else 0.0 for i in range(layers)]
        given = source.get([name], usual)
        count = sum(map(bool, given)) if isinstance(given, list) else 0
        share = given[0] if count else 0.0
        if not isinstance(share, float) or not 0 <= share < 1 or given != [share] * count + [0] * (layers - count):
            source.refuse(name, given, f"is not {layers} shares, of which the first are equal and the others 0")
            count = 0
        values["activation_sparsity"] = float(share) if count else 0.0
        values["sparse_layers"] = count if count < layers else 0

    def write(self, model: config.Model) -> dict[str, Any]:
        share = model.activation_sparsity
        count = (model.sparse_layers or model.layers) if share else 0
        return {"activation_sparsity_pattern": [share] * count + [0.0] * (model.layers - count)}
