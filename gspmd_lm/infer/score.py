"""How likely given texts are: log-likelihoods of continuations, and loss, perplexity and bits per byte of a text."""

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange

from gspmd_lm.config import Config, ModelConfig
from gspmd_lm.data.tokenizer import Tokenizer
from gspmd_lm.files import json_line
from gspmd_lm.infer.generate import not_numbers, to_devices
from gspmd_lm.infer.lines import objects, refuse
from gspmd_lm.infer.programs import Forward, parameters
from gspmd_lm.infer.sizes import rounded_up
from gspmd_lm.model import loss
from gspmd_lm.model.ends import table_specs
from gspmd_lm.model.families import decode
from gspmd_lm.model.kernels.context import zigzag_sharded
from gspmd_lm.program.supported import Pass, layer_problems, no_pipeline, settle_rules
from gspmd_lm.sharding import chunks
from gspmd_lm.sharding import mesh as meshes
from gspmd_lm.sharding.annotate import like, shard, use
from gspmd_lm.sharding.op_names import LOSS, scope
from gspmd_lm.sharding.placement import record
from gspmd_lm.sharding.problems import Problem
from gspmd_lm.sharding.rules import Rules
from gspmd_lm.sharding.shapes import check_layout

NO_TARGET = -1


class ScoredRows(NamedTuple):
    """A batch of texts, each followed by padding: int32 [B, T]. Only targets that are not negative are scored."""

    tokens_BT: Any
    targets_BT: Any


class Scores(NamedTuple):
    """Sums over a row's targets."""

    log_likelihood_B: Any  # float32
    missed_B: Any  # int32: targets that were not the most likely token


class Request(NamedTuple):
    """Tokens of which the last `scored` are scored, each given all before it."""

    tokens: Sequence[int]
    scored: int


class Score(NamedTuple):
    """The score of one request."""

    log_likelihood: float
    tokens: int
    greedy: bool  # whether every token scored was the most likely one


class TextMeasures(NamedTuple):
    """The measures of a whole text."""

    loss: float  # nats per token
    perplexity: float
    bits_per_byte: float
    tokens: int
    bytes: int


def score(cfg: ModelConfig, params: Any, rows: ScoredRows) -> Scores:
    """The scores of each row; logits are made for one chunk of the sequence after the other, never all at once."""
    B, T = rows.tokens_BT.shape
    positions_BT = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
    batch = zigzag_sharded({"tokens": rows.tokens_BT, "targets": rows.targets_BT, "positions": positions_BT})
    batch["row"] = jnp.arange(B, dtype=jnp.int32)
    batch["length"] = jnp.where(rows.targets_BT >= 0, positions_BT + 1, 1).max(1)
    x_BTD, table, bias = decode(cfg, params, batch)
    with scope("of", LOSS):
        count = loss.chunk_count(B, T)
        reduced_spec, gathered_spec = table_specs(cfg)
        x_CBTD = chunks.split(shard(like(x_BTD, reduced_spec), gathered_spec), count)
        table_VD, bias_V = use(table), None if bias is None else use(bias)

        def chunk(_: None, inputs: tuple[jax.Array, jax.Array]) -> tuple[None, Scores]:
            x_BTD, targets_BT = inputs
            logits_BTV = loss.logits_of(x_BTD, table_VD, bias_V, cfg)
            target_BT, highest_BT, log_z_BT = loss.target_logits(logits_BTV, targets_BT)
            scored_BT = targets_BT >= 0
            missed_BT = scored_BT & (target_BT < highest_BT)
            return None, Scores(jnp.where(scored_BT, target_BT - log_z_BT, 0).sum(-1), missed_BT.sum(-1, jnp.int32))

        _, scores_CB = jax.lax.scan(chunk, None, (x_CBTD, chunks.split(batch["targets"], count)))
    return Scores(*(rearrange(x, "C B -> B C").sum(-1) for x in scores_CB))


