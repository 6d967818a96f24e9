"""SmolLM3: layers without positions."""

from typing import Any

from gspmd_lm import config
from gspmd_lm.convert.config_reader import ConfigReader
from gspmd_lm.convert.families.llama import LLAMA
from gspmd_lm.convert.family import ATTENTION_BIAS, MLP_BIAS, llama_fields
from gspmd_lm.convert.fields import Values, check_each_layer, default_rotation, shortest_pattern
from gspmd_lm.convert.rope import Rope


class NoRopeLayers:
    """SmolLM3's layers without positions: those with 0 in no_rope_layers, or every no_rope_layer_interval-th."""

    def read(self, reader: ConfigReader, values: Values) -> None:
        usual = default_rotation(reader, values)
        rotated = check_each_layer(reader, "no_rope_layers", reader.get("no_rope_layers", usual), usual, "01")
        reader.names_read.update(("sliding_window", "use_sliding_window"))
        if reader.raw.get("use_sliding_window") and reader.raw.get("sliding_window"):
            reader.refuse("use_sliding_window", True, "has a window in layers without positions: not supported")
        kinds = reader.get("layer_types", [])
        if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
            reader.refuse("layer_types", kinds, "has layers with a window, which are not supported here")
        values["layer_pattern"] = shortest_pattern(["full" if one else "nope" for one in rotated])

    def write(self, model: config.ModelConfig) -> dict[str, Any]:
        rotated = [int(kind != "nope") for kind in model.kind_of_each_layer]
        return {"no_rope_layers": rotated, "use_sliding_window": False}


_SMOLLM_3 = (*llama_fields(4, rope=Rope(2e6), tied=True), ATTENTION_BIAS, MLP_BIAS, NoRopeLayers())
FAMILIES = (LLAMA.relative("SmolLM3", "smollm3", "SmolLM3ForCausalLM", _SMOLLM_3, irrelevant=("max_window_layers",)),)
