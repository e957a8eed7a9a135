"""The expert's time conditioning in numpy, for backends that run without PyTorch."""

from __future__ import annotations

from vla_runtime.families.blocks.flow_time import ActionTimeTable
from vla_runtime.families.smolvla.dimensions import SmolVlaDims
from vla_runtime.files.safetensors_reader import SafetensorsReader


def time_table(dims: SmolVlaDims, weights: SafetensorsReader) -> ActionTimeTable:
    """Return SmolVLA's time table: the time's share of the action MLP."""
    return ActionTimeTable(dims.expert.width, weights)
