"""convert on the command line: what it refuses before it writes, and what it leaves where it is stopped."""

import builtins
import errno
import json
import os
from pathlib import Path

import pytest

from gspmd_lm import api, cli, config
from gspmd_lm.config import core_yaml
from gspmd_lm.convert import safetensors, sidecars
from gspmd_lm.data import chat, special_tokens, tokenizer
from gspmd_lm.errors import InputError
from gspmd_lm.infer import generation_config
from gspmd_lm.workdir import checkpoint, layout
from tests.convert import ours, references
from tests.quick import QUICK_FLAGS

PLACE = "--rules=dp8", "--compile_cache=none"
TRAIN = *PLACE, *QUICK_FLAGS
TOKENIZER = {
    "version": "1.0",
    "model": {"type": "WordLevel", "vocab": {"a": 0, "</s>": 1}, "unk_token": "a"},
    "added_tokens": [
        {"id": 1, "content": "</s>", "special": True, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False}
    ],
}  # fmt: skip


@pytest.fixture
def run(capsys):
    """Runs convert: code, stdout, stderr."""

    def call(*arguments):
        with pytest.raises(SystemExit) as end:
            cli.main(["main.py", "convert", *map(str, arguments), *PLACE])
        out, err = capsys.readouterr()
        return end.value.code, out, err

    return call


@pytest.fixture
def folder(tmp_path):
    path = references.load("llama").folder(tmp_path / "in")
    (path / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    (path / "generation_config.json").write_text('{"eos_token_id": 1}')
    return path


def write(name, text):
    return lambda folder, patch: (folder / name).write_text(text)


def adapter(folder, patch):
    (folder / "config.json").unlink()
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "some/base"}')


def without_end(folder, patch):
    (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER | {"added_tokens": []}))
    (folder / "generation_config.json").write_text("{}")


def change(**fields):
    def damage(folder, patch):
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return damage


def cut(folder, patch):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4])


def index(folder, patch):
    (folder / "model.safetensors").unlink()
    (folder / safetensors.INDEX).write_text('{"weight_map": {"a": "gone.safetensors"}}')


def unreadable(name):
    """The file system refuses to open a file, which it does not where tests run as root."""

    def damage(folder, patch):
        real = {"open": builtins.open, "read_bytes": Path.read_bytes}

        def deny(path):
            if Path(path).name == name:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

        patch.setattr(safetensors, "open", lambda path, *how: deny(path) or real["open"](path, *how), raising=False)
        patch.setattr(Path, "read_bytes", lambda path: deny(path) or real["read_bytes"](path))

    return damage


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut, "model.safetensors: safetensors cannot read its"),
        (index, "index.json: gone.safetensors is not in the folder"),
        (write("config.json", "{"), "config.json: not valid JSON"),
        (write("config.json", "[" * 10_000), "config.json: lists or objects within each other"),
        (change(is_causal=False), "is_causal: False lets tokens see later ones"),
        (change(num_hidden_layers=3), "missing      model.layers.2.self_attn.q_proj.weight"),
        (change(num_hidden_layers=30), "not enough\n  there should be 30 layers"),
        (change(vocab_size=2**50), "model.vocab: must be at most 2147483647, got 1125899906842624"),
        (change(max_position_embeddings=2**70), "max_position_embeddings: 1180591620717411303424 is above"),
        (write("tokenizer.json", "{}"), "tokenizer.json: not a Hugging Face tokenizer.json"),
        (without_end, "has no end-of-text token"),
        (adapter, "an adapter of PEFT, not a whole model\n  fix   merge it into some/base with peft"),
        (write("tokenizer_config.json", "[" * 10_000), "tokenizer_config.json: lists or objects within each other"),
        (write("generation_config.json", "[" * 10_000), "generation_config.json: lists or objects within each other"),
        (write("generation_config.json", '{"eos_token_id": "x"}'), "generation_config.json: eos_token_id"),
        (unreadable("model.safetensors"), "model.safetensors: cannot be read (Permission denied)"),
        (unreadable("generation_config.json"), "generation_config.json: cannot be read (Permission denied)"),
    ],
)
def test_nothing_is_written_where_something_is_wrong(run, folder, tmp_path, monkeypatch, damage, message):
    damage(folder, monkeypatch)
    code, out, err = run(f"--from={folder}", f"--workdir={tmp_path / 'w'}")
    assert (code, out) == (2, "") and message in err and "\n" in err
    assert not (tmp_path / "w").exists()


