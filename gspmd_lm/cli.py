"""The command line: verbs, their flags, and the order in which a run comes together."""

import ctypes
import datetime
import importlib
import io
import json
import logging
import os
import sys
import tempfile
import textwrap
import time
import traceback
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from absl import flags

from gspmd_lm.config import Config, InputError, RunFailed, did_you_mean

if TYPE_CHECKING:  # a verb's code is imported when the verb runs
    from rich.console import Console

    from gspmd_lm.data.sources import Progress
    from gspmd_lm.rules import Problem
    from gspmd_lm.train.loop import Foresee
    from gspmd_lm.train.step import Step

VERBS = {
    "train": "trains, from the newest checkpoint of the workdir or from scratch",
    "eval": "prints the loss of the held-out rows under the newest checkpoint of the workdir",
    "explain": "says what a layout costs on hardware you do not have",
    "compare": "the same for several layouts, side by side: compare fsdp8 tp8 --target=...",
}
FORESIGHT = ("explain", "compare")


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Runs one verb. Exits with 0 when it is done, 2 when the input is wrong, 1 or a signal's code otherwise."""
    argv = list(sys.argv if argv is None else argv)
    several = False
    try:
        code = _run(argv)
        several = _several_processes()
    except (InputError, flags.Error) as error:
        print(f"{error}", file=sys.stderr)
        code = 2
    except KeyboardInterrupt:
        code = 130
    except RunFailed as error:
        several = _several_processes()
        print(f"{error}", file=sys.stderr)
        code = 1
    except Exception:
        several = _several_processes()
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    if several and code:
        os._exit(code)  # the others may never reach jax's shutdown barrier, which a normal exit would wait for
    sys.exit(code)


def _several_processes() -> bool:
    import jax

    return jax.distributed.is_initialized() and jax.process_count() > 1


def _flags(verb: str) -> flags.FlagValues:
    """The flags of a verb, and nobody else's."""
    values = flags.FlagValues()
    text = lambda name, default, about: flags.DEFINE_string(name, default, about, flag_values=values)  # noqa: E731
    whole = lambda name, default, about, least=None: flags.DEFINE_integer(  # noqa: E731
        name, default, about, lower_bound=least, flag_values=values
    )
    if verb in FORESIGHT:
        text("config", "tiny", "what is computed: a path, or a name in configs/.")
        text("rules", None, "where it runs: a path or a name in rules/; several with commas between them.")
        text("target", None, "cpu:8, v5e:4x4, v5p:4x4x8, 2@v6e:16x16, h100:8, h100:4x8, ...: nothing of it is needed.")
        text("phase", "train", "which step: train, or prefill or decode of data.batch rows with data.seq slots each.")
        text("json", None, "write everything to this file.")
        text("html", None, "write one self-contained page to this file.")
        text("export", None, "keep the compiled train step of one layout in this file, for train --executable there.")
    else:
        text("config", None, "what is computed: a path, or a name in configs/. Default: the workdir's, else tiny.")
        text("rules", None, "where it runs: a path, a name in rules/, or none. Default: the workdir's, else none.")
    flags.DEFINE_multi_string("set", [], "section.key=value laid over the config; may be repeated.", flag_values=values)
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
    if verb == "train":
        whole("steps", None, "where to stop. The schedule's length is the config's train.steps, also the default.", 1)
        flags.DEFINE_boolean(
            "dry_run", False, "print every array and its bytes per device, and stop.", flag_values=values
        )
        text("executable", None, "the train step that explain --export compiled, instead of compiling it here.")
        text("profile", None, "START:STOP, the steps to write a trace of into the workdir.")
        text(
            "train_tokenizer", None, "train a BPE tokenizer of model.vocab tokens on data.source, write it here, stop."
        )
    else:
        whole("step", None, "which checkpoint. Default: the newest that is undamaged.")
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
    if len(rest) > 1 and rest[1] in VERBS:
        raise InputError(f"{rest[1]}: the verb comes first\n  fix   python main.py {rest[1]} --flag=value ...")
    if verb in FORESIGHT:
        _import_jax()
        return _explain(verb, values, rest[1:])
    if len(rest) > 1:
        raise InputError(f"{rest[1]}: flags begin with --\n  fix   --config=NAME --rules=NAME, see --help")
    _import_jax()
    return _train_or_evaluate(verb or "train", values)


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


