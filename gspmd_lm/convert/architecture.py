"""The settings of a model from a published config.json, and back, by the table of families."""

import dataclasses
import math
import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from gspmd_lm import config
from gspmd_lm.convert import multimodal
from gspmd_lm.convert.config_reader import ConfigReader
from gspmd_lm.convert.families import DROPOUT, EVERY_FAMILY, FAMILIES, IRRELEVANT, LEFT_OUT, REFUSED, bart, whisper
from gspmd_lm.convert.family import Family
from gspmd_lm.convert.fields import Values
from gspmd_lm.convert.images import padded_rows, read_preprocessing
from gspmd_lm.convert.strict_json import read_object, show_value
from gspmd_lm.errors import InputError, did_you_mean
from gspmd_lm.units import plural

CONFIG = "config.json"
ADAPTER_CONFIG = "adapter_config.json"  # of PEFT
TOKENIZER = "tokenizer.json"
LONGEST_ROW = 2048  # data.seq of a model whose context is longer
# Settings that no config.json has: how a run computes, and padding, which export removes.
OURS_ALONE = (
    "padded_vocab", "padded_heads", "dropout", "logits.z_loss", "init_std", "compute_dtype", "weight_dtype",
    "attention.scores_dtype", "matmul_dtype", "matmul_precision", "experts.balance", "experts.balance_weight",
    "experts.balance_rate", "experts.z_loss", "row_multiple", "frozen",
)  # fmt: skip
_OTHER_HEADS = re.compile(r"classifier|summary")  # of models that do not predict tokens
# Written as null in a new config.json. Some families have defaults for them that lie beyond a small vocabulary.
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def is_published(path: Path) -> bool:
    """Whether a path that --config may name is a config.json, or a folder that has one."""
    return path.suffix == ".json" or (path / CONFIG).is_file()


def new_config(path: Path, overrides: Sequence[str] = ()) -> config.Config:
    """The config of a new model like the one of a folder, or of a config.json alone. Its weights are not read.

    The tokenizer of the folder is taken, if there is one. overrides: section.key=value. Raises InputError.
    """
    folder = path if path.is_dir() else path.parent
    place = str(folder / CONFIG if path.is_dir() else path)
    raw = multimodal.text_config(read_config_json(folder) if path.is_dir() else read_object(path), place)
    raw = {name: value for name, value in raw.items() if name != "quantization_config"}  # it is about the weights
    row = family_of(raw, place, asked_objective(overrides, place))
    values = model_settings(row, raw, place, fix="take {} out of a copy of the file")
    name = folder.resolve().name if Path(place).name == CONFIG else path.stem
    return run_config(name, folder / TOKENIZER, values, overrides, place, notes(row, raw))


def run_config(
    name: str, tokenizer: Path, values: Values, overrides: Sequence[str], place: str, notes: Sequence[str] = ()
) -> config.Config:
    """The config of a run with the model that `values` are the settings of, with overrides laid over it.

    tokenizer: its tokenizer.json, if there is such a file. notes: sentences that explain an error about settings that
    they name.
    """
    seq = min(values["context"], LONGEST_ROW) if isinstance(values["context"], int) else 1
    settings = _sections(name, values, seq)
    settings["train"] = {"steps": 1000}
    if ("patches" in values or "vision" in values) and (found := read_preprocessing(tokenizer.parent)):
        settings["data"]["images"] = found
    if "frames" in values:
        whisper.check_preprocessing(tokenizer.parent, values["frames"]["bands"])
        values["encoder"] |= whisper.read_generation(tokenizer.parent)
    elif "encoder" in values:
        values["encoder"] |= bart.read_first_tokens(tokenizer.parent)
    if tokenizer.is_file():
        settings["data"]["tokenizer"] = str(tokenizer)
    config.override(settings, overrides, place)
    try:
        return config.from_dict(settings, " ".join([place, *(f"--set {override}" for override in overrides)]))
    except InputError as error:
        why = [note for note in notes if any(setting in str(error) for setting in re.findall(r"model\.[\w.]*\w", note))]
        raise InputError("\n".join([str(error), *(f"  {note}" for note in why)])) from error


