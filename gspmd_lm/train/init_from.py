"""The weights that a run begins with: those of another workdir (train.init_from)."""

import dataclasses
import functools
from typing import Any

import jax
from etils import epath
from flax.traverse_util import flatten_dict, unflatten_dict

from gspmd_lm import config as configs
from gspmd_lm import files, versions
from gspmd_lm.config import Config, paths, value_at, with_values
from gspmd_lm.errors import InputError
from gspmd_lm.model import lora
from gspmd_lm.program.program import place_shapes
from gspmd_lm.sharding import of_flax
from gspmd_lm.train import decoder, state
from gspmd_lm.train.step import Step
from gspmd_lm.workdir import checkpoint, layout

# The head of an encoder, which is specific to its objective.
_HEAD = ("classes", "logits", "embedding.tied")


@dataclasses.dataclass(frozen=True)
class InitFrom:
    """A workdir with whose newest weights a run begins."""

    workdir: epath.Path
    config: Config  # the run's, but with the adapters and the head of an encoder that the workdir's weights have
    run: Config

    @functools.cached_property
    def new(self) -> tuple[str, ...]:
        """The paths of the weights that the workdir lacks: those of another head. They are drawn from train.seed.

        Raises InputError if a run with adapters would never train them.
        """
        have, wanted = _shapes(self.config), _shapes(self.run)
        new = tuple(path for path, shape in wanted.items() if have.get(path) != shape)
        if new and self.run.model.lora:
            raise InputError(
                f"train.init_from: {self.workdir}: lacks {', '.join(new)}, and model.lora trains adapters alone\n"
                "  fix   train all weights: leave model.lora out"
            )
        return new

    def restore(self, step: Step) -> tuple[int, Any]:
        """The number of the checkpoint and its weights, placed as the run holds them, with adapters merged in.

        Raises an InputError that lists every difference if they are not weights of the run's model.
        """
        number, params = self._restore(step)
        return number, self._with_head(params, step) if self.new else params

    def _with_head(self, params: Any, step: Step) -> Any:
        """The weights of the run's model: those of `params` that it has, and new ones."""
        arrays, have = state.arrays(self.run), flatten_dict(params, sep=".")
        shardings = flatten_dict(step.placement.shardings("weights", arrays.named_params, arrays.params), sep=".")
        draw = functools.partial(of_flax.draw_params, functools.partial(decoder.initial, self.run.model), self.new)
        drawn = jax.jit(draw, out_shardings={path: shardings[path] for path in self.new})
        new = drawn(jax.random.key(self.run.train.seed))
        return unflatten_dict({path: new.get(path, have.get(path)) for path in shardings}, sep=".")

    def _restore(self, step: Step) -> tuple[int, Any]:
        model, arrays = self.config.model, state.arrays(self.config)
        shardings = step.placement.shardings("weights", arrays.named_params, arrays.params)
        with checkpoint.run_checkpoints(self.workdir, self.config) as checkpoints:
            restored = checkpoints.restore_weights(place_shapes(arrays.params, shardings))
        assert restored is not None, "find() has seen a checkpoint"
        number, params = restored
        if not model.lora:
            return number, params

        def merge_adapters(weights: Any, adapters: Any) -> Any:
            return lora.merge_adapters(lora.join_trees(weights, adapters), model)[0]

        merge = jax.jit(merge_adapters, out_shardings=lora.weights(shardings), donate_argnums=0)
        return number, merge(lora.weights(params), lora.adapters(params))


def find(config: Config) -> InitFrom:
    """The workdir that train.init_from names. No arrays are read.

    Raises InputError if it has no checkpoint to use, or if the newest one is of another architecture.
    """
    path = config.train.init_from
    workdir = files.open_path(path)
    place = f"train.init_from: {path}"
    described = workdir / layout.CONFIG
    begun = configs.load(str(described)) if described.exists() else None
    wanted = _with_ends(config, begun)
    with checkpoint.run_checkpoints(workdir, wanted) as checkpoints:
        if checkpoints.candidates():
            return InitFrom(workdir, wanted, config)
    if (workdir / "config.json").exists():
        raise InputError(
            f"{place}: a Hugging Face directory, not a workdir\n"
            f"  fix   {versions.program()} convert --from={path} --workdir=W, then train.init_from: W"
        )
    what = "has no checkpoint" if workdir.exists() else "there is no such directory"
    then = f"{versions.program()} convert --from=FOLDER --workdir=W, then train.init_from: W"
    fix = paths.download(path, f"give the workdir of a run, or of {versions.program()} convert", then)
    raise InputError(f"{place}: {what}\n  fix   {fix}")


def _with_ends(run: Config, begun: Config | None) -> Config:
    """The config of a run with the adapters of another one, and with its head, if both are encoders.

    Where these do not go with the run's model, the config is the run's: what differs is told by the checkpoint.
    """
    model: dict[str, Any] = {"lora": begun and begun.model.lora, "frozen": ()}
    changed: dict[str, Any] = {}
    if begun and run.model.attention.mask == begun.model.attention.mask == "full":
        model |= {name: value_at(begun.model, name) for name in _HEAD}
        # Of its own records, which fit its head, and in rows of the run's length.
        data = dataclasses.replace(begun.data, seq=run.data.seq, source_seq=run.data.source_seq)
        changed = {"objective": None, "data": data}
    try:
        return dataclasses.replace(run, **changed, model=with_values(run.model, model))
    except ValueError:
        return run


def _shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """The shapes of the weights without adapters, by their paths."""
    plain = dataclasses.replace(config, model=dataclasses.replace(config.model, lora=None))
    params: Any = flatten_dict(state.arrays(plain).params, sep=".")
    return {path: one.shape for path, one in params.items()}
