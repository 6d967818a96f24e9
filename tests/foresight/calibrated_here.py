"""A calibration that takes a second: few sizes, each measured once."""

from gspmd_lm.foresight import calibration

MOVED = (2**14, 2**18)


class Gpu:
    device_kind, platform, process_index = "NVIDIA H100 80GB HBM3", "gpu", 0


def shorten(patch):
    """Has `calibration` measure a few small things."""
    patch.setattr(calibration, "MATMULS", {"cpu": ((4, 16, 32, 16),)})
    patch.setattr(calibration, "DTYPES", {"cpu": ("float32", "bfloat16")})
    patch.setattr(calibration, "MOVED_BYTES", {"cpu": MOVED})
    patch.setattr(calibration, "COLLECTIVE_BYTES", (2**12,))
    patch.setattr(calibration, "_LEAST_S", 1e-4)
    patch.setattr(calibration, "_RUNS", 1)