def test_a_field_is_ignored_and_comes_back(run, folder, tmp_path):
    work, back = tmp_path / "w", tmp_path / "back"
    change(some_feature=[1], hidden_dropout_prob=0.5)(folder, None)
    flags = f"--from={folder}", f"--workdir={work}"
    code, _, err = run(*flags)
    assert code == 2 and "fix   --ignore=some_feature  if" in err
    code, _, err = run(*flags, "--ignore=some_feature", "--ignore=hidden_size")
    assert code == 2 and "--ignore=hidden_size: the meaning of this field is known" in err and not work.exists()
    code, out, err = run(*flags, "--ignore=some_feature")
    assert (code, err) == (0, "") and "\nignored in config.json: some_feature\n" in out
    assert f"{folder / 'config.json'}: hidden_dropout_prob: 0.5: training drops nothing until model.dropout" in out
    assert json.loads((work / "hugging_face" / "ignored.json").read_text()) == {"config.json": ["some_feature"]}
    code, out, err = run(f"--workdir={work}", f"--to={back}")
    assert (code, err) == (0, "") and "ignored on import, and kept in config.json: some_feature\n" in out
    assert json.loads((back / "config.json").read_text())["some_feature"] == [1]
    assert not (back / "ignored.json").exists()
    before, after = ours.tensors(folder), ours.tensors(back)
    assert before.keys() == after.keys()
    assert all(before[name].tobytes() == after[name].tobytes() for name in before)
    code, _, err = run(f"--workdir={work}", f"--to={tmp_path / 'x'}", "--ignore=some_feature")
    assert code == 2 and err.startswith("--ignore: only for convert --from=DIR\n")


def stopped(monkeypatch, at):
    """Ends the process where it has replaced so many files, or where it begins to save."""
    replace, done = os.replace, []

    def killed(*_, **__):
        raise KeyboardInterrupt

    def counted(*paths):
        if len(done) == at:
            killed()
        done.append(paths)
        assert not os.path.exists(paths[1])  # it appears whole
        replace(*paths)

    if at is None:
        monkeypatch.setattr(checkpoint.Checkpoints, "save", killed)
    else:
        monkeypatch.setattr(os, "replace", counted)


@pytest.mark.parametrize("at", [0, 2, 3, None])
def test_a_conversion_that_was_killed_can_be_repeated(run, folder, tmp_path, monkeypatch, at):
    """Until the checkpoint is there, what is there is whole; then all is."""
    work = tmp_path / "w"
    flags = f"--from={folder}", f"--workdir={work}"
    with monkeypatch.context() as patch:
        stopped(patch, at)
        assert run(*flags)[0] == 130
    assert not (work / "checkpoints" / "0").exists()
    for path in [*work.glob("*.yaml"), *work.glob("hugging_face/*")]:
        assert path.read_text().endswith(("\n", "}"))
    change(eos_token_id=1)(folder, monkeypatch)
    (folder / "generation_config.json").unlink()  # the next one brings another folder, and nothing of this one stays
    code, _, err = run(*flags)
    assert (code, err) == (0, "")
    assert (work / "checkpoints" / "0").is_dir() and (work / "config.yaml").is_file()
    assert {path.name for path in (work / "hugging_face").iterdir()} == {"config.json", "tokenizer.json"}
    assert run(*flags)[0] == 2  # has checkpoints already


