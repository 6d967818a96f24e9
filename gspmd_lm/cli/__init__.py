"""The command line: the verbs, how their flags are read, and what becomes of errors."""

import errno
import io
import os
import platform
import shlex
import signal
import sys
import textwrap
import traceback
from collections.abc import Sequence
from importlib.metadata import version
from typing import NoReturn

from absl import flags

from gspmd_lm import versions
from gspmd_lm.cli.calibrate import CALIBRATE
from gspmd_lm.cli.completion import COMPLETION
from gspmd_lm.cli.convert import CONVERT
from gspmd_lm.cli.data import DATA
from gspmd_lm.cli.errors import ERRORS
from gspmd_lm.cli.eval import EVAL
from gspmd_lm.cli.explain import COMPARE, EXPLAIN
from gspmd_lm.cli.explore import EXPLORE
from gspmd_lm.cli.generate import GENERATE
from gspmd_lm.cli.keys import KEYS
from gspmd_lm.cli.launch import LAUNCH
from gspmd_lm.cli.logs import LOGS
from gspmd_lm.cli.plan import PLAN
from gspmd_lm.cli.plot import PLOT
from gspmd_lm.cli.tokenize import TOKENIZE
from gspmd_lm.cli.train import TRAIN
from gspmd_lm.cli.verb import HELP, MACHINE, Verb
from gspmd_lm.errors import InputError, RunFailed, did_you_mean, either, exit_code, printable
from gspmd_lm.runtime import endings

_VERBS = (
    *(TRAIN, DATA, TOKENIZE, LAUNCH, LOGS, EVAL, GENERATE, CONVERT),
    *(EXPLAIN, COMPARE, PLAN, CALIBRATE, ERRORS, EXPLORE, PLOT, KEYS, COMPLETION),
)
VERBS = {verb.name: verb for verb in _VERBS}


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Never returns: runs one verb and exits with its code, or, after an error, with that of `errors.exit_code`."""
    argv = list(sys.argv if argv is None else argv)
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal may not know all characters of a model's text
    code, message, unprinted, failed = 0, "", None, True
    try:
        code, failed = _run(argv), False
    except (InputError, RunFailed, KeyboardInterrupt) as error:
        code, message = exit_code(error), str(error)
    except Exception as error:
        if isinstance(error, OSError) and error.filename is None:
            unprinted = _printing_error("\n")
        if not unprinted:
            code, message = exit_code(error), _system_error(error) or _store_error(error)
            if not message and (processes := sys.modules.get("gspmd_lm.runtime.processes")):
                message = processes.cause()
            if not message:
                traceback.print_exc()
    unprinted = unprinted or _printing_error()
    if isinstance(unprinted, BrokenPipeError):  # `head` stops when it has what it wants
        code, failed = code or _NOBODY_READS, True
    elif unprinted:
        code, message, failed = code or exit_code(unprinted), message or _system_error(unprinted), True
    if message:
        print(printable(versions.with_documents(message)), file=sys.stderr)
    sys.stderr.flush()
    endings.do_last_acts(code if failed else 0, message)
    # A verb that needs no jax does not import `processes`.
    if failed and (processes := sys.modules.get("gspmd_lm.runtime.processes")) and processes.several():
        os._exit(code)  # a normal exit waits in jax's shutdown barrier, which the others may never reach
    sys.exit(code)


_NOBODY_READS = 128 + signal.SIGPIPE  # the exit code that a shell shows for a program whose output is not read


def _printing_error(text: str = "") -> OSError | None:
    """Prints a text and all that is not yet written. Returns why that is impossible; None if it is done."""
    try:
        print(end=text, flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more when it ends
        error.filename = "standard output"
        return error
    return None


_SYSTEM_ERRORS = {
    errno.ENOENT: "put it, or the folder that it belongs into, back",
    errno.ESTALE: "mount the folder again",
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


_STORES = {"gcsfs", "s3fs"}  # the packages for object stores, whose errors have no common class


def _store_error(error: Exception) -> str:
    """The message about an object store that failed, such as without a network; '' for any other error."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    if not any(frame.f_globals.get("__name__", "").partition(".")[0] in _STORES for frame in frames):
        return ""
    why = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    return (
        f"the object store failed ({why})\n"
        "  fix   log in, and see that the bucket is there and can be reached, then start the same command"
    )


