"""Cross-attention to encoder output (memory), of a source text (T5) or of an image (BLIP-2)."""

import flax.linen as nn
import jax

from gspmd_lm.model.attention import Attention
from gspmd_lm.model.kernels.context import keys_spec
from gspmd_lm.model.tokens import Tokens
from gspmd_lm.sharding.annotate import shard
from gspmd_lm.sharding.matmuls import gathered

MEMORY = "memory: batch seq embed"
WHOLE_MEMORY = "memory: batch kv_seq embed"  # as a matmul gathers it to compute keys and values


class CrossAttention(Attention):
    """Cross-attention to encoder output, [B, S, M]: a token attends to the source whose segment has its own's number.

    Keys and values are written to a cache of their own. They are read from it where no encoder output is given.
    """

    @property
    def keys_width(self) -> int:
        """The width of the encoder output."""
        return self.cfg.reads

    @nn.nowrap
    def keys(self, in_BTD: jax.Array, tokens: Tokens) -> tuple[jax.Array, jax.Array, Tokens]:
        """The keys and values of the encoder output, and the tokens with both in the cache."""
        k_spec, v_spec = keys_spec("k", of_memory=True), keys_spec("v", of_memory=True)
        memory = tokens.cache and tokens.cache.memory
        if tokens.memory_BSM is None:
            assert memory
            k_BSKH, v_BSKH = memory.read(tokens.layer)
            return shard(k_BSKH, k_spec), shard(v_BSKH, v_spec), tokens
        with gathered(tokens.memory_BSM, WHOLE_MEMORY, MEMORY) as in_BSM:
            k, v = self.project_heads("k", in_BSM), self.project_heads("v", in_BSM)
        k_BSKH, v_BSKH = self.k_norm(shard(k, k_spec)), self.value_norm(shard(v, v_spec))
        if tokens.cache and memory:
            memory = memory.write(k_BSKH, v_BSKH, 0, tokens.layer)
            tokens = tokens._replace(cache=tokens.cache._replace(memory=memory))
        return k_BSKH, v_BSKH, tokens
