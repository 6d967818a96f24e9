"""The two programs of generation, prefill and decode, of a config under rules: how they are built and placed."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding, PartitionSpec

from gspmd_lm import config as configs
from gspmd_lm.config import Config
from gspmd_lm.errors import InputError
from gspmd_lm.infer.processors import EMPTY, Processors, begin_history, with_tokens
from gspmd_lm.infer.sampling import Choice, Sampling, SamplingSettings, choose, mask_forbidden
from gspmd_lm.infer.sizes import Prompts, Sizes
from gspmd_lm.model.addresses import addresses, block_name
from gspmd_lm.model.cache import Cache, empty_cache
from gspmd_lm.model.families import extend, family, init
from gspmd_lm.model.loss import logits
from gspmd_lm.program.program import ShardedProgram, place_shapes
from gspmd_lm.program.supported import Pass, layer_problems, no_pipeline, settle_rules
from gspmd_lm.sharding import mesh as meshes
from gspmd_lm.sharding.annotate import parse
from gspmd_lm.sharding.axes import DECODER, EXACT
from gspmd_lm.sharding.op_names import SAMPLING, scope
from gspmd_lm.sharding.placement import MeshPlacement, Named, Recorder, record
from gspmd_lm.sharding.problems import Problem
from gspmd_lm.sharding.rules import Remat, Rules
from gspmd_lm.sharding.shapes import Arrays, arrays, bytes_per_device
from gspmd_lm.sharding.shapes import check_layout as checked_arrays


class DecodeState(NamedTuple):
    """The arrays that one decode step passes on to the next one. They are donated."""

    cache: Cache
    tokens_B: Any  # int32: the tokens chosen last, which are not in the cache yet
    slot: Any  # int32: their slot in the cache
    start_B: Any
    number_B: Any
    length_B: Any
    history_BT: Any = None  # int32: the tokens of each text so far, if processors ask for them


def abstract_weights(arrays: Arrays, placement: MeshPlacement, model: configs.ModelConfig) -> Any:
    """The shapes and shardings of weights that are not trained.

    They rest in the dtype in which they are multiplied if it is smaller than their own, so that they are cast only
    once. Norms and decays keep their own dtype.
    """
    used = jnp.dtype(model.compute_dtype)

    def one(leaf: Named, like: Any, sharding: Any) -> jax.ShapeDtypeStruct:
        exact = leaf.path.rsplit(".", 1)[-1] in EXACT
        smaller = not exact and used.itemsize < like.dtype.itemsize
        return jax.ShapeDtypeStruct(like.shape, used if smaller else like.dtype, sharding=sharding)

    named, params = arrays.named_params, arrays.params
    shardings = placement.shardings("weights", named, params)
    return jax.tree.map(one, named, params, shardings)


def attention_pass(sizes: Sizes) -> Pass:
    """The requirements of prefill on attention. A decoded token has a form of its own, which XLA compiles."""
    return Pass(sizes.source or sizes.prompt, padded=True)


def whole_context(config: Config) -> Sizes:
    """The sizes for `data.batch` rows whose cache holds `data.seq` tokens and is filled by prompts of that length."""
    data, source = config.data, config.source_seq if config.model.encoder else 0
    return Sizes(data.batch, 1 if source else data.seq, data.seq, source, config.image_rows)


def prefill(cfg: configs.ModelConfig, params: Any, prompts: Prompts, sizes: Sizes) -> tuple[jax.Array, Cache]:
    """The logits after the last token of each prompt, [B, V], and a cache of these sizes that holds the prompts.

    If an encoder reads the prompts, the logits are those after the start token, which the cache holds. If they are
    images, the cache holds the rows that stand for each, and the token behind them.
    """
    B, T = len(prompts.start_B), sizes.source or sizes.prompt
    ahead_BT = jnp.arange(T, dtype=jnp.int32) - prompts.start_B[:, None]
    given = family(cfg).prompt_batch(cfg, prompts.tokens_BT, ahead_BT)
    of_rows = {
        "row": prompts.number_B,
        "slot": jnp.zeros((), jnp.int32),
        "start": _begins(cfg, prompts.start_B),
        "length": prompts.length_B,
    }
    x_BTD, table, bias, cache = extend(cfg, params, given | of_rows, empty_cache(cfg, B, sizes.slots, T))
    return logits(x_BTD[:, -1:], table, bias, cfg)[:, 0], cache


def decode(cfg: configs.ModelConfig, params: Any, state: DecodeState) -> tuple[jax.Array, Cache]:
    """The logits after `state.tokens_B`, [B, V], and the cache with these tokens added."""
    start_B = _begins(cfg, state.start_B)
    batch = {
        "tokens": state.tokens_B[:, None],
        "positions": (state.slot - start_B)[:, None],
        "row": state.number_B,
        "slot": state.slot,
        "start": start_B,
        "length": state.length_B,
    }
    if state.cache.memory:
        of_source_S = jnp.arange(state.cache.memory.k_LBSKH.shape[2])
        batch["memory_segment_ids"] = (of_source_S >= state.start_B[:, None]).astype(jnp.int32)
        batch["segment_ids"] = jnp.ones_like(batch["tokens"])
    x_B1D, table, bias, cache = extend(cfg, params, batch, state.cache)
    return logits(x_B1D, table, bias, cfg)[:, 0], cache


def _begins(cfg: configs.ModelConfig, start_B: jax.Array) -> jax.Array:
    """The slot where each row's text begins, from that of its prompt: 0 if an encoder reads the prompts."""
    return jnp.zeros_like(start_B) if cfg.encoder else start_B


