# ruff: noqa: E501  a program's line is one line
"""Programs of a few instructions that take whole nanoseconds, and what is predicted for them."""

import dataclasses
import math

from gspmd_lm.foresight import hlo
from gspmd_lm.foresight.timing import op_time, predict
from gspmd_lm.hardware.chips import CHIPS

# A cycle is 1 ns, and so is a byte from HBM; from the host it takes 4 ns.
CHIP = dataclasses.replace(
    CHIPS["v5e"], clock_hz=1e9, peak_bf16_flops_per_s=1e12, hbm_bytes_per_s=1e9 / op_time.HBM_SHARE["tpu"], host_link_bytes_per_s=0.25e9,
)  # fmt: skip


class Links:
    """Four devices, fsdp 2 x tensor 2. What takes how long is told by the bytes that one device gives: 1 ns each."""

    slices = (0, 0, 0, 0)

    def axes(self, groups):
        return {(0, 1): ("tensor",), (0, 2): ("fsdp",)}.get(groups[0], ("fsdp", "tensor"))

    def link(self, groups):
        return "ici"

    def track(self, groups):
        return "ici " + "+".join(self.axes(groups))

    def time_s(self, kind, size_bytes, groups):
        return size_bytes / (len(groups[0]) if kind == "all-gather" else 1) * 1e-9


COMPUTATIONS = """%dot (a: f32[8,8]) -> f32[8,8] {
  %a = f32[8,8]{1,0} parameter(0)
  ROOT %d = f32[8,8]{1,0} dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%sum (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %s = f32[] add(%x, %y)
}
"""
TENSOR, FSDP, ALL = "{{0,1},{2,3}}", "{{0,2},{1,3}}", "{}"


def matmul(name, cycles, operand="p", op="jit(_train)/jvp(D)/layers/of.layers.mlp/dot_general"):
    return f'  %{name} = f32[8,8]{{1,0}} fusion(%{operand}), kind=kOutput, calls=%dot, metadata={{op_name="{op}"}}, backend_config={{"window_config":{{"estimated_cycles":"{cycles}"}}}}\n'


def gather(name, nbytes, groups, operand="q"):
    """Begins an all-gather that takes `nbytes` ns; `operand` is u8[nbytes]."""
    return f"  %{name} = ((u8[{nbytes}]), u8[{2 * nbytes}]) all-gather-start(%{operand}{nbytes}), replica_groups={groups}, dimensions={{0}}\n"


def done(name, start, nbytes):
    return f"  %{name} = u8[{2 * nbytes}] all-gather-done(%{start})\n"


def reduce(name, nbytes, groups, operand="q"):
    return f"  %{name} = u8[{nbytes}] all-reduce(%{operand}{nbytes}), replica_groups={groups}, to_apply=%sum\n"


def module(body, computations="", devices=4, slices=()):
    sizes = (10, 30, 60, 130, 150)
    given = "  %p = f32[8,8]{1,0} parameter(0)\n" + "".join(
        f"  %q{n} = u8[{n}] parameter({k})\n" for k, n in enumerate(sizes, 1)
    )
    return hlo.parse(
        f"HloModule jit__train, is_scheduled=true, num_partitions={devices}\n\n{COMPUTATIONS}\n{computations}\nENTRY %main (p: f32[8,8]) -> f32[8,8] {{\n{given}{body}  ROOT %root = f32[8,8]{{1,0}} bitcast(%p)\n}}\n",
        slices,
    )


def predicted(body, computations="", links=None, flops=0.0, tokens=0.0, chip=CHIP):
    found = predict.predict(module(body, computations), chip, links or Links(), flops, tokens)
    parts = (
        found.matmul_s + found.attention_s + found.other_s + found.exposed_communication_s + found.exposed_host_copy_s
    )
    assert math.isclose(parts, found.step_time_s, rel_tol=1e-9, abs_tol=1e-15)
    return found


def ns(seconds):
    return round(seconds * 1e9, 6)


def loop(body, turns, name="", state="f32[8,8]{1,0}", carried="x"):
    """Computations of a loop whose body is `body`, over (counter, p, `carried`)."""
    of = f"(s32[], f32[8,8]{{1,0}}, {state})"
    return f"""%body{name} (s: {of}) -> {of} {{
  %st{name} = {of} parameter(0)
  %i{name} = s32[] get-tuple-element(%st{name}), index=0
  %p{name} = f32[8,8]{{1,0}} get-tuple-element(%st{name}), index=1
  %x{name} = {state} get-tuple-element(%st{name}), index=2
  %one{name} = s32[] constant(1)
  %next{name} = s32[] add(%i{name}, %one{name})
{body}  ROOT %t{name} = {of} tuple(%next{name}, %p{name}, %{carried}{name if carried == "x" else ""})
}}

%cond{name} (s: {of}) -> pred[] {{
  %sc{name} = {of} parameter(0)
  %ic{name} = s32[] get-tuple-element(%sc{name}), index=0
  %n{name} = s32[] constant({turns})
  ROOT %lt{name} = pred[] compare(%ic{name}, %n{name}), direction=LT
}}
"""


def run_loop(name="", p="p", x="p", state="f32[8,8]{1,0}", op="", limit=""):
    of = f"(s32[], f32[8,8]{{1,0}}, {state})"
    metadata = f', metadata={{op_name="{op}"}}' if op else ""
    return f"  %zero{name} = s32[] constant(0)\n  %in{name} = {of} tuple(%zero{name}, %{p}, %{x})\n  %loop{name} = {of} while(%in{name}), condition=%cond{name}, body=%body{name}{metadata}\n"
