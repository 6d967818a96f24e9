"""The families of encoders that read a text as a whole, BERT and its kin, each with a head of tokens or of classes.

A model_type has a row for each head. Which one a folder has, its `architectures` says. With --set objective=..., a
folder is read with another head: what its files lack of that head is drawn anew.
"""

import dataclasses
from typing import Any, get_args

from gspmd_lm import config
from gspmd_lm.convert.config_reader import ConfigReader
from gspmd_lm.convert.family import BIASES, ONE_WIDTH, PLAIN_LAYERNORM, SIZES, TIED, Family
from gspmd_lm.convert.fields import Activation, Constant, DefaultsTo, FieldCodec, Fixed, MustEqual, Renamed, Values
from gspmd_lm.convert.layout import Tensor
from gspmd_lm.convert.names import QUERY_KEY_VALUE, linear, norm, separate_qkv

SEVERAL = "multi_label_classification"  # in problem_type: a text has several classes or none


@dataclasses.dataclass(frozen=True)
class Classes:
    """The number of classes, which is the length of id2label; 1 is a number to predict."""

    def read(self, reader: ConfigReader, values: Values) -> None:
        names = reader.get(["id2label"], {})
        if not isinstance(names, dict):
            reader.refuse("id2label", names, "is not an object of numbers and names")
            names = {}
        values["classes"] = reader.whole(["num_labels"], len(names) or 2, 1)
        if names and len(names) != values["classes"]:
            reader.refuse("num_labels", values["classes"], f"contradicts id2label, which has {len(names)}")
        if (kind := reader.get(["problem_type"], "")) == SEVERAL and "patches" in values:
            reader.refuse("problem_type", kind, "is not supported for images")
        elif kind == SEVERAL:
            reader.notes.append(f"problem_type: {kind}: training and eval need --set data.label_kind=classes")

    def write(self, model: config.ModelConfig) -> dict[str, Any]:
        names = [f"LABEL_{number}" for number in range(model.classes)]
        return {
            "id2label": {str(number): name for number, name in enumerate(names)},
            "label2id": {name: number for number, name in enumerate(names)},
        }


@dataclasses.dataclass(frozen=True)
class PositionsAfterPadding:
    """RoBERTa's positions: they begin after the number of the padding token, whose row and those before are unused."""

    def read(self, reader: ConfigReader, values: Values) -> None:
        rows = reader.number(["max_position_embeddings"], 512)
        values["position_offset"] = reader.whole(["pad_token_id"], 1, 0) + 1
        values["context"] = rows - values["position_offset"]
        if values["context"] < 1:
            reader.refuse("max_position_embeddings", rows, f"leaves no position after pad_token_id + 1 = "
                          f"{values['position_offset']}")  # fmt: skip
            values["context"] = 1

    def write(self, model: config.ModelConfig) -> dict[str, Any]:
        return {
            "max_position_embeddings": model.position_offset + model.context,
            "pad_token_id": model.position_offset - 1,
        }


_CAUSAL = "sees only earlier tokens or another text, which is not supported for an encoder"
_ENCODER: tuple[FieldCodec, ...] = (
    *SIZES, *PLAIN_LAYERNORM, Renamed("intermediate_size", "mlp"), *ONE_WIDTH, *BIASES,
    Renamed("layer_norm_eps", "norm_eps", 1e-12), Constant("mask", "full"), Constant("positions", "learned"),
    Constant("pre_norms", False), Constant("sum_norms", True), Constant("final_norm", False),
    Constant("embedding_norm", True), Renamed("type_vocab_size", "token_types", 2),
    Fixed("position_embedding_type", "absolute", "has positions within attention, which are not supported"),
    Fixed("is_decoder", False, _CAUSAL), Fixed("is_encoder_decoder", False, _CAUSAL),
)  # fmt: skip
_BERT = (
    *_ENCODER, Renamed("max_position_embeddings", "context", 512),
    Activation("hidden_act", "gelu", {"gelu_tanh": "gelu_new"}),
)  # fmt: skip
_ROBERTA = (
    *_ENCODER, PositionsAfterPadding(), Constant("activation", "gelu"),
    Fixed("hidden_act", "gelu", "is not the activation of this family's head"),
)  # fmt: skip
_MASKED = (Constant("head_transform", True), Constant("unembedding_bias", True), TIED)
_ERNIE = (Fixed("use_task_id", False, "adds embeddings of tasks, which are not supported"),)


