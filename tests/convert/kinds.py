"""The kinds of models that are no decoders of texts alone: small cases of each, their inputs, and what is computed.

tests/convert/test_kinds.py runs all of them. golden/GOLDEN.json has for each case its config.json, the shapes of its
tensors, and what transformers computes of the inputs.
"""

import json
import tempfile
from pathlib import Path

import jax
import numpy as np
import pytest
from einops import rearrange

from gspmd_lm.config import value_at
from gspmd_lm.data import images as of_image
from gspmd_lm.data import media, sounds
from gspmd_lm.model.families import apply
from gspmd_lm.sharding.annotate import placed_by
from tests.convert import ours, references
from tests.data.test_sound_rows import spoken, written

LABELS = {"id2label": {"0": "one", "1": "two", "2": "three"}, "label2id": {"one": 0, "two": 1, "three": 2}}


class Kind:
    """A kind of models. Arrays are found by their names, from inputs that config.json alone decides."""

    golden: str
    cases: dict[str, dict]  # name -> the fields of transformers' config
    architecture: str  # transformers' class
    default: tuple[str, ...]  # the cases that are computed without transformers, too
    expected: tuple  # of the first of these: family, objective, data.seq, data.source_seq
    layout = ""  # under which the numbers are compared, too
    variants = ("",)  # of the inputs; golden files have the results of the first
    salted = False  # whether weights are searched with which what is generated shows something

    def class_name(self, name):
        return self.architecture

    def folder(self, case, folder):
        """A folder with the config.json of a case, and with weights."""
        return ours.folder_of(case, folder)

    def compute(self, opened, more=0, placed=None, variant=""):
        """What our model finds, with `more` rows of padding than the config has."""
        raise NotImplementedError

    def spare(self, opened):
        """How many of the rows that the config has are padding."""
        return opened.config.data.seq - opened.config.model.context

    def ask(self, model, config, variant, folder):
        """What a model of transformers finds."""
        raise NotImplementedError

    def recorded(self, found):
        """The part of what is found that golden files have."""
        return found

    def amend(self, case, name):
        """Changes what transformers writes into a case."""


def run(function, opened, batch, placed):
    """The arrays that a function of model, parameters and batch gives."""
    model = opened.config.model
    params = opened.load(ours.shardings(opened, placed)) if placed else ours.on_one_device(opened)

    def compute(params, batch):
        with placed_by(placed):
            return function(model, params, batch)

    return jax.device_get(jax.jit(compute)(params, batch))


def cut_into_patches(images, size):
    return rearrange(images, "B c (h p) (w q) -> B (h w) (c p q)", p=size, q=size)


def draw_images(count, vision):
    shape = (count, vision["num_channels"], vision["image_size"], vision["image_size"])
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


_VIT = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 8, "intermediate_size": 64, "image_size": 12,
    "patch_size": 4,
}  # fmt: skip


_IMAGES = {
    "vit": _VIT | LABELS,
    "vit-grey": _VIT | {"num_channels": 1, "qkv_bias": False, "num_labels": 5},
    "deit": _VIT | LABELS | {"hidden_act": "gelu_new"},
    "beit": _VIT | LABELS | {"use_relative_position_bias": True},
    "beit-shared": _VIT | LABELS | {
        "use_shared_relative_position_bias": True, "use_absolute_position_embeddings": True,
        "use_mean_pooling": False,
    },
    "dinov2": {name: size for name, size in _VIT.items() if name != "intermediate_size"} | LABELS | {
        "mlp_ratio": 2, "use_mask_token": False,
    },
    "swin": LABELS | {
        "image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2, 3], "num_heads": [4, 8],
        "window_size": 4,
    },
    "swin-one-window": LABELS | {
        "image_size": 24, "patch_size": 2, "embed_dim": 8, "depths": [4, 1, 2], "num_heads": [4, 8, 16],
        "window_size": 3, "mlp_ratio": 2.5, "qkv_bias": False, "hidden_act": "gelu_new", "num_channels": 1,
    },
    "deit-teacher": _VIT | LABELS,
}  # fmt: skip


