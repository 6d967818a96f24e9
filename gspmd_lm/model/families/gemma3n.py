"""Gemma 3n: a decoder whose layers read vectors of the tokens beside the residual stream."""

import jax

from gspmd_lm.model.decoder import Decoder
from gspmd_lm.model.families.text import Family
from gspmd_lm.model.parts.altup import LayerInputs


class LayerInputDecoder(Decoder):
    """A decoder with an input of its own for each layer."""

    def layer_inputs(self, x_BTD: jax.Array, batch: dict[str, jax.Array]) -> jax.Array | None:
        """Each token's vectors for all layers."""
        return LayerInputs(self.cfg, name="per_layer_inputs")(x_BTD, batch["tokens"])


FAMILY = Family(module=LayerInputDecoder, fits=lambda cfg: cfg.residual.layer_embed)
