"""Answers of the target to what a program asks while it is traced for it: where it runs, and what is there.

Libraries choose kernels and shardings by such questions. This machine would answer that it is a CPU.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import jax

from gspmd_lm.hardware.chips import CUDNN, Gpu
from gspmd_lm.hardware.target import Target


@contextlib.contextmanager
def target_answers(target: Target, devices: Sequence[Any]) -> Iterator[None]:
    """A context in which jax's questions about devices are answered as on a target; `devices` are those of it.

    Other platforms are still those of this machine, and so are the devices on which jax itself puts arrays. jax 0.10.2
    asks this machine also what cuDNN's attention asks of a GPU and its libraries. The compiler needs no cuDNN: it
    leaves the kernel to the run.
    """
    here, platform = jax.devices, devices[0].platform

    def answer(backend: str | None = None) -> list[Any]:
        return [*devices] if backend in (None, platform) else here(backend)

    answers: dict[Any, dict[str, Any]] = {}
    if target.platform != "cpu":
        answers[jax] = {"default_backend": lambda: platform, "device_count": lambda backend=None: len(answer(backend))}
        answers[jax] |= {"devices": answer, "local_devices": lambda *_, backend=None, **__: answer(backend)}
        answers[jax] |= {"local_device_count": answers[jax]["device_count"]}
    if target.chip and target.chip.gpu:
        from jax._src.cudnn import fused_attention_stablehlo

        answers[fused_attention_stablehlo] = _answers_of_cudnn(target.chip.gpu)
    with contextlib.ExitStack() as stack:
        for module, functions in answers.items():
            stack.enter_context(mock.patch.multiple(module, **functions))
        yield


def _answers_of_cudnn(gpu: Gpu) -> dict[str, Any]:
    def numbers(capability: str) -> tuple[int, ...]:
        return tuple(map(int, capability.split(".")))

    return {
        "check_cudnn_version": lambda: CUDNN[0] * 10_000 + CUDNN[1] * 100,
        "check_compute_capability": lambda least: gpu.compute_capability >= numbers(least),
        "is_cuda_compute_capability_equal": lambda this: gpu.compute_capability == numbers(this),
    }