class Images(Kind):
    """Models that tell the class of an image."""

    golden = "images"
    cases = _IMAGES
    default = tuple(_IMAGES)
    expected = ("ViT", "classes", 16, 0)
    layout = "fsdp2_tp4"

    def class_name(self, name):
        word = {"vit": "ViT", "deit": "DeiT", "beit": "Beit", "dinov2": "Dinov2", "swin": "Swin"}[
            name.partition("-")[0]
        ]
        return f"{word}ForImageClassification{'WithTeacher' * name.endswith('teacher')}"

    def compute(self, opened, more=0, placed=None, variant=""):
        model, images = opened.config.model, draw_images(4, opened.like)
        patches, seq = model.patches, opened.config.data.seq + more
        padding = ((0, 0), (patches.first, seq - model.context), (0, 0))
        rows = np.pad(cut_into_patches(images, patches.size), padding, constant_values=7.0)
        return {"scores": run(apply, opened, {"patches": rows, "row": np.arange(len(rows))}, placed)}

    def ask(self, model, config, variant, folder):
        import torch

        return {"scores": model(torch.from_numpy(draw_images(4, config))).logits.numpy()}


END, LENGTHS = 98, (9, 4, 7, 12)  # the token that ends a text, and the tokens of the texts of a batch
_TOWER = {"num_attention_heads": 4, "intermediate_size": 64}
_TEXT = {
    "vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "max_position_embeddings": 16, "bos_token_id": 97,
    "eos_token_id": END, "pad_token_id": 0, **_TOWER,
}  # fmt: skip
_VISION = {"hidden_size": 48, "num_hidden_layers": 1, "image_size": 12, "patch_size": 4, **_TOWER}


_TOWERS = {
    "clip": {"text_config": _TEXT, "vision_config": _VISION, "projection_dim": 24},
    # As files of 2021 have it, where the token that ends a text is the one with the highest number.
    "clip-old": {
        "text_config": _TEXT | {"eos_token_id": 2, "hidden_act": "gelu", "hidden_size": 48},
        "vision_config": _VISION | {"hidden_act": "gelu", "num_channels": 1}, "projection_dim": 16,
        "logit_scale_init_value": 1.5,
    },
}  # fmt: skip


class Towers(Kind):
    """CLIP: features of texts and of images, and their products."""

    golden = "towers"
    cases = _TOWERS
    architecture = "CLIPModel"
    default = tuple(_TOWERS)
    expected = ("CLIP", "contrastive", 16, 16)

    def draw(self, config):
        """Texts with padding at their right, what of them is no padding, and images."""
        rng = np.random.default_rng(0)
        tokens = rng.integers(3, 97, (len(LENGTHS), max(LENGTHS) + 2))
        mask = np.arange(tokens.shape[1]) < np.array(LENGTHS)[:, None]
        tokens = np.where(mask, tokens, 0)
        tokens[np.arange(len(LENGTHS)), np.array(LENGTHS) - 1] = END
        side = config["vision_config"]["image_size"]
        shape = len(LENGTHS), config["vision_config"]["num_channels"], side, side
        return tokens, mask, rng.standard_normal(shape).astype(np.float32)

    def spare(self, opened):
        return opened.config.data.source_seq - opened.config.model.vision.patches.rows

    def compute(self, opened, more=0, placed=None, variant=""):
        patches, (tokens, mask, images) = opened.config.model.vision.patches, self.draw(opened.like)
        rows, T = opened.config.data.source_seq + more, tokens.shape[1]
        seq = min(max(T + 2 + more, T), opened.config.data.seq)
        padding = ((0, 0), (0, seq - T))
        cut, before = cut_into_patches(images, patches.size), ((0, 0), (1, rows - patches.rows), (0, 0))
        batch = {
            "tokens": np.pad(tokens, padding, constant_values=5),
            "segment_ids": np.pad(mask.astype(np.int32), padding),
            "positions": np.tile(np.arange(seq), (len(tokens), 1)) * np.pad(mask, padding),
            "patches": np.pad(cut, before, constant_values=7.0),
            "row": np.arange(len(tokens)),
        }
        text_BP, image_BP, scale = run(apply, opened, batch, placed)
        return {"text": text_BP, "image": image_BP, "logits": scale * text_BP @ image_BP.T}

    def ask(self, model, config, variant, folder):
        import torch

        tokens, mask, images = map(torch.from_numpy, self.draw(config))
        found = model(input_ids=tokens, attention_mask=mask.long(), pixel_values=images)
        return {"text": found.text_embeds.numpy(), "image": found.image_embeds.numpy(),
                "logits": found.logits_per_text.numpy()}  # fmt: skip


