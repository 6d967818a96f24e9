"""The config and the rules that flags or a workdir name, loaded without jax."""

from collections.abc import Sequence
from pathlib import Path

from absl import flags

from gspmd_lm import config as configs
from gspmd_lm.config import Config
from gspmd_lm.errors import InputError
from gspmd_lm.sharding import rules_file
from gspmd_lm.sharding.rules import Rules

_OF_RULES_ALONE = {*rules_file.SECTIONS} - {"rules", "optimizer", "context"}  # what no config has a key of
PLAN = "plan"  # in place of a rules file


def config(values: flags.FlagValues) -> Config:
    """The config that --config names, else the one in the workdir, else tiny, with --set laid over it."""
    found = load_config(_file(values, "config") or "tiny", config_sets(values))
    return with_tokenizer(found, getattr(values, "workdir", None))


def with_tokenizer(config: Config, workdir: str | None = None) -> Config:
    """The config with the size of its vocabulary, and with the tokenizer that was trained in the workdir."""
    if config.model.vocab and config.data.tokenizer == "bytes":
        return config
    from gspmd_lm.data import trained

    sized = trained.sized(config)
    return trained.found(sized, workdir) if workdir else sized


def config_sets(values: flags.FlagValues) -> list[str]:
    """What --set lays over the config. Raises InputError for a key that rules files have and configs do not."""
    found = [text for text in values.set if not _of_rules(text)]
    for text in found:
        key, equals, value = text.partition("=")
        section = next((part for part in key.split(".") if part in _OF_RULES_ALONE), None)
        if equals and section:
            rest = key[key.index(section) :]
            raise InputError(f"--set {text}: a key of the rules file\n  fix   --set rules.{rest}={value}")
    return found


def rules_sets(values: flags.FlagValues) -> list[str]:
    """What --set lays over the rules file: the keys that begin with rules."""
    return [text for text in values.set if _of_rules(text)]


def _of_rules(text: str) -> bool:
    return text.partition("=")[0].partition(".")[0].strip() == "rules"


def load_config(name: str, overrides: Sequence[str] = ()) -> Config:
    """The config of a YAML file (a path, or a name in configs/), or of a published model's folder or config.json."""
    path = Path(name).expanduser()
    if path.is_dir() or path.suffix == ".json":
        from gspmd_lm.convert import architecture

        if architecture.is_published(path):
            return architecture.new_config(path, overrides)
    return configs.load(name, overrides)


def rules(values: flags.FlagValues) -> Rules:
    """The rules file that --rules names, else the one in the workdir, else none, with --mesh laid over it.

    For --rules=plan these are rules for any number of devices, which a plan replaces once the devices are known.
    """
    if planned(values):
        if values.mesh:
            raise InputError(
                f"--mesh={values.mesh}: a plan chooses the mesh\n  fix   drop --mesh, or name a rules file"
            )
        no_rules_sets(values)
        return rules_file.from_dict({"mesh": {"data": -1}}, PLAN)
    return rules_file.load(_file(values, "rules") or "none", values.mesh, overrides=rules_sets(values))


def no_rules_sets(values: flags.FlagValues) -> None:
    """Raises InputError if --set names a key of the rules, where a plan chooses them."""
    for text in rules_sets(values):
        raise InputError(f"--set {text}: a plan chooses the rules\n  fix   drop it, or name a rules file")


def planned(values: flags.FlagValues) -> bool:
    """Whether the rules are those of a plan for the devices at hand."""
    return values.rules == PLAN


def layouts(values: flags.FlagValues, more: Sequence[str]) -> list[Rules]:
    """The rules files of a verb that takes several: those of --rules, with commas between them, and `more`."""
    names = [*filter(None, (values.rules or "").split(",")), *more]
    return [rules_file.load(name, values.mesh, overrides=rules_sets(values)) for name in names]


def _file(values: flags.FlagValues, flag: str) -> str | None:
    """The user's choice, else the file that an earlier run left in the workdir; None without one."""
    given, workdir = getattr(values, flag), getattr(values, "workdir", None)
    if given is None and workdir and (left := Path(workdir).expanduser() / f"{flag}.yaml").is_file():
        return str(left)
    return given