_NARROW: dict[str, Any] = {"is_of": lambda model: model.embedding_width > 0}  # a token table with a width of its own
_WIDE: dict[str, Any] = {"is_of": lambda model: model.embedding_width == 0}


def _tables(table: str, width: str = "D", **options) -> tuple[Tensor, ...]:
    """The tensors of embeddings and of the norm before the blocks. width: the letter of the token table's width."""
    return (
        Tensor(f"{table}.word_embeddings.weight", f"V {width}", ("embedding",), **options),
        Tensor(f"{table}.position_embeddings.weight", f"p {width}", ("position_embedding",), **options),
        Tensor(f"{table}.token_type_embeddings.weight", f"t {width}", ("type_embedding",), **options),
        *norm(f"{table}.LayerNorm", "embedding_norm", bias=True, axis=width, **options),
    )


def _blocks(
    base: str, projections: tuple[str, str, str] = QUERY_KEY_VALUE, qkv: tuple[Tensor, ...] = ()
) -> tuple[Tensor, ...]:
    """The blocks. projections: the names of those of queries, keys and values. qkv: their tensors, if not those."""
    layer = f"{base}encoder.layer.{{}}"
    attention = f"{layer}.attention"
    return (
        *(qkv or separate_qkv(f"{attention}.self", projections)),
        *linear(f"{attention}.output.dense", "D (N H)", "attention.wo"),
        *norm(f"{attention}.output.LayerNorm", "attention_sum_norm", bias=True),
        *linear(f"{layer}.intermediate.dense", "F D", "mlp.w_up"),
        *linear(f"{layer}.output.dense", "D F", "mlp.w_down"),
        *norm(f"{layer}.output.LayerNorm", "mlp_sum_norm", bias=True),
    )


def _tensors(base: str) -> tuple[Tensor, ...]:
    """The tensors that a family has under every head."""
    return (*_tables(f"{base}embeddings"), *_blocks(base))


def _masked(dense: str, layer_norm: str, decoder: str, bias: str, width: str = "D", **options) -> tuple[Tensor, ...]:
    """A head that guesses tokens. width: as in `_tables`."""
    return (
        *linear(dense, "O D" if width == "D" else f"{width} D", "head_transform", biases=("head_transform_bias",),
                **options),
        *norm(layer_norm, "head_norm", bias=True, axis=width, **options),
        Tensor(f"{decoder}.weight", f"V {width}", ("unembedding",), **options),
        Tensor(bias, "V", ("unembedding_bias",), **options),
    )  # fmt: skip


def _classes(dense: str, out: str) -> tuple[Tensor, ...]:
    """A head that scores classes."""
    return (
        *linear(dense, "O D", "pooler", biases=("pooler_bias",)),
        *linear(out, "c O", "classifier", biases=("classifier_bias",)),
    )


_OLD_NORMS = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
# Fields that change nothing: of a table that use_task_id reads, and of logits that a head of classes does not have.
_NO_TASKS, _NO_TOKENS = ("task_type_vocab_size",), ("task_type_vocab_size", "tie_word_embeddings")
_NUMBERS = (r"embeddings\.(position|token_type)_ids$",)  # 0, 1, 2, ..., and zeros
# What stands on the stack of blocks, in files with any head.
_HEADS = (r"^cls\.", r"^lm_head\.", r"^([a-z]+\.)?pooler\.", r"^classifier\.")
_BERT_MASKED = _masked(
    "cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm", "cls.predictions.decoder",
    "cls.predictions.bias",
)  # fmt: skip
_ROBERTA_MASKED = _masked("lm_head.dense", "lm_head.layer_norm", "lm_head.decoder", "lm_head.bias")


