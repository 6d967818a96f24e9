"""Compiling for devices: the compiler's options, what it refuses, and whether a program finds memory enough."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from gspmd_lm import versions
from gspmd_lm.errors import InputError, did_you_mean
from gspmd_lm.hardware.chips import GPU_MEMORY_SHARE, chip_of
from gspmd_lm.runtime import host

# Compiler options that a rules file may override; null there removes one. Each name was accepted by the compilers that
# come with jax 0.10.2 (libtpu 0.0.42 for v5e, v5p and v6e; the CUDA 12 plugin for an H100), and by libtpu 0.0.50.
DEFAULT_OPTIONS: dict[str, dict[str, bool | int | str]] = {
    "cpu": {},
    # The initial state runs once, and the compiler takes longer than the run. Level 0 would give other values, because
    # a product and the sum that it goes into are then rounded one after the other.
    "cpu once": {"xla_backend_optimization_level": 1},
    "gpu": {
        # Products by cuBLAS. Published runs of large models turn Triton's off too, and where no GPU tunes them, as in
        # `explain`, Triton's take up to a percent longer and fail to compile for some widths, such as 2304.
        "xla_gpu_enable_triton_gemm": False,
        "xla_gpu_enable_latency_hiding_scheduler": True,
        "xla_gpu_all_gather_combine_threshold_bytes": 256 * 2**20,
        "xla_gpu_all_reduce_combine_threshold_bytes": 256 * 2**20,
        "xla_gpu_reduce_scatter_combine_threshold_bytes": 256 * 2**20,
        # In percent of what 80% of a GPU's memory leaves beside the arguments. As soon as that seems full, XLA's
        # scheduler overlaps nothing any more. A process here takes more than 80%.
        "xla_gpu_memory_limit_slop_factor": round(100 * GPU_MEMORY_SHARE / 0.8),
    },
    # One matmul for q, k and v would read a copy of the layer's three weights.
    "gpu generate": {"xla_gpu_dot_merger_threshold_mb": 0},
    # jax 0.11.2 multiplies a second time to write a result into the stack of all layers. When text is generated, the
    # compiler's default stays: from 0.11 on, matmuls read a layer's weights where these lie in the stack.
    "gpu train": {"xla_gpu_enable_dynamic_slice_fusion": False},
    "gpu offload": {
        "xla_gpu_memory_limit_slop_factor": 1000,  # it counts what is offloaded as memory of the GPU
        # No CUDA graphs: in one, copies to and from the host wait in line with the kernels. If its operations ran side
        # by side, fewer arrays would share memory: 15 GB more for some layouts of Llama 3 8B (compiled).
        "xla_gpu_enable_command_buffer": "",
    },
    "tpu": {
        "xla_tpu_enable_latency_hiding_scheduler": True,
        "xla_tpu_overlap_compute_collective_tc": True,
        "xla_enable_async_all_gather": True,
        "xla_enable_async_all_reduce": True,
        "xla_jf_crs_combiner_threshold_in_bytes": 256 * 2**20,  # all-reduces
    },
    # libtpu 0.0.50 refuses to compile with these for other chips than v5e. With 0.0.42, all chips have them.
    "tpu fusion": {
        "xla_tpu_enable_async_collective_fusion": True,
        "xla_tpu_enable_async_collective_fusion_fuse_all_gather": True,
        "xla_tpu_enable_async_collective_fusion_fuse_all_reduce": True,
        "xla_tpu_enable_async_collective_fusion_fuse_reduce_scatter": True,
        "xla_tpu_enable_async_collective_fusion_multiple_steps": True,
    },
    # On a torus of three dimensions, libtpu turns reduce-scatters, and all-gathers over 64 chips or more, into
    # synchronous all-reduces of twice the bytes. With these options the collectives stay what they are, asynchronous.
    "tpu 3d": {
        "xla_tpu_enable_sparse_core_collective_offload_nd_reduce_scatter": True,
        "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter": True,
        "xla_tpu_prefer_async_allgather_to_allreduce": True,
    },
    # With two parts of `interleave`, the first gather of one part's MLP runs beside the attention of the other. libtpu
    # 0.0.42.1 ends the process with this option while it compiles four parts for v5p.
    "tpu interleave": {"xla_tpu_enable_async_collective_fusion_with_mosaic_custom_call": True},
}

FUSES_ON_ALL = 0, 0, 42  # the last libtpu that is known to take the options of "tpu fusion" for all chips


def options(
    platform: str,
    rules_options: Mapping[str, Mapping[str, Any]],
    place: str,
    device_kind: str = "",
    also: Sequence[str] = (),
) -> dict[str, bool | int | float | str]:
    """The compiler options of `platform`: its defaults, overridden by the rules file's `compiler_options.<platform>`.

    Some defaults are for TPUs of one `device_kind`, as jax calls it. Some are for programs of `also`: "once" for one
    that runs only once, "train" for a training step, "offload" for one that offloads activations, "interleave" for one
    whose layers have two parts, "generate" for prefill and decode.

    null removes a default. The compiler checks names and values, see `compile`. Rows of other platforms are not
    checked. Raises an InputError that names `place` for a value that is not a scalar.
    """
    chip = chip_of(device_kind)
    wanted = {
        platform: True,
        "tpu fusion": platform == "tpu" and (_libtpu() <= FUSES_ON_ALL or (chip and chip.fuses_collectives)),
        "tpu 3d": chip and chip.torus_dimensions == 3,
        **{f"{platform} {kind}": True for kind in also},
    }
    rows: dict[str, Any] = {}
    for of, holds in wanted.items():
        rows |= DEFAULT_OPTIONS.get(of, {}) if holds else {}
    rows |= rules_options.get(platform, {})
    for name, value in rows.items():
        if not isinstance(value, bool | int | float | str | None):
            raise InputError(
                f"{place}: compiler_options.{platform}.{name}: {value!r} is not a single value\n"
                "  fix   write true, false, a number or a word; null removes a default"
            )
    rows = {str(name): value for name, value in rows.items() if value is not None}
    if platform == "tpu":  # libtpu parses text
        return {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in rows.items()}
    return rows


def _libtpu() -> tuple[int, ...]:
    """The version of libtpu, such as (0, 0, 42); () if it is not installed."""
    return tuple(map(int, re.findall(r"\d+", versions.installed_versions(["libtpu"])["libtpu"] or "")[:3]))


def compile(lowered: jax.stages.Lowered, options: Mapping[str, Any], platform: str, place: str) -> jax.stages.Compiled:
    """The program compiled with `options`. Raises an InputError that names a row of `place` that is refused."""
    try:
        return lowered.compile(compiler_options=dict(options))
    except jax.errors.JaxRuntimeError as error:
        refused = re.search(
            r"No such compile option: '(?P<unknown>[^']*)'"
            r"|While setting option (?P<typed>\w+), '.*?' (?P<kind>is not [^.]*)"
            r"|Failed to parse '.*?' into flag (?P<parsed>\w+): *(?P<why>.*)",
            str(error),
        )
        if not refused:
            raise
        raise InputError(_refusal(refused, options, platform, place)) from error


def _refusal(refused: re.Match[str], options: Mapping[str, Any], platform: str, place: str) -> str:
    name = refused["unknown"] or refused["typed"] or refused["parsed"]
    row = f"{place}: compiler_options.{platform}.{name}"
    of_platform = (rows for of, rows in DEFAULT_OPTIONS.items() if of.split()[0] == platform)
    defaults = {name: value for rows in of_platform for name, value in rows.items()}
    if name in defaults and options[name] == defaults[name]:
        return (
            f"{row}: this default is refused by the compiler of jax {jax.__version__}: {refused[0]}\n"
            f"  fix   add {name}: null to compiler_options.{platform}"
        )
    if refused["unknown"]:
        return f"{row}: the compiler has no such option{did_you_mean(name, defaults)}\n  fix   correct or remove it"
    reason = refused["kind"] or f"cannot be read. {refused['why']}".rstrip()
    return f"{row}: {options[name]!r} {reason}\n  fix   correct the value (true and false are written without quotes)"


def check_room(compiled: jax.stages.Compiled, devices: Sequence[Any], what: str, fix: str) -> None:
    """Raises InputError if a program needs more memory than its devices have free. `what` names it in the message.

    Simulated devices share the memory of this machine.
    """
    analysis: Any = compiled.memory_analysis()
    needed = analysis.argument_size_in_bytes + analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    needed += analysis.temp_size_in_bytes
    free, sharers = _room(devices)
    needed, place = needed * max(sharers, 1), "this machine" if sharers else "each device"
    if free is not None and needed > free:
        sizes = f"needs {needed / 1e9:.3g} GB, and {place} has {free / 1e9:.3g} GB free"
        raise InputError(f"{what} {sizes}\n  fix   {fix}")


def check_held(held_bytes: Mapping[str, int], devices: Sequence[Any]) -> None:
    """Raises InputError if devices cannot hold certain arrays, whatever is compiled. Nothing is compiled to know it.

    held_bytes: the bytes of arrays on each device, by purpose.
    """
    free, sharers = _room(devices)
    needed = {name: max(sharers, 1) * size for name, size in held_bytes.items()}
    total = sum(needed.values())
    if free is None or total <= free:
        return
    parts = ", ".join(f"{name} {size / 1e9:.3g} GB" for name, size in needed.items() if size > 0.001 * total)
    whole, free_gb = f"{total / 1e9:.3g} GB", f"{free / 1e9:.3g} GB"
    if sharers:
        several = "s share" if sharers > 1 else " has"
        raise InputError(
            f"{sharers} simulated device{several} the memory of this machine, which has {free_gb} free: "
            f"{whole} are needed before anything is computed ({parts})\n"
            "  fix   a smaller model, such as --config=tiny, a machine with more memory, or explain "
            "--target=v5p:2x2x2, which allocates nothing"
        )
    raise InputError(
        f"each device has {free_gb}: {whole} are needed before anything is computed ({parts})\n"
        "  fix   rules that split more, such as fsdp, more devices, or a smaller model"
    )


def _room(devices: Sequence[Any]) -> tuple[int | None, int]:
    """The free bytes of each device of this process, or of all its simulated ones together, and how many share them.

    None where the system does not say; 0 where each device has its own.
    """
    local_devices = [device for device in devices if device.process_index == jax.process_index()]
    if devices[0].platform == "cpu":
        return host.free_bytes(), len(local_devices)
    return (local_devices[0].memory_stats() or {}).get("bytes_limit"), 0
