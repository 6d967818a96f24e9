"""In which order devices fill a mesh."""

import jax
import numpy as np

from gspmd_lm.sharding import mesh, rules_file


def test_the_last_axis_varies_fastest_over_simulated_devices():
    for sizes in ({"data": 2, "tensor": 4}, {"fsdp": 4, "tensor": 2}, {"data": 2, "fsdp": 2, "tensor": 2}):
        built = mesh.build(rules_file.from_dict({"mesh": sizes}, "here.yaml"), jax.devices())
        assert dict(built.shape) == sizes
        ids = np.vectorize(lambda device: device.id)(built.devices)
        np.testing.assert_array_equal(ids, np.arange(8).reshape(*sizes.values()))
