"""The files in a workdir that describe a run, which are written and read here, and the rows that it has logged."""

import dataclasses
import datetime
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from etils import epath

from gspmd_lm import files, versions
from gspmd_lm.config import core_yaml, paths
from gspmd_lm.errors import InputError, name_kind
from gspmd_lm.files import json_object, json_value
from gspmd_lm.workdir import layout, log, wall_time

CLASSES_SHOWN = 8
LAST = 10  # speeds are medians over so many of the last logged rows


def write_description(
    workdir: epath.Path,
    config: Mapping[str, Any],
    rules: str,
    tokenizer: Mapping[str, bytes],
    classes: Sequence[str],
    *,
    mesh: Mapping[str, int],
    rows: str,
    device: str,
) -> None:
    """Writes what is enough to repeat a run: config and rules as resolved, versions, and its tokenizer.

    tokenizer: the files that the run is to keep, name -> content. classes: the labels of its data, written if there are
    any. rules: the text of the rules file. rows: what the run is trained on. device: the kind of its devices.
    """
    workdir.mkdir(parents=True, exist_ok=True)
    for name, content in tokenizer.items():
        (workdir / name).parent.mkdir(parents=True, exist_ok=True)
        files.replace(workdir / name, content)
    if classes:
        files.replace(workdir / layout.CLASSES, json.dumps(classes) + "\n")
    files.replace(workdir / layout.CONFIG, core_yaml.dump(config))
    files.replace(workdir / layout.RULES, rules)
    packages = ("gspmd_lm", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "libtpu")
    about = {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": versions.command(),
        "host": versions.host(),
        "commit": versions.commit(),
        "mesh": dict(mesh),
        "rows": rows,
        "versions": versions.installed_versions(packages) | {"device": device},
    }
    files.replace(workdir / layout.ABOUT, json.dumps(about, indent=2) + "\n")


def count_devices(workdir: epath.Path) -> int:
    """The number of devices of a run when it was last started; 0 if no file says it."""
    path = workdir / layout.ABOUT
    try:
        return _count_devices(json_object(paths.read_text(path), path)) if path.exists() else 0
    except InputError:  # it is replaced at the next start
        return 0


def _count_devices(about: Mapping[str, Any]) -> int:
    mesh = about.get("mesh")
    sizes = [*mesh.values()] if isinstance(mesh, dict) else []
    return math.prod(sizes) if sizes and all(type(size) is int and size > 0 for size in sizes) else 0


def changes(workdir: epath.Path, config: Mapping[str, Any]) -> list[str]:
    """The settings of a run that are not those of its last start, as 'data.batch: 8 is now 16'.

    Settings that the run's config.yaml does not name are younger than it.
    """
    try:
        before: Any = core_yaml.parse(paths.read_text(workdir / layout.CONFIG), "")
    except InputError:  # it is replaced now
        return []
    old, new = _state_settings(before if isinstance(before, dict) else {}), _state_settings(config)
    return [f"{key}: {old[key]} is now {value}" for key, value in new.items() if old.get(key, value) != value]


def known_classes(workdir: epath.Path, init_from: str = "") -> tuple[str, ...]:
    """The classes of a run's model, in their order; () if nothing names any.

    They are those of the run's data, or of the config.json that came with its weights, or else those that the run has
    with whose weights it begins. Raises InputError if the file that names them is damaged.
    """
    kept, published = workdir / layout.CLASSES, workdir / layout.IMPORTED / "config.json"
    if kept.exists():
        classes = json_value(paths.read_text(kept), kept)
        if not isinstance(classes, list):
            raise InputError(f"{kept}: not a list of classes\n  fix   restore it, or use another --workdir")
        return tuple(map(str, classes))
    names = json_object(paths.read_text(published), published).get("id2label") if published.exists() else None
    named = names if isinstance(names, dict) else {}
    found = tuple(str(named[number]) for number in map(str, range(len(named))) if number in named)
    return found or (known_classes(files.open_path(init_from)) if init_from else ())


def check_classes(
    workdir: epath.Path, known: Sequence[str], classes: Sequence[str], say: Callable[[str], None]
) -> None:
    """Raises InputError if a run keeps other classes than those of its data now, whose numbers would mean others.

    known: see `known_classes`. `say` warns of classes of data that are not those of the weights with which the run
    begins. If there are more or fewer of them, the head is a new one.
    """
    path = workdir / layout.CLASSES
    if not known or not classes or (*known,) == (*classes,) or (len(known) != len(classes) and not path.exists()):
        return
    if path.exists():
        raise InputError(
            f"{path}: the run was trained with the classes {[*known]}, and the training data now has {[*classes]}\n"
            "  fix   restore the data, or use another --workdir"
        )
    numbered = (*map(str, range(len(known))),)
    if classes != numbered and (*known,) != tuple(f"LABEL_{number}" for number in numbered):
        ours, theirs = map(_list_classes, (classes, known))
        say(
            f"warning: the classes of the data, {ours}, are not those of the model, {theirs}: they are taken to be in "
            "the same order"
        )


def _list_classes(classes: Sequence[str]) -> str:
    return ", ".join(classes[:CLASSES_SHOWN]) + ", ..." * (len(classes) > CLASSES_SHOWN)


