"""Encoders of transformers: read, written, and with other heads than they came with."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gspmd_lm.cli import conversion
from gspmd_lm.config import from_dict, load, nest, to_dict
from gspmd_lm.convert import architecture, export, pretrained, safetensors
from gspmd_lm.convert.families import FAMILIES
from gspmd_lm.convert.families.bert import SEVERAL
from gspmd_lm.errors import InputError
from gspmd_lm.model.families import apply, decode, family
from gspmd_lm.model.loss import logits
from gspmd_lm.sharding.annotate import placed_by
from tests.convert import ours
from tests.convert.reference_cases import DEBERTA, DEBERTA_1

SIZES = {
    "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
    "max_position_embeddings": 40,
}  # fmt: skip
LABELS = {"id2label": {"0": "no", "1": "perhaps", "2": "yes"}, "label2id": {"no": 0, "perhaps": 1, "yes": 2}}
NARROW = {"embedding_size": 24}
ROBERTA = {"type_vocab_size": 1, "layer_norm_eps": 1e-5}
CONVOLUTION = {"type_vocab_size": 2, "conv_kernel_size": 3, "conv_act": "gelu"}
KINDS = {
    "BertForMaskedLM": {"hidden_act": "gelu_new", "is_causal": False}, "BertForSequenceClassification": LABELS,
    "RobertaForMaskedLM": ROBERTA, "RobertaForSequenceClassification": ROBERTA | LABELS,
    "XLMRobertaForMaskedLM": ROBERTA, "XLMRobertaForSequenceClassification": ROBERTA | LABELS,
    "CamembertForMaskedLM": ROBERTA, "ErnieForSequenceClassification": LABELS,
    "DebertaForMaskedLM": DEBERTA_1, "DebertaForSequenceClassification": DEBERTA_1 | LABELS | {"type_vocab_size": 2},
    "DebertaV2ForMaskedLM": DEBERTA,
    "DebertaV2ForSequenceClassification": DEBERTA | LABELS | CONVOLUTION | {"position_buckets": -1},
    "ElectraForMaskedLM": NARROW, "ElectraForPreTraining": NARROW,
    "ElectraForSequenceClassification": {"embedding_size": 32} | LABELS,
    "AlbertForMaskedLM": NARROW | {"hidden_act": "gelu"}, "AlbertForSequenceClassification": NARROW | LABELS,
}  # fmt: skip
ROWS = {row.architecture: row for row in FAMILIES if row.architecture in KINDS}
LENGTHS = np.array([16, 9, 12, 5])
HEAD = "cls.predictions.transform.dense.weight"


def _config(kind):
    row = ROWS[kind]
    raw = SIZES | {"model_type": row.model_type, "architectures": [kind]} | KINDS[kind]
    return raw if row.prefix != "roberta." else raw | {"pad_token_id": 1}


def _model(raw):
    row = architecture.family_of(raw, "x")
    settings = architecture.model_settings(row, raw, "x")
    return row, from_dict(
        {"name": "x", "model": nest(settings), "data": {"seq": 1},
         "train": {"steps": 1}}, "x"
    ).model  # fmt: skip


def _tensors(kind):
    """A value for each tensor of a file, as transformers names them."""
    row, model = _model(_config(kind))
    draw, names = np.random.default_rng(0), {}
    for tensor in row.tensors:
        if tensor.weights != ("unembedding",) and tensor.exists_in(model):
            for layer in range(model.layers if "{}" in tensor.name else 1):
                names[tensor.name.format(layer)] = tensor.shape(model)
    return {name: draw.normal(0, 0.3, shape).astype(np.float32) for name, shape in names.items()}


def _folder(folder, raw, tensors):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(raw))
    kinds = {name: ("F32", array.shape) for name, array in tensors.items()}
    body = b"".join(np.ascontiguousarray(array).tobytes() for array in tensors.values())
    (folder / "model.safetensors").write_bytes(safetensors.header_bytes(kinds) + body)
    return folder


def _same(before, after):
    assert before.keys() == after.keys()
    for name, array in before.items():
        assert array.tobytes() == after[name].tobytes(), name


@pytest.mark.parametrize("kind", KINDS)
def test_there_and_back(kind, tmp_path):
    tensors = _tensors(kind)
    found = pretrained.open_folder(_folder(tmp_path / "in", _config(kind), tensors))
    config, params, row = found.config, jax.device_get(ours.on_one_device(found)), ROWS[kind]
    wanted = ("masked", 0) if kind.endswith("LM") else ("classes", 3)
    assert (config.objective, config.model.num_classes) == (("replaced", 1) if "PreTraining" in kind else wanted)
    model, others = config.model, row.prefix != "roberta."
    types = KINDS[kind].get("type_vocab_size", 0 if "Deberta" in kind else 2)
    assert (model.embedding.token_types, model.embedding.position_offset, model.context) == (
        (types, 0, 40) if others else (1, 2, 38)
    )
    for like in (found.like, None):
        out = tmp_path / f"out {like is None}"
        export.write_folder(out, config.model, params, like)
        base = row.prefix if like else architecture.family_of(json.loads((out / "config.json").read_text()), "x").prefix
        _same({name.replace(row.prefix, base): array for name, array in tensors.items()}, ours.tensors(out))
        written = json.loads((out / "config.json").read_text())
        assert like is None or written == _config(kind) | {"torch_dtype": "float32"}
        assert _model(written)[1] == _model(_config(kind))[1] and not found.new


def test_files_of_old_names_copies_and_other_heads(tmp_path):
    tensors = _tensors("BertForMaskedLM")
    want = ours.on_one_device(pretrained.open_folder(_folder(tmp_path / "plain", _config("BertForMaskedLM"), tensors)))
    old = {name.removeprefix("bert.").replace("LayerNorm.weight", "LayerNorm.gamma")
           .replace("LayerNorm.bias", "LayerNorm.beta"): array for name, array in tensors.items()}  # fmt: skip
    old |= {
        "cls.predictions.decoder.weight": tensors["bert.embeddings.word_embeddings.weight"],
        "cls.predictions.decoder.bias": tensors["cls.predictions.bias"],
        "embeddings.position_ids": np.arange(40, dtype=np.float32)[None],
        "pooler.dense.weight": np.ones((32, 32), np.float32), "pooler.dense.bias": np.ones(32, np.float32),
        "cls.seq_relationship.weight": np.ones((2, 32), np.float32),
    }  # fmt: skip
    found = pretrained.open_folder(_folder(tmp_path / "old", _config("BertForMaskedLM"), old))
    jax.tree.map(np.testing.assert_array_equal, want, ours.on_one_device(found))
    (note,) = [note for note in found.notes if "another head" in note]
    assert "pooler.dense.weight" in note and "seq_relationship" in note and "decoder" not in note

    for name in ("cls.predictions.decoder.bias", "cls.predictions.decoder.weight"):
        with pytest.raises(InputError, match=f"unexpected   {name}: not equal to"):
            pretrained.open_folder(_folder(tmp_path / name, _config("BertForMaskedLM"), old | {name: old[name] + 1}))
    for name in (HEAD, "encoder.layer.1.output.dense.bias"):
        less = {other: array for other, array in old.items() if other != name}
        with pytest.raises(InputError, match="missing      .*" + name):
            pretrained.open_folder(_folder(tmp_path / f"no {name}", _config("BertForMaskedLM"), less))


def test_a_folder_gets_the_head_that_is_asked_for(tmp_path):
    """What the files have of it is read, and the rest is drawn, alike each time."""
    tensors = {name.removeprefix("bert."): array for name, array in _tensors("BertForSequenceClassification").items()
               if not name.startswith("classifier")}  # fmt: skip
    folder = _folder(tmp_path / "in", _config("BertForMaskedLM") | {"architectures": ["BertModel"]}, tensors)
    asked = pretrained.open_folder(folder, ["objective=classes", "model.classes.count=4"])
    assert pretrained.open_folder(folder, ["model.classes.count=4"]).config == asked.config  # classes ask for it too
    assert [*asked.new] == ["classifier", "classifier_bias"] and not any("another head" in one for one in asked.notes)
    params, again = (ours.on_one_device(asked) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, params, again)
    np.testing.assert_array_equal(params["pooler"], tensors["pooler.dense.weight"].T)
    assert params["classifier"].shape == (32, 4) and np.std(params["classifier"]) > 0
    export.write_folder(tmp_path / "out", asked.config.model, jax.device_get(params), asked.like)
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert written["architectures"] == ["BertForSequenceClassification"] and len(written["id2label"]) == 4

    plain = pretrained.open_folder(folder)
    assert plain.config.objective == "masked" and "unembedding_bias" in plain.new and "head_norm.scale" in plain.new
    assert any("pooler.dense.bias" in note for note in plain.notes)
    assert np.all(ours.on_one_device(plain)["head_norm"]["scale"] == 1)
    lacking = {name: array for name, array in tensors.items() if "layer.0" not in name}
    with pytest.raises(InputError, match="missing"):
        pretrained.open_folder(_folder(tmp_path / "broken", json.loads((folder / "config.json").read_text()), lacking))


@pytest.mark.parametrize(
    ("kind", "changed", "message"),
    [
        ("BertForMaskedLM", {"position_embedding_type": "relative_key"}, "has positions within attention"),
        ("BertForMaskedLM", {"is_decoder": True}, "sees only earlier tokens"),
        ("BertForMaskedLM", {"is_causal": True}, "is_causal: True hides later tokens from earlier ones"),
        ("BertForMaskedLM", {"something_new": 1}, "something_new: 1 is an unknown field"),
        ("BertForSequenceClassification", {"num_labels": 2}, "num_labels: 2 contradicts id2label, which has 3"),
        ("DebertaV2ForMaskedLM", {"pos_att_type": "c2p"}, "pos_att_type: 'c2p' is not supported"),
        ("DebertaV2ForMaskedLM", {"position_buckets": 10}, "position_buckets: 10 is not supported if it is"),
        ("DebertaForMaskedLM", {"talking_head": True}, "talking_head: True mixes the scores of heads"),
        ("DebertaV2ForMaskedLM", {"conv_kernel_size": 3, "conv_groups": 2}, "conv_groups: 2 is not supported, only 1"),
        ("DebertaV2ForMaskedLM", {"conv_kernel_size": 3, "conv_act": "relu"}, "only tanh and gelu"),
        ("DebertaV2ForMaskedLM", {"conv_kernel_size": 4}, "convolution: taps=4: must be an odd number"),
        ("AlbertForMaskedLM", {"num_hidden_groups": 2}, "weights of their own beside shared ones"),
        ("RobertaForMaskedLM", {"hidden_act": "relu"}, "is not the activation of this family's head"),
        ("RobertaForMaskedLM", {"max_position_embeddings": 2}, "leaves no position after"),
    ],
)
def test_what_is_refused(kind, changed, message):
    with pytest.raises(InputError, match=message):
        _model(_config(kind) | changed)


def test_one_class_is_a_number(tmp_path):
    raw = _config("BertForSequenceClassification") | {"id2label": {"0": "x"}, "label2id": {"x": 0}}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = architecture.new_config(tmp_path)
    assert (config.objective, config.model.num_classes, config.data.label_kind) == ("classes", 1, "number")
    other = architecture.new_config(tmp_path, ["objective=masked", "data.label_kind=class"])
    assert (other.objective, other.model.num_classes, other.model.logits.transform) == ("masked", 0, True)
    (tmp_path / "x.yaml").write_text(json.dumps(to_dict(config)))
    assert load(str(tmp_path / "x.yaml")) == config


def test_a_classifier_of_several_classes_says_what_its_data_need():
    raw = _config("BertForSequenceClassification") | {"problem_type": "multi_label_classification"}
    assert any("data.label_kind=classes" in note for note in architecture.notes(_model(raw)[0], raw))
    of_images = {"model_type": "vit", "architectures": ["ViTForImageClassification"]}
    with pytest.raises(InputError, match=r"problem_type(.|\n)*is not supported for images"):
        _model(of_images | {"problem_type": raw["problem_type"]})


def test_an_export_says_whether_a_text_has_several_classes(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(_config("BertForSequenceClassification")))
    one, several = (architecture.new_config(tmp_path, [f"data.label_kind={kind}"]) for kind in ("class", "classes"))
    names, came = ["a", "b", "c"], {"problem_type": SEVERAL}

    def said(config, classes, like):
        return conversion.said_of_classes(config, classes, like).get("problem_type")

    assert said(several, [], {}) == said(several, names, {}) == SEVERAL
    assert said(one, names, came) == "single_label_classification"
    assert said(one, [], came) is said(one, names, {}) is None  # as it came, and as any other says nothing
    assert conversion.said_of_classes(one, names, {})["label2id"] == {"a": 0, "b": 1, "c": 2}


def _batch(cfg, pad):
    draw = np.random.default_rng(1)
    mask = (np.arange(16) < LENGTHS[:, None]).astype(np.int32)
    tokens = np.where(mask, draw.integers(3, 96, mask.shape), pad)
    types = draw.integers(0, max(cfg.embedding.token_types, 1), mask.shape)
    places = np.broadcast_to(np.arange(16), mask.shape)
    return {"tokens": tokens, "token_types": types, "segment_ids": mask, "positions": places, "row": np.arange(4)}


def _computed(cfg, params, batch, placed=None):
    """The logits, or the scores of classes, or of tokens."""

    def run(params, batch):
        with placed_by(placed):
            found = apply(cfg, params, batch) if cfg.classes else logits(*decode(cfg, params, batch), cfg)
            return found[..., 0] if cfg.classes and cfg.classes.of == "tokens" else found

    return np.asarray(jax.jit(run)(params, jax.tree.map(jnp.asarray, batch)))


@pytest.mark.parity
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_numbers_are_those_of_transformers(kind, tmp_path):
    import torch
    import transformers

    torch.set_num_threads(1)
    torch.manual_seed(0)
    theirs = getattr(transformers, kind)(
        getattr(transformers, f"{kind.split('For')[0]}Config")(**SIZES, **KINDS[kind], attn_implementation="eager")
    ).eval()
    for name, array in theirs.named_parameters():
        array.data.normal_(1 if "norm" in name.lower() and name.endswith("weight") else 0, 0.2)
    theirs.save_pretrained(tmp_path / "in")
    found = pretrained.open_folder(tmp_path / "in", [ours.EXACT])
    cfg, params = found.config.model, ours.on_one_device(found)
    batch = _batch(cfg, theirs.config.pad_token_id)
    with torch.no_grad():
        inputs = {"input_ids": "tokens", "attention_mask": "segment_ids", "token_type_ids": "token_types"}
        want = theirs(**{name: torch.tensor(batch[of]) for name, of in inputs.items()}).logits.numpy()
    real = ... if cfg.num_classes > 1 else batch["segment_ids"] == 1
    limit = 1e-5 * np.abs(want).max()
    assert np.abs(_computed(cfg, params, batch) - want)[real].max() < limit
    placed = ours.placement(cfg, "fsdp2_tp4")
    split = found.load(ours.shardings(found, placed))
    assert np.abs(_computed(cfg, split, batch, placed) - want)[real].max() < limit
    like = found.like if kind.startswith("Ernie") else None  # else it is written as BERT, which it equals
    export.write_folder(tmp_path / "out", cfg, jax.device_get(params), like)
    again = getattr(transformers, type(theirs).__name__).from_pretrained(tmp_path / "out")
    for name, array in theirs.state_dict().items():
        assert torch.equal(array, again.state_dict()[name]), name


@pytest.mark.parity
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["BertForSequenceClassification", "DebertaV2ForSequenceClassification"])
def test_the_loss_of_several_classes_and_its_gradients_are_those_of_transformers(kind, tmp_path):
    import torch
    import transformers

    torch.manual_seed(0)
    settings = {**KINDS[kind], "problem_type": SEVERAL, "attn_implementation": "eager"}
    rates = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    theirs = getattr(transformers, kind)(
        getattr(transformers, f"{kind.split('For')[0]}Config")(**SIZES, **settings, **rates)
    )
    for name, array in theirs.named_parameters():
        array.data.normal_(1 if "norm" in name.lower() and name.endswith("weight") else 0, 0.2)
    theirs.save_pretrained(tmp_path / "in")
    found = pretrained.open_folder(tmp_path / "in", [ours.EXACT, "data.label_kind=classes"])
    cfg, true = found.config.model, np.array([[1, 0, 1], [0, 0, 0], [1, 1, 1], [0, 1, 0]])
    batch = _batch(cfg, theirs.config.pad_token_id or 0)
    inputs = {"input_ids": "tokens", "attention_mask": "segment_ids", "token_type_ids": "token_types"}
    want = theirs(**{name: torch.tensor(batch[of]) for name, of in inputs.items()},
                  labels=torch.tensor(true, dtype=torch.float32)).loss  # fmt: skip
    want.backward()
    batch |= {"labels": true @ [1, 2, 4]}
    padded = {name: np.concatenate([x, np.full_like(x[:1], -(name == "labels"))]) for name, x in batch.items()}
    module, objective = family(cfg).module(cfg), family(cfg).objective(found.config)

    def loss(params, batch):
        return objective.sums(module, params, batch, None).loss / objective.count(batch)

    params = ours.on_one_device(found)
    our_loss, gradients = jax.jit(jax.value_and_grad(loss))(params, jax.tree.map(jnp.asarray, padded))
    assert float(our_loss) == pytest.approx(want.item(), rel=1e-6)
    export.write_folder(tmp_path / "out", cfg, jax.device_get(gradients), found.like)
    written = ours.tensors(tmp_path / "out")
    theirs = {name: array.grad.numpy() for name, array in theirs.named_parameters() if array.grad is not None}
    nothing = 1e-6 * np.linalg.norm([np.linalg.norm(gradient) for gradient in theirs.values()])
    for name, gradient in theirs.items():
        assert np.linalg.norm(written[name] - gradient) <= 1e-3 * np.linalg.norm(gradient) + nothing, name
