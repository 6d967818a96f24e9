"""Gemma 3n: a decoder whose layers read an embedding of each token of their own beside the residual stream."""

import jax

from gspmd_lm.model.decoder import Decoder
from gspmd_lm.model.families.text import Family
from gspmd_lm.model.parts.altup import LayerInputs


class LayerInputDecoder(Decoder):
    """A decoder with per-layer embeddings."""

    def layer_inputs(self, x_BTD: jax.Array, batch: dict[str, jax.Array]) -> jax.Array | None:
        """The embeddings of each token for all layers."""
        return LayerInputs(self.cfg, name="per_layer_inputs")(x_BTD, batch["tokens"])


FAMILY = Family(module=LayerInputDecoder, fits=lambda cfg: cfg.residual.layer_embed)
