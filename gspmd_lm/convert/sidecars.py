"""The sidecar files of published weights: those that are carried along, and those that are written anew."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gspmd_lm import config, files
from gspmd_lm.config import paths
from gspmd_lm.data import chat, special_tokens, tokenizer
from gspmd_lm.data.special_tokens import GENERATION, SETTINGS
from gspmd_lm.errors import InputError

CARD, FORMER_CARD = "README.md", "README.original.md"
# Files about the terms of use, which licences ask to be passed on, and the model card.
_TERMS = ("LICENSE*", "LICENCE*", "USE_POLICY*", "NOTICE*", CARD, FORMER_CARD)
_LICENCE = re.compile(r"^license\w*:.*(?:\n[ -].*)*", re.MULTILINE)  # a field, and lines that go on with its value


def find_sidecars(folder: Path, patterns: Sequence[str] = (*special_tokens.FILES, *_TERMS)) -> dict[str, Path]:
    """The files of a folder that are carried along: name within the folder -> path.

    Raises InputError if one of them is a link to a file elsewhere, which would be published with the others. The hub's
    own cache has all files as links to its blobs.
    """
    every = {path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}
    root = folder.resolve()
    own = (root, root.parents[1] / "blobs") if root.parent.name == "snapshots" else (root,)
    for path in sorted(every):
        if not any(path.resolve().is_relative_to(place) for place in own):
            raise InputError(
                f"{path}: a link to {path.resolve()}, outside of the folder, which would be copied into another one\n"
                "  fix   put a copy of the file there if it belongs to the model, or remove the link"
            )
    return {path.relative_to(folder).as_posix(): path for path in sorted(every)}


def choose_sidecars(original: Path | None, name: str) -> dict[str, Path]:
    """The files to export with a run's weights: name -> path. Those about text are of its tokenizer, `name`.

    original: the folder of the files that came with the weights. Raises InputError if there is no such tokenizer.
    """
    imported = find_sidecars(original) if original else {}
    if name == "bytes":
        return imported
    try:
        path = tokenizer.tokenizer_path(name)
    except InputError:
        if "tokenizer.json" in imported:  # the workdir was moved since
            return imported
        raise
    if original and path.parent.samefile(original):
        return imported
    kept = find_sidecars(original, (*_TERMS, GENERATION)) if original else {}
    return kept | find_sidecars(path.parent, special_tokens.FILES) | {"tokenizer.json": path}


def write_text_sidecars(
    imported: Mapping[str, Path], original: Path | None, name: str, vocab: int
) -> tuple[dict[str, bytes], list[int]]:
    """The files about text that a run's own tokenizer asks for, name -> content, and the ids that end a text.

    Nothing is written where the tokenizer came with the weights. Without these files, transformers would not know
    where a text ends.
    """
    moved = name != "bytes" and not files.expand_user(name).exists()
    if original and (name == "bytes" or moved or _same_texts(imported["tokenizer.json"], original / "tokenizer.json")):
        return {}, []
    ends = [end for end in chat.stop_ids(name) if end < vocab]
    settings = special_tokens.read_object(imported[GENERATION]) if GENERATION in imported else {}
    known = settings.get("eos_token_id")
    written = {}
    if any(end not in (known if isinstance(known, list) else [known]) for end in ends):
        written[GENERATION] = as_json(settings | {"eos_token_id": ends[0] if len(ends) == 1 else ends})
    tokens = tokenizer.load_tokenizer(name)
    if isinstance(tokens, tokenizer.HuggingFace) and SETTINGS not in imported:
        end = next(text for text, number in tokens.special.items() if number == tokens.end)
        written[SETTINGS] = as_json({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end})
    return written, ends


def _same_texts(ours: Path, theirs: Path) -> bool:
    """Whether two tokenizers are the same and their texts end alike: a run keeps a copy of that of its weights."""
    if not theirs.is_file() or ours.read_bytes() != theirs.read_bytes():
        return False
    return {*chat.stop_ids(str(ours))} == {*chat.stop_ids(str(theirs))}


def as_json(value: Any) -> bytes:
    """The content of a JSON file."""
    return f"{json.dumps(value, indent=2)}\n".encode()


def card(run: config.Config, family: str, parameters: int, dtype: str, step: int, imported: Mapping[str, Path]) -> str:
    """The model card of an export: what was done to the weights, and under which terms they came.

    run: its config, which names LoRA if adapters were merged. step: of the checkpoint. imported: the files that came
    with the weights.
    """
    former = imported.get(FORMER_CARD, imported.get(CARD))
    terms = [name for name in imported if name not in (CARD, FORMER_CARD) and any(map(Path(name).match, _TERMS))]
    head = _front_matter(paths.read_text(former)) if former else ""
    licence = _LICENCE.findall(head)
    done = []
    data, optimizer = run.data, run.optimizer
    if former or run.train.init_from or not step:
        done.append(f"The weights began as those of {run.name}.")
    else:
        done.append("The weights were new, drawn at random.")
    if step:
        rows, tokens = step * data.batch, step * data.batch * data.seq
        sources = ", ".join(f"`{Path(one.path).name}`" for one in data.sources)
        done.append(
            f"They were trained for {step:,} steps on {rows:,} rows, which hold at most {tokens:,} tokens, "
            f"of {sources}, with {optimizer.name} and a learning rate of up to {optimizer.learning_rate:g}."
        )
        if run.model.lora:
            rank, targets = run.model.lora.rank, ", ".join(run.model.lora.targets)
            done.append(f"Only adapters of rank {rank} were trained (LoRA, on {targets}), and they are merged.")
    else:
        done.append("They were not trained here: only the files were written anew.")
    lines = ["---", "library_name: transformers", *licence, "---", "", f"# {run.name}", ""]
    lines += [
        f"A {family} model of {parameters:,} parameters in {dtype}, written by gspmd_lm.",
        "", "## What was done", "", *(f"- {line}" for line in done), "", "## Terms", "",
    ]  # fmt: skip
    if terms:
        lines.append(f"These files came with the weights and still hold: {', '.join(f'`{name}`' for name in terms)}.")
    if licence:
        lines.append("The licence that the former model card names stands at the top of this one.")
    if not terms and not licence:
        lines.append("No licence came with the weights. Whoever publishes this folder states one here.")
    if former:
        lines += ["", f"The former model card is `{FORMER_CARD}`."]
    return "\n".join([*lines, ""])


def _front_matter(text: str) -> str:
    """The lines between the first two lines of dashes of a model card; '' if there are none."""
    parts = text.split("---\n", 2)
    return parts[1] if len(parts) == 3 and not parts[0].strip() else ""
