"""Compiled programs that are kept in `programs`, and programs of a few lines."""

import gzip
from pathlib import Path

from gspmd_lm.foresight import hlo

PROGRAMS = Path(__file__).parent / "programs"


def text(name):
    return gzip.decompress((PROGRAMS / f"{name}.txt.gz").read_bytes()).decode()


def saved(name, slices=()):
    return hlo.parse(text(name), slices)


def program(body, computations="", head=", num_partitions=8", slices=()):
    entry = f"ENTRY %main (p: f32[8]) -> f32[8] {{\n{body}\n}}\n"
    return hlo.parse(f"HloModule jit__train, is_scheduled=true{head}\n\n{computations}\n{entry}", slices)