ROWS, TEXT, NEW = 20, 5, 24  # of a sound, of a text, and tokens that are generated
FIRST = [1, 2, 3]
_WHISPER = {
    "vocab_size": 257, "d_model": 32, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 8,
    "decoder_attention_heads": 8, "encoder_ffn_dim": 48, "decoder_ffn_dim": 64, "num_mel_bins": 8,
    "max_source_positions": ROWS, "max_target_positions": 40, "pad_token_id": 256, "bos_token_id": 256,
    "eos_token_id": 256, "decoder_start_token_id": 0,
}  # fmt: skip
# All but the bytes of letters, and at first all but some of these: nothing ends a text.
NEVER, NEVER_FIRST = [*range(32), *range(127, 257)], [*range(32, 100), *range(110, 127)]
GENERATION = {
    "decoder_start_token_id": 0, "eos_token_id": 256, "pad_token_id": 256,
    "suppress_tokens": NEVER, "begin_suppress_tokens": NEVER_FIRST,
    "forced_decoder_ids": [[place, token] for place, token in enumerate(FIRST, 1)],
}  # fmt: skip


class Salted(Kind):
    """A kind whose weights are searched: what is generated must depend on the inputs."""

    salted = True
    smaller = 1.0  # a factor of token tables: a larger tied table makes a text repeat its last token

    def folder(self, case, folder):
        def weight(name, shape):
            drawn = references.weight(name, tuple(shape), case["salt"], "t5")
            return drawn * np.float32(self.smaller if "embed_tokens" in name else 1)

        weights = {name: weight(name, shape) for name, shape in case["tensors"].items()}
        return references.save(folder, dict(case["config"]), weights)

    def prompts(self, folder):
        """The files of two prompts."""
        raise NotImplementedError

    def generate(self, model, opened, folder):
        """The tokens that transformers generates for each prompt."""
        raise NotImplementedError

    def shows_something(self, tokens):
        raise NotImplementedError


_SOUNDS = {
    "whisper": _WHISPER,
    "whisper-new": _WHISPER | {"encoder_layers": 2, "encoder_attention_heads": 4, "activation_function": "gelu_new"},
}


class Sounds(Salted):
    """Whisper."""

    golden = "sounds"
    cases = _SOUNDS
    architecture = "WhisperForConditionalGeneration"
    default = tuple(_SOUNDS)
    expected = ("Whisper", "seq2seq", 40, 24)
    smaller = 0.1

    def folder(self, case, folder):
        super().folder(case, folder)
        (folder / "generation_config.json").write_text(json.dumps(GENERATION))
        return folder

    def prompts(self, folder):
        return [written(folder / f"{number}.wav", spoken(number, seconds)) for number, seconds in ((1, 0.4), (2, 0.31))]

    def texts(self):
        return np.random.default_rng(0).integers(0, 257, (2, TEXT))

    def spare(self, opened):
        return opened.config.source_seq - ROWS

    def compute(self, opened, more=0, placed=None, variant=""):
        source_seq = opened.config.source_seq + more
        with tempfile.TemporaryDirectory() as folder:
            paths = self.prompts(Path(folder))
            frames = np.stack([sounds.read_sound_frames(str(path), opened.config.model) for path in paths])
        padding = ((0, 0), (0, source_seq - ROWS), (0, 0), (0, 0))
        places = np.tile(np.arange(source_seq), (2, 1))
        batch = {
            "tokens": self.texts(),
            "positions": np.tile(np.arange(TEXT), (2, 1)),
            "segment_ids": np.ones((2, TEXT), int),
            "source_frames": np.pad(frames, padding, constant_values=7.0),
            "source_positions": places % ROWS,
            "source_segment_ids": (places < ROWS).astype(int),
        }
        return {"logits": np.asarray(ours.compiled(opened.config.model, ours.on_one_device(opened), batch))}

    def features(self, folder):
        import transformers

        extractor = transformers.WhisperFeatureExtractor(feature_size=8, chunk_length=1)
        extractor.n_samples = samples = ROWS * sounds.ROW_SAMPLES
        heard = [sounds.samples("", path.read_bytes(), ROWS).astype(np.float32) for path in self.prompts(folder)]
        return extractor(heard, sampling_rate=16000, return_tensors="pt", max_length=samples).input_features

    def ask(self, model, config, variant, folder):
        import torch

        found = model(input_features=self.features(folder), decoder_input_ids=torch.from_numpy(self.texts()))
        return {"logits": found.logits.numpy()}

    def generate(self, model, opened, folder):
        found = [model.generate(one[None], do_sample=False, max_new_tokens=NEW) for one in self.features(folder)]
        return [one[0].tolist() for one in found]

    def shows_something(self, tokens):
        return min(len({*text}) for text in tokens) >= 8 and tokens[0][8:] != tokens[1][8:]


