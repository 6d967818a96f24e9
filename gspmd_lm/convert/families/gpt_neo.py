"""GPT-Neo: layers with a window."""

from typing import Any

from gspmd_lm import config
from gspmd_lm.convert.config_reader import ConfigReader
from gspmd_lm.convert.families.gpt2 import GPT2, GPT_ACTIVATION, GPT_EPS, HEAD_SUMMARY, gpt2_tensors
from gspmd_lm.convert.family import ONE_WIDTH, PLAIN_LAYERNORM, TIED, four_times
from gspmd_lm.convert.fields import MOST_LAYERS, Given, Renamed, Values, number_of_layers, shortest_pattern
from gspmd_lm.convert.layout import linear, plain_mlp, separate_qkv


class LocalLayers:
    """GPT-Neo's layers with a window: attention_layers, or attention_types, and window_size."""

    def read(self, reader: ConfigReader, values: Values) -> None:
        layers = number_of_layers(values)
        window = reader.whole("window_size", 256, 1)
        types = reader.get("attention_types", [[["global", "local"], 12]])
        try:
            implied = [kind for kinds, times in types for _ in range(min(times, MOST_LAYERS)) for kind in kinds]
        except (TypeError, ValueError):
            implied = []
        kinds = reader.get("attention_layers", implied) if "attention_types" not in reader.raw else implied
        reader.names_read.add("attention_layers")  # transformers makes it from attention_types
        if not isinstance(kinds, list) or len(kinds) != layers or not set(map(str, kinds)) <= {"global", "local"}:
            reader.refuse("attention_types", types, f"must be {layers} of global, local")
            return
        short = ["sliding" if kind == "local" else "full" for kind in kinds]
        values["attention.window"] = window if "sliding" in short else 0
        values["layer_pattern"] = shortest_pattern(short)

    def write(self, model: config.ModelConfig) -> dict[str, Any]:
        kinds = ["local" if kind == "sliding" else "global" for kind in model.kind_of_each_layer]
        return {
            "attention_types": [[kinds, 1]],
            "attention_layers": kinds,
            "window_size": model.attention.window or 256,
        }


_GPT_NEO = (
    Renamed("vocab_size", "vocab"),
    Renamed("hidden_size", "embed"),
    Renamed("num_layers num_hidden_layers", "layers", most=MOST_LAYERS),
    Renamed("num_heads num_attention_heads", "heads"),
    Renamed("max_position_embeddings", "context"),
    Renamed("intermediate_size", "mlp", four_times),
    *(ONE_WIDTH, PLAIN_LAYERNORM, GPT_EPS, LocalLayers(), GPT_ACTIVATION, TIED),
    Given({"positions": "learned", "attention.scale": 1.0, "attention.out_bias": True, "feed_forward.bias": True}),
)
_LAYER = "transformer.h.{}"
_TENSORS = gpt2_tensors(
    *separate_qkv(f"{_LAYER}.attn.attention", bias=False),
    *linear(f"{_LAYER}.attn.attention.out_proj", "D (N H)", "attention.wo"),
    *plain_mlp(f"{_LAYER}.mlp", "c_fc", "c_proj"),
)
FAMILIES = (GPT2.relative("GPT-Neo", "gpt_neo", "GPTNeoForCausalLM", _GPT_NEO, _TENSORS, irrelevant=HEAD_SUMMARY),)
