"""Eight simulated devices for every test in this process, and for the commands that tests run."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["PJRT_NPROC"] = os.environ["NPROC"] = "32"  # threads for eight devices: see runtime.py

import jax

jax.config.update("jax_num_cpu_devices", 8)
