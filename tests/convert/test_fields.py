"""Each field of config.json changed, one at a time: what moves transformers' logits moves our settings or is refused.

`pytest -m parity`, with .[parity] installed, and `pytest -m slow` for more families. The names that are tried are
those of transformers' config classes, those that are known here, and every name that transformers' sources ask a
config for.
"""

import copy
import dataclasses
import inspect
import re
from pathlib import Path
from types import FunctionType, MethodType

import pytest

from gspmd_lm.config import nest
from gspmd_lm.convert import architecture
from gspmd_lm.convert.families import DROPOUT, FAMILIES, IRRELEVANT
from gspmd_lm.errors import InputError
from tests.convert import references

pytestmark = pytest.mark.filterwarnings("ignore")  # what torch and transformers warn of is theirs

MOVED = 1e-4  # of logits of about 5
ABSENT = object()
VALUES = (ABSENT, None, False, True, 0, 1, 2, 0.5, "x", [], {})
UNREAD = (None, False, True, 2, "x", {"0": {"head_dim": 2}})  # for fields that change nothing, as we say
ROPE_VALUES = (ABSENT, None, 0, 1, 0.5, 2.0, 7.0, "linear", "x", [], [1, 1, 2])
ROPE_FIELDS = (
    "rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "original_max_position_embeddings",
    "low_freq_factor", "high_freq_factor", "attention_factor", "mrope_section", "beta_fast", "short_factor", "x",
)  # fmt: skip
ACTIVATIONS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu")
# Cases whose fields other cases have too. Of mT5, no config builds the model again: transformers 5 ties its tables.
ALIKE = (
    "llama3", "gptneox-sequential", "stablelm-parallel", "starcoder-all-heads", "longrope-short", "dynamic",
    "deepseek-v2-lite", "llama4-scout", "opt-no-last-norm", "t5-v1.1", "mt5",
)  # fmt: skip
# Files of transformers that every family shares and that read configs.
SHARED = (
    "modeling_utils.py", "masking_utils.py", "modeling_rope_utils.py", "modeling_layers.py", "cache_utils.py",
    "configuration_utils.py", "generation/utils.py", "integrations/heterogeneity/configuration_utils.py",
)  # fmt: skip
# Gemma 1 was trained with the approximated GELU, whatever its config.json calls it; transformers 4 computed that.
MEANT_OTHERWISE = [("gemma", "hidden_act", "gelu"), ("gemma", "hidden_activation", "gelu")]


def config_class(row, model_type=""):
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING[model_type or row.model_type]


def row_of(case):
    return next(row for row in FAMILIES if row.model_type == references.CASES[case][0])


THEIRS = [row for row in FAMILIES if row.model_type not in references.NOT_IN_TRANSFORMERS]


@pytest.mark.parity
@pytest.mark.parametrize("row", THEIRS, ids=lambda row: row.model_type)
def test_every_field_of_transformers_is_known(row):
    """So that a field that is not known is one that transformers does not have either."""
    found = config_class(row)
    names = {field.name for field in dataclasses.fields(found)} | found().to_dict().keys() | set(found.attribute_map)
    assert {name for name in names if not DROPOUT.search(name)} <= architecture.known_fields(row, {})


def asked_for(row):
    """Names that the sources of a family, and those that all share, ask a config for, if a file can set them."""
    folder = Path(inspect.getfile(config_class(row))).parent
    root = folder.parent.parent
    text = "".join(path.read_text() for path in [*folder.glob("*.py"), *(root / name for name in SHARED)])
    patterns = (
        r"config\.([a-z_][a-z_0-9]*)",
        r"getattr\([a-z_.]*config[a-z_()]*, \"(\w+)\"",
        r"kwargs\.(?:pop|get)\(\"(\w+)\"",
    )
    names = {name for pattern in patterns for name in re.findall(pattern, text) if not name.startswith("__")}
    own = {
        name
        for name in names
        if isinstance(getattr(config_class(row), name, None), property | FunctionType | MethodType)
    }
    return names - own


def changes(raw, names):
    """A name, a value of it, and config.json with that."""
    for name in sorted(names):
        now = raw.get(name)
        near = (now * 2, now + 1) if isinstance(now, int | float) and not isinstance(now, bool) else ()
        words = ACTIVATIONS if "act" in name else ()
        for value in (*VALUES, *near, *words):
            changed = {field: held for field, held in raw.items() if field != name}
            yield name, value, changed if value is ABSENT else changed | {name: value}
    for outer in ("rope_parameters", "rope_scaling"):
        inside = [name for name, held in (raw.get(outer) or {}).items() if isinstance(held, dict)]
        for at in ([outer], *([outer, name] for name in inside)):
            for name in ROPE_FIELDS:
                for value in ROPE_VALUES:
                    changed = copy.deepcopy(raw)
                    holder = changed
                    for key in at:
                        holder[key] = holder.get(key) or {}
                        holder = holder[key]
                    holder.pop(name, None)
                    if value is not ABSENT:
                        holder[name] = value
                    yield ".".join([*at, name]), value, changed


