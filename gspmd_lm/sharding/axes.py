"""The table of logical axes and arrays of the decoder."""

from gspmd_lm.sharding.names import Vocabulary

# Logical axis -> its letter in shapes and einsums, and its meaning.
AXES = {
    "batch": ("B", "sequences"),
    "seq": ("T", "query positions"),
    "kv_seq": ("S", "key positions"),
    "embed": ("D", "model width"),
    "embedding_width": ("W", "width of a token table that is not as wide as the model"),
    "layers": ("L", "scanned layers"),
    "positions": ("-", "rows of a position table"),
    "mlp": ("F", "feed-forward width"),
    "heads": ("N", "query heads"),
    "kv_heads": ("K", "key and value heads"),
    "head_dim": ("H", "size of one head"),
    "q_rank": ("Q", "size of the vector that queries are made from"),
    "kv_rank": ("Z", "size of the vector that keys and values are made from"),
    "rope_dim": ("P", "the part of a key that all heads of latent attention share"),
    "key_dim": ("I", "size of a key, in the state of linear attention"),
    "taps": ("A", "tokens or frames that a short convolution sees"),
    "vocab": ("V", "padded vocabulary"),
    "expert": ("E", "experts"),
    "scores": ("C", "scores of a router, one for each expert"),
    "rank": ("R", "rank of an adapter, or of the product beside attention"),
    "streams": ("M", "residual streams"),
    "coefficients": ("U", "how much streams enter each other"),
    "stream_width": ("O", "model width, as the other side of a matrix from and to that width"),
    "layer_embed": ("Y", "width of a token's embedding for one layer"),
    "types": ("-", "rows of a table of token types"),
    "ranges": ("-", "ranges of distances from query to key"),
    "classes": ("X", "classes of texts or images"),
    "pixels": ("-", "numbers of a patch of an image"),
    "bands": ("-", "numbers of a frame of sound"),
    "joint": ("-", "numbers of the space in which texts and images are compared"),
}
STACKED = ("layers", "expert", "streams")  # axes along which matrices stand side by side; they are the first ones
NARROW = {"embed", "rank", "q_rank", "kv_rank"}  # a side of a matrix that is one axis
# The far side of a matrix inside a block.
HIDDEN = {"heads", "kv_heads", "mlp", "rank", "layer_embed", "q_rank", "kv_rank", "rope_dim"}