def _bert(name: str, model_type: str, kind: str, more: tuple[FieldCodec, ...] = ()) -> tuple[Family, Family]:
    """The rows of a family with BERT's tensors. kind: how the names of its classes begin."""
    shared = {"no_weights": _NUMBERS, "older_names": _OLD_NORMS, "heads": _HEADS}
    base, fields = f"{model_type}.", (*_BERT, *more)
    return (
        Family(
            name, model_type, f"{kind}ForMaskedLM", base, (*fields, *_MASKED), (*_tensors(base), *_BERT_MASKED),
            irrelevant=_NO_TASKS, twice={"cls.predictions.decoder.bias": "cls.predictions.bias"}, **shared,
        ),
        Family(
            name, model_type, f"{kind}ForSequenceClassification", base, (*fields, Classes()),
            (*_tensors(base), *_classes(f"{base}pooler.dense", "classifier")), irrelevant=_NO_TOKENS, **shared,
        ),
    )  # fmt: skip


def _roberta(name: str, model_type: str, kind: str) -> tuple[Family, Family]:
    """The rows of a family with RoBERTa's tensors."""
    shared = {"no_weights": _NUMBERS, "older_names": _OLD_NORMS, "heads": _HEADS}
    base = "roberta."
    return (
        Family(
            name, model_type, f"{kind}ForMaskedLM", base, (*_ROBERTA, *_MASKED), (*_tensors(base), *_ROBERTA_MASKED),
            twice={"lm_head.decoder.bias": "lm_head.bias"}, **shared,
        ),
        Family(
            name, model_type, f"{kind}ForSequenceClassification", base, (*_ROBERTA, Classes()),
            (*_tensors(base), *_classes("classifier.dense", "classifier.out_proj")), irrelevant=_NO_TOKENS, **shared,
        ),
    )  # fmt: skip


_ALBERT_LAYER = "albert.encoder.albert_layer_groups.0.albert_layers.0"
_ALBERT_TENSORS = (
    *_tables("albert.embeddings", "W"),
    *linear("albert.encoder.embedding_hidden_mapping_in", "D W", "embedding_in", biases=("embedding_in_bias",)),
    *separate_qkv(f"{_ALBERT_LAYER}.attention", QUERY_KEY_VALUE),
    *linear(f"{_ALBERT_LAYER}.attention.dense", "D (N H)", "attention.wo"),
    *norm(f"{_ALBERT_LAYER}.attention.LayerNorm", "attention_sum_norm", bias=True),
    *linear(f"{_ALBERT_LAYER}.ffn", "F D", "mlp.w_up"),
    *linear(f"{_ALBERT_LAYER}.ffn_output", "D F", "mlp.w_down"),
    *norm(f"{_ALBERT_LAYER}.full_layer_layer_norm", "mlp_sum_norm", bias=True),
)
_GROUPS = "has layers with weights of their own beside shared ones, which is not supported"
_ALBERT = (
    *_ENCODER, Renamed("max_position_embeddings", "context", 512), Constant("shared_layers", True),
    Activation("hidden_act", "gelu_new", {"gelu_tanh": "gelu_new"}), Renamed("embedding_size", "embedding_width", 128),
    Constant("embedding_in", "sum"), Fixed("num_hidden_groups", 1, _GROUPS), Fixed("inner_group_num", 1, _GROUPS),
)  # fmt: skip
_ALBERT_SHARED = {
    "no_weights": _NUMBERS, "older_names": _OLD_NORMS,
    "heads": (r"^predictions\.", r"^sop_classifier\.", r"^(albert\.)?pooler\.", r"^classifier\."),
}  # fmt: skip
_ELECTRA = (
    *_BERT, DefaultsTo("embedding_size", "embedding_width", "embed", 128),
    Constant("embedding_in", lambda values: "sum" if values["embedding_width"] else "tokens"),
)  # fmt: skip
_ELECTRA_TENSORS = (
    *_tables("electra.embeddings", **_WIDE), *_tables("electra.embeddings", "W", **_NARROW), *_blocks("electra."),
    *linear("electra.embeddings_project", "D W", "embedding_in", biases=("embedding_in_bias",), **_NARROW),
)  # fmt: skip
_ELECTRA_MASKED = (
    "generator_predictions.dense", "generator_predictions.LayerNorm", "generator_lm_head", "generator_lm_head.bias",
)  # fmt: skip
_ELECTRA_SHARED = {
    "no_weights": _NUMBERS, "older_names": _OLD_NORMS,
    "heads": (r"^(generator|discriminator)_", r"^classifier\."),
}  # fmt: skip
_SUMMARY = ("summary_type", "summary_use_proj", "summary_activation")  # of a head for multiple choice
# What a DeBERTa must say of its attention, in the words of config.json. Without these fields it says something else.
_TERMS = {
    "relative_attention": True, "pos_att_type": ["c2p", "p2c"], "share_att_key": True, "norm_rel_ebd": "layer_norm",
    "position_biased_input": False,
}  # fmt: skip
_SHARED_TERMS = ("share_att_key", "norm_rel_ebd")  # which the first DeBERTa does not have


