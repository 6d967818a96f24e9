"""Configs of small models, whose data is what tests look at."""

from gspmd_lm import config
from gspmd_lm.config import nest

TEXT = {"layers": 1, "embed": 8, "heads": 1, "kv_heads": 1, "head_dim": 8, "mlp": 8, "vocab": 257, "context": 1024}
MEDIA = {"layers": 1, "embed": 16, "heads": 2, "kv_heads": 2, "head_dim": 8, "mlp": 32, "compute_dtype": "float32",
         "norm.kind": "layernorm", "norm.bias": True, "feed_forward.kind": "plain", "feed_forward.activation": "gelu",
         "positions": "learned"}  # fmt: skip


def config_of(data, model=None, objective=None, plain=TEXT, optimizer=None, **train):
    """A config with these settings. model: what differs from `plain`."""
    about = {"data": {"batch": 8, "seq": 32} | data, "train": {"steps": 1} | train, "optimizer": optimizer or {}}
    return config.from_dict({"name": "x", "objective": objective, "model": nest(plain | (model or {}))} | about, "x")
