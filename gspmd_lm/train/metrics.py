"""The numbers of a run: what its steps give, and what the clock adds to them."""

import contextlib
import dataclasses
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from gspmd_lm.config import Config, ModelConfig, levels, padded_rows
from gspmd_lm.config.masks import PARTS, POINTS
from gspmd_lm.sharding.shapes import Arrays, pairs


def flops_per_token(model: ModelConfig, parameter_count: int, seq: int, *, last: bool = False) -> float:
    """Model FLOPs of one token, forward and backward, recomputation not counted: 6 P + attention.

    P are the parameters that compute a token, without tables that are only looked up. For attention see
    `attention_flops`. This is three times what the traced forward pass multiplies, except that the trace has all T
    keys, and P has norms and biases too.
    """
    table_width = model.embedding_width or model.embed
    summed_width = model.embed if model.embedding_in == "tokens" else table_width
    looked_up = 0 if model.tied_embeddings and not model.classes else model.vocab_rows * table_width
    looked_up += model.token_types * summed_width
    if relative := model.relative_positions:
        looked_up += relative.ranges * model.head_rows * (1 if relative.shared else model.layers)
    tables = [2 * (2 * layer.windows.size - 1) for layer in model.each_layer if layer.windows and layer.windows.vectors]
    looked_up += sum(tables) * model.head_dim  # see `attention_flops`
    if vectors := model.relative_vectors:  # layers multiply them once for all tokens
        own = 2 * model.embed * model.heads * model.head_dim if vectors.own_projections else 0
        looked_up += vectors.ranges * model.embed + model.layers * own
    if model.classes and model.classes_of == "text":  # one token of a row is scored, of a text after a matrix
        looked_up += model.embed * (model.classes + (0 if model.patches else model.embed))
    if model.positions == "learned":
        looked_up += model.context * summed_width
    looked_up += model.vocab_rows * model.layers * model.layer_embed
    return 6.0 * (parameter_count - looked_up) + attention_flops(model, seq, last=last)


def attention_flops(model: ModelConfig, seq: int, *, last: bool = False) -> float:
    """The FLOPs of scores and sums of values of one token, forward and backward: 6 N (H + V) S, S summed over layers.

    H and V are the sizes of a key and a value, and S the keys that a token sees: see `keys_seen`. PaLM (arXiv
    2204.02311, appendix B) counts all T keys of a row in place of S.
    """
    with_ranges = 2 * model.head_dim * model.relative_vectors.ranges * model.layers if model.relative_vectors else 0
    with_ranges += sum(
        2 * model.head_dim * layer.windows.size for layer in model.each_layer if layer.windows and layer.windows.vectors
    )
    return 6.0 * model.heads * (_numbers(model, last) * keys_seen(model, seq, last=last) + with_ranges)


def _numbers(model: ModelConfig, last: bool) -> int:
    """The numbers of a key and a value of a head. A single token of latent attention reads what they are made from."""
    if last and (latent := model.latent_attention):
        return 2 * latent.kv_rank + model.rope_dim
    return model.head_dim + model.v_head_dim


def model_flops(config: Config, arrays: Arrays) -> float:
    """Model FLOPs of one train step that computes the gradients of all that is multiplied: see `flops_per_token`."""
    model, data = config.model, config.data
    if model.masks:
        of_masks = (
            like.size for leaf, like in pairs(arrays.named_params, arrays.params) if leaf.path.startswith("masks.")
        )
        of_image = flops_per_token(model, arrays.parameter_count - sum(of_masks), data.seq) * data.seq
        return data.batch * (of_image + flops_of_masks(model, data.seq))
    if model.windows:
        return data.batch * sum(
            flops_per_token(level, count, rows) * rows
            for (level, rows), count in zip(rows_of_levels(config), _read_by_levels(config, arrays), strict=True)
        )
    active, of_images = arrays.active_count(model), 0.0
    if model.vision and model.vision.queries:
        of_images, read_by_images = _of_queries(config, arrays)
        active -= read_by_images
    elif model.vision and (vision := model.of_vision):
        seen = (
            like.size for leaf, like in pairs(arrays.named_params, arrays.params) if leaf.path.startswith("vision.")
        )
        of_images, joint, rows = sum(seen), model.vision.projection, config.source_seq
        heads = joint * model.embed, joint * vision.embed  # which one row of each goes through
        of_text = flops_per_token(model, active - of_images - heads[0] - 1, data.seq)  # 1: the temperature
        of_image = flops_per_token(vision, of_images - heads[1], rows)
        return data.batch * (of_text * data.seq + of_image * rows + 6.0 * (sum(heads) + data.batch * joint))
    if not (encoder := model.of_encoder):
        return data.batch * (flops_per_token(model, active, data.seq) * data.seq + of_images)
    of_source = _read_by_sources(arrays)
    of_text = flops_per_token(model, active - of_source, data.seq)
    no_table = dataclasses.replace(encoder, tied_embeddings=True)  # it is among the parameters of texts
    sources = flops_per_token(no_table, of_source, config.source_seq)
    if model.frames:  # the first convolution makes two frames for each row
        sources += 6.0 * 3 * model.frames.bands * model.embed
    crossed = cross_attention_flops(model, config.source_seq)
    return data.batch * ((of_text + crossed) * data.seq + sources * config.source_seq + of_images)