@dataclasses.dataclass(frozen=True)
class Disentangled:
    """DeBERTa's terms of scores by distance: both, with the projections of tokens, and normed.

    own: those of the first DeBERTa, with projections of their own and no norm.
    """

    own: bool = False

    @property
    def terms(self) -> dict[str, Any]:
        return {name: value for name, value in _TERMS.items() if not self.own or name not in _SHARED_TERMS}

    def read(self, reader: ConfigReader, values: Values) -> None:
        for name, wanted in self.terms.items():
            value = reader.get([name])
            found = value.lower().split("|") if name == "pos_att_type" and isinstance(value, str) else value
            if value is None:
                reader.problems.append(f"{name}: missing, and only {wanted} is supported")
            elif (sorted(map(str, found)) if isinstance(found, list) else found) != wanted:
                reader.refuse(name, value, f"is not supported, only {wanted}")
        distance = reader.get(["max_relative_positions"], -1)
        distance = values["context"] if type(distance) is int and distance < 1 else distance
        distance = reader.positive("max_relative_positions", distance)
        buckets = -1 if self.own else reader.get(["position_buckets"], -1)
        half = distance if buckets == -1 else reader.positive("position_buckets", buckets)
        if buckets == distance:
            reader.refuse("position_buckets", buckets, "is not supported if it is max_relative_positions, only -1")
        values["relative_vectors"] = {"ranges": 2 * half, "distance": distance, "own_projections": self.own}
        values["query_scale"] = max(3 * values["head_dim"], 1) ** -0.5

    def write(self, model: config.ModelConfig) -> dict[str, Any]:
        if not (vectors := model.relative_vectors):
            return {}
        written = self.terms | {"max_relative_positions": vectors.distance}
        half = vectors.ranges // 2
        return written if self.own else written | {"position_buckets": -1 if half == vectors.distance else half}


@dataclasses.dataclass(frozen=True)
class ConvolutionOfTokens:
    """A convolution beside the first layer, if there is one."""

    def read(self, reader: ConfigReader, values: Values) -> None:
        taps = reader.whole(["conv_kernel_size"], 0, 0)
        groups, activation = reader.get(["conv_groups"], 1), reader.get(["conv_act"], "tanh")
        if not taps:
            return
        if groups != 1:
            reader.refuse("conv_groups", groups, "is not supported, only 1")
        if activation not in (known := get_args(config.Convolution.__annotations__["activation"])):
            reader.refuse("conv_act", activation, f"is not supported, only {' and '.join(known)}")
        values["convolution"] = {"taps": taps, "activation": activation}

    def write(self, model: config.ModelConfig) -> dict[str, Any]:
        if not (convolution := model.convolution):
            return {}
        return {"conv_kernel_size": convolution.taps, "conv_act": convolution.activation}


