"""The facts about tokens that layers read besides the residual stream: positions, segments, cache, encoder output."""

from typing import Any, NamedTuple

import jax

from gspmd_lm.model.cache import Cache, Kept

IN_BATCH = {  # field of `Tokens` -> name of its array in a batch
    "positions_BT": "positions",
    "segments_BT": "segment_ids",
    "places_BT": "places",
    "length_B": "length",
    "slot": "slot",
    "start_B": "start",
    "memory_BSM": "memory",
    "memory_segments_BS": "memory_segment_ids",
}


class Tokens(NamedTuple):
    """The tokens that a layer reads, and the cache and router output that it returns. Fields a model lacks are None."""

    positions_BT: Any = None  # int32, the position of each token in its document; None in windows of images
    segments_BT: jax.Array | None = None  # int32, equal within a document, 0 for padding
    places_BT: jax.Array | None = None  # int32, the position of each token in its row, if rows are in zigzag order
    keys_BT: jax.Array | None = None  # a dropout key for each token
    # While text is generated: where the T tokens begin, the first slot of each row's text, and how many tokens each row
    # will have.
    slot: Any = None
    start_B: Any = None
    length_B: jax.Array | None = None
    # The encoder output that cross-attention reads, and the segment of each of its tokens: see parts/memory.py.
    memory_BSM: Any = None
    memory_segments_BS: jax.Array | None = None
    biases_RN: jax.Array | None = None  # relative position biases that all layers share: see parts/relative.py
    vectors_RD: Any = None
    shared: Kept | None = None  # keys and values of earlier layers: see parts/shared_keys.py
    places_in_cache_L: jax.Array | None = None  # the index of each layer in the cache, if it is not its number
    # Of one layer:
    layer: Any = None  # its number, counted from 0
    input_BTY: jax.Array | None = None  # see `altup.LayerInputs`
    cache: Cache | None = None
    kept: Kept | None = None  # keys and values of the layers before it, for later ones
    routed: Any = None  # what its router did: see `moe.RouterOutput`

    @classmethod
    def from_batch(cls, batch: dict[str, jax.Array], keys_BT: jax.Array | None = None) -> "Tokens":
        """The tokens of a batch: see `decoder.Decoder`. keys_BT: a dropout key for each token."""
        found: dict[str, Any] = {field: batch.get(name) for field, name in IN_BATCH.items()}
        return cls(keys_BT=keys_BT, **found)

    @property
    def rows(self) -> "Tokens":
        """The arrays that have a row for each row of the batch, so that they can be split along with it.

        Their names say so: B is the first of their axes.
        """
        return Tokens(**{name: x for name, x in self._asdict().items() if name.rpartition("_")[2].startswith("B")})

    def lengths(self, tokens: int) -> int | jax.Array:
        """The lengths of rows, on which some rotary positions depend: [B, 1, 1], or `tokens` for all."""
        return tokens if self.length_B is None else self.length_B[:, None, None]

    @property
    def place_in_cache(self) -> Any:
        """The index of this layer in the cache, among those of its kind."""
        return self.layer if self.places_in_cache_L is None else self.places_in_cache_L[self.layer]

    def for_layer(self, layer: Any, cache: Cache | None, kept: Kept | None, input_BTY: Any) -> "Tokens":
        """The tokens as one layer reads them, with its own dropout keys."""
        keys_BT = self.keys_BT
        if keys_BT is not None:
            keys_BT = jax.vmap(jax.vmap(jax.random.fold_in, (0, None)), (0, None))(keys_BT, layer + 1)
        return self._replace(layer=layer, cache=cache, kept=kept, input_BTY=input_BTY, keys_BT=keys_BT)