def parse_flags(verb: Verb, arguments: Sequence[str]) -> tuple[flags.FlagValues, list[str]]:
    """The flags of a verb, and the arguments that are not flags. Raises InputError for a flag that is wrong."""
    values, fix = verb.flags(), f"{versions.program()} {verb.name} --help lists the flags"
    try:
        return values, values(["", *_spell_as_defined(values, arguments)])[1:]
    except flags.UnrecognizedFlagError as error:
        name = error.flagname
        others = [other.name for other in VERBS.values() if name in other.flags()]
        hint = f": it belongs to {', '.join(others)}" if others else ""
        near = "" if others else did_you_mean(name, values).replace("mean ", "mean --")
        settings = _settings(name) if "set" in values and not near else []
        settings = [key for key in settings if not (verb is PLAN and key.startswith("rules."))]
        hint = hint or near
        wrong = f"--{name}: {verb.name} has no such flag{hint}"
        if settings:
            named = (one.lstrip("-").partition("=") for one in arguments if one.startswith("-"))
            value = next((value for key, _, value in named if key.replace("-", "_") == name and value), "VALUE")
            fixes = either(f"--set {key}={shlex.quote(value)}" for key in settings)
            raise InputError(f"{wrong}\n  fix   {fixes}") from error
    except flags.IllegalFlagValueError as error:
        name, _, rest = str(error).removeprefix("flag --").partition("=")
        kind = values[name].flag_type()
        wanted = "true or false" if kind == "bool" else values[name].parser.syntactic_help
        value = "" if kind == "bool" else f"={rest.partition(': ')[0]}"
        wrong, fix = f"--{name}{value}: must be {wanted}", getattr(values[name].parser, "fix", fix)
    except flags.Error as error:
        wrong = str(error)
    raise InputError(f"{wrong}\n  fix   {fix}")


def _settings(name: str) -> list[str]:
    """The keys of a config, or else of a rules file, that have the name of a flag that does not exist."""
    from gspmd_lm.sharding import rules_file
    from gspmd_lm.show import config_keys

    keys = [key.name for group in config_keys.sections() for key in group.keys if key.name.count(".") == 1]
    return [key for key in keys if key.endswith(f".{name}")] or [f"rules.{name}"] * (name in rules_file.SECTIONS)


def _spell_as_defined(values: flags.FlagValues, arguments: Sequence[str]) -> list[str]:
    """The arguments with the names of flags as they are defined: --dry-run is --dry_run."""
    spelled: list[str] = []
    value_follows = False
    for at, argument in enumerate(arguments):
        if argument == "--":
            return [*spelled, *arguments[at:]]
        if value_follows or not argument.startswith("-"):
            spelled.append(argument)
            value_follows = False
            continue
        name, equals, value = argument.partition("=")
        dashes = "-" * (len(name) - len(name.lstrip("-")))
        name = name[len(dashes) :].replace("-", "_")
        value_follows = not equals and name in values and values[name].flag_type() != "bool"
        spelled.append(f"{dashes}{name}{equals}{value}")
    return spelled


def _overview() -> str:
    """The text of --help without a verb: all verbs, and the flags of train."""
    verbs = "\n".join(f"  {verb.name:10} {verb.about}" for verb in VERBS.values())
    return (
        f"usage: {versions.program()} [VERB] [--flag=value ...]\n\nverbs (train is the default):\n"
        f"{verbs}\n\n{_help(TRAIN)}\n\n{versions.program()} VERB --help shows the flags of another verb."
    )


def _help(verb: Verb) -> str:
    """The text of a verb's --help."""
    lines = [f"{versions.program()} {verb.name}: {verb.about}"]
    groups = verb.flags().flags_by_module_dict()
    for title in sorted(groups, key=lambda title: (title == HELP, title == MACHINE)):
        lines += ["", f"{title}:"]
        for flag in groups[title]:
            default = f" The default is {flag.default}." if flag.default not in (None, "", [], False) else ""
            text = flag.help.partition(";\n")[0]  # absl appends to the help of flags that may be repeated
            about = textwrap.wrap(f"{text}{default}", 90)
            lines += [f"  --{flag.name:16} {about[0]}", *(f"{'':21}{line}" for line in about[1:])]
    lines += ["", "In the name of a flag, - and _ are the same.", "", "Examples:"]
    for command, about in verb.examples:
        lines += [f"  {versions.program()} {command}".rstrip(), f"      {about}"]
    return "\n".join(lines)


def _version() -> str:
    """The text of --version. No library is imported for it."""
    return f"gspmd_lm {versions.__version__}, jax {version('jax')}, Python {platform.python_version()}"


def _run(argv: list[str]) -> int:
    name = argv[1] if len(argv) > 1 and not argv[1].startswith("-") else None
    if name is not None and name not in VERBS:
        from gspmd_lm.config import paths

        folders = {"rules": "rules", "config": "configs"}
        flag = next((flag for flag, folder in folders.items() if paths.found_file(name, folder)), "")
        hint = f" (did you mean --{flag}={name}?)" if flag else did_you_mean(name, VERBS)
        raise InputError(f"{name}: no such verb{hint}\n  fix   use one of {', '.join(VERBS)}")
    verb = VERBS[name or "train"]
    values, rest = parse_flags(verb, argv[2 if name else 1 :])
    if values.help or values.version:
        print(_version() if values.version else versions.with_documents(_help(verb) if name else _overview()))
        return 0
    for flag in values:
        if values[flag].present and values[flag].value == "":
            raise InputError(f"--{flag}= is empty; a variable that is not set?\n  fix   give a value, or drop the flag")
    if rest and rest[0] in VERBS:
        raise InputError(f"{rest[0]}: the verb comes first\n  fix   {versions.program()} {rest[0]} --flag=value ...")
    if rest and not verb.takes_names:
        raise InputError(f"{rest[0]}: flags begin with --\n  fix   --config=NAME --rules=NAME, see --help")
    return verb.run(values, rest)
