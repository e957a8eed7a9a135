"""Kernels around an expert's layers in Triton; `step` launches them.

Everything is float32, numbers and sums. Annotations and capitals as in `kernels`.
"""

# mypy: allow-untyped-defs
# ruff: noqa: N803

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def linear_kernel(
    x,
    weight,
    bias,
    result,
    inputs,
    outputs,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    """A small layer in float32; a program computes OUTPUTS outputs of one token.

    Args:
        x: (N, inputs) float32.
        weight: (outputs, inputs) float32; bias: (outputs,) float32.
        result: (N, outputs) float32.
    """
    row = tl.program_id(0)
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_output = output < outputs
    sums = tl.zeros((OUTPUTS, INPUTS), dtype=tl.float32)
    for start in range(0, inputs, INPUTS):
        inner = start + tl.arange(0, INPUTS)
        is_inner = inner < inputs
        values = tl.load(x + row * inputs + inner, mask=is_inner, other=0.0)
        at = output[:, None] * inputs + inner[None, :]
        inside = is_output[:, None] & is_inner[None, :]
        sums += values[None, :] * tl.load(weight + at, mask=inside, other=0.0)
    found = tl.sum(sums, axis=1) + tl.load(bias + output, mask=is_output, other=0.0)
    tl.store(result + row * outputs + output, found, mask=is_output)


# Some steps' rows of the tables are aligned and some are not: one form serves all of them.
@triton.jit(do_not_specialize=['time', 'step', 'plan_weight'])
def advance_kernel(
    x,
    velocity,
    time,
    step,
    row_weight,
    plan,
    plan_weight,
    result,
    count,
    rows,
    chunk,
    actions,
    BLOCK: tl.constexpr,
):
    """Mix the velocities of all rows, add the plan term, and move x along the flow; in float32.

    Args:
        x, result: (requests * chunk,); velocity: (requests * rows, chunk).
        time, step: (1,), flow time and its step.
        row_weight: (requests * rows,); plan: as x; plan_weight: (requests * chunk / actions,), of
            each action.
        rows, chunk, actions: rows of a request, numbers of a chunk, and of an action.
    """
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    first_row, place = at // chunk * rows, at % chunk
    old = tl.load(x + at, mask=inside, other=0.0)
    mixed = tl.zeros((BLOCK,), dtype=tl.float32)
    for row in range(rows):
        here = first_row + row
        of_row = tl.load(velocity + here * chunk + place, mask=inside, other=0.0)
        mixed += tl.load(row_weight + here, mask=inside, other=0.0) * of_row
    clean = old - tl.load(time) * mixed
    weight = tl.load(plan_weight + at // actions, mask=inside, other=0.0)
    mixed -= weight * (tl.load(plan + at, mask=inside, other=0.0) - clean)
    tl.store(result + at, old + tl.load(step) * mixed, mask=inside)
