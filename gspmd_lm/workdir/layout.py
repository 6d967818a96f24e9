"""What a run leaves in its workdir: the names of its files, and the files that describe it."""

import datetime
import json
from collections.abc import Collection, Mapping
from pathlib import Path

from etils import epath

from gspmd_lm import config as configs
from gspmd_lm import files, versions
from gspmd_lm.config import Config, core_yaml

CONFIG, RULES = "config.yaml", "rules.yaml"  # as resolved
ABOUT = "versions.json"  # the command, the versions and the machine
METRICS, SAMPLES = "metrics.jsonl", "samples.jsonl"
CHECKPOINTS = "checkpoints"
TOKENIZER = "tokenizer.json"  # one that the run trained
PAGE = "plot.html"  # of a single run
LOCK, HOLDER = "lock", "lock.json"  # the file that the system locks, and the name of its holder
IMPORTED = "hugging_face"  # a folder: the files that came with imported weights
IGNORED = "ignored.json"  # in it: the fields of config.json that --ignore named


def path_of(name: str) -> epath.Path:
    """A local path, in which ~ may stand for the home folder, or a remote one."""
    return epath.Path(name) if files.is_remote(name) else epath.Path(name).expanduser()


def is_run(folder: Path | epath.Path) -> bool:
    """Whether a folder is the workdir of a run or of an import."""
    return (folder / CONFIG).is_file()


def are_of_run(names: Collection[str]) -> bool:
    """Whether a folder with these names in it is the workdir of a run, which may just have begun."""
    return any(pair <= {*names} for pair in ({LOCK, HOLDER}, {CONFIG, RULES}, {CONFIG, CHECKPOINTS}))


def left(workdir: str | None, name: str) -> str | None:
    """The path of a file that an earlier run left in a local workdir; None where there is none."""
    path = Path(workdir).expanduser() / name if workdir else None
    return str(path) if path and path.is_file() else None


def write_description(
    workdir: epath.Path,
    config: Config,
    rules: str,
    tokenizer: Path | None,
    *,
    mesh: Mapping[str, int],
    rows: str,
    device: str,
) -> None:
    """Writes what is enough to repeat a run: config and rules as resolved, versions, and a tokenizer that it trained.

    rules: the text of the rules file. rows: what the run is trained on. device: the kind of its devices.
    """
    workdir.mkdir(parents=True, exist_ok=True)
    if tokenizer:
        files.replace(workdir / TOKENIZER, tokenizer.read_bytes())
    files.replace(workdir / CONFIG, core_yaml.dump(configs.to_dict(config)))
    files.replace(workdir / RULES, rules)
    packages = ("gspmd_lm", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "libtpu")
    about = {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": versions.command(),
        "host": versions.host(),
        "commit": versions.commit(),
        "mesh": dict(mesh),
        "rows": rows,
        "versions": versions.installed(packages) | {"device": device},
    }
    files.replace(workdir / ABOUT, json.dumps(about, indent=2) + "\n")
