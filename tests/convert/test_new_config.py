"""--config=DIR: a new model like a published one, from its config.json alone."""

import dataclasses
import json

import pytest

from gspmd_lm import api, load_config
from gspmd_lm.convert import architecture
from gspmd_lm.errors import InputError
from gspmd_lm.sharding import rules_file
from gspmd_lm.train import state
from tests.convert.published_configs import LLAMA31, PUBLISHED
from tests.convert.test_architecture import model_of, refused


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "Llama-3.1").mkdir()
    (tmp_path / "Llama-3.1" / "config.json").write_text(json.dumps(LLAMA31))
    return tmp_path / "Llama-3.1"


CHUNKED = PUBLISHED["qwen2.5-1m"][0]


def test_a_row_beyond_its_chunk_is_refused_with_the_reason(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CHUNKED))
    assert architecture.new_config(path, ["data.seq=262144"]).model.context == 262144
    with pytest.raises(InputError) as error:
        architecture.new_config(path, ["data.seq=262145"])
    assert "data.seq=262145 is longer than model.context=262144\n  dual_chunk_attention_config is" in str(error.value)
    assert "For up to 262,144 tokens it is plain attention" in str(error.value)


@pytest.mark.parametrize(("chunk", "local", "original"), [(12, 4, 0), (12, 8, 0), (16, 1, 0), (12, 4, 7)])
def test_within_its_context_attention_in_chunks_is_plain(chunk, local, original):
    """Positions as in arXiv 2402.17463: those of one chunk, of the next one, and of later ones."""
    sizes = {"chunk_size": chunk, "local_size": local, "original_max_position_embeddings": original or 99}
    found = model_of(CHUNKED | {"dual_chunk_attention_config": sizes})
    plain, context = model_of(CHUNKED | {"dual_chunk_attention_config": None}), found.context
    assert found == dataclasses.replace(plain, context=context)
    part = chunk - local

    def is_plain(length):
        for i in range(length):
            for j in range(i + 1):
                apart = i // part - j // part
                query = i % part if apart == 0 else min(i % part + part, chunk) if apart == 1 else chunk
                if query - j % part != i - j:
                    return False
        return True

    assert is_plain(context) and (original or not is_plain(context + 2))
    assert context <= (original or chunk)


def test_chunks_that_are_all_local_are_refused():
    sizes = CHUNKED["dual_chunk_attention_config"] | {"chunk_size": 1024}
    assert "local_size: 8192 is not below chunk_size: 1024" in refused(CHUNKED | {"dual_chunk_attention_config": sizes})


def test_a_folder_and_its_config_json_say_the_same(folder):
    found = api.load_config(str(folder))
    assert found == load_config(str(folder / "config.json"))
    assert found.model == model_of(LLAMA31)  # float32 weights: they are new
    assert (found.name, found.data.seq, found.data.tokenizer) == ("Llama-3.1", 2048, "bytes")


def test_a_file_of_another_name_gives_its_own(folder):
    (folder / "mine.json").write_text(json.dumps(LLAMA31))
    assert load_config(str(folder / "mine.json")).name == "mine"


def test_the_tokenizer_is_the_folders_and_overrides_come_last(folder):
    (folder / "tokenizer.json").write_text("{}")
    assert load_config(str(folder)).data.tokenizer == str(folder / "tokenizer.json")
    found = load_config(str(folder), ["model.layers=3", "data.tokenizer=bytes"])
    assert (found.model.layers, found.data.tokenizer) == (3, "bytes")


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("llama-3.1", 8_030_261_248),
        ("falcon-40b", 41_303_293_952),
        ("qwen3-moe", 235_093_634_560),
        ("gpt-oss", 116_829_156_672),
    ],
)
def test_the_parameters_of_a_published_model_are_counted(name, count, tmp_path):
    of_weights = {"quantization_config": {"quant_method": "mxfp4"}}  # which are not read
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name][0] | of_weights))
    config = load_config(str(tmp_path))
    found, _ = state.arrays_and_warnings(config, rules_file.load("fsdp8").fill(8), "cpu")
    assert found.parameter_count == count


def test_what_is_wrong_is_told(folder):
    (folder / "config.json").write_text(json.dumps(LLAMA31 | {"odd": 3}))
    with pytest.raises(
        InputError, match=r"  odd: 3 is an unknown field.*\n  fix   take odd out of a copy of the file "
    ):
        load_config(str(folder))
    with pytest.raises(InputError, match=r"absent.json: cannot be read"):
        load_config(str(folder / "absent.json"))
    (folder / "config.json").unlink()
    with pytest.raises(InputError, match=r"no such file, here or in configs/"):
        load_config(str(folder))
