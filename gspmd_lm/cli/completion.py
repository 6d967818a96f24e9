"""completion: lets a shell complete verbs, flags, keys and the names of files."""

import os
import shlex

from absl import flags

from gspmd_lm.cli.verb import Verb
from gspmd_lm.errors import InputError, either
from gspmd_lm.hardware.chips import PLATFORMS

PROGRAM = "gspmd-lm"
_ASK = f"{PROGRAM} completion --"
_BASH = f"complete -o default -o nospace -C '{_ASK}' {PROGRAM}"
SHELLS = {
    "bash": _BASH,
    "zsh": f"autoload -U +X bashcompinit && bashcompinit\n{_BASH}",
    "fish": f"complete -c {PROGRAM} -a '(COMP_LINE=(commandline -cp) {_ASK} {PROGRAM} (commandline -ct))'",
}


def run(values: flags.FlagValues, names: list[str]) -> int:
    """Prints what a shell has to run once, or, to a shell that asks, what may follow. Returns the exit code."""
    if "COMP_LINE" in os.environ:
        line = os.environ["COMP_LINE"]
        last, found = candidates(line[: int(os.environ.get("COMP_POINT", len(line)))])
        replaced = names[1] if len(names) > 1 else last  # of --rules=tp, bash replaces tp
        print("\n".join(one[len(last) - len(replaced) :] for one in found))
    elif len(names) == 1 and names[0] in SHELLS:
        print(SHELLS[names[0]])
    else:
        raise InputError(f"completion: for which shell?\n  fix   {PROGRAM} completion {either(SHELLS)}")
    return 0


def candidates(line: str) -> tuple[str, list[str]]:
    """The last word of a command, and all words that may stand in its place. A space ends what is complete."""
    from gspmd_lm.cli import VERBS

    try:
        words = shlex.split(line)
    except ValueError:  # a quote is still open
        words = line.split()
    *before, last = [*words[1:], *[""] * line[-1:].isspace()]
    verb = VERBS.get(before[0] if before else "", VERBS["train"])
    known, flag_before = verb.flags(), _flag(before[-1]) if before else ""
    head, found = "", []
    if last.startswith("-") and "=" in last:
        head = last[: max(last.find("="), last.rfind(",")) + 1]
        found = _values(_flag(last))
    elif last.startswith("-"):
        found = [
            f"--{name} " if known[name].flag_type() == "bool" else f"--{name}="
            for name in sorted(known)
            if len(name) > 1
        ]
    elif flag_before in known and known[flag_before].flag_type() != "bool":
        found = _values(flag_before)
    elif not before:
        found = [f"{name} " for name in VERBS]
    else:
        found = _values({"keys": "set", "explain": "rules", "compare": "rules"}.get(verb.name, ""))
    return last, [head + one for one in found if (head + one).startswith(last)]


def _flag(word: str) -> str:
    """The name of the flag --name=value; '' of any other word."""
    return word.partition("=")[0].lstrip("-").replace("-", "_") if word.startswith("-") else ""


def _values(name: str) -> list[str]:
    """The values of a flag, if they can be listed. Other files are found by the shell."""
    from gspmd_lm.config import paths

    if name == "set":
        from gspmd_lm.show import config_keys

        return [f"{key.name}=" for group in config_keys.every_key() for key in group.keys if "[]" not in key.name]
    listed = {
        "rules": lambda: paths.known_names("rules"),
        "config": lambda: paths.known_names("configs"),
        "platform": lambda: PLATFORMS,
        "phase": lambda: ("train", "prefill", "decode"),
    }
    return [f"{value} " for value in listed[name]()] if name in listed else []


COMPLETION = Verb(
    "completion",
    "Let a shell complete verbs, flags, keys and the names of files.",
    [("completion bash", 'What bash has to run, as by eval "$(gspmd-lm completion bash)" in ~/.bashrc.')],
    lambda flags: None,
    run,
    takes_names=True,
)
