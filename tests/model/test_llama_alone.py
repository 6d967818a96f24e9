"""The loss of a plain Llama runs through no file of another family."""

import sys
from pathlib import Path

import flax.linen as nn
import jax
import pytest

from gspmd_lm.train import decoder

MODEL = Path(decoder.__file__).parent.parent / "model"
# The files of model/ that a reader of a Llama reads, kernels aside. Only an idea that a Llama has may make it longer.
FILES = {"attention", "block", "decoder", "ends", "loss", "mlp", "norm", "rope", "stack", "tokens", "weights"}


def files_run(function, *args):
    """The files of model/ of which lines run while a function is traced, kernels aside, without their endings."""
    found = set()

    def trace(frame, event, arg):
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(MODEL) and "kernels" not in path.parts:
            found.add(".".join(path.relative_to(MODEL).with_suffix("").parts))

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        jax.eval_shape(function, *args)
    finally:
        sys.settrace(before)
    return found


def loss_of(config):
    """The loss of a config, its parameters and a batch. The parts of the model have been chosen before."""
    task = decoder.task(config)
    params = nn.unbox(jax.eval_shape(task.initial, jax.random.key(0)))
    return lambda params, batch: task.sum_batch(params, batch, None)[0], params, task.batch(2)


def test_a_loss_of_a_llama_runs_through_its_own_files_alone(small):
    assert files_run(*loss_of(small())) == FILES


@pytest.mark.long
def test_another_family_runs_through_its_parts(small):
    other = small(block="parallel", dropout=0.1, **{"attention.qkv_bias": True})
    assert files_run(*loss_of(other)) == FILES | {"parts.dropout", "parts.heads", "parts.parallel"}
