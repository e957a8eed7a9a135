"""Lengths at which a prompt is encoded where shapes are static.

A CUDA graph cannot leave padded tokens out. So a prefix has a graph for each of a few lengths, if
its family allows that (`Family.cuts_padding`), and the shortest that holds the prompt runs. What it
hands to the head is shorter along some axis; zeros follow there, which masks hide.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from vla_runtime.family.declaration import Family, PolicyDims, RowInput

# Prompts of a sentence alone, with the state of a few joints, and with a long state.
LENGTHS = (48, 96, 200)
Inputs = Mapping[str, RowInput]


def inputs_by_length(family: Family, dims: PolicyDims, static_shapes: bool) -> tuple[Inputs, ...]:
    """Return the prefix's inputs at each length, shortest first; the last are the policy's own."""
    own = family.prefix_inputs(dims)
    if not (static_shapes and family.cuts_padding):
        return (own,)
    whole: Any = dims
    shorter = [length for length in LENGTHS if length < whole.prompt_length]
    return (*(family.prefix_inputs(replace(whole, prompt_length=n)) for n in shorter), own)


def shortest(lengths: Sequence[Inputs], rows: Mapping[str, np.ndarray]) -> int:
    """Return the index of the first length that cuts off no valid token of any row.

    `rows` are inputs at the full length, (R, …) each; booleans mark valid tokens.
    """
    for index, inputs in enumerate(lengths[:-1]):
        masks = [(rows[name], one.shape[0]) for name, one in inputs.items() if one.kind == 'bool']
        if not any(mask[:, length:].any() for mask, length in masks):
            return index
    return len(lengths) - 1


def cut(rows: Mapping[str, Tensor], inputs: Inputs) -> dict[str, Tensor]:
    """Return views of the rows (R, …) in the shapes of these inputs."""
    return {
        name: rows[name][(slice(None), *(slice(size) for size in one.shape))]
        for name, one in inputs.items()
    }


def write_padded(tensor: Tensor, buffer: Tensor) -> None:
    """Copy into the front of a buffer that is longer along some axes; zeros follow."""
    for axis, size in enumerate(tensor.shape):
        if size < buffer.shape[axis]:
            # What an earlier prompt left behind may be NaN, and zero times NaN is NaN.
            buffer.narrow(axis, size, buffer.shape[axis] - size).zero_()
            buffer = buffer.narrow(axis, 0, size)
    buffer.copy_(tensor)