def _has_convolution(model: config.ModelConfig) -> bool:
    return model.convolution is not None


_EACH_DEBERTA = (
    *(one for one in _BERT if getattr(one, "setting", "") not in ("positions", "norm_eps", "token_types")),
    Renamed("layer_norm_eps", "norm_eps", 1e-7), Renamed("type_vocab_size", "token_types", 0, may_be_zero=True),
    Constant("positions", "none"),
    MustEqual("embedding_size", "embed", "is another width than hidden_size, which is not supported"),
)  # fmt: skip
_DEBERTA = (*_EACH_DEBERTA, Disentangled(), ConvolutionOfTokens())
_DEBERTA_1 = (
    *_EACH_DEBERTA, Constant("key_bias", False), Disentangled(own=True),
    Fixed("talking_head", False, "mixes the scores of heads, which is not supported"),
)  # fmt: skip
_DEBERTA_TABLES = (
    Tensor("deberta.embeddings.word_embeddings.weight", "V D", ("embedding",)),
    Tensor("deberta.embeddings.token_type_embeddings.weight", "t D", ("type_embedding",),
           is_of=lambda model: model.token_types > 0),
    *norm("deberta.embeddings.LayerNorm", "embedding_norm", bias=True),
    Tensor("deberta.encoder.rel_embeddings.weight", "r D", ("relative_embedding",)),
)  # fmt: skip
_DEBERTA_TENSORS = (
    *_DEBERTA_TABLES,
    *norm("deberta.encoder.LayerNorm", "relative_norm", bias=True),
    *linear("deberta.encoder.conv.conv", "D O A", "convolution", biases=("convolution_bias",), is_of=_has_convolution),
    *norm("deberta.encoder.conv.LayerNorm", "convolution_norm", bias=True, is_of=_has_convolution),
    *_blocks("deberta.", ("query_proj", "key_proj", "value_proj")),
)  # fmt: skip
_SELF = "deberta.encoder.layer.{}.attention.self"
_DEBERTA_1_TENSORS = (
    *_DEBERTA_TABLES,
    *_blocks("deberta.", qkv=(
        Tensor(f"{_SELF}.in_proj.weight", "(R H) D", ("attention.wq", "attention.wk", "attention.wv"), order="grouped"),
        Tensor(f"{_SELF}.q_bias", "(N H)", ("attention.bq",)), Tensor(f"{_SELF}.v_bias", "(K H)", ("attention.bv",)),
        *linear(f"{_SELF}.pos_q_proj", "(N H) D", "attention.wq_relative"),
        *linear(f"{_SELF}.pos_proj", "(N H) D", "attention.wk_relative", bias=False),
    )),
)  # fmt: skip
_DEBERTA_SHARED = {
    "no_weights": (*_NUMBERS, r"embeddings\.position_embeddings\."),  # of a model without such positions
    "older_names": _OLD_NORMS, "heads": (r"^(cls|lm_predictions|mask_predictions|pooler|classifier)\.",),
}  # fmt: skip


