"""The installed transformers against the golden files and against us: `pytest -m parity`, with .[parity] installed."""

from importlib.util import find_spec

import jax
import numpy as np
import pytest

from gspmd_lm.convert import export
from tests.convert import ours, references
from tests.convert import published_configs as published
from tests.convert.test_architecture import model_of, sizes_alone

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # what torch and transformers warn of is theirs
    pytest.mark.skipif(not (find_spec("torch") and find_spec("transformers")), reason="needs .[parity]"),
]


FEW = 12  # tokens that are generated again, of those of a golden file: one step is computed as the next one
THEIRS = [
    name for name, (raw, _) in published.PUBLISHED.items() if raw["model_type"] not in references.NOT_IN_TRANSFORMERS
]


@pytest.fixture(scope="module", params=references.marked(list(references.CASES), references.NEARLY, "parity"))
def case(request, tmp_path_factory):
    """A golden file, and the model of transformers that it was made from, with its folder."""
    golden = references.load(request.param)
    folder = tmp_path_factory.mktemp("live") / request.param
    model, config, weights = references.build(request.param, folder, golden.about["salt"])
    config.pop("transformers_version")
    recorded = {name: value for name, value in golden.about["config"].items() if name != "transformers_version"}
    assert config == recorded
    assert {name: array.shape for name, array in weights.items()} == golden.tensors
    return golden, model, weights, folder


@pytest.fixture(scope="module")
def computed(case):
    """Logits, loss and gradients of transformers."""
    golden, model, _, _ = case
    return references.forward(model, golden.about["config"]["vocab_size"])


def test_the_golden_file_is_what_transformers_computes(case, computed):
    golden, model, weights, _ = case
    logits, loss, gradients = computed
    # Processors round differently. Norm scales about two, as those of Gemma, enlarge that: two differed by 2.6e-5.
    np.testing.assert_allclose(logits, golden.logits, rtol=0, atol=references.MOST_ROUNDING)
    assert loss == pytest.approx(golden.about["loss"], rel=1e-6)
    by_disk = references.on_disk(model, weights, gradients)
    norms = [np.linalg.norm(by_disk[name]) for name in golden.tensors]
    np.testing.assert_allclose(norms, golden.norms, rtol=1e-4, atol=1e-6 * np.linalg.norm(norms))
    tokens, gaps = references.generate(model, golden.about["config"]["vocab_size"], FEW)
    assert tokens == [text[:FEW] for text in golden.about["tokens"]]
    assert all(gap > least - 1e-4 for gap, least in zip(gaps, golden.about["gaps"], strict=True))


def test_all_gradients(case, computed, tmp_path):
    golden, model, weights, _ = case
    logits, loss, gradients = computed
    found = ours.read(golden, tmp_path / "in")
    params = ours.on_one_device(found)
    (our_loss, our_logits), ours_grads = ours.compiled(found.config.model, params, golden.batch, gradients=True)
    real = golden.batch["segment_ids"] > 0
    np.testing.assert_allclose(np.asarray(our_logits)[real], logits[real], rtol=0, atol=1e-4)
    assert float(our_loss) == pytest.approx(loss, rel=1e-5)
    export.write_folder(tmp_path / "gradients", found.config.model, jax.device_get(ours_grads), found.like)
    written = ours.tensors(tmp_path / "gradients")
    by_disk = references.on_disk(model, weights, gradients)
    nothing = 1e-6 * np.linalg.norm([np.linalg.norm(gradient) for gradient in by_disk.values()])
    for name, want in by_disk.items():
        assert np.linalg.norm(written[name] - want) <= 1e-3 * np.linalg.norm(want) + nothing, name


@pytest.mark.parity
@pytest.mark.parametrize("name", THEIRS)
def test_defaults_are_those_of_transformers(name):
    import transformers

    sizes = sizes_alone(published.PUBLISHED[name][0])
    kind = references.UNDER_ANOTHER_TYPE.get(sizes["model_type"], sizes["model_type"])
    theirs = transformers.CONFIG_MAPPING[kind](**sizes | {"model_type": kind}).to_dict()
    theirs.pop("transformers_version")
    assert model_of(sizes) == model_of(theirs)


@pytest.mark.parametrize("kept", [True, False], ids=["original config.json", "config.json of ours"])
def test_transformers_loads_what_we_write(case, computed, kept, tmp_path):
    golden, _, _, _ = case
    found = ours.read(golden, tmp_path / "in")
    params = jax.device_get(ours.on_one_device(found))
    export.write_folder(tmp_path / "out", found.config.model, params, found.like if kept else None)
    model, report = references.loaded(tmp_path / "out")
    assert not any(report.values()), report
    logits, _, _ = references.forward(model, golden.about["config"]["vocab_size"])
    # Another family multiplies the same numbers in another order.
    other = not kept and model.config.model_type != golden.about["config"]["model_type"]
    np.testing.assert_allclose(logits, computed[0], rtol=0, atol=2e-5 if other else 0)