def _explain(verb: str, values: flags.FlagValues, layouts: list[str]) -> int:
    from rich.console import Console

    from gspmd_lm import config as configs
    from gspmd_lm import rules as rules_files
    from gspmd_lm.foresight import compile
    from gspmd_lm.foresight import target as targets

    layouts = [*filter(None, (values.rules or "").split(",")), *layouts]
    if not layouts or values.target is None:
        lacking = "--target" if layouts else "--rules"
        raise InputError(f"{verb} needs {lacking}\n  fix   {verb} --rules=fsdp8 --target=v5p:2x2x2 (or cpu:8, h100:8)")
    config = configs.load(values.config, values.set)
    rules = [rules_files.load(name, values.mesh) for name in layouts]
    target = targets.parse(values.target)
    if values.phase not in compile.PHASES:
        known = ", ".join(compile.PHASES)
        raise InputError(f"--phase={values.phase}: no such phase{did_you_mean(values.phase, compile.PHASES)}\n"
                         f"  fix   use one of {known}")  # fmt: skip
    if values.export and values.phase != "train":
        raise InputError(f"--export={values.export}: only a train step is exported\n  fix   drop --phase")
    outputs = [Path(name) for name in (values.json, values.html, values.export) if name]
    if values.export and len(layouts) > 1:
        raise InputError(f"--export={values.export}: holds one executable\n  fix   give one rules file")
    for path in outputs:
        if not path.parent.is_dir():
            raise InputError(f"{path}: there is no folder {path.parent}\n  fix   make it, or name another")
    import jax

    jax.config.update("jax_platforms", "cpu")  # shapes are worked out here; no accelerator that may be here is touched
    from gspmd_lm.foresight import explain, page, report, terminal

    waiting = Console(stderr=True, highlight=False)
    say = lambda line: waiting.print(line, soft_wrap=True, markup=False)  # noqa: E731
    export = Path(values.export) if values.export else None
    found = explain.reports(config, rules, target, say, export, values.phase)
    terminal.show(found, Console(highlight=False, width=None if sys.stdout.isatty() else 120))
    if values.json:
        Path(values.json).write_text(json.dumps(report.to_json(found), indent=1) + "\n", encoding="utf-8")
    if values.html:
        Path(values.html).write_text(page.render(found), encoding="utf-8")
    return 0


def _train_or_evaluate(verb: str, values: flags.FlagValues) -> int:
    from etils import epath
    from rich.console import Console

    from gspmd_lm import config as configs
    from gspmd_lm import rules as layouts
    from gspmd_lm import runtime

    log = logging.getLogger("gspmd_lm")  # what a process waits for, and what it found odd
    if not log.handlers:
        log.addHandler(logging.StreamHandler())
        log.setLevel(logging.INFO)
    workdir = epath.Path(values.workdir) if values.workdir else None
    profile = _profile(values.profile) if verb == "train" else None
    if verb == "eval" and workdir is None:
        raise InputError("eval needs the folder of a run that has saved a checkpoint\n  fix   eval --workdir=DIR")
    config = configs.load(_file(values.config, workdir, "config.yaml") or "tiny", values.set)
    rules = layouts.load(_file(values.rules, workdir, "rules.yaml") or "none", values.mesh)
    processes = values.num_processes or 1
    wanted = rules.devices if rules.devices > 0 else values.devices
    machine = runtime.start(
        platform=values.platform,
        simulated_devices=max(1, wanted // processes),
        coordinator=values.coordinator,
        num_processes=values.num_processes,
        process_id=values.process_id,
    )
    import jax

    devices = jax.devices()
    if rules.devices == 1 and machine.process_count == 1:
        devices = devices[:1]
    rules = rules.fill(len(devices))
    console = Console(stderr=False, highlight=False, width=None if sys.stdout.isatty() else 160)

    from gspmd_lm.train import state, step

    arrays, warnings = state.checked(config, rules, machine.platform)
    if machine.is_main:
        for warning in warnings:
            console.print(f"warning: {warning}", soft_wrap=True, markup=False)
    if verb == "train" and values.dry_run:
        from gspmd_lm.train import table

        if machine.is_main:
            table.show(config, rules, arrays, console)
        return 0
    if verb == "train" and values.train_tokenizer:
        return _train_tokenizer(config, values.train_tokenizer, console)
    if workdir is None and machine.process_count > 1:
        raise InputError(
            "each of several processes would choose its own workdir\n  fix   give all the same --workdir=DIR"
        )
    cache = runtime.enable_compile_cache(values.compile_cache)
    workdir = workdir or epath.Path("runs") / _fresh_name(config.name, rules.name)

    from gspmd_lm.data import loader
    from gspmd_lm.train import loop

    train_rows, held_out_rows = loader.open(config, _progress(console) if machine.is_main else None)
    if verb == "train":
        try:
            workdir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"{workdir}: cannot be written ({error.strerror})\n  fix   --workdir=DIR") from error
    built = step.build(config, rules, arrays, devices)
    foresee = _foresee(built, warnings) if verb == "train" else None
    executable = _executable(values.executable, built) if verb == "train" and values.executable else None
    run = loop.Run(
        built, train_rows, held_out_rows, workdir, machine, console, cache, profile, foresee, executable=executable
    )
    mesh = " x ".join(f"{name}={size}" for name, size in rules.mesh.items())
    simulated = "simulated " if machine.simulated else ""
    run.say(f"{config.name}: {arrays.parameter_count:,} parameters under {rules.path}, mesh {mesh} on {len(devices)} "
            f"{simulated}{machine.device_kind} device{'s' * (len(devices) > 1)}")  # fmt: skip
    run.say(train_rows.description)
    run.say(f"workdir {workdir}")
    if verb == "eval":
        run.evaluate(values.step)
        return 0
    run.train(config.train.steps if values.steps is None else values.steps)
    run.say(f"metrics {workdir / 'metrics.jsonl'}, checkpoints {workdir / 'checkpoints'}")
    return 0


