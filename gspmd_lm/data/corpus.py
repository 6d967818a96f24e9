"""The files that sources name: folders, globs and addresses, and what of them is skipped and why."""

import ast
import dataclasses
import glob
import json
import os
import platform
import random
import sysconfig
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

from gspmd_lm.config.data import Source
from gspmd_lm.config.paths import cache_folder, download, read_text, readable_entry, unwritable
from gspmd_lm.data import formats, remote
from gspmd_lm.data.remote import Progress
from gspmd_lm.errors import InputError, did_you_mean
from gspmd_lm.files import expand_user, json_object, replace
from gspmd_lm.workdir import layout

STDLIB, STDLIB_PAIRS = "stdlib", "stdlib:pairs"
_NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
_SHOWN = 3  # names of skipped files


@dataclasses.dataclass
class FileNotes:
    """What a user should know of some files: those that are skipped, and those that are odd."""

    files: dict[str, list[str]] = dataclasses.field(default_factory=dict)  # paths and addresses

    def skip(self, reason: str, name: Path | str) -> None:
        self.add(f"skipped, {reason}", name)

    def add(self, what: str, name: Path | str) -> None:
        self.files.setdefault(what, []).append(str(name))

    def __str__(self) -> str:
        """One line for each kind of note, which names each file once; "" if there is none."""
        return "\n".join(f"{what}: {list_names([*dict.fromkeys(names)])}" for what, names in self.files.items())


def files(
    names: Sequence[str],
    place: str,
    notes: FileNotes,
    progress: Progress | None = None,
    uncopied: dict[Path, remote.RemoteFile] | None = None,
) -> list[Path]:
    """The files of known formats that the names stand for, each once, in a fixed order. `notes` is told the others.

    uncopied: takes the files at addresses by the paths of their copies, which are not made. Without it, they are.

    A name is a folder, a file, a glob, an address, or stdlib. A name that matches nothing may be several with spaces
    between them. Raises an InputError that begins with `place` if a name matches nothing or cannot be listed, or if a
    file that is named itself is of no known format.
    """
    paths: dict[Path, None] = {}
    for name in names:
        for one in _words(name):
            if one == STDLIB:
                paths.update(dict.fromkeys(_standard_library(place)))
            elif one == STDLIB_PAIRS:
                paths[_pairs_of_standard_library(place, progress)] = None
            elif "://" in one and uncopied is not None:
                found = {file.copy: file for file in remote.listing(one, place, notes.skip)}
                uncopied.update(found)
                paths.update(dict.fromkeys(found))
            elif "://" in one:
                paths.update(dict.fromkeys(remote.copies(one, place, notes.skip, progress)))
            else:
                paths.update(dict.fromkeys(_local(one, name, place, notes)))
    if not any(name.strip() for name in names):
        raise InputError(f"{place} is empty\n  fix   give a folder, a file, a glob, stdlib or random:ROWS")
    if not paths:
        raise InputError(
            f"{place}: {', '.join(names)}: nothing to read\n"
            + "".join(f"  {line}\n" for line in str(notes).splitlines())
            + f"  fix   give files that end in {formats.KNOWN}"
        )
    return list(paths)


def with_places(named: str | tuple[str | Source, ...]) -> str | tuple[str | Source, ...]:
    """What `data.source` names, with absolute paths, so that it means the same in every folder."""
    if isinstance(named, str):
        return absolute(named)
    return tuple(
        absolute(one) if isinstance(one, str) else dataclasses.replace(one, path=absolute(one.path)) for one in named
    )


def absolute(name: str) -> str:
    """The absolute path of a file, folder or glob; the name itself of what has none. Several names stay several."""
    if name in (STDLIB, STDLIB_PAIRS) or name.startswith("random:") or "://" in name:
        return name
    words = [str(expand_user(word).absolute()) for word in _words(name)]
    return " ".join(words) if len(words) == 1 or not any(" " in word for word in words) else name


def list_names(files: Sequence[Path | str]) -> str:
    """How many files, and the names of the first."""
    names = ", ".join(map(str, files[:_SHOWN]))
    return f"{len(files):,} files ({names}, ...)" if len(files) > _SHOWN else names


def _words(name: str) -> list[str]:
    """The name alone if it means something as it is; else the words in it."""
    if name == STDLIB or "://" in name or _matching(name):
        return [name]
    return name.split()


def _matching(name: str) -> list[Path]:
    path = expand_user(name)
    if not name.strip():
        return []
    if os.path.lexists(path):  # a name may hold the characters of globs, such as [1]
        return [path]
    return [Path(one) for one in sorted(glob.glob(str(path), recursive=True))]


def _local(name: str, whole_name: str, place: str, notes: FileNotes) -> Iterator[Path]:
    matching = _matching(name)
    if not matching:
        hint = did_you_mean(name, [STDLIB, STDLIB_PAIRS, "random:64"])
        near = "" if hint or glob.has_magic(name) else f" (there is no such file or folder in {Path.cwd()})"
        part = "" if name == whole_name else f", and neither does {name} in it"
        fix = "give a folder, a file, a glob, stdlib or random:ROWS; several as [a, b]"
        fix = download(name, fix, repo_type="dataset")
        raise InputError(f"{place}: {whole_name} matches no file{part}{hint or near}\n  fix   {fix}")
    alone = matching == [expand_user(name)]
    for path in matching:
        if path.is_dir():
            yield from _walk(path, place, notes)
        elif formats.format_of(path) is None and alone:
            raise InputError(f"{place}: {path}: unknown ending\n  fix   give files that end in {formats.KNOWN}")
        else:
            yield from _readable(path, notes)