@dataclasses.dataclass(frozen=True)
class Scoring(Forward):
    """The scoring program of a config under rules on a mesh, for batches of `rows` texts of up to `seq` tokens."""

    rows: int
    seq: int

    @property
    def attention_pass(self) -> Pass:
        return Pass(self.seq)

    @functools.cached_property
    def abstract_rows(self) -> ScoredRows:
        """The shapes and shardings of a batch."""
        shape = self.rows, self.seq
        sharding = self.placement.sharding("rules", "tokens", ("batch", "seq"), shape)
        one = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding)
        return ScoredRows(one, one)

    def lower(self) -> jax.stages.Lowered:
        """(params, ScoredRows) -> Scores, on every device."""
        jitted = jax.jit(self._score, out_shardings=Scores(self.whole, self.whole))
        return jitted.trace(self.abstract_params, self.abstract_rows).lower()

    @functools.cached_property
    def compile_forward(self) -> jax.stages.Compiled:
        """The program, compiled. Raises InputError if it needs more memory than there is."""
        what = f"scoring {self.rows:,} rows of {self.seq:,} tokens at a time"
        fix = "--batch=1, for a text a smaller --seq, or rules that split more"
        self.check_held({"weights": self.abstract_params})
        return self.compile(self.lower(), what, fix)

    def _score(self, params: Any, rows: ScoredRows) -> Scores:
        with self.trace_under():
            return score(self.config.model, params, rows)


def build_scoring(
    config: Config, rules: Rules, devices: Sequence[Any], platform: str, rows: int, seq: int
) -> tuple[Scoring, list[Problem]]:
    """The program for at least `rows` texts of at least `seq` tokens at a time, and the warnings about the rules.

    Nothing is compiled or allocated. The model predicts the next token: `check_causal` is asked before a text is read.
    Raises ShardingError that lists everything that does not fit.
    """
    rows, seq = rounded_up(rules, rows, seq, platform, zigzag=True)
    cfg = config.model
    arrays = parameters(cfg)
    one = jax.ShapeDtypeStruct((rows, seq), jnp.int32)
    named = record(rules, lambda params, rows: score(cfg, params, rows), arrays.params, ScoredRows(one, one))
    more = [*layer_problems(config, rules, platform, Pass(seq)), *no_pipeline(rules)]
    warnings = check_layout(arrays, rules, [named], more)
    rules = settle_rules(rules, config, meshes.processor(devices[0]), Pass(seq))
    return Scoring(config, rules, arrays, meshes.build(rules, devices), rows, seq), warnings


class Scorer:
    """The compiled program and the weights it runs with."""

    def __init__(self, built: Scoring, params: Any, tokenizer: Tokenizer):
        """`params`: placed as `built.abstract_params`."""
        self.program, self.params, self.tokenizer = built, params, tokenizer
        self._run = built.compile_forward

    def scores(self, requests: Sequence[Request]) -> Iterator[Score]:
        """The score of each request, in order. The devices score the next batch while one is read.

        Raises RunFailed where the model gives what is not a number.
        """
        pending: tuple[Sequence[Request], Scores] | None = None
        for first in range(0, len(requests), self.program.rows):
            batch = requests[first : first + self.program.rows]
            running = batch, self._run(self.params, self._place_batch(batch))
            if pending:
                yield from self._read(*pending)
            pending = running
        if pending:
            yield from self._read(*pending)

    def text(self, ids: Sequence[int] | np.ndarray, size_bytes: int) -> TextMeasures:
        """Loss, perplexity and bits per byte of a text of `size_bytes`, in windows of the program's length that do not
        overlap.

        Every token is scored once. The first one is given the `lead` of the tokenizer. The first one of each later
        window is given the token before it.
        """
        return measures(list(self.scores(windows(ids, lead(self.tokenizer), self.program.seq))), size_bytes)

    def _place_batch(self, batch: Sequence[Request]) -> ScoredRows:
        shape = self.program.rows, self.program.seq
        tokens_BT, targets_BT = np.zeros(shape, np.int32), np.full(shape, NO_TARGET, np.int32)
        for row, (tokens, scored) in enumerate(batch):
            length = len(tokens) - 1
            tokens_BT[row, :length] = tokens[:-1]
            targets_BT[row, length - scored : length] = tokens[len(tokens) - scored :]
        pairs = zip((tokens_BT, targets_BT), self.program.abstract_rows, strict=True)
        return ScoredRows(*(to_devices(x, like.sharding) for x, like in pairs))

    def _read(self, batch: Sequence[Request], scores: Scores) -> Iterator[Score]:
        fetched = jax.device_get(scores)
        for request, log_likelihood, missed in zip(batch, *(x.tolist() for x in fetched), strict=False):
            if math.isnan(log_likelihood):
                raise not_numbers("a text", self.program.config.name)
            yield Score(log_likelihood, request.scored, missed == 0)


