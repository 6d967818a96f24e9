"""What a chip costs to rent, where a price is public: one on-demand price for each chip, the lowest that was found.

The prices were looked up on 2026-11-21 in catalogs that carry no date. Those of TPUs stand in "How to Scale Your Model"
of 2025-02 too (v5e and v5p). Hosts of GPUs cost up to four times as much elsewhere: an H100 is 10.98 at Google Cloud
(a3-highgpu-8g, us-east4). v4 and tpu7x have no public price.
"""

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Rent:
    """The price of one chip, its share of the host included."""

    usd_per_chip_hour: float
    where: str
    source: str
    date: str = "looked up 2026-11-21"


_GOOGLE = "skypilot-org/skypilot-catalog @006059e0f, catalogs/v8/gcp/vms.csv"
_NEBIUS = "skypilot-org/skypilot-catalog @0082b0435, catalogs/v8/nebius/vms.csv"
_LAMBDA = "skypilot-org/skypilot-catalog @0f4070387, catalogs/v8/lambda/vms.csv"

RENTS: Mapping[str, Rent] = {  # by the names of hardware.CHIPS
    "v5e": Rent(1.20, "Google Cloud, US regions, on demand", _GOOGLE),
    "v5p": Rent(4.20, "Google Cloud, us-central1, us-east1 and us-east5, on demand", _GOOGLE),
    "v6e": Rent(2.70, "Google Cloud, US regions, on demand", _GOOGLE),
    "a100": Rent(2.79, "Lambda, hosts of 8, on demand", _LAMBDA),
    "h100": Rent(2.95, "Nebius, on demand", _NEBIUS),
    "h200": Rent(3.50, "Nebius, on demand", _NEBIUS),
    "b200": Rent(5.50, "Nebius, us-central1, on demand", _NEBIUS),
}
