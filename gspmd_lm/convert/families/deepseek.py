"""DeepSeek-V3 and DeepSeek-V2: latent attention, and experts beside those that compute every token."""

import dataclasses
from typing import Any

from gspmd_lm import config
from gspmd_lm.convert.config_reader import ConfigReader
from gspmd_lm.convert.families.llama import LLAMA, ROUTER_TRAINING, llama_tensors, routed_experts, shared_experts
from gspmd_lm.convert.family import llama_fields, mixture
from gspmd_lm.convert.fields import FieldCodec, Fixed, Flag, Given, Renamed, Values
from gspmd_lm.convert.layout import Tensor, norm
from gspmd_lm.convert.rope import Rope


@dataclasses.dataclass(frozen=True)
class SharedExperts:
    """n_shared_experts: how many experts, each as wide as a routed one, compute every token."""

    default: int = 1

    def read(self, reader: ConfigReader, values: Values) -> None:
        values["experts.shared_mlp"] = reader.whole("n_shared_experts", self.default, 0) * values["experts.mlp"]

    def write(self, model: config.ModelConfig) -> dict[str, Any]:
        return {"n_shared_experts": config.value_at(model, "experts.shared_mlp") // model.expert_width}


@dataclasses.dataclass(frozen=True)
class LatentSizes:
    """The sizes of DeepSeek's latent attention, with defaults. What is rotated of a head is `Rope`'s."""

    q_rank: int = 1536
    own: int = 128
    v_head_dim: int = 128

    def read(self, reader: ConfigReader, values: Values) -> None:
        turned, own = reader.number("qk_rope_head_dim", 64), reader.number("qk_nope_head_dim", self.own)
        q_rank = reader.get("q_lora_rank", None if "q_lora_rank" in reader.raw else self.q_rank)
        values["head_dim"] = turned + own
        values["attention.latent"] = {
            "kv_rank": reader.number("kv_lora_rank", 512),
            "q_rank": 0 if q_rank is None else reader.positive("q_lora_rank", q_rank),
            "v_head_dim": reader.number("v_head_dim", self.v_head_dim),
        }
        for name, value in (("head_dim", turned), ("qk_head_dim", turned + own)):  # as transformers writes them
            if reader.get(name, value) != value:
                reader.refuse(name, reader.raw[name], f"is not {value}, as the sizes of its parts have it")

    def write(self, model: config.ModelConfig) -> dict[str, Any]:
        if not (latent := model.attention.latent):
            return {}
        return {
            "kv_lora_rank": latent.kv_rank, "q_lora_rank": latent.q_rank or None, "v_head_dim": latent.v_head_dim,
            "qk_nope_head_dim": model.head_dim - model.attention.rope.dim, "head_dim": model.attention.rope.dim,
            "qk_head_dim": model.head_dim,
        }  # fmt: skip


class GroupLimited:
    """DeepSeek-V2's topk_method: whether experts are chosen in the best groups, n_group and topk_group, or in all."""

    def read(self, reader: ConfigReader, values: Values) -> None:
        method = reader.get("topk_method", "greedy")
        groups, used = reader.get("n_group", 1), reader.get("topk_group", 1)
        if method not in ("greedy", "group_limited_greedy"):
            reader.refuse("topk_method", method, "is not greedy or group_limited_greedy")
        limited = method == "group_limited_greedy"
        values["experts.groups"] = reader.positive("n_group", groups) if limited else 1
        values["experts.groups_per_token"] = reader.positive("topk_group", used) if limited else 1

    def write(self, model: config.ModelConfig) -> dict[str, Any]:
        method = "group_limited_greedy" if config.value_at(model, "experts.groups") > 1 else "greedy"
        return {
            "topk_method": method,
            "n_group": config.value_at(model, "experts.groups"),
            "topk_group": config.value_at(model, "experts.groups_per_token"),
        }


class LaterTokens:
    """num_nextn_predict_layers: layers behind the last one that predict later tokens. They are left out."""

    def read(self, reader: ConfigReader, values: Values) -> None:
        names = "num_nextn_predict_layers num_mtp_layers"
        if count := reader.whole(names, 1, 0) * any(map(reader.raw.get, names.split())):
            reader.notes.append(
                f"{names.split()[0]}: {count}: what predicts later tokens stands behind the last layer and is left out"
            )

    def write(self, model: config.ModelConfig) -> dict[str, Any]:
        return {"num_nextn_predict_layers": 0}


NUMBERS = "n_routed_experts num_local_experts"
# Settings of parallelism, and of a loss for equal loads: model.experts.balance row is that loss.
DEEPSEEK_TRAINING = (*ROUTER_TRAINING, "ep_size", "seq_aux", "aux_loss_alpha")


def latent_fields(sizes: LatentSizes, eps: float) -> tuple[FieldCodec, ...]:
    """The fields of a family with latent attention: Llama's, whose heads have other sizes."""
    return (
        *llama_fields(head_dim=sizes, eps=eps, rope=Rope(turned_name="qk_rope_head_dim")),
        Fixed("attention_bias", False, "has biases in latent attention, which are not supported"),
        Fixed("rope_interleave", True, "pairs the numbers that are rotated otherwise, which is not supported"),
    )


def deepseek_router(groups: int, used: int, scale: float) -> tuple[FieldCodec, ...]:
    """DeepSeek-V3's router, with defaults. The bias on its scores stays as it came until balance_rate is set."""
    return (
        Given({"experts.routing": "sigmoid", "experts.balance": "bias", "experts.balance_rate": 0.0}),
        Flag("norm_topk_prob", ("experts.normalized_weights",), True, null_is_false=True),
        Renamed("routed_scaling_factor", "experts.scale", scale),
        Renamed("n_group", "experts.groups", groups),
        Renamed("topk_group", "experts.groups_per_token", used),
    )


def first_layers(default: int) -> Renamed:
    """first_k_dense_replace: how many layers at the beginning have no experts."""
    return Renamed("first_k_dense_replace", "experts.dense_layers", default, may_be_zero=True)


def _fixed_field(name: str, value: Any) -> Fixed:
    return Fixed(name, value, "is not supported in this family")


_DEEPSEEK = (
    *latent_fields(LatentSizes(), 1e-6),
    Fixed("moe_layer_freq", 1, "has layers without experts between those with experts, which is not supported"),
)
_V3 = (
    *(*_DEEPSEEK, *deepseek_router(8, 4, 2.5), *mixture(NUMBERS, 256, 8, width=2048)),
    *(_fixed_field("topk_method", "noaux_tc"), _fixed_field("scoring_func", "sigmoid")),
    *(first_layers(3), SharedExperts(), LaterTokens()),
)
_V2 = (
    # transformers has no default for the experts of a token: this is the published number.
    *(*_DEEPSEEK, GroupLimited(), *mixture("n_routed_experts num_experts", 64, 6, width=1407)),
    *(
        _fixed_field("scoring_func", "softmax"),
        _fixed_field("norm_topk_prob", False),
        Given({"experts.normalized_weights": False}),
    ),
    *(Renamed("routed_scaling_factor", "experts.scale", 1.0), first_layers(0), SharedExperts(2)),
    Fixed("mlp_bias", False, "has biases in the MLP, which are not supported"),
)
_ATTENTION, _MLP = "model.layers.{}.self_attn", "model.layers.{}.mlp"
DEEPSEEK_EXPERTS = (
    *(*routed_experts(_MLP), *shared_experts(f"{_MLP}.shared_experts")),
    Tensor(f"{_MLP}.gate.e_score_correction_bias", "C", ("mlp.balance_bias",), float32=True),
)
_LATENT_ATTENTION = (
    Tensor(f"{_ATTENTION}.q_a_proj.weight", "Q D", ("attention.wq_down",)),
    *norm(f"{_ATTENTION}.q_a_layernorm", "attention.q_norm", axis="Q"),
    Tensor(f"{_ATTENTION}.q_b_proj.weight", "(N H) Q", ("attention.wq_up",)),
    Tensor(f"{_ATTENTION}.kv_a_proj_with_mqa.weight", "G D", ("attention.wkv_down", "attention.wk_rope")),
    *norm(f"{_ATTENTION}.kv_a_layernorm", "attention.kv_norm", axis="Z"),
    Tensor(f"{_ATTENTION}.kv_b_proj.weight", "(N X) Z", ("attention.wk_up", "attention.wv_up")),
)
DEEPSEEK_V3 = LLAMA.relative(
    "DeepSeek-V3",
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    _V3,
    llama_tensors(more=(*_LATENT_ATTENTION, *DEEPSEEK_EXPERTS)),
    irrelevant=DEEPSEEK_TRAINING,
    also=("kimi_k2",),
)
FAMILIES = (DEEPSEEK_V3, DEEPSEEK_V3.relative("DeepSeek-V2", "deepseek_v2", "DeepseekV2ForCausalLM", _V2, also=()))