@dataclasses.dataclass(frozen=True)
class Forward(ShardedProgram):
    """A program without a backward pass."""

    @functools.cached_property
    def placement(self) -> MeshPlacement:
        """The placement without remat, because nothing runs backward."""
        return MeshPlacement(dataclasses.replace(self.rules, remat=Remat()), self.mesh)

    @functools.cached_property
    def abstract_params(self) -> Any:
        """The weights' shapes and shardings: what a checkpoint is restored into."""
        return abstract_weights(self.arrays, self.placement, self.config.model)


def _blocks(params: Any, model: configs.ModelConfig, stack: configs.Stack) -> Any:
    """The weights of each layer of a stack, in stacks of one: views on the host, for which no program is compiled."""
    blocks = {}
    for i, (module, row) in enumerate(addresses(model)[stack.first : stack.first + stack.layers]):
        rows = None if row is None else slice(row, row + 1)
        weights = functools.reduce(lambda tree, name: tree[name], module, params)
        blocks[block_name(i)] = jax.tree.map(lambda x, rows=rows: np.asarray(x)[rows], weights)
    return blocks if stack.layers > 1 else blocks[block_name(0)]


@dataclasses.dataclass(frozen=True)
class GenerationPrograms(Forward):
    """Prefill and decode of a config under rules on a mesh, ready to be compiled, with the placement of their inputs.

    Each is a single program, however many tokens are generated.
    """

    sizes: Sizes
    unrolled: bool = False  # layers one after the other, not in a loop, with weights of their own: see `unstack_layers`
    processors: Processors | None = None  # of logits, before a token is chosen

    @property
    def attention_pass(self) -> Pass:
        return attention_pass(self.sizes)

    @property
    def program_kinds(self) -> tuple[str, ...]:
        return ("generate",)

    @functools.cached_property
    def model(self) -> configs.ModelConfig:
        """The model that is run: the config's, with a pattern as long as its depth if the layers are unrolled."""
        model = self.config.model
        if not self.unrolled:
            return model
        return dataclasses.replace(model, layer_pattern=model.kind_of_each_layer)

    def unstack_layers(self, params: Any) -> Any:
        """The weights as the programs take them: a copy with one array per layer if the layers are unrolled.

        XLA:CPU copies the weights of a layer out of the stack of all layers before it multiplies with them, which
        costs more than the product itself when there are few tokens.
        """
        if not self.unrolled:
            return params
        model = self.config.model
        layers = {stack.name: _blocks(params, model, stack) for stack in model.stacks}
        shards = jax.tree.map(lambda like: like.sharding, self.abstract_unstacked)
        placed = jax.device_put(layers, {name: shards[name] for name in layers}, may_alias=False)
        of_layers = {address.module[0] for address in addresses(model)}
        rest = {name: array for name, array in params.items() if name not in of_layers}
        return rest | placed

    @functools.cached_property
    def abstract_unstacked(self) -> Any:
        """The shapes and shardings of the weights that `unstack_layers` returns."""
        if not self.unrolled:
            return self.abstract_params
        return abstract_weights(parameters(self.model), self.placement, self.model)

    @functools.cached_property
    def abstract_prompts(self) -> Prompts:
        """The shapes and shardings of a batch of prompts."""
        rows = jax.ShapeDtypeStruct((self.sizes.rows,), jnp.int32, sharding=self.whole)
        like = self.sizes.prompts(self.model)
        spec = parse(family(self.model).prompts(self.model, *like.shape[:2]).spec, len(like.shape))
        return Prompts(place_shapes(like, self.placement.sharding("rules", *spec[:2], like.shape)), rows, rows, rows)

    @functools.cached_property
    def abstract_decode_state(self) -> DecodeState:
        """The shapes and shardings of DecodeState."""
        cache, *rest = _decode_state_shapes(self.config.model, self.sizes, self.processors is not None)

        def one(like: Any, text: str) -> Any:
            spec = parse(text, len(like.shape))
            return place_shapes(like, self.placement.sharding("rules", spec.array, spec.axes, like.shape))

        return DecodeState(
            jax.tree.map(one, cache, cache.specs), *jax.tree.map(lambda like: place_shapes(like, self.whole), rest)
        )

    @property
    def abstract_settings(self) -> SamplingSettings:
        """The shapes and shardings of SamplingSettings."""
        return jax.tree.map(lambda x: place_shapes(x, self.whole), Sampling().settings)

    @property
    def cache_bytes_per_device(self) -> int:
        """The bytes on each device for the keys and values of all slots, and the states of linear attention."""
        return sum(map(bytes_per_device, jax.tree.leaves(self.abstract_decode_state.cache)))

    @property
    def arrays_between_steps(self) -> dict[str, Any]:
        """The arrays that devices hold between steps: trees of shapes and shardings, by purpose."""
        cache, *batch = self.abstract_decode_state
        return {"weights": self.abstract_params, "optimizer": (), "batch": batch, "cache": cache}

    def trace_prefill(self, cache: Any = None) -> jax.stages.Traced:
        """(params, Prompts, SamplingSettings) -> (DecodeState, Choice).

        cache: the formats of the cache that decode takes; None leaves them to the compiler.
        """
        state = self._state_formats if cache is None else self._state_formats._replace(cache=cache)
        jitted = jax.jit(self._prefill, out_shardings=(state, Choice(self.whole, self.whole)))
        return jitted.trace(self.abstract_unstacked, self.abstract_prompts, self.abstract_settings)

    def trace_decode(self) -> jax.stages.Traced:
        """(params, DecodeState, SamplingSettings) -> (DecodeState, Choice). The donated cache changes in place."""
        state = self._state_formats
        out = state, Choice(self.whole, self.whole)
        jitted = jax.jit(self._decode, in_shardings=(None, state, None), out_shardings=out, donate_argnums=1)
        return jitted.trace(self.abstract_unstacked, self.abstract_decode_state, self.abstract_settings)

    @property
    def _state_formats(self) -> DecodeState:
        """The shardings of DecodeState. Compilers of TPUs and GPUs choose the order of the cache's axes in memory.

        They read and write the cache in an order that depends on the layout. With another one, each token copies it.
        """
        shardings = jax.tree.map(lambda like: like.sharding, self.abstract_decode_state)
        if meshes.platform(self.mesh) == "cpu":
            return shardings
        return shardings._replace(cache=jax.tree.map(lambda place: Format(Layout.AUTO, place), shardings.cache))

    @functools.cached_property
    def compile_both(self) -> tuple[jax.stages.Compiled, jax.stages.Compiled]:
        """Prefill and decode, compiled. Raises InputError if they need more memory than there is."""
        sizes = self.sizes
        what = f"generating {sizes.rows:,} texts of up to {sizes.slots + 1:,} tokens"
        fix = "--batch=1, a smaller --max_new_tokens, shorter prompts, or rules that split more"
        self.check_held(self.arrays_between_steps)
        decode = self.compile(self.trace_decode().lower(), what, fix, self.program_kinds)
        cache = decode.input_formats[0][1].cache if meshes.platform(self.mesh) != "cpu" else None
        return self.compile(self.trace_prefill(cache).lower(), what, fix, self.program_kinds), decode

    def _prefill(self, params: Any, prompts: Prompts, settings: SamplingSettings) -> tuple[DecodeState, Choice]:
        with self.trace_under():
            logits_BV, cache = prefill(self.model, params, prompts, self.sizes)
        slot = jnp.asarray(self.sizes.prompt, jnp.int32)
        of_rows = prompts.start_B, prompts.number_B, prompts.length_B
        history_BT = begin_history(self._text_tokens(prompts), self.sizes.slots) if self.processors else None
        return self._choose_tokens(logits_BV, settings, DecodeState(cache, prompts.start_B, slot, *of_rows, history_BT))

    def _decode(self, params: Any, state: DecodeState, settings: SamplingSettings) -> tuple[DecodeState, Choice]:
        with self.trace_under():
            logits_BV, cache = decode(self.model, params, state)
        return self._choose_tokens(logits_BV, settings, state._replace(cache=cache, slot=state.slot + 1))

    def _choose_tokens(
        self, logits_BV: jax.Array, settings: SamplingSettings, state: DecodeState
    ) -> tuple[DecodeState, Choice]:
        """The state with the tokens that come into its slot, and their choice."""
        position_B = state.slot - _begins(self.model, state.start_B)
        with scope("of", SAMPLING):
            logits_BV = jax.lax.with_sharding_constraint(logits_BV, self._by_rows)[:, : self.config.model.vocab]
            if self.processors:
                new = state.slot - self.sizes.prompt
                logits_BV = self.processors(logits_BV, state.history_BT, state.slot, position_B, new)
            if self.model.encoder:
                logits_BV = mask_forbidden(logits_BV, position_B, self.model.encoder)
            choice = choose(logits_BV, settings, state.number_B, position_B)
            if self.processors:
                state = state._replace(history_BT=with_tokens(state.history_BT, choice.tokens_B, state.slot))
            return state._replace(tokens_B=choice.tokens_B), choice

    @functools.cached_property
    def _by_rows(self) -> NamedSharding:
        """The sharding of logits from which tokens are chosen: each device has whole rows, and few if they divide."""
        axes, first = [], self.rules.split("rules", "logits", "batch")
        for name in (*first, *(name for name in self.rules.mesh if name not in first)):
            if self.sizes.rows % self.rules.num_shards([*axes, name]) == 0:
                axes.append(name)
        return NamedSharding(self.mesh, PartitionSpec(tuple(axes)))

    def _text_tokens(self, prompts: Prompts) -> jax.Array:
        """The tokens of each text that prefill has seen, by slot. An image or a source is no part of the text."""
        slots_T, start_token = jnp.arange(self.sizes.prompt), family(self.model).start_token(self.model)
        if start_token is not None:
            alone_T = jnp.where(slots_T == self.sizes.prompt - 1, jnp.int32(start_token), EMPTY)
            return jnp.broadcast_to(alone_T, (self.sizes.rows, self.sizes.prompt))
        tokens_BT = jax.lax.with_sharding_constraint(prompts.tokens_BT, self.whole)
        return jnp.where(slots_T >= prompts.start_B[:, None], tokens_BT, EMPTY)