WIDTH = 32
_SAM = {
    "hidden_size": 48, "output_channels": WIDTH, "num_hidden_layers": 3, "num_attention_heads": 8, "image_size": 24,
    "patch_size": 4, "window_size": 4, "global_attn_indexes": [2], "num_pos_feats": WIDTH // 2, "mlp_dim": 64,
}  # fmt: skip
_PROMPT = {"hidden_size": WIDTH, "image_size": 24, "patch_size": 4}
_DECODER = {"hidden_size": WIDTH, "mlp_dim": 40, "iou_head_hidden_dim": WIDTH}


def _sam(**vision):
    return {"vision_config": _SAM | vision, "prompt_encoder_config": _PROMPT, "mask_decoder_config": _DECODER}


_SAMS = {
    # 6 x 6 patches: windows of 4 reach beyond them, with keys that are biases alone.
    "sam": _sam(),
    # Windows that fit, no positions of either kind, and a pattern that the layers repeat.
    "sam-plain": _sam(
        window_size=3, num_hidden_layers=4, global_attn_indexes=[1, 3], use_abs_pos=False, use_rel_pos=False,
        qkv_bias=False, num_channels=1,
    ),
    "sam-whole": _sam(window_size=0, num_hidden_layers=1, global_attn_indexes=[]),
}  # fmt: skip