def read_config_json(folder: Path) -> dict[str, Any]:
    """The fields of a folder's config.json. Raises InputError if there is none, or it is not a JSON object."""
    path = folder / CONFIG
    if not path.is_file() and (adapter := folder / ADAPTER_CONFIG).is_file():
        base = read_object(adapter).get("base_model_name_or_path") or "its base model"
        merged = f"PeftModel.from_pretrained(base, '{folder}').merge_and_unload()"
        raise InputError(
            f"{folder}: an adapter of PEFT, not a whole model\n"
            f"  fix   merge it into {base} with peft, {merged},\n"
            "        and give the folder that its save_pretrained wrote"
        )
    if not path.is_file():
        what = "no such folder" if not folder.is_dir() else f"no {CONFIG}"
        raise InputError(f"{folder}: {what}\n  fix   give a folder that transformers' save_pretrained wrote")
    return read_object(path)


def family_of(raw: Mapping[str, Any], place: str, objective: str = "") -> Family:
    """The row of the table that a config.json belongs to. Raises InputError if there is none.

    Of several rows, one for each head, it is that of `objective`, or of the class that config.json names.
    """
    kind = raw.get("model_type")
    classes = raw.get("architectures")
    named = [row for row in FAMILIES if isinstance(classes, list) and row.architecture in classes]
    rows = [row for row in FAMILIES if kind in (row.model_type, *row.also)] if kind is not None else named
    if texts := [row.text_type for row in rows if row.text_type]:
        part = raw.get("text_config")
        of_text = part.get("model_type", texts[0]) if isinstance(part, Mapping) else texts[0]
        if of_text not in texts:
            raise InputError(f"{place}: text_config.model_type: {show_value(of_text)} is not supported in {kind}\n"
                             f"  fix   a model whose text part is one of {', '.join(texts)}")  # fmt: skip
        rows = [row for row in rows if row.text_type == of_text]
    named = [row for row in named if row in rows]
    asked = [row for row in rows if _find_objective(row, raw) == objective] if len(rows) > 1 else []
    if found := [*(row for row in named if row in asked), *asked, *named, *rows]:
        return found[0]
    known = [kind for row in FAMILIES for kind in (row.model_type, *row.also)]
    if kind is None:
        message = "no model_type"
    elif reason := LEFT_OUT.get(str(kind)):
        message = f"model_type: {kind!r} is not supported: {reason}"
    else:
        # A name that is near a family's is usually the name of another family: mpt is not opt.
        alike = [f" (did you mean {name}?)" for name in known if _letters(name) == _letters(str(kind))]
        message = f"model_type: {show_value(kind)} is not a supported family{''.join(alike)}"
    raise InputError(f"{place}: {message}\n  fix   one of {', '.join(known)}")


def asked_objective(overrides: Sequence[str], place: str) -> str:
    """The objective that overrides set, or that follows from what they set of a model; '' for none."""
    laid: dict[str, Any] = {}
    config.override(laid, overrides, place)
    head = isinstance(laid.get("model"), dict) and "classes" in laid["model"]
    return str(laid.get("objective") or (config.objective_of(laid["model"]) if head else ""))


def _find_objective(row: Family, raw: Mapping[str, Any]) -> str:
    """The objective of a model that a config.json describes, read as one of a family."""
    return config.objective_of(config.nest(_read(row, raw)[1]))


def _sections(name: str, values: Values, seq: int) -> dict[str, Any]:
    """The sections of a config that follow from the settings of its model."""
    seq = padded_rows(values["context"]) if "patches" in values else seq
    one_number = values.get("classes.count") == 1 and values.get("classes.of") != "tokens"
    of_data = {"seq": seq} | ({"label_kind": "number"} if one_number else {})
    if "frames" in values:
        of_data["source_seq"] = padded_rows(values["encoder"]["context"])
    if isinstance(vision := values.get("vision"), dict):
        rows = config.Patches(**vision["patches"]).rows
        of_data["source_seq"] = padded_rows(vision["queries"]["rows"] + 1 if values.get("encoder") else rows)
    return {"name": name, "model": config.nest(values), "data": of_data}


def _letters(word: str) -> str:
    return re.sub(r"[^a-z0-9]", "", word.lower())


