"""The capacity that a job runs on, as far as a user knows it: price of a chip, interruptions, and storage of hosts."""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from gspmd_lm.errors import InputError, did_you_mean
from gspmd_lm.hardware.chips import CHIPS, Chip


class Price(NamedTuple):
    """Dollars of one chip for an hour; None where no price is known."""

    on_demand: float | None = None
    spot: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Assumptions:
    """What is known of a job beside its program. Each is a key of --assume."""

    storage_gb_per_s: float = 1.0  # that one host writes to its disk or bucket, or reads from it; a guess
    # Google Cloud, "Spot VMs": 30 s, which Azure gives too; AWS, "Spot instance interruption notices": 120 s.
    notice_s: float = 30.0
    preemptions_per_day: float = 0.0  # of the whole job on spot; 0: nothing is said of spot
    # Of one chip, between failures: 419 unexpected interruptions of 16,384 GPUs in 54 days, arXiv 2407.21783, 3.3.4.
    failure_hours: float = 50_700.0
    away_s: float = 300.0  # from an interruption until there are hosts again; a guess
    start_s: float = 30.0  # of processes that find compiled programs in a cache, without the restore; a guess


def read_prices(texts: Sequence[str], described: Iterable[Chip | None] = ()) -> dict[str, Price]:
    """Chip -> its price, of texts such as v5e=1.2, or v5e=1.2/0.6 with that on spot. A text may hold several.

    described: the chips of the targets, which have prices too where files describe them. Raises InputError for a chip
    that is not known, and for what is no price.
    """
    chips = dict.fromkeys([*CHIPS, *(chip.name for chip in described if chip)])
    prices = {}
    for entry in (entry for text in texts for entry in text.split(",")):
        chip, equals, amounts = entry.partition("=")
        if not equals or chip not in chips:
            raise InputError(
                f"--price={entry}: not a chip and its price\n  fix   --price=v5e=1.2, with one of {', '.join(chips)}"
            )
        prices[chip] = Price(*(_amount(entry, chip, amount) for amount in amounts.split("/", 1)))
    return prices


def _amount(entry: str, chip: str, amount: str) -> float:
    try:
        usd = float(amount)
    except ValueError:
        usd = math.nan
    if not 0 <= usd < math.inf:
        raise InputError(
            f"--price={entry}: {amount!r} is not a price in dollars per chip and hour\n  fix   --price={chip}=1.2"
        )
    return usd


def read_assumptions(text: str, place: str = "--assume=") -> Assumptions:
    """The assumptions that 'notice_s=120,preemptions_per_day=4' changes; place: what stands before it in errors.

    Raises InputError for a key that does not exist, and for a value that is no number or out of its domain.
    """
    fields, values = {field.name for field in dataclasses.fields(Assumptions)}, dict[str, float]()
    for entry in filter(None, map(str.strip, text.split(","))):
        key, _, value = entry.partition("=")
        if key not in fields:
            raise InputError(
                f"{place}{entry}: no such key{did_you_mean(key, fields)}\n  fix   use {', '.join(sorted(fields))}"
            )
        try:
            values[key] = float(value)
        except ValueError:
            values[key] = math.nan
        may_be_0 = key not in ("storage_gb_per_s", "failure_hours")
        if not (0 <= values[key] < math.inf) or (values[key] == 0 and not may_be_0):
            domain = "at least 0" if may_be_0 else "more than 0"
            raise InputError(f"{place}{entry}: {value!r} is no number of {domain}\n  fix   {place}{key}=30")
    return Assumptions(**values)
