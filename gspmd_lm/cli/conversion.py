"""A Hugging Face folder turned into a workdir, and a workdir into a Hugging Face folder."""

import contextlib
import dataclasses
import functools
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from absl import flags
from etils import epath

from gspmd_lm import config as configs
from gspmd_lm import files, session
from gspmd_lm.cli import inputs
from gspmd_lm.config import core_yaml, paths
from gspmd_lm.convert import architecture, export, images, pretrained, sidecars
from gspmd_lm.convert.families import whisper
from gspmd_lm.convert.families.bert import SEVERAL
from gspmd_lm.convert.strict_json import parse_object, read_object
from gspmd_lm.data import chat, special_tokens, tokenizer
from gspmd_lm.errors import InputError
from gspmd_lm.model import lora
from gspmd_lm.runtime import compiler
from gspmd_lm.session import Session
from gspmd_lm.sharding import shapes
from gspmd_lm.sharding.rules import Rules
from gspmd_lm.train import state, step
from gspmd_lm.units import human_bytes, plural
from gspmd_lm.workdir import checkpoint, layout
from gspmd_lm.workdir.layout import IGNORED, IMPORTED


def run(values: flags.FlagValues, rules: Rules) -> int:
    """Imports a folder or exports a workdir, and returns the exit code."""
    example = "convert --from=DIR --workdir=W, or convert --workdir=W --to=DIR"
    workdir = inputs.needs_workdir(values, example)
    source: str | None = values["from"].value  # `from` is a keyword of Python
    if bool(source) == bool(values.to):
        raise InputError("convert goes one way\n  fix   give either --from=DIR or --to=DIR")
    if source:
        return _import(values, rules, files.expand_user(source), files.open_path(workdir))
    return _export(values, rules, inputs.needs_weights(values, example))


def _import(values: flags.FlagValues, rules: Rules, source: Path, workdir: epath.Path) -> int:
    if not source.is_dir():
        fix = paths.download(str(source), "give one with config.json and *.safetensors")
        raise InputError(f"--from={source}: no such folder\n  fix   {fix}")
    idle = [name for name in ("dtype", "adapter", "base", "step") if values[name].value not in (None, False, "")]
    if idle:
        also = ", or --set model.weight_dtype=bfloat16" if "dtype" in idle else ""
        raise InputError(f"--{', --'.join(idle)}: only for convert --to=DIR\n  fix   drop it{also}")
    if "://" not in str(workdir):
        files.check_folder("--workdir=", Path(workdir))
    published = pretrained.open_folder(source, inputs.config_sets(values), values.ignore)
    carried = {architecture.CONFIG: sidecars.as_json(dict(published.like))} | _sidecars_of(source)
    if values.ignore:
        carried[IGNORED] = sidecars.as_json({architecture.CONFIG: values.ignore})
    chat.stop_ids(published.config.data.tokenizer)  # raises if the tokenizer cannot be used
    begun = inputs.begin(values, published.config, rules, keep_memory=False)
    with (
        session.exclusive(begun, workdir),
        checkpoint.run_checkpoints(workdir, published.config, begun.say) as checkpoints,
    ):
        if checkpoints.steps():
            raise InputError(f"{workdir}: has checkpoints already\n  fix   give another --workdir")
        built = _build_step(begun, published.config)
        built.check_held({"weights": built.arrays_between_steps["weights"]})
        begun.say(f"{source}: {published.family.name}, {built.arrays.parameter_count:,} parameters")
        if published.left_out:
            begun.say(
                f"{source}: {published.left_out:,} tensors are left out: they are not of the layers that make text"
            )
        if published.new:
            begun.say(f"{source}: new weights, which no file has and training must learn: {', '.join(published.new)}")
        for note in published.notes:
            begun.say(f"{source / architecture.CONFIG}: {note}")
        if values.ignore:
            begun.say(f"ignored in {architecture.CONFIG}: {', '.join(values.ignore)}")
        if not published.reads_text and not published.config.model.patches:
            begun.say(
                f"warning: {source}: there is no tokenizer.json, so the model cannot read text. With "
                f"transformers, AutoTokenizer.from_pretrained('{source}').save_pretrained('T') writes one from "
                "what there is; then --set data.tokenizer=T"
            )
        params = published.load(built.state_shardings.params)
        # The checkpoint comes last: if it exists, everything exists. Until then the same command can be given again.
        if begun.machine.is_main:
            _write_sidecars(workdir, published, carried)
        checkpoints.save(0, {"params": params}, {"data": "", "rules": begun.rules.path})
        checkpoints.wait()
    begun.say(f"{workdir}: {layout.CONFIG}, {IMPORTED}/ and checkpoint 0")
    generate = f"generate --workdir={workdir} --prompt=..., or " * (published.config.objective == "causal")
    begun.say(f"next: {generate}train with --config={workdir}/{layout.CONFIG} --set train.init_from={workdir}")
    return 0


