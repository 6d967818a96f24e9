"""The command line: verbs, their flags, and the order in which a run comes together."""

import errno
import os
import platform
import sys
import textwrap
import traceback
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any, NoReturn

from absl import flags

from gspmd_lm.errors import InputError, RunFailed, did_you_mean
from gspmd_lm.versions import __version__

VERBS = {
    "train": "Train a model, from the newest checkpoint of the workdir or from scratch.",
    "eval": "Score the held-out rows, a text or continuations with a checkpoint of the workdir.",
    "generate": "Continue prompts with the weights of the workdir.",
    "convert": "Bring a Hugging Face checkpoint into a workdir (--from), or write one (--to).",
    "explain": "Say what a layout costs on hardware you do not have.",
    "compare": "Explain several layouts side by side: compare fsdp8 tp8 --target=...",
    "plan": "Find the best layout for hardware you do not have, and write its rules file.",
    "plot": "Show what runs have logged, laid over each other in one page: plot RUN RUN2.",
    "keys": "Print the keys of a config, each with its type, default and meaning: all, or those with a word in them.",
}
EXAMPLES = {  # verb -> commands, each with what it does
    "train": [
        ("", "Train the tiny config on one device, on the text that Python brings."),
        ("--config=gpt2_124m --rules=fsdp8 --dry-run", "Show every array, and its bytes on each device."),
        ("--config=uva --rules=tp8 --workdir=runs/a", "Train on 8 devices, simulated if there are none. The same "
         "command goes on."),
        ("--workdir=runs/a --rules=fsdp8", "Go on under another layout."),
        ("--set data.source=FOLDER --set rules.remat=block", "Lay values over the config and the rules."),
        ("--set data.source=FOLDER --set data.tokenizer=bpe:4096 --set model.vocab=0", "Train a tokenizer on it too."),
    ],
    "eval": [
        ("eval --workdir=runs/a", "Score the held-out rows."),
        ("eval --workdir=runs/a --text='books/*.txt'", "Score texts."),
    ],
    "generate": [
        ("generate --workdir=runs/a --prompt='Once upon'", "Take the most likely tokens."),
        ("generate --workdir=runs/a --prompt='Once upon' --temperature=0.8 --top-p=0.95", "Sample."),
    ],
    "convert": [
        ("convert --from=Llama-3.2-1B --workdir=runs/llama", "Bring a model in."),
        ("convert --workdir=runs/a --to=exported", "Write one that transformers can load."),
    ],
    "explain": [
        ("explain --config=tiny --rules=fsdp8 --target=v5p:2x2x2", "Time, memory and collectives on 8 TPU v5p."),
        ("explain --config=llama3_8b --rules=fsdp_tp --target=v5p-128 --html=page.html", "The same as a page."),
    ],
    "compare": [
        ("compare fsdp8 tp8 --config=tiny --target=v5p:2x2x2", "Two layouts side by side."),
    ],
    "plan": [
        ("plan --config=llama3_8b --target=v5e:4x8 --out=mine.yaml", "Find the best layout, and write it."),
        ("plan --config=llama3_8b --target=v5e:4x8,v5p-32 --tokens=1e12", "Compare hardware for a trillion tokens."),
    ],
    "plot": [
        ("plot runs/a runs/b", "Lay the curves of two runs over each other, in plot.html."),
    ],
    "keys": [
        ("keys", "All keys, which --set can set too."),
        ("keys rope", "Those with rope in their names."),
    ],
}  # fmt: skip
# Groups of flags, in the help.
INPUTS, RUN, RESULTS, MACHINE, HELP = "What is computed, and where", "The run", "Results", "The machine", "Help"
EXPLAIN = ("explain", "compare")
FORESIGHT = (*EXPLAIN, "plan")
OF_FILES = ("keys", "plot")  # verbs that compute nothing


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Never returns: runs one verb and exits with 0 on success, 2 for wrong input, else 1 or a signal's code."""
    argv = list(sys.argv if argv is None else argv)
    code, said = 0, ""
    try:
        code = _run(argv)
    except InputError as error:
        code, said = 2, str(error)
    except RunFailed as error:
        code, said = 1, str(error)
    except KeyboardInterrupt:
        code = 130
    except Exception as error:
        code, said = 1, _system_error(error)
        if not said and (processes := sys.modules.get("gspmd_lm.runtime.processes")):
            said = processes.cause()
        if not said:
            traceback.print_exc()
    if said:
        print(said, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    if processes := sys.modules.get("gspmd_lm.runtime.processes"):  # a verb that needs no jax does not import it
        processes.leave(code, said)
        if code and processes.several():
            os._exit(code)  # a normal exit waits in jax's shutdown barrier, which the others may never reach
    sys.exit(code)


_SYSTEM_ERRORS = {
    errno.ENOSPC: "make room on that disk",
    errno.EDQUOT: "make room in your quota",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f)",
    errno.EROFS: "give a folder that can be written in",
    errno.EACCES: "change its permissions, or give another path",
    errno.EPERM: "change its permissions, or give another path",
    errno.EIO: "check the disk",
    errno.EISDIR: "move the folder away: a file belongs there",
    errno.ENOTDIR: "move the file away: a folder belongs there",
    errno.ELOOP: "mend the symbolic link",
    errno.ENAMETOOLONG: "give a shorter path",
}


