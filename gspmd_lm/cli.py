"""The command line: verbs, their flags, and the order in which a run comes together."""

import ctypes
import errno
import importlib
import os
import sys
import tempfile
import textwrap
import traceback
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import NoReturn

from absl import flags

from gspmd_lm.errors import InputError, RunFailed, did_you_mean

VERBS = {
    "train": "trains, from the newest checkpoint of the workdir or from scratch",
    "eval": "scores the held-out rows, a text or continuations under a checkpoint of the workdir",
    "generate": "goes on from prompts with the weights of the workdir",
    "convert": "brings a Hugging Face checkpoint into a workdir (--from), or writes one (--to)",
    "explain": "says what a layout costs on hardware you do not have",
    "compare": "the same for several layouts, side by side: compare fsdp8 tp8 --target=...",
}
FORESIGHT = ("explain", "compare")


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Runs one verb. Exits with 0 when it is done, 2 when the input is wrong, 1 or a signal's code otherwise."""
    argv = list(sys.argv if argv is None else argv)
    code, said = 0, ""
    try:
        code = _run(argv)
    except (InputError, flags.Error) as error:
        code, said = 2, str(error)
    except RunFailed as error:
        code, said = 1, str(error)
    except KeyboardInterrupt:
        code = 130
    except Exception as error:
        code, said = 1, _system_error(error)
        if not said and (processes := sys.modules.get("gspmd_lm.processes")):
            said = processes.cause()
        if not said:
            traceback.print_exc()
    if said:
        print(said, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    if processes := sys.modules.get("gspmd_lm.processes"):  # not imported for what needs no jax
        processes.leave(code, said)
        if code and processes.several():
            os._exit(code)  # the others may never reach jax's shutdown barrier, which a normal exit would wait for
    sys.exit(code)


_SYSTEM_ERRORS = {
    errno.ENOSPC: "make room on that disk",
    errno.EDQUOT: "make room in your quota",
    errno.EROFS: "give a folder that can be written in",
    errno.EACCES: "change its permissions, or give another path",
    errno.EPERM: "change its permissions, or give another path",
    errno.EIO: "see to the disk",
    errno.EISDIR: "move the folder away: a file belongs there",
    errno.ENOTDIR: "move the file away: a folder belongs there",
    errno.ELOOP: "mend the symbolic link",
    errno.ENAMETOOLONG: "give a shorter path",
}


def _system_error(error: Exception) -> str:
    """What is said of a file that the system refuses, such as one on a full disk; '' for any other error."""
    if not isinstance(error, OSError) or error.errno not in _SYSTEM_ERRORS or error.filename is None:
        return ""
    return f"{error.filename}: {error.strerror}\n  fix   {_SYSTEM_ERRORS[error.errno]}, then start the same command"


def _flags(verb: str) -> flags.FlagValues:
    """The flags of a verb, and nobody else's."""
    values = flags.FlagValues()
    text = lambda name, default, about: flags.DEFINE_string(name, default, about, flag_values=values)  # noqa: E731
    whole = lambda name, default, about, least=None: flags.DEFINE_integer(  # noqa: E731
        name, default, about, lower_bound=least, flag_values=values
    )
    number = lambda name, default, about: flags.DEFINE_float(name, default, about, flag_values=values)  # noqa: E731
    several = lambda name, about: flags.DEFINE_multi_string(name, [], about, flag_values=values)  # noqa: E731
    yes_no = lambda name, about: flags.DEFINE_boolean(name, False, about, flag_values=values)  # noqa: E731
    if verb in FORESIGHT:
        text("config", "tiny", "what is computed: a path, or a name in configs/.")
        text("rules", None, "where it runs: a path or a name in rules/; several with commas between them.")
        text(
            "target",
            None,
            "hardware that need not be here: cpu:8, v5e:4x4, v5p:4x4x8, 2@v6e:16x16, h100:8, h100:4x8, ... "
            "Step times compare layouts; on GPUs they are 24% too short in the mean (docs/foresight.md).",
        )
        text("phase", "train", "which step: train, or prefill or decode of data.batch rows with data.seq slots each.")
        text("json", None, "write everything to this file.")
        text("html", None, "write one self-contained page to this file.")
        text("export", None, "keep the compiled train step of one layout in this file, for train --executable there.")
    else:
        text("config", None, "what is computed: a path, or a name in configs/. Default: the workdir's, else tiny.")
        text("rules", None, "where it runs: a path, a name in rules/, or none. Default: the workdir's, else none.")
    several("set", "section.key=value laid over the config; may be repeated.")
    text("mesh", "", "sizes laid over the rules' mesh, such as tensor=4 or data=2,tensor=4.")
    flags.DEFINE_boolean("help", False, "show this and stop.", short_name="h", flag_values=values)
    if verb in FORESIGHT:
        return values
    text("workdir", None, "folder of the run; may be remote (gs://). Default: a fresh one in runs/.")
    text("platform", None, "cpu, gpu or tpu. Default: what is there.")
    whole("devices", 8, "how many devices to simulate on a CPU where a size of the mesh is -1.", 1)
    text("coordinator", None, "HOST:PORT of the first of several processes, where jax does not find it by itself.")
    whole("num_processes", None, "how many processes there are.")
    whole("process_id", None, "which of them this one is, from 0.")
    text("compile_cache", None, "folder of compiled programs; none switches it off. Default: the user's cache.")
    whole(
        "step",
        None,
        "which checkpoint to begin from. Default: the newest sound one; --step takes one in doubt too.",
    )
    if verb == "train":
        whole("steps", None, "where to stop. The schedule's length is the config's train.steps, also the default.", 1)
        yes_no("dry_run", "print every array and its bytes per device, and stop.")
        text("executable", None, "the train step that explain --export compiled, instead of compiling it here.")
        yes_no("trust", "take an --executable that was exported elsewhere: it can run any code as you.")
        text("profile", None, "START:STOP, the steps to write a trace of into the workdir.")
        text(
            "train_tokenizer", None, "train a BPE tokenizer of model.vocab tokens on data.source, write it here, stop."
        )
    elif verb == "eval":
        text("text", None, "globs of text files to score instead of the held-out rows.")
        text("continuations", None, "JSONL of {prompt, continuation} to score instead.")
        text("output", None, "where their log-likelihoods go, as JSONL. Default: the terminal.")
        whole("batch", 8, "rows at a time.", 1)
        whole("seq", None, "tokens in a row of --text. Default: data.seq, with which the model was trained.", 1)
    elif verb == "generate":
        several("prompt", "what to go on from; may be repeated.")
        text("prompts", None, "JSONL of {prompt} or {messages} to go on from instead.")
        text("output", None, "where their texts go, as JSONL. Default: the terminal.")
        yes_no("chat", "a prompt is a user's message, in the model's chat template.")
        whole("max_new_tokens", 128, "where to stop at the latest.", 1)
        whole("batch", 8, "prompts at a time.", 1)
        number("temperature", 0.0, "of sampling; 0 takes the best token.")
        whole("top_k", 0, "sample from the best so many tokens; 0: all.", 0)
        number("top_p", 1.0, "sample from the best tokens whose probabilities add up to this.")
        number("min_p", 0.0, "sample from tokens with at least this share of the best one's probability.")
        whole("seed", 0, "of sampling.")
        several("stop", "a text to stop before; may be repeated.")
    else:
        text("from", None, "a folder with config.json and *.safetensors, as transformers writes it.")
        several(
            "ignore", "a field of --from's config.json to pass over, where its meaning is not known; may be repeated."
        )
        text("to", None, "a new folder, for transformers to load.")
        text("dtype", None, "of what --to writes: float32, bfloat16 or float16. Default: as it came.")
        yes_no("adapter", "--to writes the LoRA adapter alone, for PEFT.")
        text("base", "", "what the adapter's config names as its base model.")
    return values


def _help(verb: str | None) -> str:
    if verb is None:
        verbs = "\n".join(f"  {name:8} {about}" for name, about in VERBS.items())
        return (
            "usage: python main.py [VERB] [--flag=value ...]\n\nverbs (train is the default):\n"
            f"{verbs}\n\n{_help('train')}\n\npython main.py VERB --help shows the flags of another verb."
        )
    lines = [f"python main.py {verb}: {VERBS[verb]}", ""]
    found = _flags(verb)
    for name in found:
        flag = found[name]
        if name == flag.short_name:
            continue
        default = f" [{flag.default}]" if flag.default not in (None, "", [], False) else ""
        about = textwrap.wrap(f"{flag.help}{default}", 90)
        lines += [f"  --{name:16} {about[0]}", *(f"{'':21}{line}" for line in about[1:])]
    return "\n".join(lines)


def _run(argv: list[str]) -> int:
    verb = argv[1] if len(argv) > 1 and not argv[1].startswith("-") else None
    if verb is not None and verb not in VERBS:
        raise InputError(f"{verb}: no such verb{did_you_mean(verb, VERBS)}\n  fix   use one of {', '.join(VERBS)}")
    values = _flags(verb or "train")
    rest = values([argv[0], *argv[2 if verb else 1 :]])
    if values.help:
        print(_help(verb))
        return 0
    for name in values:
        if values[name].present and values[name].value == "":
            raise InputError(f"--{name}= is empty; a variable that is not set?\n  fix   give a value, or drop the flag")
    if len(rest) > 1 and rest[1] in VERBS:
        raise InputError(f"{rest[1]}: the verb comes first\n  fix   python main.py {rest[1]} --flag=value ...")
    if len(rest) > 1 and verb not in FORESIGHT:
        raise InputError(f"{rest[1]}: flags begin with --\n  fix   --config=NAME --rules=NAME, see --help")
    from gspmd_lm.verbs import given  # what is wrong with a file is told before jax is imported, which takes a second

    if verb in FORESIGHT:
        given.layouts(values, rest[1:])
    else:
        given.rules(values)
    if verb != "convert":  # a published model brings its own config
        given.config(values)
    _import_jax()
    if verb in FORESIGHT:
        from gspmd_lm.verbs import explain

        return explain.run(verb, values, rest[1:])
    if verb == "generate":
        from gspmd_lm.verbs import generate

        return generate.run(values)
    if verb == "convert":
        from gspmd_lm.verbs import convert

        return convert.run(values)
    if verb == "eval" and (values.text or values.continuations):
        from gspmd_lm.verbs import score

        return score.run(values)
    from gspmd_lm.verbs import train

    return train.run(verb or "train", values)


def _import_jax() -> None:
    """Imports jax without what its CUDA plugin, which is there for foresight too, writes where no GPU's driver is."""
    plugins = [plugin for plugin in entry_points(group="jax_plugins") if plugin.name.startswith("xla_cuda")]
    if not plugins or os.path.exists("/dev/nvidiactl"):
        return
    stderr = os.dup(2)
    with tempfile.TemporaryFile() as written:
        os.dup2(written.fileno(), 2)
        try:
            importlib.import_module("jax")
            for plugin in plugins:
                for library in Path(plugin.load().__file__).parent.glob("xla_*plugin.so"):
                    ctypes.CDLL(str(library))  # jax loads it with the first device
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            written.seek(0)
            for line in written.read().decode(errors="replace").splitlines():
                if "cudart_stub" not in line and "before absl::InitializeLog()" not in line:
                    print(line, file=sys.stderr)
