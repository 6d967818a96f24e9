"""The batches of a model of one's own, which a function of the step gives: the step is the position in the data."""

import dataclasses
import functools
import hashlib
import sys
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from gspmd_lm.data.loader import ahead
from gspmd_lm.errors import InputError


def check_arrays(
    batch: Mapping[str, Any], shapes: Mapping[str, jax.ShapeDtypeStruct], place: str
) -> dict[str, np.ndarray]:
    """The arrays of a batch. Raises InputError, which begins with `place`, if they are not those of `shapes`."""
    arrays = {name: np.asarray(array) for name, array in batch.items()}
    given, wanted = ({name: f"{x.dtype}{list(x.shape)}" for name, x in of.items()} for of in (arrays, shapes))
    lines = [
        f"  {name}: {given.get(name, 'absent')}, and the task's inputs say {wanted.get(name, 'nothing')}"
        for name in {**wanted, **given}
        if given.get(name) != wanted.get(name)
    ]
    if lines:
        raise InputError("\n".join([place, *lines, "  fix   make both say the same"]))
    return arrays


@dataclasses.dataclass(frozen=True, eq=False)
class Batches:
    """Batches by number. Each process makes the whole batch and hands its devices their parts."""

    at: Callable[[int], Mapping[str, np.ndarray]]  # the batch of a number, with the rows of all devices
    shapes: Mapping[str, jax.ShapeDtypeStruct]
    use: str = "training"
    count: int | None = None  # how many there are; None: as many as are asked for

    epochs_per_step = 0.0  # nothing tells when rows come again
    tokenizer: Path | None = None
    classes: tuple[str, ...] = ()

    @property
    def description(self) -> str:
        """For the user: what is read."""
        which = "a function of the step" if self.count is None else f"{self.count:,} batches"
        return f"{self.use}: {which}"

    @functools.cached_property
    def fingerprint(self) -> str:
        """Equal only where the first batch is, as it must be in every process."""
        first, sums = self.read(0), hashlib.sha256()
        for name in sorted(first):
            sums.update(name.encode() + np.ascontiguousarray(first[name]).tobytes())
        return f"{self.use}-{sums.hexdigest()}"

    def read(self, number: int) -> dict[str, np.ndarray]:
        """A batch. Raises InputError if its arrays are not those of the task."""
        return check_arrays(self.at(number), self.shapes, f"{self.use}: batch {number}")

    def batches(
        self, start_step: int, shardings: Mapping[str, Any], stop_step: int | None = None
    ) -> Generator[tuple[int, dict[str, jax.Array]], None, None]:
        """Pairs of a step and its arrays, from `start_step` to before `stop_step`, made ahead by a thread."""
        stop = min(sys.maxsize if stop_step is None else stop_step, sys.maxsize if self.count is None else self.count)

        def place(batch: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
            wanted = {name: batch[name] for name in shardings}
            return {
                name: jax.make_array_from_callback(x.shape, shardings[name], x.__getitem__)
                for name, x in wanted.items()
            }

        return ahead(start_step, stop, self.read, place)
