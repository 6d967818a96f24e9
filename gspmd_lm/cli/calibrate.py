"""calibrate: measure the devices at hand, and write the YAML file of their chip."""

import logging
import re
from pathlib import Path

from absl import flags

from gspmd_lm.cli import outputs
from gspmd_lm.cli.verb import RESULTS, Flags, Verb, on_machine
from gspmd_lm.errors import InputError
from gspmd_lm.hardware.chips import CHIPS, reading


def _define(flags: Flags) -> None:
    on_machine(flags)
    flags.group(RESULTS)
    flags.path("out", "my.yaml", "Write the chip to this file. Its name is that of the chip in a --target: my:8.")


def run(values: flags.FlagValues, names: list[str]) -> int:
    """Measures the devices, writes the file of --out, and returns the exit code."""
    out = Path(values.out)
    if out.suffix != reading.ENDING or not re.fullmatch(r"[a-zA-Z]\w*", out.stem) or out.stem in (*CHIPS, "cpu"):
        raise InputError(
            f"--out={values.out}: the file has the name of the chip: letters and digits, and no chip of the table\n"
            "  fix   --out=my.yaml"
        )
    outputs.check_writable((values.out,))
    from gspmd_lm.cli import inputs

    inputs.log_to_stderr()
    import jax

    from gspmd_lm.foresight import calibration

    machine = inputs.start(values, 1 if values.num_processes else values.devices, keep_memory=True)  # as train does
    with outputs.clock("measuring"):
        fields = calibration.measure_chip(jax.devices(), out.stem, logging.getLogger("gspmd_lm").info)
    if machine.is_main:
        text = calibration.write_chip(fields)
        outputs.write(values.out, text)
        chip = reading.read_chip(out, values.out)  # what was written can be read
        outputs.say(f"wrote {values.out}: {chip.note}")
        outputs.say(f"explain --target={chip.name}:{len(jax.devices())} --chip={values.out} predicts steps with it")
    return 0


CALIBRATE = Verb(
    "calibrate",
    "Measure the devices at hand in two minutes, and write the file of their chip.",
    [
        ("calibrate --out=my.yaml", "Measure the accelerators of this machine."),
        ("calibrate --platform=cpu --devices=1 --out=laptop.yaml", "Measure a CPU as one device."),
    ],
    _define,
    run,
)