def _write_sidecars(workdir: epath.Path, published: pretrained.Pretrained, carried: Mapping[str, bytes]) -> None:
    """Writes config.yaml and the files that came with the weights."""
    plain = configs.to_dict(published.config)
    del plain["objective"]  # it follows from the model, of which fine-tuning may set another head
    del plain["optimizer"]["learning_rate"]  # so that fine-tuning has its own, and adapters theirs
    if published.tokenizer and plain["data"]["tokenizer"] == str(published.tokenizer):
        # Tokenizers can only be read from local files.
        kept = published.tokenizer if files.is_remote(workdir) else Path(workdir) / IMPORTED / published.tokenizer.name
        plain["data"]["tokenizer"] = str(kept.absolute())  # runs may be started in other folders
    if (workdir / IMPORTED).exists():  # a conversion that was killed leaves it
        (workdir / IMPORTED).rmtree()
    (workdir / IMPORTED).mkdir(parents=True)
    for name, content in carried.items():
        (workdir / IMPORTED / name).parent.mkdir(parents=True, exist_ok=True)
        files.replace(workdir / IMPORTED / name, content)
    files.replace(workdir / layout.CONFIG, core_yaml.dump(plain))


def _sidecars_of(source: Path) -> dict[str, bytes]:
    """The sidecar files of published weights: name -> content. Raises InputError if one cannot be read."""
    try:
        return {name: path.read_bytes() for name, path in sidecars.find_sidecars(source).items()}
    except OSError as error:
        raise InputError(
            f"{error.filename}: cannot be read ({error.strerror})\n  fix   make it readable, or remove it"
        ) from error


def _export(values: flags.FlagValues, rules: Rules, workdir: str) -> int:
    if values.ignore:
        raise InputError("--ignore: only for convert --from=DIR\n  fix   drop it")
    if values.adapter and values.dtype:
        raise InputError("--dtype: an adapter is float32\n  fix   drop it")
    begun = inputs.begin(values, inputs.read_config(values), rules, keep_memory=False)
    with _open_original(workdir, begun.config) as original:
        _export_run(values, begun, workdir, original)
    return 0


def _export_run(values: flags.FlagValues, begun: Session, workdir: str, original: Path | None) -> None:
    """Exports the weights of a workdir. original: the folder of the files that came with them, or None."""
    config = begun.config
    folder, model = files.expand_user(values.to), config.model
    like = architecture.read_config_json(original) if original else None
    of_classes = said_of_classes(config, _classes(workdir), like or {})
    if like:
        like |= of_classes
    elif "problem_type" in of_classes:
        begun.say(
            f"warning: add problem_type: {SEVERAL} to {folder / architecture.CONFIG}: without it, "
            "pipelines of transformers take one class of a text"
        )
    if original and (original / IGNORED).is_file():
        fields = read_object(original / IGNORED).get(architecture.CONFIG)
        named = ", ".join(map(str, fields)) if isinstance(fields, list) else f"see {original / IGNORED}"
        begun.say(f"ignored on import, and kept in {architecture.CONFIG}: {named}")
    base = config.train.init_from
    if not original and base and not files.open_path(base).is_dir():
        begun.say(
            f"warning: train.init_from: {base} does not exist, so neither does its config.json: "
            "a new one is written from the model's settings"
        )
    if begun.machine.is_main:
        files.check_folder("--to=", folder)
    built = _build_step(begun, config)
    if values.adapter:
        export.family_and_model(folder, model, like)
        imported, written, ends = {}, {}, []  # they are those of the base model
    else:
        export.family_and_config(folder, dataclasses.replace(model, lora=None), like, values.dtype)
        imported = sidecars.choose_sidecars(original, config.data.tokenizer)
        written, ends = _written_anew(config, imported, original)
    wanted = built.abstract_state.params
    if begun.machine.platform == "cpu" and begun.machine.process_count == 1 and not model.lora:
        # Without a sharding they are read as numpy's arrays. A device on the CPU would hold a copy of them.
        wanted = jax.tree.map(lambda like: jax.ShapeDtypeStruct(like.shape, like.dtype), wanted)
        sizes = (like.size * like.dtype.itemsize for like in jax.tree.leaves(wanted))
        compiler.check_held({"weights": sum(sizes)}, begun.devices[:1])
    else:
        built.check_held({"weights": wanted})
    with checkpoint.run_checkpoints(workdir, config, begun.say) as checkpoints:
        restored = checkpoints.restore_weights(wanted, values.step)
    if restored is None:
        raise session.no_checkpoint(workdir)
    number, params = restored
    shardings = built.state_shardings.params
    if model.lora and not values.adapter:
        merge = jax.jit(
            lambda params: lora.merge_adapters(params, config.model)[0], out_shardings=lora.weights(shardings)
        )
        params, model = merge(params), dataclasses.replace(model, lora=None)
    if values.adapter:
        export.write_adapter(folder, model, params, values.base, like)
    else:
        describe = functools.partial(sidecars.card, config, step=number, imported=imported)
        export.write_folder(folder, model, params, like, values.dtype, imported | written, ends, describe)
    if begun.machine.is_main:
        every = [path for path in folder.rglob("*") if path.is_file()]
        begun.say(f"{folder}: {human_bytes(sum(path.stat().st_size for path in every))}, {plural(len(every), 'file')}")


