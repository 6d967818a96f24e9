"""What `transformers` makes of a config.json that leaves fields out, for every family, as one golden file.

    python -m tests.convert.defaults

needs transformers (.[parity]). golden/defaults.json has, by the name of a family, a list of pairs of config.json files:
what is given, and what transformers makes of it. The first pair gives no sizes. The second one gives sizes that
are not the usual ones, so that a default that follows from a size shows. Kept are the fields that the family reads.
"""

import json
import re
from typing import Any

from gspmd_lm.convert import architecture
from gspmd_lm.convert.families import FAMILIES
from gspmd_lm.convert.family import Family
from tests.convert import references
from tests.convert.reference_cases import DEBERTA, DEBERTA_1

GOLDEN = references.GOLDEN / "defaults.json"
ROWS = [row for row in FAMILIES if row.model_type not in references.NOT_IN_TRANSFORMERS]
# Sizes that the second pair gives, by their names, each with the number that the usual size is divided by.
_SMALLER = {
    r"(^|\.)(hidden_size|d_model|n_embd|embed_dim|intermediate_size|ffn_dim|d_ff)$": 4,
    r"(^|\.)(num_attention_heads|n_heads?|encoder_attention_heads|num_heads)$": 2,
    r"(^|\.)(num_hidden_layers|n_layer|num_layers|encoder_layers|decoder_layers|vocab_size|n_positions)$": 2,
}
# Sizes that others must be equal to, or that other fields must fit, in all families and in one.
_NOT_SMALLER = ("mask_decoder_config.hidden_size", "prompt_encoder_config.hidden_size")
# Latent attention has no key heads of its own: they are as many as heads here, whatever transformers says.
_FIXED = {
    "gpt_neo": ("num_layers",), "whisper": ("vocab_size",), "deepseek_v3": ("num_attention_heads",),
    "glm4_moe_lite": ("num_attention_heads",),
}  # fmt: skip
# What a DeBERTa must say, because it is refused with the defaults of transformers.
_SAID = {"deberta": DEBERTA_1, "deberta-v2": DEBERTA}
_SIZES_OF_DISTANCES = ("max_relative_positions", "position_buckets")


def name_of(row: Family) -> str:
    return f"{row.model_type} {row.text_type}".strip()


def compute(row: Family) -> list[list[dict[str, Any]]]:
    """The pairs of a family, as the installed transformers has them."""
    said = {name: value for name, value in _SAID.get(row.model_type, {}).items() if name not in _SIZES_OF_DISTANCES}
    usual = _made(row, said)
    smaller = dict(said)
    for name, value in row.flatten(usual).items():
        divisor = next((by for pattern, by in _SMALLER.items() if re.search(pattern, name)), 1)
        fits = not name.endswith((*_NOT_SMALLER, *_FIXED.get(row.model_type, ())))
        if divisor > 1 and type(value) is int and fits:
            smaller[name] = value // divisor
    return [[_kept(row, row.nest(given)), _kept(row, _made(row, given))] for given in (said, smaller)]


def _made(row: Family, given: dict[str, Any]) -> dict[str, Any]:
    """The config.json that transformers makes of some fields, flat names of parts among them."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    nested = row.nest(given)
    if row.text_type:
        nested["text_config"] = {"model_type": row.text_type, **nested.get("text_config", {})}
    kind = references.UNDER_ANOTHER_TYPE.get(row.model_type, row.model_type)
    return CONFIG_MAPPING[kind](**nested).to_dict() | {"model_type": row.model_type}


def _kept(row: Family, raw: dict[str, Any]) -> dict[str, Any]:
    """The fields of a config.json that a family reads, and those that say which family it is."""
    read = architecture._read(row, raw)[0].names_read | {"text_config.model_type"}
    kept = {name: value for name, value in row.flatten(raw).items() if name in read}
    return json.loads(json.dumps({"model_type": row.model_type} | row.nest(kept)))


def recorded() -> dict[str, list[list[dict[str, Any]]]]:
    return json.loads(GOLDEN.read_text())


def main() -> None:
    made = {name_of(row): compute(row) for row in ROWS}
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(pairs)}" for name, pairs in made.items())
    GOLDEN.write_text(f"{{\n{lines}\n}}\n")
    print(f"{GOLDEN.name}: {len(made)} families, {GOLDEN.stat().st_size} bytes")


if __name__ == "__main__":
    main()