def test_a_full_disk_is_no_traceback(run, folder, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        code, _, err = run(f"--from={folder}", f"--workdir={tmp_path / 'w'}")
        assert code == 1 and err.startswith(f"{tmp_path}/w/lock.json: No space left on device\n  fix   make room")
    assert run(f"--from={folder}", f"--workdir={tmp_path / 'w'}")[0] == 0
    monkeypatch.setattr(os, "replace", full)
    code, _, err = run(f"--workdir={tmp_path / 'w'}", f"--to={tmp_path / 'out'}")
    assert code == 1 and err.startswith(f"{tmp_path}/out: No space left on device\n  fix   make room")
    assert not (tmp_path / "out").exists()


def test_the_kept_config_is_read_as_strictly(run, folder, tmp_path):
    assert run(f"--from={folder}", f"--workdir={tmp_path / 'w'}")[0] == 0
    kept = tmp_path / "w" / layout.IMPORTED / "config.json"
    kept.write_text(kept.read_text()[:-3])
    code, _, err = run(f"--workdir={tmp_path / 'w'}", f"--to={tmp_path / 'out'}")
    assert code == 2 and err.startswith(f"{kept}: not valid JSON")


def test_terms_and_templates_are_carried_and_a_card_says_what_was_done(run, folder, tmp_path):
    work, back = tmp_path / "w", tmp_path / "back"
    (folder / "additional_chat_templates").mkdir()
    (folder / "README.md").write_text("---\nlicense:\n- mit\n- other\nlicense_name: llama\ntags:\n- x\n---\n# Before\n")
    carried = {
        "LICENSE.txt": "terms", "USE_POLICY.md": "policy", "chat_template.jinja": "{{ messages }}",
        "additional_chat_templates/tools.jinja": "tools",
        "generation_config.json": '{"eos_token_id": 1, "repetition_penalty": 1.5}',
    }  # fmt: skip
    for name, text in carried.items():
        (folder / name).write_text(text)
    (folder / "notes.txt").write_text("mine")
    assert run(f"--from={folder}", f"--workdir={work}")[0] == 0
    tokens = tokenizer.load_tokenizer(config.load(str(work / "config.yaml")).data.tokenizer)
    obeyed, _ = generation_config.read(tokens)
    assert obeyed and obeyed.repetition_penalty == 1.5
    assert run(f"--workdir={work}", f"--to={back}")[0] == 0
    assert {name: (back / name).read_text() for name in carried} == carried
    assert (back / "README.original.md").read_text() == (folder / "README.md").read_text()
    assert not (back / "notes.txt").exists()
    card = (back / "README.md").read_text()
    assert card.startswith(
        "---\nlibrary_name: transformers\nlicense:\n- mit\n- other\nlicense_name: llama\n---\n\n# in\n"
    )
    assert "A Llama model of 26,784 parameters in float32, written by gspmd_lm." in card
    assert "- The weights began as those of in.\n- They were not trained here" in card
    assert "still hold: `LICENSE.txt`, `USE_POLICY.md`." in card
    # A second way there and back keeps the first card.
    assert run(f"--from={back}", f"--workdir={tmp_path / 'w2'}")[0] == 0
    assert run(f"--workdir={tmp_path / 'w2'}", f"--to={tmp_path / 'again'}")[0] == 0
    assert (tmp_path / "again" / "README.original.md").read_text() == card


@pytest.mark.parametrize("name", ["LICENSE", "README.md", "additional_chat_templates/x.jinja", "tokenizer.json"])
def test_links_lead_no_other_files_into_an_export(run, folder, tmp_path, name):
    """Neither on the way in nor on the way out, nor by way of a folder that is a link."""
    (tmp_path / "private").mkdir()
    secret = tmp_path / "private" / Path(name).name
    secret.write_text((folder / name).read_text() if (folder / name).exists() else "secret")
    if "/" in name:
        (folder / name).parent.symlink_to(secret.parent)
    else:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(secret)
    code, _, err = run(f"--from={folder}", f"--workdir={tmp_path / 'w'}")
    assert code == 2 and f"{folder / name}: a link to {secret}, outside of the folder" in err
    assert not (tmp_path / "w").exists()
    with pytest.raises(InputError, match="outside of the folder"):
        sidecars.choose_sidecars(folder, "bytes")


def test_links_of_the_hubs_cache_and_within_a_folder_are_followed(folder, tmp_path):
    blobs, snapshot = tmp_path / "hub" / "blobs", tmp_path / "hub" / "snapshots" / "0123"
    for path in (blobs, snapshot / "additional_chat_templates"):
        path.mkdir(parents=True)
    (blobs / "abc").write_text("terms")
    (snapshot / "LICENSE").symlink_to("../../blobs/abc")
    (snapshot / "additional_chat_templates" / "x.jinja").symlink_to("../../../blobs/abc")
    (snapshot / "NOTICE").symlink_to("LICENSE")
    (tmp_path / "linked").symlink_to(snapshot)
    for place in (snapshot, tmp_path / "linked"):
        assert {*sidecars.find_sidecars(place)} == {"LICENSE", "NOTICE", "additional_chat_templates/x.jinja"}
    (snapshot / "NOTICE").unlink()
    (snapshot / "NOTICE").symlink_to("../../refs")
    (tmp_path / "hub" / "refs").touch()
    with pytest.raises(InputError, match="NOTICE: a link to"):
        sidecars.find_sidecars(snapshot)


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """A run of two steps with a tokenizer of its own."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    (tmp_path / "mine" / "chat_template.jinja").write_text("{{ messages }}")
    (tmp_path / "mine" / "config.json").write_text('{"eos_token_id": 1}')
    monkeypatch.chdir(tmp_path)
    sets = ["model.layers=1", "model.embed=16", "model.heads=2", "model.kv_heads=2", "model.head_dim=8", "model.mlp=16",
            "model.context=16", "model.vocab=64", "data.tokenizer=mine",
            "data.source=random:64", "data.seq=16", "data.batch=8", "data.held_out=0.0", "train.steps=2",
            "train.trackers=[]"]  # fmt: skip
    with pytest.raises(SystemExit) as end:
        cli.main(["main.py", "train", "--workdir=run", *TRAIN, *(f"--set={one}" for one in sets)])
    assert end.value.code == 0
    return tmp_path / "run"


@pytest.mark.long
def test_a_model_that_was_trained_here_says_where_its_texts_end(run, trained, tmp_path):
    code, _, err = run(f"--workdir={trained}", f"--to={tmp_path / 'out'}", "--set=model.weight_dtype=int8")
    assert code == 2 and err.startswith("model.weight_dtype: int8: weights of 8 bits are not trained or converted")
    code, out, err = run(f"--workdir={trained}", f"--to={tmp_path / 'out'}")
    assert (code, err) == (0, ""), err
    out = tmp_path / "out"
    assert json.loads((out / "config.json").read_text())["eos_token_id"] == 1
    assert json.loads((out / "generation_config.json").read_text()) == {"eos_token_id": 1}
    assert json.loads((out / "tokenizer_config.json").read_text())["eos_token"] == "</s>"
    assert (out / "chat_template.jinja").read_text() == "{{ messages }}"
    card = (out / "README.md").read_text()
    assert "- The weights were new" in card
    assert "trained for 2 steps on 16 rows, which hold at most 256 tokens, of `random:64`" in card
    assert "No licence came with the weights." in card and str(tmp_path) not in card


def test_a_run_keeps_its_tokenizer(trained, tmp_path, monkeypatch):
    kept = {path.name for path in trained.iterdir()} & {*special_tokens.FILES, "config.json"}
    assert kept == {"tokenizer.json", "chat_template.jinja", "generation_config.json"}, "with the ends of config.json"
    run = str(trained / "config.yaml")
    named = core_yaml.parse((trained / "config.yaml").read_text(), "")["data"]["tokenizer"]
    assert named == str(trained / "tokenizer.json")
    (tmp_path / "elsewhere" / "mine").mkdir(parents=True)
    for folder in (tmp_path, tmp_path / "elsewhere"):  # one has another tokenizer of the same name
        monkeypatch.chdir(folder)
        config = api.load_config(run, workdir=str(trained))
        assert config.data.tokenizer == named and chat.stop_ids(named) == (1,)
    other = TOKENIZER | {"truncation": None, "version": "1.1"}
    (tmp_path / "elsewhere" / "mine" / "tokenizer.json").write_text(json.dumps(other))
    with pytest.raises(
        InputError, match=r"data.tokenizer=mine is not the tokenizer of the run in .*/run: its sha256 is"
    ):
        api.load_config(run, "data.tokenizer=mine", str(trained))
    monkeypatch.chdir(tmp_path)
    assert api.load_config(run, "data.tokenizer=mine", str(trained)).data.tokenizer == "mine"
    trained.rename(tmp_path / "moved")
    moved = str(tmp_path / "moved" / "config.yaml")
    assert api.load_config(moved, workdir="moved").data.tokenizer == str(tmp_path / "moved" / "tokenizer.json")


@pytest.mark.parity
@pytest.mark.filterwarnings("ignore")
def test_transformers_ends_its_texts(run, trained, tmp_path):
    import torch
    import transformers

    assert run(f"--workdir={trained}", f"--to={tmp_path / 'out'}")[0] == 0
    tokens = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert (tokens.eos_token, tokens.eos_token_id, model.generation_config.eos_token_id) == ("</s>", 1, 1)
    with torch.no_grad():  # logits that are largest for the end
        model.lm_head.weight.zero_()
        model.model.norm.weight.zero_()
        model.lm_head.bias = torch.nn.Parameter(torch.eye(64)[1])
    made = model.generate(torch.tensor([[0]]), max_new_tokens=9, do_sample=False)
    assert made.tolist() == [[0, 1]]


def test_a_copy_of_the_tokenizer_that_came_with_the_weights_changes_nothing(tmp_path):
    original, kept = tmp_path / "hugging_face", tmp_path / "tuned"
    for path in (original, kept):
        path.mkdir()
        (path / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    (original / "config.json").write_text('{"eos_token_id": 1}')

    def written():
        name = str(kept / "tokenizer.json")
        return sidecars.write_text_sidecars(sidecars.choose_sidecars(original, name), original, name, 2)

    for name, content in special_tokens.files_of(original / "tokenizer.json").items():
        (kept / name).write_bytes(content)
    assert written() == ({}, [])
    (kept / "generation_config.json").write_text('{"eos_token_id": 0}')  # whoever tunes lets texts end otherwise
    assert written()[1] == [0]