def settings(row, raw, ignored=()):
    try:
        return architecture.model_settings(row, raw, "x", ignored)
    except InputError:
        return None


# Plain rotary positions, windows with norms of heads, learned positions, and a parallel block.
BY_PARITY = ("llama", "gemma3", "gpt2", "falcon-40b")


def swept():
    """The cases whose fields are changed one at a time; `pytest -m slow` has those that `pytest -m parity` has not."""
    for name in references.CASES:
        if name not in ALIKE and row_of(name) in THEIRS:
            yield pytest.param(name, marks=pytest.mark.parity if name in BY_PARITY else pytest.mark.slow)


@pytest.fixture(scope="module", params=list(swept()))
def case(request, tmp_path_factory):
    """The row of a family, config.json, and a function: config.json -> how far transformers' logits are from those of
    the original one, with the same weights; None where it refuses.
    """
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    name = request.param
    transformers.logging.set_verbosity_error()
    model, raw, _ = references.build(name, tmp_path_factory.mktemp("fields"), references.load(name).about["salt"])
    weights, how = model.state_dict(), model.config._attn_implementation  # Falcon's forms differ with alibi
    tokens = torch.randint(3, raw["vocab_size"], (2, 40), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(tokens)
    mask[1, :7] = 0

    def logits(model):
        if model.config.is_encoder_decoder:
            with torch.no_grad():
                return model(input_ids=tokens, attention_mask=mask.flip(1), decoder_input_ids=tokens[:, :20]).logits
        with torch.no_grad():
            padded = model(tokens, attention_mask=mask, return_dict=True).logits
            begun = model(tokens[:1, :39], use_cache=True, return_dict=True)
            last = model(tokens[:1, 39:], past_key_values=begun.past_key_values, use_cache=True, return_dict=True)
            return torch.cat([padded[0], padded[1, 7:], begun.logits[0], last.logits[0]])

    wanted = logits(model)

    def config(changed):
        try:
            return config_class(row_of(name)).from_dict(copy.deepcopy(changed))
        except Exception:  # whatever it raises, it computes nothing
            return None

    def computed(changed):
        try:
            of_kind = references.auto_class(raw["model_type"])
            other = of_kind.from_config(changed, attn_implementation=how, dtype=torch.float32)
            other.load_state_dict(weights)
            return (logits(other.eval()) - wanted).abs().max().item()
        except Exception:
            return None

    distances = {}  # by all that a config says: many files say the same

    def distance(changed):
        made = config(changed)
        said = repr(made and made.to_dict())
        if said not in distances:
            distances[said] = computed(made)
        return distances[said]

    return row_of(name), raw, config, distance


def test_no_change_of_a_field_that_is_read_is_missed(case):
    """Nor of the positions' fields, in the form of transformers 5 and in the older one."""
    row, newer, _, distance = case
    older = newer | architecture.config_json_of(row, model_of(row, newer))
    if row.model_type not in ("olmo3", "qwen3_next"):  # which are new, and say their layers in the new form alone
        new = ("rope_parameters",) if row.model_type == "gemma3n_text" else ("rope_parameters", "layer_types")
        older = {name: value for name, value in older.items() if name not in new}
    assert distance(older) < MOVED
    read = architecture.known_fields(row, {}) - IRRELEVANT - set(row.irrelevant)
    missed, compared = [], 0
    for raw in (newer, older):
        wanted = settings(row, raw)
        for name, value, changed in changes(raw, read):
            if settings(row, changed) != wanted or (row.model_type, name, value) in MEANT_OTHERWISE:
                continue
            moved = distance(changed)
            compared += moved is not None
            if moved is not None and not moved < MOVED:
                missed.append(f"{name}: {'absent' if value is ABSENT else value!r} moves logits by {moved:.2g}")
    assert not missed, "\n".join(missed)
    assert compared > 40


def test_no_field_that_we_do_not_read_moves_anything(case):
    """Neither those that we call irrelevant nor those that --ignore would let pass."""
    row, raw, config, distance = case
    # What asks for attention's scores has transformers compute attention in another form.
    unread = sorted((asked_for(row) | IRRELEVANT | set(row.irrelevant)) - {"model_type", "output_attentions"})
    wanted = settings(row, raw)
    missed, compared = [], 0

    def look(names, value):
        nonlocal compared
        moved = distance(raw | dict.fromkeys(names, value))
        if len(names) > 1 and (moved is None or not moved < MOVED):
            look(names[::2], value)
            look(names[1::2], value)
        elif moved is not None and not moved < MOVED:
            missed.append(f"{names[0]}: {value!r} moves logits by {moved:.2g}")
        elif moved is not None:
            compared += len(names)

    for value in UNREAD:
        names = [name for name in unread if config(raw | {name: value})]
        look([name for name in names if settings(row, raw | {name: value}, {name}) == wanted], value)
    assert not missed, "\n".join(missed)
    assert compared > 600


def model_of(row, raw):
    from gspmd_lm import config

    values = architecture.model_settings(row, raw, "x")
    return config.from_dict(
        {"name": "x", "model": nest(values), "data": {"seq": 1},
         "train": {"steps": 1}}, "x",
    ).model  # fmt: skip