def _system_error(error: Exception) -> str:
    """The message about a file that the system refused, such as one on a full disk; '' for any other error."""
    if not isinstance(error, OSError) or error.errno not in _SYSTEM_ERRORS or error.filename is None:
        return ""
    return f"{error.filename}: {error.strerror}\n  fix   {_SYSTEM_ERRORS[error.errno]}, then start the same command"


def _flags(verb: str) -> flags.FlagValues:
    """The flags of one verb, and of no other. The module of each, in absl's words, is its group in the help."""
    values = flags.FlagValues()
    here: dict[str, Any] = {"flag_values": values, "module_name": INPUTS}

    def group(title: str) -> None:
        here["module_name"] = title

    text = lambda name, default, about: flags.DEFINE_string(name, default, about, **here)  # noqa: E731
    whole = lambda name, default, about, least=None: flags.DEFINE_integer(  # noqa: E731
        name, default, about, lower_bound=least, **here
    )
    number = lambda name, default, about: flags.DEFINE_float(name, default, about, **here)  # noqa: E731
    several = lambda name, about: flags.DEFINE_multi_string(name, [], about, **here)  # noqa: E731
    yes_no = lambda name, about: flags.DEFINE_boolean(name, False, about, **here)  # noqa: E731
    if verb == "keys":
        yes_no("markdown", "Print the page docs/config.md.")
    elif verb == "plot":
        here["module_name"] = RUN
        several("workdir", "The folder of a run, or a folder of runs. This flag may be repeated, and folders may also "
                "stand without it.")  # fmt: skip
        group(RESULTS)
        text("html", None, "Write the page to this file. The default is plot.html in the run's folder; with several "
             "runs, in the current folder.")  # fmt: skip
    elif verb in FORESIGHT:
        text("config", "tiny", "The config: a path, a name in configs/, or the folder or config.json of a published "
             "model. It says what is computed.")  # fmt: skip
    if verb == "plan":
        text("target", None, "The hardware, which need not be here: v5e:4x8, 2@v6e:16x16, h100:8, h100:2x8/800, ... "
             "Commas separate several, which are compared.")  # fmt: skip
        group("The search")
        number("minutes", 15.0, "Compile nothing new after this many minutes. A plan that was stopped goes on from "
               "what it has compiled.")  # fmt: skip
        text("batch", None, "A:B: let the batch be any of A, 2A, 4A, ... up to B rows. By default it is data.batch.")
        number("tokens", None, "How many tokens to train on, such as 1e12: say how long that takes, and what it costs.")
        number("days", None, "In how many days --tokens must be done.")
        several("price", "Dollars per chip and hour, such as v5e=1.2. By default the lowest public price, where there "
                "is one. This flag may be repeated.")  # fmt: skip
        group(RESULTS)
        text("out", None, "Write the best layout to this rules file.")
        text("json", None, "Write all figures to this file (docs/plan.md).")
        text("html", None, "Write one self-contained page to this file.")
    elif verb in EXPLAIN:
        text("rules", None, "The rules file: a path, or a name in rules/. Commas separate several. "
             "It says where and how the config is computed.")  # fmt: skip
        text("target", None, "The hardware, which need not be here: cpu:8, v5e:4x4, v5p:4x4x8, 2@v6e:16x16, h100:8, "
             "h100:4x8, h100:4x8/800 (hosts with a network of 800 Gbit/s), ... How wrong predicted step times were: "
             "docs/validation.md.")  # fmt: skip
        text("phase", "train", "The step to explain: train, prefill or decode. prefill and decode work on data.batch "
             "rows with data.seq slots each.")  # fmt: skip
        group(RESULTS)
        text("json", None, "Write all figures to this file (docs/explain_json.md).")
        text("html", None, "Write one self-contained page to this file.")
        text("export", None, "Keep the compiled train step of one layout in this file. On the target, "
             "train --executable runs it.")  # fmt: skip
    elif verb not in OF_FILES:
        text("config", None, "The config: a path, a name in configs/, or the folder or config.json of a published "
             "model. It says what is computed. The default is the "
             "workdir's config, else tiny.")  # fmt: skip
        text("rules", None, "The rules file: a path, a name in rules/, none, or plan, which finds the best layout for "
             "the devices at hand. It says where and how the config is computed. The default is the workdir's rules "
             "file, else none.")  # fmt: skip
    group(INPUTS)
    if verb not in OF_FILES:
        several("set", "Lay section.key=value over the config, such as model.layers=4, or rules.KEY=value over the "
                "rules file, such as rules.remat=block. The verb keys lists all keys. This flag may be "
                "repeated.")  # fmt: skip
    if verb not in ("plan", *OF_FILES):
        text("mesh", "", "Lay sizes over the mesh of the rules file, such as tensor=4 or data=2,tensor=4.")
    group(HELP)
    flags.DEFINE_boolean("help", False, "Show this text and stop.", short_name="h", **here)
    yes_no("version", "Show the versions of this program, jax and Python, and stop.")
    if verb in (*FORESIGHT, *OF_FILES):
        return values
    group(RUN)
    text("workdir", None, "The folder of the run, which may be remote (gs://). The default is a new folder in runs/.")
    group(MACHINE)
    text("platform", None, "The platform: cpu, gpu or tpu. By default it is the one that this machine has.")
    whole("devices", 8, "How many devices to simulate on a CPU if the mesh has a size of -1.", 1)
    text("coordinator", None, "HOST:PORT of the first of several processes, if jax does not find it by itself.")
    whole("num_processes", None, "How many processes the run has.")
    whole("process_id", None, "The number of this process, counted from 0.")
    text("compile_cache", None, "The folder of compiled programs; none switches the cache off. The default is the "
         "user's cache folder.")  # fmt: skip
    group(RUN)
    whole("step", None, "The step of the checkpoint to begin from. The default is the newest checkpoint that is not in "
          "doubt; --step also accepts one in doubt.")  # fmt: skip
    if verb == "train":
        whole(
            "steps",
            None,
            "The step to stop at. The default is train.steps, which also is the length of the schedule.",
            1,
        )
        yes_no("dry_run", "Print every array and its bytes per device, then stop.")
        text("executable", None, "Run the train step that explain --export compiled, instead of compiling it here.")
        yes_no("trust", "Accept an --executable that was exported elsewhere. It can run any code as you.")
        text("profile", None, "START:STOP: write a trace of these steps into the workdir.")
        text("train_tokenizer", None, "Train a BPE tokenizer on data.source, write it to this "
             "file, then stop. It gets TOKENS tokens with data.tokenizer=bpe:TOKENS, else model.vocab.")  # fmt: skip
    elif verb == "eval":
        text("text", None, "Score texts instead of the held-out rows: a folder, a file or a glob.")
        text("continuations", None, "Score this JSONL file of {prompt, continuation} instead.")
        group(RESULTS)
        text("output", None, "Write the log-likelihoods to this file, as JSONL. The default is the terminal.")
        group(RUN)
        whole("batch", 8, "How many rows are scored at a time.", 1)
        whole("seq", None, "How many tokens a row of --text has. The default is data.seq, with which the model was "
              "trained.", 1)  # fmt: skip
    elif verb == "generate":
        group("Prompts and texts")
        several("prompt", "Continue this prompt. This flag may be repeated.")
        text("prompts", None, "Continue the prompts of this JSONL file of {prompt} or {messages} instead.")
        text("output", None, "Write the texts to this file, as JSONL. The default is the terminal.")
        yes_no("chat", "Treat each prompt as a user's message, in the model's chat template.")
        several("stop", "Stop before this text. This flag may be repeated.")
        whole("max_new_tokens", 128, "Stop after this many tokens at the latest.", 1)
        whole("batch", 8, "How many prompts are continued at a time.", 1)
        group("Sampling")
        number("temperature", 0.0, "The temperature of sampling. With 0, the most likely token is taken.")
        whole("top_k", 0, "Sample from this many of the most likely tokens. With 0, sample from all tokens.", 0)
        number("top_p", 1.0, "Sample from the most likely tokens whose probabilities add up to this.")
        number("min_p", 0.0, "Sample from the tokens with at least this share of the most likely token's probability.")
        whole("seed", 0, "The seed of sampling.")
    else:
        group("The published model")
        text("from", None, "The folder to read: config.json and *.safetensors, as transformers writes them.")
        several("ignore", "Pass over this field of --from's config.json, whose meaning is not known. This flag may be "
                "repeated.")  # fmt: skip
        text("to", None, "The new folder to write, which transformers can load.")
        text("dtype", None, "The dtype that --to writes: float32, bfloat16 or float16. The default is the dtype that "
             "each tensor came in.")  # fmt: skip
        yes_no("adapter", "Let --to write the LoRA adapter alone, for PEFT.")
        text("base", "", "The base model that the adapter's config names.")
    return values