def build_programs(
    config: Config,
    rules: Rules,
    arrays: Arrays,
    devices: Sequence[Any],
    sizes: Sizes,
    unrolled: bool = False,
    processors: Processors | None = None,
) -> GenerationPrograms:
    """The programs of `config` under `rules`, which have been checked, on `devices`: real or compile-only."""
    rules = settle_rules(rules, config, meshes.processor(devices[0]), attention_pass(sizes))
    return GenerationPrograms(config, rules, arrays, meshes.build(rules, devices), sizes, unrolled, processors)


def record_arrays(config: Config, arrays: Arrays, sizes: Sizes, rules: Rules) -> dict[str, Recorder]:
    """Records of the arrays that the model places in "prefill" and in "decode" under `rules`."""
    model, state = config.model, _decode_state_shapes(config.model, sizes)
    prompts = Prompts(sizes.prompts(model), state.start_B, state.number_B, state.length_B)
    return {
        "prefill": record(
            rules, lambda params, prompts: prefill(model, params, prompts, sizes), arrays.params, prompts
        ),
        "decode": record(rules, lambda params, state: decode(model, params, state), arrays.params, state),
    }


@functools.lru_cache(maxsize=8)
def parameters(model: configs.ModelConfig) -> Arrays:
    """The weights of a model that is not trained."""
    return arrays(functools.partial(init, model), DECODER)