def _foresee(built: "Step", problems: "Sequence[Problem]") -> "Foresee":
    """What a run asks once its step is compiled: what it will cost here, and whether it fits."""
    from rich.console import Console

    from gspmd_lm.foresight import compile, explain, target, terminal
    from gspmd_lm.train.loop import Foreseen

    def foresee(compiled: Any, options: Mapping[str, Any], trace_s: float, compile_s: float) -> Foreseen:
        here = target.of(list(built.mesh.devices.flat))
        program = compile.described(built, compiled, options, here, trace_s, compile_s)
        found = explain.report(built.config, built.rules, here, built.arrays, problems, program)
        if not found.memory.fits:
            page = io.StringIO()
            terminal.show([found], Console(file=page, width=120))
            raise InputError(
                f"{page.getvalue()}the layout does not fit, and nothing was started\n"
                "  fix   rules that split or recompute more (fsdp, remat: block), or a smaller data.batch"
            )
        return Foreseen(
            terminal.paragraph(found),
            found.prediction.step_time_s if found.prediction else None,
            found.memory.peak_bytes,
            here.chip.peak_bf16_flops_per_s if here.chip else None,
        )

    return foresee


def _executable(path: str, built: "Step") -> Any:
    from gspmd_lm.foresight import compile, target

    here = target.of(list(built.mesh.devices.flat))
    return compile.load(Path(path), compile.Request(built.config, built.rules, here, export=True))


def _file(given: str | None, workdir: object, name: str) -> str | None:
    """What the user gave, else the file of that name that an earlier run left in the workdir."""
    if given is None and workdir is not None and (Path(str(workdir)) / name).is_file():
        return str(Path(str(workdir)) / name)
    return given


def _fresh_name(config: str, rules: str) -> str:
    return f"{config}-{rules}-{datetime.datetime.now():%Y%m%d-%H%M%S}"


def _profile(span: str | None) -> tuple[int, int] | None:
    if span is None:
        return None
    start, colon, stop = span.partition(":")
    if not colon or not start.isdigit() or not stop.isdigit() or int(start) >= int(stop):
        raise InputError(f"--profile={span}: not two steps, the first before the second\n  fix   --profile=10:13")
    return int(start), int(stop)


def _train_tokenizer(config: Config, path: str, console: "Console") -> int:
    from gspmd_lm.data import sources, tokenizer

    source = sources.open(config.data, _progress(console))
    trained = tokenizer.train(source.documents(), config.model.vocab, path)
    console.print(f"{path}: {trained.vocab_size:,} tokens, trained on {source.description}", soft_wrap=True)
    console.print(f"use it with --set data.tokenizer={path}", soft_wrap=True)
    return 0


def _progress(console: "Console") -> "Progress":
    """Shows a long preparation as one line that rewrites itself, or as one line per stage where nobody watches."""
    seen: set[str] = set()
    last = 0.0

    def show(what: str, done: int, total: int) -> None:
        nonlocal last
        share = f" {done / total:.0%}" if total else ""
        if console.is_terminal and (time.monotonic() - last > 0.1 or done >= total):
            last = time.monotonic()
            end = "\n" if total and done >= total else "\r"
            console.print(f"{what}: {done / 1e6:,.1f} MB{share}", end=end)
        elif not console.is_terminal and what not in seen:
            seen.add(what)
            console.print(f"{what} ...")

    return show