def _deberta(
    model_type: str, kind: str, fields: tuple[FieldCodec, ...], tensors: tuple[Tensor, ...]
) -> tuple[Family, Family]:
    """The rows of a DeBERTa. kind: how the names of its classes begin."""
    return (
        Family(
            "DeBERTa", model_type, f"{kind}ForMaskedLM", "deberta.",
            (*fields, *_MASKED, Fixed("legacy", True, "has a head of other names")), (*tensors, *_BERT_MASKED),
            irrelevant=("pooler_hidden_size", "pooler_hidden_act"),
            twice={"cls.predictions.decoder.bias": "cls.predictions.bias"}, **_DEBERTA_SHARED,
        ),
        Family(
            "DeBERTa", model_type, f"{kind}ForSequenceClassification", "deberta.",
            (*fields, Classes(), Constant("pooler_activation", "gelu"),
             Fixed("pooler_hidden_act", "gelu", "is not supported"),
             MustEqual("pooler_hidden_size", "embed", "is another width than hidden_size, which is not supported")),
            (*tensors, *_classes("pooler.dense", "classifier")), irrelevant=("legacy", "tie_word_embeddings"),
            **_DEBERTA_SHARED,
        ),
    )  # fmt: skip


# Of its authors' own code, which nothing of transformers' reads.
_ALBERT_UNUSED = ("down_scale_factor", "gap_size", "net_structure_type", "num_memory_blocks")


ENCODER_FAMILIES: tuple[Family, ...] = (
    *_bert("BERT", "bert", "Bert"),
    *_roberta("RoBERTa", "roberta", "Roberta"),
    *_roberta("XLM-RoBERTa", "xlm-roberta", "XLMRoberta"),
    *_roberta("CamemBERT", "camembert", "Camembert"),
    *_bert("ERNIE", "ernie", "Ernie", _ERNIE),
    Family(
        "ALBERT", "albert", "AlbertForMaskedLM", "albert.", (*_ALBERT, *_MASKED),
        (*_ALBERT_TENSORS, *_masked("predictions.dense", "predictions.LayerNorm", "predictions.decoder",
                                    "predictions.bias", "W")),
        irrelevant=_ALBERT_UNUSED, twice={"predictions.decoder.bias": "predictions.bias"}, **_ALBERT_SHARED,
    ),
    Family(
        "ALBERT", "albert", "AlbertForSequenceClassification", "albert.", (*_ALBERT, Classes()),
        (*_ALBERT_TENSORS, *_classes("albert.pooler", "classifier")),
        irrelevant=(*_ALBERT_UNUSED, "tie_word_embeddings"), **_ALBERT_SHARED,
    ),
    Family(
        "ELECTRA", "electra", "ElectraForMaskedLM", "electra.",
        (*_ELECTRA, *_MASKED, Fixed("hidden_act", "gelu", "is not the activation of this family's head")),
        (*_ELECTRA_TENSORS, *_masked(*_ELECTRA_MASKED, **_WIDE), *_masked(*_ELECTRA_MASKED, "W", **_NARROW)),
        irrelevant=_SUMMARY, **_ELECTRA_SHARED,
    ),
    Family(
        "ELECTRA", "electra", "ElectraForPreTraining", "electra.",
        (*_ELECTRA, Constant("classes", 1), Constant("classes_of", "tokens"), Constant("pooler_activation", "gelu"),
         Fixed("hidden_act", "gelu", "is not the activation of this family's head")),
        (*_ELECTRA_TENSORS, *_classes("discriminator_predictions.dense", "discriminator_predictions.dense_prediction")),
        irrelevant=(*_SUMMARY, "tie_word_embeddings"), **_ELECTRA_SHARED,
    ),
    Family(
        "ELECTRA", "electra", "ElectraForSequenceClassification", "electra.",
        (*_ELECTRA, Classes(), Constant("pooler_activation", "gelu")),
        (*_ELECTRA_TENSORS, *_classes("classifier.dense", "classifier.out_proj")),
        irrelevant=(*_SUMMARY, "tie_word_embeddings"), **_ELECTRA_SHARED,
    ),
    *_deberta("deberta", "Deberta", _DEBERTA_1, _DEBERTA_1_TENSORS),
    *_deberta("deberta-v2", "DebertaV2", _DEBERTA, _DEBERTA_TENSORS),
)  # fmt: skip