def _parsed(verb: str, arguments: Sequence[str]) -> tuple[flags.FlagValues, list[str]]:
    """The flags of a verb, and the arguments that are not flags. Raises InputError for a flag that is wrong."""
    values = _flags(verb)
    try:
        return values, values(["", *_spelled(values, arguments)])[1:]
    except flags.UnrecognizedFlagError as error:
        name = error.flagname
        others = [other for other in VERBS if name in _flags(other)]
        hint = f": it belongs to {', '.join(others)}" if others else ""
        hint = hint or did_you_mean(f"--{name}", [f"--{known}" for known in values])
        wrong = f"--{name}: {verb} has no such flag{hint}"
    except flags.IllegalFlagValueError as error:
        name, _, rest = str(error).removeprefix("flag --").partition("=")
        kind = values[name].flag_type()
        wanted = "true or false" if kind == "bool" else values[name].parser.syntactic_help
        given = "" if kind == "bool" else f"={rest.partition(': ')[0]}"
        wrong = f"--{name}{given}: must be {wanted}"
    except flags.Error as error:
        wrong = str(error)
    raise InputError(f"{wrong}\n  fix   python main.py {verb} --help lists the flags")


def _spelled(values: flags.FlagValues, arguments: Sequence[str]) -> list[str]:
    """The arguments with the names of flags as they are defined: --dry-run is --dry_run."""
    found: list[str] = []
    value_follows = False
    for at, argument in enumerate(arguments):
        if argument == "--":
            return [*found, *arguments[at:]]
        if value_follows or not argument.startswith("-"):
            found.append(argument)
            value_follows = False
            continue
        name, equals, value = argument.partition("=")
        dashes = "-" * (len(name) - len(name.lstrip("-")))
        name = name[len(dashes) :].replace("-", "_")
        value_follows = not equals and name in values and values[name].flag_type() != "bool"
        found.append(f"{dashes}{name}{equals}{value}")
    return found


