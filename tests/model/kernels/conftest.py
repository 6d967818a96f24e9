"""Splash, a kernel for TPUs, runs in Pallas's interpreter."""

import functools

import pytest
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    monkeypatch.setattr(splash, "make_splash_mha", functools.partial(splash.make_splash_mha, interpret=True))
