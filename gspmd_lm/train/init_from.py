"""The weights that a run begins with: those of another workdir (train.init_from)."""

import dataclasses
from typing import Any

import jax
from etils import epath

from gspmd_lm import config as configs
from gspmd_lm.config import Config, paths
from gspmd_lm.errors import InputError
from gspmd_lm.model import lora
from gspmd_lm.model.program import placed
from gspmd_lm.train import state
from gspmd_lm.train.step import Step
from gspmd_lm.workdir import checkpoint, layout


@dataclasses.dataclass(frozen=True)
class InitFrom:
    """A workdir with whose newest weights a run begins."""

    workdir: epath.Path
    config: Config  # the run's, but with the adapters that the workdir's weights have

    def restore(self, step: Step) -> tuple[int, Any]:
        """The number of the checkpoint and its weights, placed as the run holds them, with adapters merged in.

        Raises an InputError that lists every difference if they are not weights of the run's model.
        """
        model, arrays = self.config.model, state.arrays(self.config)
        shardings = step.placement.shardings("weights", arrays.named_params, arrays.params)
        with checkpoint.of_run(self.workdir, self.config) as checkpoints:
            restored = checkpoints.restore_weights(placed(arrays.params, shardings))
        assert restored is not None, "find() has seen a checkpoint"
        number, params = restored
        if not model.lora:
            return number, params

        def merged(weights: Any, adapters: Any) -> Any:
            return lora.merged(lora.joined(weights, adapters), model)[0]

        merge = jax.jit(merged, out_shardings=lora.weights(shardings), donate_argnums=0)
        return number, merge(lora.weights(params), lora.adapters(params))


def find(config: Config) -> InitFrom:
    """The workdir that train.init_from names. No arrays are read.

    Raises InputError if it has no checkpoint to use, or if the newest one is of another architecture.
    """
    path = config.train.init_from
    workdir = epath.Path(path).expanduser()
    place = f"train.init_from: {path}"
    described = workdir / layout.CONFIG
    adapters = configs.load(str(described)).model.lora if described.exists() else None
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, lora=adapters))
    with checkpoint.of_run(workdir, config) as checkpoints:
        if checkpoints.candidates():
            return InitFrom(workdir, config)
    if (workdir / "config.json").exists():
        raise InputError(
            f"{place}: a Hugging Face directory, not a workdir\n"
            f"  fix   python main.py convert --from={path} --workdir=W, then train.init_from: W"
        )
    what = "has no checkpoint" if workdir.exists() else "there is no such directory"
    then = "python main.py convert --from=FOLDER --workdir=W, then train.init_from: W"
    fix = paths.download(path, "give the workdir of a run, or of python main.py convert", then)
    raise InputError(f"{place}: {what}\n  fix   {fix}")