def _help(verb: str | None) -> str:
    """The text of --help: all verbs and the flags of train without a verb, else the flags of the verb."""
    if verb is None:
        verbs = "\n".join(f"  {name:8} {about}" for name, about in VERBS.items())
        return (
            "usage: python main.py [VERB] [--flag=value ...]\n\nverbs (train is the default):\n"
            f"{verbs}\n\n{_help('train')}\n\npython main.py VERB --help shows the flags of another verb."
        )
    lines = [f"python main.py {verb}: {VERBS[verb]}"]
    groups = _flags(verb).flags_by_module_dict()
    for title in sorted(groups, key=lambda title: (title == HELP, title == MACHINE)):
        lines += ["", f"{title}:"]
        for flag in groups[title]:
            default = f" The default is {flag.default}." if flag.default not in (None, "", [], False) else ""
            said = flag.help.partition(";\n")[0]  # absl appends to the help of flags that may be repeated
            about = textwrap.wrap(f"{said}{default}", 90)
            lines += [f"  --{flag.name:16} {about[0]}", *(f"{'':21}{line}" for line in about[1:])]
    lines += ["", "In the name of a flag, - and _ are the same.", "", "Examples:"]
    for command, about in EXAMPLES[verb]:
        lines += [f"  python main.py {command}".rstrip(), f"      {about}"]
    return "\n".join(lines)


