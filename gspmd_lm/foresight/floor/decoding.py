"""The least that one step of generation could take: `floor`, for prefill and decode.

The same logic as in `floor`, of the forward pass alone, on one token per row for decode. Every weight and, in decode,
every slot of the cache is read once; prefill writes the cache. Sources: the counts of arXiv 2211.05102.
"""

from gspmd_lm.arrays import Arrays, pairs
from gspmd_lm.config import Config
from gspmd_lm.foresight.floor import Floor, bounds, used_bytes
from gspmd_lm.foresight.floor.moves import FLOAT32_BYTES
from gspmd_lm.foresight.floor.traffic import Traffic
from gspmd_lm.foresight.machine.hardware import Chip
from gspmd_lm.foresight.traced import Traced
from gspmd_lm.infer.programs import Sizes
from gspmd_lm.rules import Rules
from gspmd_lm.train.metrics import flops_per_token

_FORWARD = 1 / 3  # of the FLOPs of a training step


def floor(
    config: Config,
    rules: Rules,
    arrays: Arrays,
    chip: Chip | None,
    traced: Traced,
    sizes: Sizes,
    tokens: int,
    cache_bytes: int,
) -> Floor:
    """The floor of prefill (`tokens` per row, all slots of a prompt) or decode (one token per row).

    `traced` is what was recorded of that program, `cache_bytes` what one device holds of keys and values.
    """
    model = config.model
    alone = tokens == 1
    keys = sizes.slots if alone else sizes.prompt
    per_token = flops_per_token(model, arrays.active_count(model), keys, last=alone) * _FORWARD
    per_token -= 2 * model.vocab_rows * model.embed * (1 - 1 / tokens)  # only the last token of a row has logits
    flops = per_token * sizes.rows * tokens / rules.devices
    sent, wide = (Traffic(rules, arrays, traced, False, narrowest).sent for narrowest in (0, FLOAT32_BYTES))
    state_bytes = used_bytes(rules, pairs(arrays.named_params, arrays.params), traced) + cache_bytes
    return bounds(config, chip, flops, round(state_bytes), sent, wide)