def _readable(path: Path, notes: FileNotes) -> Iterator[Path]:
    """The path, unless it cannot hold documents."""
    if not os.path.isfile(path):  # Path.is_file raises OSError for a link into a folder that may not be entered
        notes.skip("no file, or a link to nothing", path)
    elif formats.format_of(path) is None:
        notes.skip("unknown ending", path)
    else:
        yield path


def _walk(folder: Path, place: str, notes: FileNotes) -> Iterator[Path]:
    """The files below a folder, in the order of their names."""

    def refuse(error: OSError) -> None:
        raise InputError(
            f"{place}: {error.filename}: cannot be listed ({error.strerror})\n"
            "  fix   change its permissions, or name what to read"
        ) from error

    seen: set[str] = set()
    for at, subfolders, names in os.walk(folder, onerror=refuse, followlinks=True):
        directory = Path(at)
        if os.path.realpath(at) in seen:  # a link to a folder above
            subfolders.clear()
            continue
        seen.add(os.path.realpath(at))
        if directory != folder and layout.are_of_run({*names, *subfolders}):
            notes.skip("the folder of a run", directory)
            subfolders.clear()
            continue
        if saved := _list_saved_files(directory, names, place, notes):
            subfolders.clear()
            yield from saved
            continue
        for name in [name for name in subfolders if name.startswith(".")]:
            notes.skip("hidden", directory / name)
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        for name in sorted(names):
            if name.startswith("."):
                notes.skip("hidden", directory / name)
            else:
                yield from _readable(directory / name, notes)


def _list_saved_files(folder: Path, names: Sequence[str], place: str, notes: FileNotes) -> list[Path]:
    """The files of a folder that `save_to_disk` of the package datasets wrote; of several splits, those of train."""
    if "dataset_dict.json" in names:
        splits = _member(folder / "dataset_dict.json", "splits")
        if "train" not in splits:
            raise InputError(
                f"{place}: {folder}: a saved dataset without a split named train\n"
                f"  fix   name the folder of one of its splits: {', '.join(splits)}"
            )
        for split in splits:
            if split != "train":
                notes.skip("another split than train", folder / split)
        train = folder / "train"
        return _list_saved_files(train, os.listdir(train) if train.is_dir() else [], place, notes)
    if not {"state.json", "dataset_info.json"} <= set(names):
        return []
    paths = [folder / name for name in _member(folder / "state.json", "_data_files")]
    missing = [path for path in paths if not path.is_file()]
    if missing or not paths:
        raise InputError(
            f"{folder / 'state.json'}: names {missing[0].name if missing else 'no file'}, which is not there\n"
            "  fix   save the dataset again with save_to_disk"
        )
    return paths


def _member(path: Path, key: str) -> list[str]:
    """The names under a key of a JSON file, as texts or as {filename}. Raises InputError if there are none."""
    fix = "save the dataset again with save_to_disk"
    members = json_object(read_text(path), path, fix).get(key)
    if not isinstance(members, list):
        raise InputError(f"{path}: has no list {key}\n  fix   {fix}")
    return [str(one.get("filename") if isinstance(one, dict) else one) for one in members]


def _standard_library(place: str) -> list[Path]:
    """The .py files of the running interpreter's library, without tests and without installed packages."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _NOT_LIBRARY]  # os.walk does not enter the others
        paths += [Path(folder, name) for name in names if name.endswith(".py")]
    paths = [path for path in paths if path.is_file() and path.stat().st_size]
    paths.sort(key=lambda path: path.relative_to(root).as_posix())
    if not paths:
        raise InputError(f"{place}: stdlib: no .py files in {root}\n  fix   give a folder of text files")
    return paths


def _pairs_of_standard_library(place: str, progress: Progress | None) -> Path:
    """The file of `pairs` of the interpreter's library, which is written once."""
    path = readable_entry(cache_folder("data") / f"stdlib-pairs-{platform.python_version()}.jsonl")
    if not path.exists():
        if progress:
            progress("reading the functions of the standard library", 0, 0)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace(path, "".join(f"{json.dumps(pair)}\n" for pair in pairs(_standard_library(place))))
        except OSError as error:
            raise unwritable(path, error.strerror) from error
    return path


def pairs(paths: Sequence[Path]) -> list[dict[str, str | int]]:
    """For each function with a docstring its `code` without it, a `docstring`, and whether it is `matched`: 1 or 0.

    Half of the functions, chosen by lot, have the docstring of another one. The docstring is its first paragraph.
    """
    functions = [pair for path in paths for pair in _functions(path.read_text(encoding="utf-8", errors="replace"))]
    random.Random(0).shuffle(functions)
    others, own = functions[: len(functions) // 2], functions[len(functions) // 2 :]
    found = [(code, docstring, 1) for code, docstring in own]
    found += [(others[i][0], others[i - 1][1], 0) for i in range(len(others))]
    return [{"code": code, "docstring": docstring, "matched": matched} for code, docstring, matched in found]


def _functions(text: str) -> Iterator[tuple[str, str]]:
    """The code of each function that has a docstring, without it, and the first paragraph of the docstring."""
    lines = text.splitlines()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about escapes in the library's texts
        try:
            nodes = [*ast.walk(ast.parse(text))]
        except (SyntaxError, ValueError):  # a template, or a text in another encoding
            return
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (docstring := ast.get_docstring(node)):
            first, after = node.body[0], lines[node.body[0].end_lineno : node.end_lineno]
            code = textwrap.dedent("\n".join([*lines[node.lineno - 1 : first.lineno - 1], *after]))
            if code:
                yield code, docstring.split("\n\n")[0]