class Masks(Kind):
    """SAM: the masks of an object and their quality, for points, for a box, and for a mask as a prompt."""

    golden = "masks"
    cases = _SAMS
    architecture = "SamModel"
    default = ("sam",)
    expected = ("SAM", "masks", 40, 0)
    layout = "fsdp2_tp4"
    variants = ("mask", "points", "box")

    def draw(self, config):
        """Images, two points of each, of and beside the object, a box, and a mask that is a prompt."""
        rng, vision = np.random.default_rng(0), config["vision_config"]
        side = vision["image_size"]
        images = rng.standard_normal((2, vision["num_channels"], side, side)).astype(np.float32)
        points = rng.integers(0, side, (2, 2, 2)).astype(np.float32)
        corner = rng.integers(0, side // 2, (2, 1, 2))
        boxes = np.concatenate([corner, corner + 5], -1).astype(np.float32)
        fine = 4 * side // vision["patch_size"]
        return images, points, boxes, rng.standard_normal((2, 1, fine, fine)).astype(np.float32)

    def compute(self, opened, more=0, placed=None, variant="mask"):
        model, seq = opened.config.model, opened.config.data.seq + more
        patches, (images, points, boxes, mask) = model.patches, self.draw(opened.like)
        padding = (0, 0), (0, seq - model.context), (0, 0)
        cut = cut_into_patches(images, patches.size)
        batch = {"patches": np.pad(cut, padding, constant_values=7.0), "row": np.arange(2)}
        kinds = np.tile(np.array([1, 0, -1], np.int32), (2, 1))
        batch |= {"points": np.pad((points + 0.5) / patches.image, ((0, 0), (0, 1), (0, 0))), "point_kinds": kinds}
        if variant != "points":  # with a box, no token says that there is no further point
            corners = (boxes.reshape(2, 2, 2) + 0.5) / patches.image
            batch["points"] = np.concatenate([batch["points"][:, :2], corners], 1)
            batch["point_kinds"] = np.concatenate([kinds[:, :2], np.tile(np.array([2, 3], np.int32), (2, 1))], 1)
        if variant == "mask":
            of_patches = rearrange(mask, "B 1 (h y) (w x) -> B (h w) (y x)", y=4, x=4)
            batch["prompt_mask"] = np.pad(of_patches, padding, constant_values=7.0)
        drawn, iou = run(apply, opened, batch, placed)
        drawn = drawn[:, :, : model.context]
        return {"masks": rearrange(drawn, "B M (h w) (y x) -> B M (h y) (w x)", h=patches.side, y=4), "iou": iou}

    def ask(self, model, config, variant, folder):
        import torch

        images, points, boxes, mask = map(torch.from_numpy, self.draw(config))
        prompt = {"input_points": points[:, None], "input_labels": torch.tensor([[[1, 0]]] * 2)}
        prompt |= {} if variant == "points" else {"input_boxes": boxes}
        prompt |= {"input_masks": mask} if variant == "mask" else {}
        both = [model(pixel_values=images, multimask_output=several, **prompt) for several in (False, True)]
        return {
            name: torch.cat([value_at(found, theirs)[:, 0] for found in both], 1).numpy()
            for name, theirs in (("masks", "pred_masks"), ("iou", "iou_scores"))
        }


# The token of an image's rows, that behind them, and the tokens of each text; and tokens that are generated.
IMAGE, START, OF_TEXTS, CAPTION = 254, 255, (7, 3), 12
_BLIP2 = {"num_attention_heads": 4, "intermediate_size": 40}
_SEEN = {"hidden_size": 24, "num_hidden_layers": 2, "image_size": 8, "patch_size": 4, **_BLIP2}
_QUERIES = {"hidden_size": 16, "num_hidden_layers": 3, "vocab_size": 7, **_BLIP2}
_OPT = {
    "model_type": "opt", "vocab_size": 257, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "ffn_dim": 48, "max_position_embeddings": 24, "word_embed_proj_dim": 32, "bos_token_id": START, "eos_token_id": 256,
    "pad_token_id": 1,
}  # fmt: skip
_T5 = {
    "model_type": "t5", "vocab_size": 257, "d_model": 32, "num_layers": 2, "num_decoder_layers": 1, "num_heads": 4,
    "d_kv": 8, "d_ff": 48, "n_positions": 24, "bos_token_id": START, "eos_token_id": 256, "pad_token_id": 0,
    "decoder_start_token_id": 0, "feed_forward_proj": "gated-gelu", "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 6, "tie_word_embeddings": False,
}  # fmt: skip
_CAPTIONS = {"vision_config": _SEEN, "num_query_tokens": 4, "image_token_index": IMAGE}


_READING = {
    "blip2-opt": _CAPTIONS | {"text_config": _OPT, "qformer_config": _QUERIES},
    "blip2-t5": _CAPTIONS | {"text_config": _T5, "qformer_config": _QUERIES},
    # Every layer of the queries reads the image, and norms stand after the sums of the decoder.
    "blip2-opt-post": _CAPTIONS | {
        "text_config": _OPT | {"do_layer_norm_before": False, "tie_word_embeddings": False},
        "qformer_config": _QUERIES | {"cross_attention_frequency": 1, "num_hidden_layers": 2, "hidden_act": "relu"},
        "vision_config": _SEEN | {"hidden_act": "gelu_new", "layer_norm_eps": 1e-4},
    },
}  # fmt: skip


class Reading(Salted):
    """BLIP-2: logits at the tokens of texts behind an image."""

    golden = "reading"
    cases = _READING
    architecture = "Blip2ForConditionalGeneration"
    default = ("blip2-opt",)
    expected = ("BLIP-2", "causal", 24, 8)
    smaller = 0.2

    def amend(self, case, name):
        if "t5" in name:  # transformers 5 leaves it to the files whether there is a head
            case["config"]["text_config"]["tie_word_embeddings"] = False
            case["tensors"]["language_model.lm_head.weight"] = case["tensors"]["language_model.shared.weight"]

    def draw(self, config):
        """Texts with padding at their right behind the rows of images, what is no padding, and images. With an
        encoder, the texts alone."""
        rng, rows = np.random.default_rng(0), config["num_query_tokens"]
        mask = np.arange(max(OF_TEXTS)) < np.array(OF_TEXTS)[:, None]
        tokens = np.where(mask, rng.integers(4, IMAGE, mask.shape), 1)
        tokens[:, 0] = START
        side = config["vision_config"]["image_size"]
        images = rng.standard_normal((len(OF_TEXTS), 3, side, side)).astype(np.float32)
        if config["text_config"]["model_type"] == "t5":
            return tokens, mask, images
        ahead = np.full((len(OF_TEXTS), rows), IMAGE)
        return np.concatenate([ahead, tokens], 1), np.concatenate([ahead > 0, mask], 1), images

    def spare(self, opened):
        return 8 - opened.config.model.vision.patches.rows

    def compute(self, opened, more=0, placed=None, variant=""):
        model, (tokens, mask, images) = opened.config.model, self.draw(opened.like)
        patches, T, rows = model.vision.patches, tokens.shape[1], 8 + more
        seq = max(T + 1 + more, T)
        padding, before = ((0, 0), (0, seq - T)), ((0, 0), (1, rows - patches.rows), (0, 0))
        batch = {
            "tokens": np.pad(tokens, padding, constant_values=5),
            "segment_ids": np.pad(mask.astype(np.int32), padding),
            "positions": np.tile(np.arange(seq), (len(tokens), 1)),
            "patches": np.pad(cut_into_patches(images, patches.size), before, constant_values=7.0),
        }
        if model.encoder:
            row, places = np.pad([IMAGE] * 4 + [START], (0, rows - 5), constant_values=5), np.arange(rows)
            source = {"tokens": row, "segment_ids": places < 5, "positions": places}
            repeated = {name: np.tile(one.astype(np.int32), (len(tokens), 1)) for name, one in source.items()}
            batch |= {f"source_{name}": one for name, one in repeated.items()}
        found = ours.compiled(model, ours.on_one_device(opened), batch)
        return {"logits": np.asarray(found)[:, :T][mask]}

    def recorded(self, found):
        """At the last token of each text."""
        ahead = len(found["logits"]) - sum(OF_TEXTS)  # rows of images
        last = np.cumsum(OF_TEXTS) + ahead // 2 * np.arange(1, 3) - 1
        return {"logits": found["logits"][last]}

    def ask(self, model, config, variant, folder):
        import torch

        tokens, mask, images = self.draw(config)
        arrays = {"input_ids": tokens, "attention_mask": mask.astype(np.int64), "pixel_values": images}
        if config["text_config"]["model_type"] == "t5":
            source = np.array([[IMAGE] * 4 + [START]] * len(tokens))
            arrays = {"input_ids": source, "decoder_input_ids": tokens, "pixel_values": images}
        return {"logits": model(**{key: torch.from_numpy(one) for key, one in arrays.items()}).logits.numpy()[mask]}

    def prompts(self, folder):
        image = pytest.importorskip("PIL.Image", reason="pip install 'gspmd_lm[vision]'")
        paths = [folder / f"{number}.png" for number in range(2)]
        for number, path in enumerate(paths):
            pixels = np.random.default_rng(number).integers(0, 256, (8, 8, 3), np.uint8)
            image.fromarray(pixels).save(path)
        return paths

    def generate(self, model, opened, folder):
        import torch

        vision, texts = opened.config.model.vision, []
        for path in self.prompts(folder):
            seen = of_image.pixels(media.Encoded.of("", path.read_bytes()), vision.patches, opened.config.data.images)
            pixels = torch.from_numpy(seen.transpose(2, 0, 1)[None])
            found = model.generate(pixel_values=pixels, do_sample=False, max_new_tokens=CAPTION)
            ahead = 1 if opened.config.model.encoder else vision.queries.rows + 1
            texts.append(found[0, ahead:].tolist())
        return texts

    def shows_something(self, tokens):
        return min(len({*text}) for text in tokens) >= 8 and tokens[0] != tokens[1] and max(map(max, tokens)) < IMAGE


KINDS = (Images(), Towers(), Sounds(), Masks(), Reading())
CASES = {name: kind for kind in KINDS for name in kind.cases}


def golden(name):
    """What the golden file has of a case."""
    return json.loads((Path(__file__).parent / "golden" / f"{CASES[name].golden}.json").read_text())[name]


def folder(name, folder, **changed):
    """A folder with a case, whose config.json or tensors may be changed."""
    return CASES[name].folder(golden(name) | changed, folder)
