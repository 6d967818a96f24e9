"""convert: brings a Hugging Face folder into a workdir, and writes one from a workdir."""

from absl import flags

from gspmd_lm.cli.verb import Flags, Verb, on_devices
from gspmd_lm.runtime.quiet import import_jax


def _define(flags: Flags) -> None:
    on_devices(flags)
    flags.group("The published model")
    flags.path("from", None, "The folder to read: config.json and *.safetensors, as transformers writes them.")
    flags.several(
        "ignore", "Pass over this field of --from's config.json, whose meaning is not known. This flag may be repeated."
    )
    flags.path("to", None, "The new folder to write, which transformers can load.")
    flags.text(
        "dtype",
        None,
        "The dtype that --to writes: float32, bfloat16 or float16. The default is the dtype that each tensor came in.",
    )
    flags.yes_no("adapter", "Let --to write the LoRA adapter alone, for PEFT.")
    flags.text("base", "", "The base model that the adapter's config names.")


def run(values: flags.FlagValues, names: list[str]) -> int:
    """Imports a folder or exports a workdir, and returns the exit code."""
    from gspmd_lm.cli import inputs

    rules = inputs.read_rules(values)  # a published model brings its own config
    import_jax()
    from gspmd_lm.cli import conversion

    return conversion.run(values, rules)


CONVERT = Verb(
    "convert",
    "Bring a Hugging Face checkpoint into a workdir (--from), or write one (--to).",
    [
        ("convert --from=Llama-3.2-1B --workdir=runs/llama", "Bring a model in."),
        ("convert --workdir=runs/a --to=exported", "Write one that transformers can load."),
    ],
    _define,
    run,
)