@dataclasses.dataclass(frozen=True)
class RunHistory:
    """One run. Rows are as metrics.jsonl has them: of training, and of evaluation."""

    name: str
    workdir: str
    rows: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    samples: list[dict[str, Any]]
    config: dict[str, Any]
    rules: str  # the text of rules.yaml
    about: dict[str, Any]  # versions.json
    damage: str = ""  # lines about what cannot be read
    wall_s: dict[str, float] = dataclasses.field(default_factory=dict)  # kind of `wall_time` -> seconds, if counted

    @property
    def step(self) -> int:
        """The last step that was logged."""
        return int(max((row["step"] for row in (*self.rows, *self.evaluations)), default=0))

    @property
    def step_tokens(self) -> int:
        """The tokens of one step; 0 if the config does not say it."""
        return self.whole("data", "batch") * self.whole("data", "seq")

    @property
    def devices(self) -> int:
        """The number of devices when the run was last started; 0 if no file says it."""
        return _count_devices(self.about)

    def whole(self, section: str, key: str) -> int:
        """A setting that is a number above 0; 0 if the config has none there."""
        values = self.config.get(section)
        value = values.get(key) if isinstance(values, dict) else None
        return value if type(value) is int and value > 0 else 0

    @property
    def best(self) -> dict[str, Any] | None:
        """The evaluation with the lowest held-out loss."""
        return min(
            (row for row in self.evaluations if row.get("eval_loss") is not None),
            key=lambda row: row["eval_loss"],
            default=None,
        )

    def last(self, key: str) -> float | None:
        """The value that was logged last."""
        return next((row[key] for row in reversed(self.rows) if row.get(key) is not None), None)

    def speed(self, key: str) -> float | None:
        """The median of the values that were logged last."""
        values = [row[key] for row in self.rows if row.get(key) is not None]
        return statistics.median(values[-LAST:]) if values else None

    def points(self, key: str) -> list[tuple[float, float]]:
        """(step, value) for each row that has the value; of evaluation for a key such as eval_loss."""
        rows = self.evaluations if key.startswith("eval_") else self.rows
        return [(row["step"], row[key]) for row in rows if row.get(key) is not None]


def read_runs(folders: Sequence[str]) -> list[RunHistory]:
    """The runs in folders: each is a workdir, or holds workdirs.

    What cannot be read of a run is left out, and its `damage` says so. Raises InputError for a folder without runs, or
    if no run has rows.
    """
    workdirs: dict[str, epath.Path] = {}
    for folder in folders:
        path = files.open_path(folder)
        workdirs_here = _workdirs(path)
        if not workdirs_here:
            what = f"no {layout.METRICS} in it" if path.exists() else "there is no such folder"
            raise InputError(
                f"{folder}: {what}\n  fix   give the --workdir of a run that has taken a step, or a folder of runs"
            )
        workdirs |= {str(workdir): workdir for workdir in workdirs_here}
    names = [workdir.name for workdir in workdirs.values()]
    runs = [
        _read(workdir, workdir.name if names.count(workdir.name) == 1 else str(workdir))
        for workdir in workdirs.values()
    ]
    if not any(run.rows or run.evaluations for run in runs):
        raise InputError("\n".join([*(run.damage for run in runs), "  fix   wait until the run has taken a step"]))
    return runs


def _workdirs(path: epath.Path) -> list[epath.Path]:
    if (path / layout.METRICS).exists():
        return [path]
    return [one for one in sorted(path.iterdir()) if (one / layout.METRICS).exists()] if path.is_dir() else []


def _read(workdir: epath.Path, name: str) -> RunHistory:
    damage: list[str] = []

    def rows_of(name: str) -> list[dict[str, Any]]:
        try:
            rows, damaged = log.read_rows(workdir / name)
        except OSError as error:
            rows, damaged = [], f"cannot be read ({files.reason(error)})"
        damage.extend([f"{workdir / name}: {damaged}"] if damaged else [])
        return rows

    def value_of(name: str, parse: Callable[[str, str], Any], missing: Any) -> Any:
        """The value that a file holds; `missing` if there is no such file, or if it is damaged or of another type."""
        path = workdir / name
        try:
            value = parse(paths.read_text(path), str(path)) if path.exists() else missing
        except InputError as error:
            damage.append(" ".join(map(str.strip, str(error).partition("\n  fix")[0].splitlines())))
            return missing
        if not isinstance(value, type(missing)):
            damage.append(f"{path}: is {name_kind(value)}, and is left out")
            return missing
        return value

    rows = rows_of(layout.METRICS)
    run = RunHistory(
        name=name,
        workdir=str(workdir),
        rows=[row for row in rows if "loss" in row],
        evaluations=[row for row in rows if "eval_loss" in row],
        samples=rows_of(layout.SAMPLES),
        config=value_of(layout.CONFIG, core_yaml.parse, {}),
        rules=value_of(layout.RULES, lambda text, _: text, ""),
        about=value_of(layout.ABOUT, json_object, {}),
        wall_s=wall_time.read_totals(rows),
    )
    if not (run.rows or run.evaluations):
        damage.append(f"{workdir / layout.METRICS}: has no rows of training or evaluation")
    return dataclasses.replace(run, damage="\n".join(damage))


def settings(run: RunHistory) -> dict[str, str]:
    """The settings of a run, each as `section.key`, and its rules."""
    return _state_settings(run.config) | {"rules": run.rules.partition("\n")[0].lstrip("# ")}


def _state_settings(config: Mapping[str, Any]) -> dict[str, str]:
    return {
        f"{section}.{key}": json.dumps(value)
        for section, values in config.items()
        if isinstance(values, dict)
        for key, value in values.items()
    } | {key: json.dumps(value) for key, value in config.items() if not isinstance(value, dict)}


def differences(runs: Sequence[RunHistory]) -> dict[str, list[str]]:
    """The settings that are not the same in all runs, with the value in each."""
    each = [settings(run) for run in runs]
    keys = dict.fromkeys(key for one in each for key in one)
    values_of_key = {key: [one.get(key, "-") for one in each] for key in keys}
    return {key: values for key, values in values_of_key.items() if len(set(values)) > 1}
