"""Numbers with their units, as people read them, and the size of what programs compute with."""

import re


def human_bytes(count: float) -> str:
    """'1.2 MB': decimal units, as the field counts memory traffic."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def human_seconds(value: float) -> str:
    """'2.31 s', '14.2 ms', '310 us'"""
    unit, scale = ("s", 1.0) if value >= 1 or not value else ("ms", 1e-3) if value >= 1e-3 else ("us", 1e-6)
    return f"{value / scale:.0f} {unit}" if value >= 100 * scale else f"{value / scale:.3g} {unit}"


def human_duration(value: float) -> str:
    """'42 s', '7.5 min'; of a command, not of a step"""
    return f"{value:.0f} s" if value < 100 else f"{value / 60:.1f} min"


def plural(count: int, noun: str) -> str:
    """'1 device', '8 devices', '2,048 simulated devices'"""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def human_count(value: float) -> str:
    """'8.03 B', '4.19 M', '2048'"""
    for unit, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6)):
        if value >= scale:
            return f"{value / scale:.2f} {unit}"
    return f"{value:,.0f}"


def human_short(value: float) -> str:
    """'8.03T', '41.2k', '998': three digits and no unit, for columns"""
    suffixes = iter(("k", "M", "B", "T"))
    suffix = ""
    while value >= 999.5 and suffix != "T":
        value, suffix = value / 1000, next(suffixes)
    return f"{value:#.3g}".rstrip(".") + suffix if suffix and value < 999.5 else f"{value:.0f}{suffix}"


def human_amount(value: float) -> str:
    """'1,234', '37.2', '0.0033': of days or dollars, of which there may be little."""
    if 0 < value < 0.001:
        return "under 0.001"
    return f"{value:,.0f}" if value >= 99.95 else f"{value:#.3g}" if value >= 0.995 else f"{value:.2g}"


def human_clock(value: float) -> str:
    """'42s', '7m05s', '2h09m', '3d04h': a time that is left, for columns"""
    minutes, seconds = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d{hours:02}h"
    if hours:
        return f"{hours}h{minutes:02}m"
    return f"{minutes}m{seconds:02}s" if minutes else f"{seconds}s"


def whole_number(text: str) -> int | None:
    """The number that a text of ASCII digits is, as long as Python reads it; None for another text."""
    return int(text) if re.fullmatch("[0-9]{1,4000}", text) else None


# Dtypes of matmuls: as jax names them, and as compiled programs write them.
PROGRAM_DTYPES = {
    "float64": "f64",
    "float32": "f32",
    "bfloat16": "bf16",
    "float16": "f16",
    "float8_e4m3fn": "f8e4m3fn",
    "float8_e5m2": "f8e5m2",
    "int8": "s8",
    "int4": "s4",
}


def program_dtype(name: str) -> str:
    """'bf16', 'f32', 's8' or 'f8e4m3fn': a dtype of jax, by its name, as compiled programs write it."""
    return PROGRAM_DTYPES.get(name, name)


def bits(dtype: str) -> int:
    """How many bits one element has of a dtype as programs write it: bf16, f8e4m3fn. 0 for those without a size."""
    width = re.match(r"[a-z]+(\d+)", dtype)
    return 8 if dtype == "pred" else int(width[1]) if width else 0
