"""convert: a Hugging Face folder becomes a workdir, and a workdir a Hugging Face folder."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import yaml
from absl import flags
from etils import epath

from gspmd_lm import checkpoint
from gspmd_lm import config as configs
from gspmd_lm.config import InputError
from gspmd_lm.convert import export, peft, pretrained
from gspmd_lm.model import lora
from gspmd_lm.rules import human_bytes
from gspmd_lm.train import state, step
from gspmd_lm.verbs import generate, session

ORIGINAL = "hugging_face"  # in a workdir: what came with the weights, without them
# What lies beside the weights and says how text becomes tokens, conversations text, and when an answer ends.
BESIDE = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
          "generation_config.json", "vocab.json", "merges.txt", "tokenizer.model", "added_tokens.json")  # fmt: skip


def run(values: flags.FlagValues) -> int:
    """Converts, one way or the other."""
    workdir = session.needs(values, "workdir", "convert --from=DIR --workdir=W, or convert --workdir=W --to=DIR")
    source: str | None = values["from"].value  # `from` is a word of Python
    if bool(source) == bool(values.to):
        raise InputError("convert goes one way\n  fix   give either --from=DIR or --to=DIR")
    return _import(values, Path(source), epath.Path(workdir)) if source else _export(values, workdir)


def _import(values: flags.FlagValues, source: Path, workdir: epath.Path) -> int:
    if not source.is_dir():
        raise InputError(f"--from={source}: no such folder\n  fix   give one with config.json and *.safetensors")
    if (workdir / "checkpoints").exists():
        raise InputError(f"{workdir}: has checkpoints already\n  fix   give another --workdir")
    found = pretrained.read(source, values.set)
    here = session.begin(values, found.config)
    arrays, _ = state.checked(found.config, here.rules, here.machine.platform)
    built = step.build(found.config, here.rules, arrays, here.devices)
    here.say(f"{source}: {found.family.name}, {arrays.parameter_count:,} parameters")
    params = found.load(built.state_shardings.params)
    if here.machine.is_main:
        (workdir / ORIGINAL).mkdir(parents=True, exist_ok=True)
        (workdir / ORIGINAL / "config.json").write_text(json.dumps(dict(found.like), indent=2) + "\n")
        for name in BESIDE:
            if (source / name).is_file():
                shutil.copy(source / name, workdir / ORIGINAL / name)
        plain = configs.to_dict(found.config)
        if found.tokenizer:
            plain["data"]["tokenizer"] = str(workdir / ORIGINAL / "tokenizer.json")
        (workdir / "config.yaml").write_text(yaml.safe_dump(plain, sort_keys=False))
    with checkpoint.of_run(workdir, found.config, here.say) as checkpoints:
        checkpoints.save(0, {"params": params}, {"data": "", "rules": here.rules.path})
        checkpoints.wait()
    here.say(f"{workdir}: config.yaml, {ORIGINAL}/ and checkpoint 0")
    here.say(f"next: generate --workdir={workdir} --prompt=..., or train with --config={workdir}/config.yaml "
             f"--set train.init_from={workdir}")  # fmt: skip
    return 0


def _export(values: flags.FlagValues, workdir: str) -> int:
    here = session.begin(values)
    config = here.config
    arrays, _ = state.checked(config, here.rules, here.machine.platform)
    built = step.build(config, here.rules, arrays, here.devices)
    params = generate.restored(here, workdir, built.abstract_state.params, values.step)
    original = _original(workdir, config)
    like = json.loads((original / "config.json").read_text()) if original else None
    folder, model, shardings = Path(values.to), config.model, built.state_shardings.params
    if values.adapter:
        peft.write_adapter(folder, model, params, values.base, like)
    else:
        if model.lora:
            merge = jax.jit(lambda params: lora.merged(params, config.model)[0], out_shardings=lora.weights(shardings))
            params, model = merge(params), dataclasses.replace(model, lora=None)
        folders = [original] if original else [Path(config.data.tokenizer).parent]
        beside = [path for name in BESIDE for path in (folders[0] / name,) if path.is_file()]
        export.write(folder, model, params, like, values.dtype, beside)
    if here.machine.is_main:
        size = sum(path.stat().st_size for path in folder.iterdir())
        here.say(f"{folder}: {human_bytes(size)}, {len(list(folder.iterdir()))} files")
    return 0


def _original(workdir: str, config: configs.Config) -> Path | None:
    """What came with the weights that a run began from, or None."""
    tried = [Path(workdir) / ORIGINAL]
    if config.train.init_from:
        tried.append(Path(config.train.init_from) / ORIGINAL)
    return next((folder for folder in tried if (folder / "config.json").is_file()), None)