def lead(tokenizer: Tokenizer) -> int:
    """The token that stands before a text: the one with which the tokenizer begins texts, or else its end of a text."""
    return [tokenizer.end, *tokenizer.encode_prompt("").tolist()][-1]


def windows(ids: Sequence[int] | np.ndarray, lead: int, seq: int) -> list[Request]:
    """Requests that score each of `ids` once, `seq` at a time. The first one is given `lead`."""
    whole = [lead, *np.asarray(ids).tolist()]
    return [Request(window := whole[at : at + seq + 1], len(window) - 1) for at in range(0, len(ids), seq)]


def measures(scores: Sequence[Score], size_bytes: int) -> TextMeasures:
    """The measures of a text, from the scores of its windows."""
    tokens = sum(one.tokens for one in scores)
    nats = -math.fsum(one.log_likelihood for one in scores)
    return TextMeasures(
        nats / tokens, math.exp(min(nats / tokens, 700)), nats / math.log(2) / size_bytes, tokens, size_bytes
    )


class ContinuationLine(NamedTuple):
    """One line of a file of continuations."""

    fields: dict[str, Any]
    request: Request


def read_continuations(path: str | Path, tokenizer: Tokenizer, context: int) -> list[ContinuationLine]:
    """The requests of a JSONL file of {"prompt": ..., "continuation": ...}.

    A prompt and its continuation are encoded together. As in EleutherAI's evaluation harness, spaces at the end of a
    prompt belong to the continuation. An empty prompt is the `lead` of the tokenizer.

    Raises InputError that lists every wrong line.
    """
    path, wrong, lines = Path(path), [], []
    for where, fields in objects(path, wrong):
        lacking = [name for name in ("prompt", "continuation") if not isinstance(fields.get(name), str)]
        if lacking:
            wrong.append(f"{where}: no text in {' and '.join(lacking)}")
            continue
        prompt, continuation = fields["prompt"], fields["continuation"]
        before = tokenizer.encode_prompt(prompt.rstrip()).tolist()
        whole = tokenizer.encode_prompt(prompt + continuation).tolist()
        if not before:
            whole, before = [lead(tokenizer), *whole], [lead(tokenizer)]
        if not continuation or len(whole) <= len(before):
            wrong.append(f"{where}: continuation is empty")
        elif len(whole) - 1 > context:
            wrong.append(f"{where}: {len(whole):,} tokens do not fit model.context={context:,}")
        else:
            lines.append(ContinuationLine(fields, Request(whole, len(whole) - len(before))))
    refuse(path, wrong, lines, 'write one object such as {"prompt": "...", "continuation": "..."} on each line')
    return lines


def write_scores(lines: Sequence[ContinuationLine], scores: Iterator[Score], out: TextIO) -> None:
    """Writes each line's fields with log_likelihood, the number of tokens scored and greedy."""
    for line, score in zip(lines, scores, strict=True):
        out.write(json_line(line.fields | score._asdict()))
        out.flush()
