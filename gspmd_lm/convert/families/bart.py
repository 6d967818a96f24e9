"""BART and mBART."""

from pathlib import Path

from gspmd_lm.convert.families.t5 import T5_COPIES, EncoderPart
from gspmd_lm.convert.family import BIASES, GELU_NEW, ONE_WIDTH, PLAIN_LAYERNORM, TIED, Family
from gspmd_lm.convert.fields import MOST_LAYERS, Activation, FieldCodec, Fixed, Flag, Given, Renamed
from gspmd_lm.convert.layout import Tensor, linear, norm, plain_mlp, separate_qkv
from gspmd_lm.convert.sidecars import GENERATION
from gspmd_lm.convert.strict_json import read_object
from gspmd_lm.errors import InputError, is_whole_number


def read_first_tokens(folder: Path) -> dict[str, list[int]]:
    """The setting of model.encoder with which texts begin as generation_config.json of a folder forces them to.

    {} if there is no such file, or if it forces nothing. Raises InputError for what is no token.
    """
    path = folder / GENERATION
    forced = read_object(path).get("forced_bos_token_id") if path.is_file() else None
    if forced is None:
        return {}
    if not is_whole_number(forced, 0):
        raise InputError(f"{path}: forced_bos_token_id={forced}: is not a token\n  fix   correct or remove it")
    return {"first_tokens": [forced]}


def bart_attention(name: str, ours: str, norms: str) -> tuple[Tensor, ...]:
    return (
        *separate_qkv(name, ours=ours),
        *linear(f"{name}.out_proj", "D (N H)", f"{ours}.wo"),
        *norm(f"{name}_layer_norm", f"{ours}_{norms}", bias=True),
    )


def bart_stack(prefix: str, ours: str, norms: str, positions: str = "position_embedding") -> tuple[Tensor, ...]:
    layer = f"{prefix}.layers.{{}}"
    return (
        Tensor(f"{prefix}.embed_positions.weight", "p D", (f"{ours}{positions}",)),
        *norm(f"{prefix}.layernorm_embedding", f"{ours}embedding_norm", bias=True),
        *bart_attention(f"{layer}.self_attn", f"{ours}attention", norms),
        *plain_mlp(layer, "fc1", "fc2", ours),
        *norm(f"{layer}.final_layer_norm", f"{ours}mlp_{norms}", bias=True),
        *norm(f"{prefix}.layer_norm", f"{ours}final_norm", bias=True),
    )


def _bart(norms: str) -> tuple[Tensor, ...]:
    """BART's tensors. norms: sum_norm where norms stand after the sums, norm where they stand before sublayers."""
    return (
        Tensor("model.shared.weight", "V D", ("embedding",)),
        *bart_stack("model.encoder", "encoder.", norms),
        *bart_stack("model.decoder", "", norms),
        *bart_attention("model.decoder.layers.{}.encoder_attn", "cross", norms),
        Tensor("final_logits_bias", "1 V", ("unembedding_bias",)),
        Tensor("lm_head.weight", "V D", ("unembedding",)),
    )


_BEFORE = "has other norms, which are not supported"
_ADDS = "adds an array, which is not supported"
BART_SIZES = (
    Renamed("vocab_size", "vocab"),
    Renamed("d_model hidden_size", "embed"),
    Renamed("decoder_ffn_dim", "mlp"),
    Renamed("decoder_layers", "layers", most=MOST_LAYERS),
    Renamed("decoder_attention_heads", "heads"),
    *(ONE_WIDTH, PLAIN_LAYERNORM, Given({"norm.eps": 1e-5, "positions": "learned"})),
    Activation("activation_function", "gelu", GELU_NEW),
    *(BIASES, TIED),
)
ENCODER_SIZES = {
    "layers": "encoder_layers",
    "heads": "encoder_attention_heads num_attention_heads",
    "mlp": "encoder_ffn_dim",
}
_BART = (
    *BART_SIZES,
    Renamed("max_position_embeddings", "context", 1024),
    Given({"embedding.position_offset": 2, "embedding.norm": True, "logits.bias": True}),
    Flag("scale_embedding", ("embedding.scale",), False, lambda values: values["embed"] ** 0.5, 1.0),
    Fixed("normalize_embedding", True, _BEFORE),
    Fixed("add_bias_logits", False, _ADDS),
    Fixed("static_position_embeddings", False, "has fixed positions, which are not supported"),
)


def _norms(before: bool) -> tuple[FieldCodec, ...]:
    """before: whether norms stand before sublayers, and a last one behind all; otherwise they stand after the sums."""
    return (
        Given({"norm.pre": before, "norm.sum": not before, "norm.final": before}),
        Fixed("normalize_before", before, _BEFORE),
        Fixed("add_final_layer_norm", before, _BEFORE),
    )


_UNREAD = ("num_hidden_layers", "force_bos_token_to_be_generated", "extra_pos_embeddings")
BART = Family(
    "BART",
    "bart",
    "BartForConditionalGeneration",
    (*_BART, *_norms(before=False), EncoderPart(ENCODER_SIZES, 2)),
    _bart("sum_norm"),
    no_weights=(r"^(model\.)?(en|de)coder\.version$",),
    irrelevant=_UNREAD,
    copies=tuple(f"model.{copy}" for copy in T5_COPIES),
)
FAMILIES = (
    BART,
    BART.relative(
        "mBART",
        "mbart",
        "MBartForConditionalGeneration",
        (*_BART, *_norms(before=True), EncoderPart(ENCODER_SIZES, 2, of_language=True)),
        _bart("norm"),
    ),
)