def _of_queries(config: Config, arrays: Arrays) -> tuple[float, int]:
    """The model FLOPs of rows that read one image, those of the stack that sees it among them; and their parameters."""
    vision, queries = config.model.of_vision, config.model.of_queries
    counts = dict.fromkeys(("image", "rows", "keys"), 0)
    assert vision and queries
    for leaf, like in pairs(arrays.named_params, arrays.params):
        first, *rest = leaf.path.split(".")
        if first == "vision":
            counts["image"] += like.size
        elif first.startswith("quer"):  # queries, query_projection and its bias
            counts["keys" if rest[-2:-1] == ["cross"] and rest[-1][1] in "kv" else "rows"] += like.size
    of_image = flops_per_token(vision, counts["image"], config.image_rows)
    of_row = flops_per_token(queries, counts["rows"] - queries.context * queries.embed, queries.context)
    of_row += cross_attention_flops(queries, config.image_rows)
    return (of_image + 6.0 * counts["keys"]) * config.image_rows + of_row * queries.context, sum(counts.values())


def flops_of_masks(model: ModelConfig, rows: int) -> float:
    """Model FLOPs of the masks of one image with so many rows, forward and backward, without norms and biases."""
    assert model.masks
    masks, D, M = model.masks, model.masks.embed, model.masks.count
    narrow, tokens = D // masks.narrowing, 1 + M + POINTS
    # Of a token, and of a row of the image: in each layer, and in the attention that follows.
    of_token = masks.layers * (4 * D * D + 2 * D * masks.mlp + 4 * D * narrow) + 2 * D * narrow
    of_row = masks.layers * 4 * D * narrow + 2 * D * narrow + D * D + D * D // 2  # and cut in 4, and in 16
    attention = masks.layers * tokens * (2 * tokens * D + 4 * rows * narrow) + 2 * tokens * rows * narrow
    heads = M * (2 * D * D + D * D // 8) + 2 * D * D + D * M + M * rows * PARTS**2 * D // 8
    return 6.0 * (tokens * of_token + rows * of_row + attention + heads)


def _read_by_sources(arrays: Arrays) -> int:
    """How many parameters compute a token of a source: those of the encoder, and of keys of what it made."""
    leaves = [(leaf.path.split("."), like.size) for leaf, like in pairs(arrays.named_params, arrays.params)]
    return sum(
        size for path, size in leaves if path[0] == "encoder" or (path[-2:-1] == ["cross"] and path[-1][1] in "kv")
    )


def rows_of_levels(config: Config) -> list[tuple[ModelConfig, int]]:
    """The settings of each level of blocks, and its rows of an image or text, with padding."""
    first, *rest = levels(config.model)
    return [(first, config.data.seq), *((level, padded_rows(level.context, level.row_multiple)) for level in rest)]


def _read_by_levels(config: Config, arrays: Arrays) -> list[int]:
    """How many parameters compute a row of each level. What is outside of levels stands before the first or after the
    last one."""
    count = len(levels(config.model))
    found = dict.fromkeys((f"level_{number}" for number in range(count)), 0)
    for leaf, like in pairs(arrays.named_params, arrays.params):
        place = leaf.path.partition(".")[0]
        outside = f"level_{count - 1}" if place.startswith("classifier") else "level_0"
        found[place if place in found else outside] += like.size
    return [*found.values()]


def attention_flops_of_row(config: Config) -> dict[str, float]:
    """`attention_flops` of all tokens of one row of the batch, and of its source.

    By the first word of the names of the weights of a stack; those of a model's own layers, which may have several, are
    "".
    """
    model, levels_have_names = config.model, config.model.windows and not config.model.masks
    total = {
        f"level_{number}" if levels_have_names else "": attention_flops(level, rows) * rows
        for number, (level, rows) in enumerate(rows_of_levels(config))
    }
    words = {"the encoder": "encoder", "images": "vision", "queries": "queries"}
    for name, (other, _, rows) in config.other_stacks.items():
        total[words[name]] = attention_flops(other, rows) * rows
    if queries := model.of_queries:
        total["queries"] += cross_attention_flops(queries, config.image_rows) * queries.context
    if model.encoder:
        total[""] += cross_attention_flops(model, config.source_seq) * config.data.seq
    return total


def cross_attention_flops(model: ModelConfig, source_seq: int) -> float:
    """What `attention_flops` counts of one token that attends to a source of so many tokens."""
    reading = sum(layer.reads > 0 for layer in model.each_layer)
    return 6.0 * model.heads * _numbers(model, last=False) * source_seq * reading


def keys_seen(model: ModelConfig, seq: int, *, last: bool = False) -> float:
    """The keys that a token of a row of `seq` tokens sees in all layers: the mean of the row, or of its last token."""
    return sum(_seen(layer, seq, last) for layer in model.each_layer)


def _seen(layer: ModelConfig, seq: int, last: bool) -> float:
    """The keys that a token sees in one layer, or a row of it, of which some may be padding."""
    if layer.windows:
        return layer.windows.size**2 * layer.context / seq
    if layer.mask == "full":
        whole, rest = divmod(seq, layer.attention_chunk or seq)
        return (whole * (layer.attention_chunk or seq) ** 2 + rest**2) / seq
    if linear := layer.linear_attention:  # keys with as many FLOPs: a token reads its state twice and writes it once
        return 3 * linear.value_heads * linear.head_dim**2 / (layer.heads * _numbers(layer, last))
    if layer.attention_chunk:
        whole, rest = divmod(seq, layer.attention_chunk)
        if last:
            return float(rest or layer.attention_chunk)
        return (whole * layer.attention_chunk * (layer.attention_chunk + 1) + rest * (rest + 1)) / (2 * seq)
    keys = min(layer.sliding_window or seq, seq)
    return float(keys if last else keys - keys * (keys - 1) / (2 * seq))


def added(totals: Iterable[Mapping[str, jax.Array]]) -> dict[str, Any]:
    """The sums of the totals of batches, in float64: numbers, and arrays of the totals that are arrays."""
    sums: dict[str, Any] = {}
    for of_batch in totals:
        for name, total in jax.device_get(of_batch).items():
            sums[name] = sums.get(name, 0.0) + np.float64(total)
    return sums


class Meter:
    """Turns the results of steps and the clock into the values that are logged.

    The first step also waits for its rows and for devices that start, so it has no speed. Neither have evaluation and
    saving, after which a new interval begins.
    """

    def __init__(self, start: int, stop: int, tokens: int, epochs: float, flops: float, peak_flops_per_s: float | None):
        """tokens, epochs, flops: of one step. peak_flops_per_s: of all devices together; None if it is not known."""
        self.start, self.stop = start, stop
        self.tokens, self.epochs, self.flops, self.peak_flops_per_s = tokens, epochs, flops, peak_flops_per_s
        self.first_step_s: float | None = None  # from the beginning until the first step had ended
        self.tokens_per_s: float | None = None  # in the last interval
        self.begin()

    def begin(self) -> None:
        """Begins before the first step."""
        self.began, self.once_s = time.perf_counter(), 0.0
        self.restart(self.start)

    def restart(self, step: int) -> None:
        """Begins a new interval, so that evaluation and saving are not counted as steps."""
        self.interval_began, self.at, self.wait_s = time.perf_counter(), step, 0.0

    @contextlib.contextmanager
    def once(self) -> Iterator[None]:
        """A context for what happens only once, such as compiling: the time left does not count it."""
        before = time.perf_counter()
        yield
        self.once_s += time.perf_counter() - before

    def waiting(self, batches: Any) -> Any:
        """The batches. The time spent waiting for them is recorded."""
        batches = iter(batches)
        while True:
            before = time.perf_counter()
            batch = next(batches, None)
            self.wait_s += time.perf_counter() - before
            if batch is None:
                return
            yield batch

    def read(self, step: int, values: Mapping[str, jax.Array]) -> dict[str, float]:
        """The values of the step just dispatched, and the speed since the last read. Waits for the step."""
        logged = {name: float(value) for name, value in jax.device_get(values).items()}
        now, steps = time.perf_counter(), step - self.at
        if "cross_entropy" in logged:
            logged["perplexity"] = math.exp(min(logged.pop("cross_entropy"), 700.0))
        logged |= {"tokens": float(step * self.tokens)} | ({"epoch": step * self.epochs} if self.epochs else {})
        if self.first_step_s is None:
            self.first_step_s = now - self.began
        else:
            step_time_s = (now - self.interval_began) / steps
            self.tokens_per_s = self.tokens / step_time_s
            logged |= {
                "step_time_s": step_time_s,
                "tokens_per_s": self.tokens_per_s,
                "data_wait_s": self.wait_s / steps,
            }
            if self.peak_flops_per_s:
                logged["mfu"] = self.flops / step_time_s / self.peak_flops_per_s
        self.restart(step)
        return logged

    def left_s(self, step: int) -> float | None:
        """The time until the last step, at the speed since the first one, evaluation and saving included."""
        steps = step - self.start - 1
        if self.first_step_s is None or not steps:
            return None
        taken_s = time.perf_counter() - self.began - self.first_step_s - self.once_s
        return taken_s / steps * (self.stop - step)
