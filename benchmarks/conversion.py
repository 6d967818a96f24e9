"""What a conversion takes of a machine: CPU time and peak memory of `convert --from` and `convert --to`, beside a copy.

    python -m benchmarks.conversion [--gigabytes=1.16] [--shards=4]

writes a directory of bfloat16 weights of that size, several safetensors files, to a temporary folder; copies it with
and without the sha256 of what is written; imports it; and exports it again. Each runs as a process of its own. The
folder's bytes have been read once before, so that all of them find its pages in memory.

Memory is touched and freed before each command. A virtual machine may have handed its free pages back to its host, and
the first touch of such a page took up to 2 s of CPU time per GB: the first command to need them would pay for all.
"""

import json
import mmap
import shutil
import sys
import tempfile
from pathlib import Path

import ml_dtypes
import numpy as np

from benchmarks import measure
from gspmd_lm.convert import safetensors

MAIN = measure.ROOT / "main.py"
HIDDEN, MLP, VOCAB = 2048, 7680, 32000
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": MLP,
    "num_attention_heads": 16, "max_position_embeddings": 4096, "vocab_size": VOCAB, "torch_dtype": "bfloat16",
}  # fmt: skip
HASHED_COPY = """
import hashlib, sys
from pathlib import Path
source, target = map(Path, sys.argv[1:])
target.mkdir()
for path in source.iterdir():
    sha256 = hashlib.sha256()
    with path.open("rb") as read, (target / path.name).open("wb") as write:
        while block := read.read(1 << 20):
            sha256.update(block)
            write.write(block)
"""


def shapes(gigabytes: float) -> dict[str, tuple[int, ...]]:
    """The tensors of a Llama of about so many bytes."""
    layer = {
        **{f"self_attn.{name}_proj.weight": (HIDDEN, HIDDEN) for name in "qkvo"},
        "mlp.gate_proj.weight": (MLP, HIDDEN), "mlp.up_proj.weight": (MLP, HIDDEN),
        "mlp.down_proj.weight": (HIDDEN, MLP), "input_layernorm.weight": (HIDDEN,),
        "post_attention_layernorm.weight": (HIDDEN,),
    }  # fmt: skip
    tables = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,),
              "lm_head.weight": (VOCAB, HIDDEN)}  # fmt: skip
    numbers = sum(int(np.prod(shape)) for shape in layer.values())
    layers = round((gigabytes * 1e9 / 2 - sum(int(np.prod(shape)) for shape in tables.values())) / numbers)
    return tables | {f"model.layers.{i}.{name}": shape for i in range(layers) for name, shape in layer.items()}


def write(folder: Path, tensors: dict[str, tuple[int, ...]], shards: int) -> int:
    """Writes a directory as transformers does, and returns its bytes."""
    folder.mkdir()
    layers = sum("input_layernorm" in name for name in tensors)
    (folder / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": layers}))
    sizes = {name: 2 * int(np.prod(shape)) for name, shape in tensors.items()}
    files = safetensors.split_into_files(sizes, -(-sum(sizes.values()) // shards))
    (folder / safetensors.INDEX).write_text(safetensors.index_text(files, sum(sizes.values())))
    rng = np.random.default_rng(0)
    for file, names in files.items():
        with (folder / file).open("wb") as out:
            out.write(safetensors.header_bytes({name: ("BF16", tensors[name]) for name in names}))
            for name in names:
                out.write((0.02 * rng.standard_normal(tensors[name], np.float32)).astype(ml_dtypes.bfloat16).tobytes())
    return sum(path.stat().st_size for path in folder.iterdir())


def claim(size: int) -> None:
    """Touches so many bytes of memory and frees them."""
    np.empty(size, np.uint8)[:: mmap.PAGESIZE] = 1


def main() -> None:
    flags = measure.flags(__doc__, writes=False)
    flags.add_argument("--gigabytes", type=float, default=1.16)
    flags.add_argument("--shards", type=int, default=4)
    given = flags.parse_args()
    with tempfile.TemporaryDirectory() as made:
        at = Path(made)
        size = write(at / "source", shapes(given.gigabytes), given.shards)
        convert = [sys.executable, str(MAIN), "convert", "--platform=cpu", f"--workdir={at / 'workdir'}"]
        commands = {
            "cp": ["cp", "-r", str(at / "source"), str(at / "copy")],
            "cp with sha256": [sys.executable, "-c", HASHED_COPY, str(at / "source"), str(at / "hashed")],
            "import jax": [sys.executable, "-c", "import jax; jax.devices()"],
            "import of convert": [sys.executable, "-c", "import gspmd_lm.cli.conversion, jax; jax.devices()"],
            "convert --from": [*convert, f"--from={at / 'source'}"],
            "convert --to": [*convert, f"--to={at / 'out'}"],
        }
        print(f"{size / 1e9:.2f} GB in {given.shards} files")
        for name, command in commands.items():
            claim(4 * size)
            user_s, system_s, peak_gb = measure.taken(command)
            print(f"{name:17s} {user_s:5.2f} + {system_s:4.2f} s of CPU   {peak_gb:5.2f} GB at most")
            for folder in ("copy", "hashed"):
                shutil.rmtree(at / folder, ignore_errors=True)
        kept = sum(path.stat().st_size for path in (at / "workdir").rglob("*") if path.is_file())
        print(f"the checkpoint has {kept / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