def _written_anew(
    config: configs.Config, imported: Mapping[str, Path], original: Path | None
) -> tuple[dict[str, bytes], list[int]]:
    """The sidecar files that a run asks for beside those that came with its weights, and the ids that end a text."""
    model = config.model
    written, ends = sidecars.write_text_sidecars(imported, original, config.data.tokenizer, model.vocab)
    if patches := model.vision.patches if model.vision else model.patches:
        written |= images.write_preprocessing(patches, config.data.images)
    if model.frames:
        name, path = special_tokens.GENERATION, imported.get(special_tokens.GENERATION)
        text = written[name].decode() if name in written else path.read_text() if path else "{}"
        end = tokenizer.load_tokenizer(config.data.tokenizer).end
        written |= whisper.write_sidecars(model, parse_object(text, path or Path(name)), end)
    return written, ends


def said_of_classes(config: configs.Config, classes: Sequence[str], like: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a config.json about the classes of a run's data, and whether a text has several of them.

    classes: their names; none where the run was not trained. like: what came with the weights.
    """
    numbered = {str(number): name for number, name in enumerate(classes)}
    said: dict[str, Any] = {"id2label": numbered, "label2id": {name: int(number) for number, name in numbered.items()}}
    said = said if classes else {}
    if config.objective == "classes" and config.data.label_kind == "classes":
        return said | {"problem_type": SEVERAL}
    if said and like.get("problem_type"):
        said["problem_type"] = "single_label_classification"
    return said


def _classes(workdir: str) -> list[str]:
    """The names of the classes that a run was trained on, in the order of their numbers; [] without any."""
    path = files.open_path(workdir) / layout.CLASSES
    return files.json_value(path.read_text(), Path(path)) if path.exists() else []


def _build_step(begun: Session, config: configs.Config) -> step.Step:
    """A Step, for the placement of its weights at rest. Raises ShardingError if weights do not divide."""
    arrays = state.arrays(config)
    shapes.check_layout(dataclasses.replace(arrays, named_optimizer=(), optimizer=()), begun.rules)
    return step.build_step(config, begun.rules, arrays, begun.devices)


@contextlib.contextmanager
def _open_original(workdir: str, config: configs.Config) -> Iterator[Path | None]:
    """A context that gives a local folder with the files that came with a run's weights, or None if there are none.

    Files in a bucket are copied until the context ends.
    """
    found = _find_original(workdir, config)
    if found is None or not files.is_remote(found):
        yield Path(found) if found else None
        return
    with tempfile.TemporaryDirectory() as copies:
        for name in files.list_files(found, [path.name for path in found.iterdir()]):
            copy = Path(copies, name)
            copy.parent.mkdir(parents=True, exist_ok=True)
            files.replace(copy, (found / name).read_bytes())
        yield Path(copies)


def _find_original(workdir: str, config: configs.Config) -> epath.Path | None:
    """The folder of the files that came with a run's weights, found also through earlier runs; None without one."""
    at, seen = files.open_path(workdir), set[epath.Path]()
    while at not in seen:
        if layout.find_earlier(str(at), f"{IMPORTED}/{architecture.CONFIG}"):
            return at / IMPORTED
        seen.add(at)
        if config.train.init_from:
            at = files.open_path(config.train.init_from)
            if layout.is_run(at):
                config = configs.load(str(at / layout.CONFIG))
    return None
