"""Copies between arrays whose dimensions lie in different orders, and arrays that a CPU device takes as they are."""

import itertools

import jax
import ml_dtypes
import numpy as np
import pytest

from gspmd_lm.convert import layout, pretrained


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("shape", [(5,), (37, 20), (3, 18, 40), (2, 3, 17, 5)])
def test_every_order_of_dimensions_is_copied(shape, dtype):
    values = np.random.default_rng(0).standard_normal(shape).astype(dtype)
    for order in itertools.permutations(range(len(shape))):
        theirs = np.asfortranarray(values.transpose(order)).transpose(np.argsort(order))
        for source in (values, theirs):
            into = np.zeros([shape[axis] for axis in order], dtype).transpose(np.argsort(order))
            layout.copy_transposed(into, source)
            assert into.tobytes() == values.tobytes()


def test_rows_at_equal_distances_are_a_slice():
    assert layout._as_slice(np.array([4])) == slice(4, 5, 1)
    assert layout._as_slice(np.array([1, 3, 5])) == slice(1, 6, 2)
    assert isinstance(layout._as_slice(np.array([0, 2, 3])), np.ndarray)
    rows = np.arange(20)[1::2]
    for start in range(0, 10, 3):
        assert rows[start : start + 3].tolist() == list(range(20))[pretrained._rows(slice(1, 20, 2), start, 3)]


def test_a_device_on_the_cpu_takes_an_array_as_it_is():
    for shape in ((3,), (7, 5), (64, 1000)):
        on_host = pretrained._zeros(shape, ml_dtypes.bfloat16)
        placed = jax.device_put(on_host, jax.devices()[0])
        assert placed.unsafe_buffer_pointer() == on_host.ctypes.data and not on_host.any()