def check_causal(config: Config, or_of_source: bool = False) -> None:
    """Raises InputError for a model that does not predict the next token, for programs that generate or score.

    or_of_source: a model that does so given a source or an image will do, too.
    """
    read_before = "sources" if config.objective == "seq2seq" else "images" if config.model.vision else ""
    if config.objective in ("causal", "seq2seq") and read_before and not or_of_source:
        raise InputError(
            f"{config.name}: scoring texts alone leaves out their {read_before}\n"
            "  fix   without --text and --continuations, eval scores texts behind theirs"
        )
    if config.objective not in ("causal", "seq2seq"):
        raise InputError(
            f"{config.name}: objective: {config.objective}: generating and scoring texts need a model that predicts "
            "the next token\n  fix   use a config of objective: causal"
        )


def arrays_and_warnings(config: Config, rules: Rules, platform: str, sizes: Sizes) -> tuple[Arrays, list[Problem]]:
    """The arrays of `config` and the warnings about generating under `rules`. Nothing is compiled or allocated.

    The model writes text: `check_causal` is asked before a prompt is read. Raises ShardingError that lists everything
    that does not fit.
    """
    arrays = parameters(config.model)
    more = [*layer_problems(config, rules, platform, attention_pass(sizes)), *no_pipeline(rules)]
    return arrays, checked_arrays(arrays, rules, record_arrays(config, arrays, sizes, rules).values(), more)


def _decode_state_shapes(model: configs.ModelConfig, sizes: Sizes, history: bool = False) -> DecodeState:
    cache: Any = jax.eval_shape(lambda: empty_cache(model, sizes.rows, sizes.slots, sizes.source))
    rows = jax.ShapeDtypeStruct((sizes.rows,), jnp.int32)
    history_BT = jax.ShapeDtypeStruct((sizes.rows, sizes.slots), jnp.int32) if history else None
    return DecodeState(cache, rows, jax.ShapeDtypeStruct((), jnp.int32), rows, rows, rows, history_BT)
