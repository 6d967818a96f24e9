"""What every verb of the command line is made of: its line in the help, its examples, its flags, and what it runs."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from absl import flags

from gspmd_lm import files

# Groups of flags, in the help.
INPUTS, RUN, JOB, RESULTS = "What is computed, and where", "The run", "The whole job", "Results"
MACHINE, HELP = "The machine", "Help"


class _LocalPath(flags.ArgumentParser[str]):
    """The path of a file or folder of this machine, in which ~ may stand for the home folder."""

    syntactic_help = "a path of this machine"
    fix = "copy it from there or to there, or mount the bucket as a file system"

    def parse(self, argument: str) -> str:
        if files.is_remote(argument):
            raise ValueError(self.syntactic_help)
        return str(files.expand_user(argument)) if argument else ""


class Flags:
    """Defines the flags of one verb, and of no other. The module of each, in absl's words, is its group in the help."""

    def __init__(self) -> None:
        self.values = flags.FlagValues()
        self._where: dict[str, Any] = {"flag_values": self.values}
        self.group(INPUTS)

    def group(self, title: str) -> None:
        """Puts the flags that follow into this group."""
        self._where["module_name"] = title

    def text(self, name: str, default: str | None, about: str) -> None:
        flags.DEFINE_string(name, default, about, **self._where)

    def path(self, name: str, default: str | None, about: str) -> None:
        flags.DEFINE(_LocalPath(), name, default, about, **self._where)

    def whole(self, name: str, default: int | None, about: str, least: int | None = None) -> None:
        flags.DEFINE_integer(name, default, about, lower_bound=least, **self._where)

    def number(self, name: str, default: float | None, about: str) -> None:
        flags.DEFINE_float(name, default, about, **self._where)

    def several(self, name: str, about: str) -> None:
        flags.DEFINE_multi_string(name, [], about, **self._where)

    def yes_no(self, name: str, about: str, short_name: str | None = None) -> None:
        flags.DEFINE_boolean(name, False, about, short_name=short_name, **self._where)


@dataclasses.dataclass(frozen=True)
class Verb:
    """A verb. `run` takes the values of its flags and the arguments that are no flags, and returns the exit code."""

    name: str
    about: str
    examples: Sequence[tuple[str, str]]  # what follows the program's name, and what it does
    define: Callable[[Flags], None]
    run: Callable[[flags.FlagValues, list[str]], int]
    takes_names: bool = False  # whether arguments that are no flags may stand after it

    def flags(self) -> flags.FlagValues:
        """The flags of the verb, those of every verb included."""
        defined = Flags()
        self.define(defined)
        defined.group(HELP)
        defined.yes_no("help", "Show this text and stop.", short_name="h")
        defined.yes_no("version", "Show the versions of this program, jax and Python, and stop.")
        return defined.values


def on_config(flags: Flags, about: str, default: str | None = None) -> None:
    """Defines --config. about: sentences that say what the verb takes from the config, and what the default is."""
    places = "a path, a name in configs/, or the folder or config.json of a published model"
    flags.text("config", default, f"The config: {places}. {about}")


def on_target(flags: Flags) -> None:
    """Defines what a verb computes for hardware that need not be here."""
    on_config(flags, "It says what is computed.", "tiny")
    on_chip(flags)


def on_chip(flags: Flags) -> None:
    """Defines the file of a chip that the table of chips lacks, or that was measured."""
    flags.path(
        "chip",
        None,
        "A YAML file that describes the chip of the devices, as calibrate writes it (docs/foresight.md). "
        "With --target, the target names that chip.",
    )


def overrides(flags: Flags, mesh: bool = True) -> None:
    """Defines what is laid over the config, and over the rules."""
    flags.group(INPUTS)
    flags.several(
        "set",
        "Lay section.key=value over the config, such as model.layers=4, or rules.KEY=value over the "
        "rules file, such as rules.remat=block. The verb keys lists all keys. This flag may be "
        "repeated.",
    )
    if mesh:
        flags.text("mesh", "", "Lay sizes over the mesh of the rules file, such as tensor=4 or data=2,tensor=4.")


def about_job(flags: Flags) -> None:
    """Defines what is taken for granted of a whole job, and what its chips cost."""
    flags.group(JOB)
    flags.several(
        "price",
        "Dollars per chip and hour, such as v5e=1.2, or v5e=1.2/0.6 with the price on spot. By default the lowest "
        "public price on demand, where there is one. This flag may be repeated.",
    )
    flags.text(
        "assume",
        "",
        "What is known of the job, with commas between: storage_gb_per_s (that one host writes and reads; 1 by "
        "default), notice_s (of a preemption; 30), preemptions_per_day (on spot), failure_hours (of one chip; 50700), "
        "away_s (until there are hosts again; 300), start_s (of processes; 30).",
    )


def on_devices(flags: Flags) -> None:
    """Defines the flags of a verb that computes here: what is computed, the run's folder, and the machine."""
    flags.group(INPUTS)
    on_config(flags, "It says what is computed. The default is the workdir's config, else tiny.")
    flags.text(
        "rules",
        None,
        "The rules file: a path, a name in rules/, none, or plan, which finds the best layout "
        "for the devices at hand. It says where and how the config is computed. The default is the workdir's "
        "rules file, else none.",
    )
    overrides(flags)
    flags.group(RUN)
    flags.text(
        "workdir", None, "The folder of the run, which may be remote (gs://). The default is a new folder in runs/."
    )
    on_machine(flags)
    flags.text(
        "compile_cache",
        None,
        "The folder of compiled programs; none switches the cache off. The default is the user's cache folder.",
    )
    flags.group(RUN)
    flags.whole(
        "step",
        None,
        "The step of the checkpoint to begin from. The default is the newest checkpoint that is "
        "not in doubt; --step also accepts one in doubt.",
    )


def on_machine(flags: Flags) -> None:
    """Defines the devices and the processes of a verb that computes here."""
    flags.group(MACHINE)
    flags.text("platform", None, "The platform: cpu, gpu or tpu. By default it is the one that this machine has.")
    flags.whole("devices", 8, "How many devices to simulate on a CPU if the mesh has a size of -1.", 1)
    flags.text("coordinator", None, "HOST:PORT of the first of several processes, if jax does not find it by itself.")
    flags.whole("num_processes", None, "How many processes the run has.")
    flags.whole("process_id", None, "The number of this process, counted from 0.")
