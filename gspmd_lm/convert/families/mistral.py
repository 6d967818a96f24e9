"""Mistral, Ministral 3 and Mixtral."""

from gspmd_lm.convert.families.llama import LLAMA, ROUTER_TRAINING, llama_tensors, routed_experts
from gspmd_lm.convert.family import llama_fields, mixture
from gspmd_lm.convert.fields import Window
from gspmd_lm.convert.rope import BETA, Rope

_MISTRAL = (*llama_fields(8), Window(4096))
_YARN = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "beta_fast": 32.0, "beta_slow": 1.0,
    "original_max_position_embeddings": 16384, "mscale": 1.0, "mscale_all_dim": 1.0, BETA: 0.1,
}  # fmt: skip
_MINISTRAL = (*llama_fields(8, 128, 1e-5, Rope(temperature=True, default=_YARN)), Window(None))
_MIXTRAL = (*llama_fields(8, eps=1e-5, rope=Rope(1e6)), Window(None))
MIXTRAL = LLAMA.relative(
    "Mixtral",
    "mixtral",
    "MixtralForCausalLM",
    (*_MIXTRAL, *mixture("num_local_experts num_experts", 8, 2)),
    llama_tensors(more=routed_experts("model.layers.{}.block_sparse_moe", "w1", "w3", "w2")),
    irrelevant=ROUTER_TRAINING,
)
FAMILIES = (
    # document_attention matters only in training on rows of several documents.
    LLAMA.relative("Mistral", "mistral", "MistralForCausalLM", _MISTRAL, irrelevant=("document_attention",)),
    LLAMA.relative("Ministral 3", "ministral3", "Ministral3ForCausalLM", _MINISTRAL),
    MIXTRAL,
)
