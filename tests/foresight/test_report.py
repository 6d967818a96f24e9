"""The JSON form: every key is documented, every documented key is there, and json can write and read it."""

import json
import re
from pathlib import Path

import pytest
import sample

from gspmd_lm.foresight import report

# What scripts may rely on, whatever else is added.
PROMISED = {
    "": "schema target devices config rules parameters unpriced_share compile_s",
    "memory.": "weights_bytes optimizer_bytes batch_bytes temporaries_bytes peak_bytes limit_bytes host_bytes fits",
    "memory.largest[].": "bytes axes[] source",
    "collectives[].": "kind mesh_axes[] dtype times_per_step bytes_per_device_per_step phase op source rules[] "
    "overlapped",
    "prediction.": "step_time_s matmul_s attention_s other_s exposed_communication_s exposed_by_axis.* "
    "exposed_host_copy_s mfu tokens_per_s_per_device basis error",
    "floor.": "compute_s memory_s communication_bytes",
    "warnings[].": "code message fix",
}
DOCUMENT = (Path(__file__).parents[2] / "docs/explain_json.md").read_text()
KEYS = dict(re.findall(r"^\| `(\S+)` \| (.+) \|$", DOCUMENT, re.M))
OPEN = {key.removesuffix(".*") for key in KEYS if key.endswith(".*")}  # objects with any keys


def keys(value, at=""):
    """The paths of a JSON value, as the document writes them."""
    if isinstance(value, dict):
        for name, entry in value.items():
            yield from keys(entry, f"{at}.*" if at in OPEN else f"{at}.{name}".removeprefix("."))
    elif isinstance(value, list):
        for entry in value:
            yield from keys(entry, f"{at}[]")
    elif value is not None or not any(key.startswith(f"{at}[") for key in KEYS):  # null in place of a list
        yield at


def test_every_key_is_documented_and_there():
    assert set(keys(report.to_json([sample.LLAMA]))) == set(KEYS)
    assert KEYS["schema"] == f"version of this table: {report.SCHEMA}"


def test_the_keys_that_scripts_rely_on():
    assert {place + name for place, names in PROMISED.items() for name in names.split()} <= set(KEYS)


@pytest.mark.parametrize("layout", [sample.LLAMA, sample.CPU, sample.REFUSED, sample.SLICES])
def test_json_can_write_it(layout):
    value = report.to_json([layout])
    assert json.loads(json.dumps(value, allow_nan=False)) == value
    assert value["schema"] == report.SCHEMA


@pytest.mark.parametrize("layout", [sample.CPU, sample.REFUSED])
def test_without_a_prediction_the_values_are_null(layout):
    value, predicted = report.to_json([layout]), report.to_json([sample.LLAMA])
    assert set(value) == set(predicted) and set(value["prediction"]) == set(predicted["prediction"])
    assert value["prediction"].pop("reason") == layout.no_prediction and predicted["prediction"]["reason"] is None
    assert set(value["prediction"].values()) == {None} and value["unpriced_share"] is None
    assert value["timeline"] == [] and value["unpriced"] == {}


def test_values():
    value = report.to_json([sample.LLAMA])
    assert value["prediction"]["exposed_by_axis"] == {"fsdp": 0.12, "tensor": 2.15}
    assert value["prediction"]["fusions"][0] == {"name": "layers.mlp.w_gate gradient", "seconds": 1.25}
    assert value["unpriced_share"] == 0.005
    assert value["collectives"][0]["rules"] == ["rules.mlp", "rules.residual.seq"]
    assert len(value["timeline"]) == len(sample.PREDICTION.timeline)
    assert list(value["mesh"]) == ["fsdp", "tensor"]  # in device order


def test_several_make_a_list():
    values = report.to_json([sample.LLAMA, sample.REFUSED])
    assert values == [report.to_json([sample.LLAMA]), report.to_json([sample.REFUSED])]