# Every array that a rules file may name: weights by the end of their path, activations by their name in `shard`.
WEIGHTS = {
    "embedding": "token table",
    "embedding_in": "projection of the token table's rows, where they have a width of their own",
    "embedding_in_bias": "its bias",
    "embedding_out": "projection of the output back to that width",
    "position_embedding": "table of learned positions",
    "unembedding": "output matrix of an untied model",
    "unembedding_bias": "its bias",
    "type_embedding": "table of token types",
    "head_transform": "matrix that stands before the logits",
    "head_transform_bias": "its bias",
    "pooler": "matrix of a text's first token, before its classes are scored",
    "pooler_bias": "its bias",
    "classifier": "matrix that scores classes",
    "classifier_bias": "its bias",
    "distillation_classifier": "matrix that scores classes at the second learned row of an image (DeiT)",
    "distillation_classifier_bias": "its bias",
    "stem": "projection of the patches of images",
    "stem_bias": "its bias",
    "class_row": "learned row that stands before patches, and that the class of an image is read at",
    "distillation_row": "learned row that follows it (DeiT)",
    "conv_in": "first convolution over frames of sound",
    "conv_in_bias": "its bias",
    "conv_out": "second convolution over frames of sound",
    "conv_out_bias": "its bias",
    "sinusoids": "table of fixed positions of sounds, which is not trained",
    "projection": "matrix from a text or an image to the space in which they are compared",
    "temperature": "logarithm of what their products are multiplied by",
    "relative_bias": "each head's bias of each range of distances",
    "relative_embedding": "vector of each range of distances",
    "merge": "matrix that makes one patch of four neighbouring ones",
    "convolution": "convolution over the tokens that the first layer reads",
    "convolution_bias": "its bias",
    "wq": "query projection",
    "wk": "key projection",
    "wv": "value projection",
    "wo": "output projection of attention",
    "bq": "query bias",
    "bk": "key bias",
    "bv": "value bias",
    "bo": "bias of the output projection",
    "sinks": "each head's logit of nothing",
    "wg": "projection of the gate on the output of attention",
    "wq_down": "projection of a token to the vector that queries are made from",
    "wq_up": "query projection of that vector",
    "wkv_down": "projection of a token to the vector that keys and values are made from",
    "wk_up": "key projection of that vector",
    "wv_up": "value projection of that vector",
    "wk_rope": "projection of a token to the part of keys that all heads share",
    "linear_q": "query projection of linear attention",
    "linear_k": "key projection of linear attention",
    "linear_v": "value projection of linear attention",
    "linear_z": "projection of the gate on the output of linear attention",
    "linear_a": "projection of how fast a head of linear attention forgets",
    "linear_b": "projection of how much a token changes the state of linear attention",
    "linear_out": "output projection of linear attention",
    "conv_q": "short convolution of queries of linear attention",
    "conv_k": "short convolution of its keys",
    "conv_v": "short convolution of its values",
    "decay": "logarithm of how fast each head of linear attention forgets",
    "decay_bias": "what is added to the projection of it",
    "streams_in": "projection of the embedded tokens to each residual stream but the first",
    "streams_out": "projection of each residual stream but the first before all are added",
    "altup_router": "what turns a token into features that streams are predicted and corrected by",
    "altup_predict": "what turns these features into how much streams enter each other before a block",
    "altup_correct": "what turns them into how much of the block's change enters each stream",
    "altup_scale": "scale of the first stream where a layer's embedding is multiplied with it",
    "laurel_in": "first matrix of the low-rank product beside attention",
    "laurel_out": "second matrix of the low-rank product beside attention",
    "layer_table": "table of each token's embeddings for all layers",
    "layer_in": "projection of the embedded tokens to a part of their embeddings for each layer",
    "layer_gate": "what turns the first stream into the gate of a layer's embedding",
    "layer_out": "projection of a gated embedding of a layer to the residual streams",
    "w_gate": "gate projection of a gated MLP",
    "w_up": "first projection of the MLP",
    "w_down": "second projection of the MLP",
    "router": "what turns a token into a logit for each expert",
    "router_bias": "bias of the router's logits",
    "balance_bias": "what is added to scores when experts are chosen",
    "shared_gate": "what turns a token into the logit of the shared experts' gate",
    "attention_layer_scale": "learned numbers that the output of attention is multiplied by",
    "mlp_layer_scale": "those of the output of the MLP",
    "b_gate": "bias of w_gate",
    "b_up": "bias of w_up",
    "b_down": "bias of w_down",
    "scale": "scale of a norm (final_norm.scale, attention_norm.scale, ...)",
    "bias": "bias of a norm",
}
BALANCE_BIAS = "balance_bias"  # it moves against the loads of a step; gradients do not change it
SINUSOIDS = "sinusoids"  # not trained
TO_RESIDUAL = ("wo", "w_down", "linear_out", "laurel_out")  # matrices that write to the residual stream
# Weights that may have a low-rank adapter (LoRA, arXiv 2106.09685): x @ wq + scale * (x @ wq_a) @ wq_b.
ADAPTED = ("wq", "wk", "wv", "wo", "w_gate", "w_up", "w_down")
# Weights that model.weight_dtype may keep in 8 bits, and whose products model.matmul_dtype is of: but for those of
# routed experts.
QUANTISED = (
    *ADAPTED, "wg", "wq_down", "wq_up", "wkv_down", "wk_rope", "wk_up", "wv_up", "linear_q", "linear_k", "linear_v",
    "linear_z", "linear_out",
)  # fmt: skip
ADAPTERS = {f"{name}_{part}": name for name in ADAPTED for part in "ab"}  # matrix of an adapter -> its weight
SCALES = {f"{name}_scale": name for name in QUANTISED}  # scales of a weight that rests in 8 bits -> the weight
WEIGHTS |= {
    name: f"{'first' if name.endswith('_a') else 'second'} matrix of the adapter of {of}"
    for name, of in ADAPTERS.items()
}
# Weights that keep their own dtype where they are not trained.
EXACT = ("scale", "bias", "decay", "decay_bias", *SCALES)
ACTIVATIONS = {
    "tokens": "the batch: input tokens, and what has their shape",
    "patches": "patches of images",
    "compared": "texts and images in the space in which they are compared",
    "frames": "frames of sounds",
    "frames_hidden": "output of the first convolution over them",
    "embedded": "rows of a token table with a width of its own, and what is multiplied with it",
    "residual": "the residual stream between blocks",
    "block_input": "what the projections of a block read: the normed residual, gathered",
    "q": "queries",
    "k": "keys",
    "v": "values",
    "q_latent": "vectors that queries are made from",
    "kv_latent": "vectors that keys and values are made from",
    "k_rope": "the part of keys that all heads of latent attention share",
    "attention_out": "output of attention, before wo",
    "hidden": "output of the MLP's activation, before w_down",
    "routing": "the logits of a router",
    "low_rank": "output of an adapter's first matrix",
    "logits": "one chunk of the logits",
    "memory": "what another stack made, as the blocks of this one read it",
    "vectors": "normed vectors of ranges of distances",
    "transformed": "output of head_transform or of pooler",
    "merged": "four neighbouring patches side by side, normed, before they become one",
    "class_scores": "scores of classes",
    "cache": "keys and values of the tokens so far, or what they are made from, kept while text is generated",
    "state": "what linear attention carries from token to token while text is generated",
}
ARRAYS = WEIGHTS | ACTIVATIONS
# Names that remat can save. `residual`: a layer's input and the sum after attention; `layer_input`: the input alone;
# `dispatched`: tokens where their experts compute them, sorted by expert.
_OUTSIDE = (
    "tokens", "patches", "frames", "frames_hidden", "embedded", "logits", "cache", "state", "low_rank", "memory",
    "vectors", "transformed", "class_scores", "compared", "merged",
)  # fmt: skip
IN_BLOCKS = ("layer_input", "dispatched", *(name for name in ACTIVATIONS if name not in _OUTSIDE))
DECODER = Vocabulary(
    axes=AXES,
    weights=WEIGHTS | {name: f"scales of the outputs of {of}, in 8 bits" for name, of in SCALES.items()},
    adapters=ADAPTERS | SCALES,
    stages="layers",
    activations=ACTIVATIONS,
    remat=IN_BLOCKS,
    settings={"batch": "data.batch", "vocab": "model.padded_vocab"},
)