def model_settings(
    row: Family, raw: Mapping[str, Any], place: str, ignored: Collection[str] = (), fix: str = "{flags}"
) -> Values:
    """The settings of config.ModelConfig that a family's config.json asks for.

    ignored: fields that may be set although their meaning is not known. Raises an InputError that lists every other
    field with an unknown meaning, and every field whose value is not supported. fix: what to do about the former.
    """
    reader, values = _read(row, raw)
    unknown = [name for name in unknown_fields(row, raw) if name not in ignored]
    for name in unknown:
        value = show_value(reader.raw[name])
        reader.problems.append(f"{name}: {value} is an unknown field, which may change what is computed")
    if not reader.problems:
        return values
    lines = [f"{place}: {plural(len(reader.problems), 'problem')}", *(f"  {problem}" for problem in reader.problems)]
    if unknown:
        flags = " ".join(f"--ignore={shlex.quote(name)}" for name in unknown)
        remedy = fix.format(", ".join(unknown), flags=flags)
        lines.append(f"  fix   {remedy}  if nothing that is computed depends on it")
    raise InputError("\n".join(lines))


def unknown_fields(row: Family, raw: Mapping[str, Any]) -> list[str]:
    """The fields of a config.json that are set and whose meaning is not known.

    null, and a value that is empty, count as not set. false and 0 count as set, because `is_causal: false` means
    something. transformers has no such field and so no default for it; a test checks that.
    """
    raw, known = row.flatten(raw), known_fields(row, raw)
    unknown = raw.keys() - known
    return sorted(name for name in unknown if raw[name] not in (None, "", [], {}) and not DROPOUT.search(name))


def known_fields(row: Family, raw: Mapping[str, Any]) -> set[str]:
    """The fields of a family whose meaning is known, besides dropout."""
    everywhere = IRRELEVANT | REFUSED.keys() | set(row.irrelevant)
    within = {f"{part}.{name}" for part in row.parts for name in everywhere}
    return _read(row, raw)[0].names_read | everywhere | within | {*row.parts}


def notes(row: Family, raw: Mapping[str, Any]) -> list[str]:
    """Sentences about what a config.json says and the settings do not."""
    sentences = _read(row, raw)[0].notes
    rates = {
        name: rate for name, rate in row.flatten(raw).items() if DROPOUT.search(name) and not _OTHER_HEADS.search(name)
    }
    rates = {name: rate for name, rate in rates.items() if isinstance(rate, int | float) and rate is not True}
    if drops := [f"{name}: {rate}" for name, rate in rates.items() if rate > 0]:
        sentences.append(f"{', '.join(drops)}: training drops nothing until model.dropout is set")
    return sentences


def check_ignored(row: Family, raw: Mapping[str, Any], place: str, ignored: Collection[str]) -> None:
    """Raises InputError if a field to be ignored does not exist, or has a known meaning."""
    fields, unknown = row.flatten(raw), unknown_fields(row, raw)
    for name in ignored:
        if name not in fields:
            raise InputError(f"--ignore={name}: not in {place}{did_you_mean(name, unknown)}\n  fix   drop it")
        if name not in unknown:
            raise InputError(f"--ignore={name}: the meaning of this field is known\n  fix   drop it")


def _read(row: Family, raw: Mapping[str, Any]) -> tuple[ConfigReader, Values]:
    """The settings that the codecs of a family read from a config.json, and the reader with its problems."""
    raw = row.flatten(raw)
    reader, values = ConfigReader(raw), Values()
    for codec in (*row.codecs, *EVERY_FAMILY):
        codec.read(reader, values)
    types = raw.get("layer_types")  # transformers 5 reads it in every family
    if isinstance(types, list) and len(types) == values.get("layers") and all(one == "full_attention" for one in types):
        reader.names_read.add("layer_types")
    for part in ("", *(f"{part}." for part in row.parts)):
        for name, reason in REFUSED.items():
            if raw.get(part + name) and part + name not in reader.names_read:
                reader.problems.append(f"{part}{name}: {reason}")
    return reader, values


def config_json_of(row: Family, model: config.ModelConfig) -> dict[str, Any]:
    """The fields of the config.json of a model, as a family writes them."""
    written: dict[str, Any] = {"architectures": [row.architecture], "model_type": row.model_type}
    for codec in row.codecs:
        written |= codec.write(model)
    return row.nest(written)


