"""The Pareto front of layouts. It needs no jax, because the server of the workbench draws it, too."""

from collections.abc import Callable, Iterable
from typing import TypeVar

Layout = TypeVar("Layout")


def pareto_front(layouts: Iterable[Layout], costs: Callable[[Layout], tuple[float, float]]) -> list[Layout]:
    """The layouts of which no other one is better in both costs, such as time and memory, by the first cost."""
    front: list[Layout] = []
    for layout in sorted(layouts, key=costs):
        if not front or costs(layout)[1] < costs(front[-1])[1]:
            front.append(layout)
    return front