def _version() -> str:
    """The text of --version. No library is imported for it."""
    return f"gspmd_lm {__version__}, jax {version('jax')}, Python {platform.python_version()}"


def _run(argv: list[str]) -> int:
    verb = argv[1] if len(argv) > 1 and not argv[1].startswith("-") else None
    if verb is not None and verb not in VERBS:
        raise InputError(f"{verb}: no such verb{did_you_mean(verb, VERBS)}\n  fix   use one of {', '.join(VERBS)}")
    values, rest = _parsed(verb or "train", argv[2 if verb else 1 :])
    if values.help or values.version:
        print(_version() if values.version else _help(verb))
        return 0
    for name in values:
        if values[name].present and values[name].value == "":
            raise InputError(f"--{name}= is empty; a variable that is not set?\n  fix   give a value, or drop the flag")
    if rest and rest[0] in VERBS:
        raise InputError(f"{rest[0]}: the verb comes first\n  fix   python main.py {rest[0]} --flag=value ...")
    if rest and verb not in (*EXPLAIN, *OF_FILES):
        raise InputError(f"{rest[0]}: flags begin with --\n  fix   --config=NAME --rules=NAME, see --help")
    if verb == "keys":
        from gspmd_lm.cli import keys

        print(keys.page().rstrip() if values.markdown else keys.text("".join(rest[:1])))
        return 0
    if verb == "plot":
        from gspmd_lm.cli import plot

        return plot.run(values, rest)
    from gspmd_lm.cli import given  # what is wrong with a file is told before jax is imported, which takes a second

    if verb in EXPLAIN:
        given.layouts(values, rest)
    elif verb == "plan":
        given.no_rules_sets(values)
    else:
        given.rules(values)
    if verb != "convert":  # a published model brings its own config
        given.config(values)
    if verb == "plan":
        from gspmd_lm.cli import plan

        return plan.run(values)
    if verb in EXPLAIN:
        from gspmd_lm.cli import explain

        return explain.run(verb, values, rest)
    from gspmd_lm.runtime import without_a_gpu

    without_a_gpu.import_jax()
    if verb == "generate":
        from gspmd_lm.cli import generate

        return generate.run(values)
    if verb == "convert":
        from gspmd_lm.cli import convert

        return convert.run(values)
    if verb == "eval" and (values.text or values.continuations):
        from gspmd_lm.cli import score

        return score.run(values)
    from gspmd_lm.cli import train

    return train.run(verb or "train", values)