def differences(row: Family, raw: Mapping[str, Any], model: config.ModelConfig) -> list[str]:
    """A line for each setting of `model` that a config.json contradicts, or for each field that no model has."""
    try:
        differing = _find_differing(row, raw, model)
    except InputError as error:
        return [f"{CONFIG}: {line.strip()}" for line in str(error).splitlines()[1:]]  # the first one counts the others
    return [f"model.{path}: {mine!r}, {row.name} would have {other!r}" for path, mine, other in differing]


def _find_differing(row: Family, raw: Mapping[str, Any], model: config.ModelConfig) -> list[tuple[str, Any, Any]]:
    """The path of each setting of `model` that a config.json contradicts, with both values.

    Raises InputError if the config.json describes no model of the family.
    """
    values = model_settings(row, raw, row.name, ignored=row.flatten(raw))  # unknown ones were dealt with on import
    sections = _sections(row.name, values, values["context"]) | {"train": {"steps": 1}}
    theirs = config.from_dict(sections, row.name).model
    ours = OURS_ALONE
    if model.balance_bias != theirs.balance_bias:  # a weight of the router
        ours = tuple(name for name in OURS_ALONE if name != "experts.balance")
    model, theirs = (
        dataclasses.replace(one, **{name: part.with_all_sizes(one) for name in ("encoder", "vision")
                                    if (part := getattr(one, name))})
        for one in (model, theirs)
    )  # fmt: skip
    return [found for found in _find_within(model, theirs) if found[0] not in ours]


def _find_within(ours: Any, theirs: Any, above: str = "") -> list[tuple[str, Any, Any]]:
    """What `config.differing` finds, with the settings of a section that both have one by one."""
    found: list[tuple[str, Any, Any]] = []
    for path, mine, other in config.differing(ours, theirs):
        both = dataclasses.is_dataclass(mine) and dataclasses.is_dataclass(other)
        found += _find_within(mine, other, f"{above}{path}.") if both else [(f"{above}{path}", mine, other)]
    return found


def _count_differing(row: Family, raw: Mapping[str, Any], model: config.ModelConfig) -> float:
    """How many settings of `model` a config.json contradicts. It is infinite where the file describes no model.

    A section that only one of them has counts for each of its settings that is not a default.
    """
    try:
        differing = _find_differing(row, raw, model)
    except InputError:
        return math.inf
    return sum(max(len(_find_stated(mine)), len(_find_stated(other)), 1) for _, mine, other in differing)


def _find_stated(section: Any) -> list[str]:
    """The settings of a section that are not its defaults; none of anything else."""
    if not dataclasses.is_dataclass(section):
        return []
    settings = config.flat(section).items()
    return [path for path, value in settings if value != config.default_at(type(section), path)]


def describe(model: config.ModelConfig, like: Mapping[str, Any] | None) -> tuple[Family, dict[str, Any]]:
    """The family of a model and its config.json.

    like: the config.json that the model came with, whose other fields are kept. Without it, the family is the first in
    the table that can express the model. If none can, raises an InputError that names the settings in the way.
    """
    if like is not None:
        row = family_of(like, CONFIG, config.objective_of(model))
        if row.heads:
            like = {**like, "architectures": [row.architecture]}
        if not differences(row, like, model):
            return row, dict(like)
        newer = ("rope_parameters", "layer_types")  # these are written again, in the older form or in the same
        kept = {name: value for name, value in row.flatten(like).items() if name not in newer}
        written = row.nest(kept | row.flatten(config_json_of(row, model)))
        if differ := differences(row, written, model):
            raise InputError(_inexpressible(row, differ))
        return row, written
    nearest: tuple[float, Family, dict[str, Any]] | None = None
    for row in FAMILIES:
        written = config_json_of(row, model)
        distance = _count_differing(row, written, model)
        if not distance:
            return row, dict.fromkeys(_TOKENS) | written
        if nearest is None or distance < nearest[0]:
            nearest = distance, row, written
    assert nearest
    _, row, written = nearest
    raise InputError(_inexpressible(row, differences(row, written, model)))


def _inexpressible(row: Family, differ: list[str]) -> str:
    lines = "\n".join(f"  {line}" for line in differ)
    return f"no family of transformers has this model; the nearest is {row.name}, except for\n{lines}"
