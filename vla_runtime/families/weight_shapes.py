"""Names and shapes of a network's weights, which take PyTorch the first time only."""

from __future__ import annotations

from typing import Any

from vla_runtime.families.shape_cache import remember, remembered, shapes_file
from vla_runtime.family.declaration import PolicyDims
from vla_runtime.family.listing import code_folders, find_family

Shapes = dict[str, tuple[int, ...]]


def weight_shapes(name: str, dims: PolicyDims) -> Shapes:
    """Return names and shapes of a network's tensors; allocates nothing.

    Imports PyTorch the first time only: they are remembered in the user's cache folder.

    Raises:
        ValueError: unknown family.
        ModuleNotFoundError: not remembered, and PyTorch is not installed.
    """
    find_family(name)
    path = shapes_file(name, dims, code_folders())
    shapes = remembered(path, _shapes_of)
    if shapes is None:
        from vla_runtime.families.flow_network import empty_network

        state = empty_network(name, dims).state_dict()
        shapes = {tensor: tuple(value.shape) for tensor, value in state.items()}
        remember(path, shapes)
    return shapes


def _shapes_of(content: dict[str, Any]) -> Shapes:
    return {name: tuple(map(int, shape)) for name, shape in content.items()}
