"""Matmuls with operands of 8 bits: what a run says of them, and the chips on which they are refused."""

from gspmd_lm.config import Config
from gspmd_lm.errors import InputError
from gspmd_lm.hardware.chips import Processor
from gspmd_lm.sharding.quantised import EIGHT_BITS
from gspmd_lm.sharding.rules import Rules

_TRITON = "xla_gpu_enable_triton_gemm"  # an option of XLA: its own matmuls convert an operand while they read it


def check_matmul_dtype(dtype: str | None, on: Processor) -> None:
    """Raises InputError if a chip of the table is no faster with operands of this dtype than with bfloat16."""
    chip = on.chip
    if dtype and chip and not chip.peak_of_operands(dtype):
        other = next((name for name in ("int8", "fp8") if chip.peak_of_operands(name)), "null")
        raise InputError(
            f"model.matmul_dtype: {dtype}: no published rate of {on.name} for operands of {dtype} is above that for "
            f"bfloat16\n  fix   --set model.matmul_dtype={other}"
        )


def matmul_operands(config: Config, rules: Rules, on: Processor) -> str:
    """A line about matmuls in 8 bits, or about weights that are stored in 8 bits; '' if the model has neither."""
    model, chip, simulated = config.model, on.chip, " (simulated)" if on.platform == "cpu" else ""
    rest_in_8_bits = model.weight_dtype in EIGHT_BITS
    if model.matmul_dtype:
        said = f"{model.matmul_dtype} operands in products with block weights{simulated}; MFU is of the bf16 peak"
        if chip and chip.int8_share and model.experts:
            longer = {"fp8": "2%", "int8": "6%"}[model.matmul_dtype]
            said += f". On one H100 alone, a train step of experts took {longer} longer than with bfloat16"
        elif chip and chip.int8_share and model.matmul_dtype == "int8" and not rest_in_8_bits:
            said += (
                ". A train step with int8 was measured to be slower than with bfloat16 on one H100, and with fp8 to be "
                "faster; fix --set model.matmul_dtype=fp8"
            )
        return said
    if not rest_in_8_bits:
        return ""
    said = f"block weights are {model.weight_dtype}, and {model.compute_dtype} where they are multiplied"
    if on.platform == "gpu" and not rules.compiler_options.get("gpu", {}).get(_TRITON):
        said += (
            f". cuBLAS reads them from a copy of a layer's weights, which saves memory and takes longer than bfloat16; "
            f"Triton's matmuls take less long; fix --set rules.compiler_options.gpu.{_TRITON}=true"
        )
    return said
