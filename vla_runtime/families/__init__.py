"""Families of policies, found by listing this folder: each is one folder and nothing else.

What a family must bring is in `family.py` and `flow_network.py`. Nothing here imports PyTorch
before a network is asked for.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from typing import TYPE_CHECKING

from vla_runtime.families.family import Family, PolicyDims

if TYPE_CHECKING:
    from vla_runtime.families.flow_network import FlowNetwork

# Shared parts of networks, and no family.
_SHARED = 'blocks'


def family_folders() -> list[str]:
    """Names of the folders that hold families."""
    found = (module.name for module in pkgutil.iter_modules(__path__) if module.ispkg)
    return sorted(name for name in found if name != _SHARED)


def _in_folders() -> dict[str, tuple[str, Family]]:
    """Family name to its folder and declaration."""
    families: dict[str, tuple[str, Family]] = {}
    for folder in family_folders():
        module = importlib.import_module(f'{__name__}.{folder}.declaration')
        families |= {family.name: (folder, family) for family in module.FAMILIES}
    return families


def family_names() -> list[str]:
    """Names of all families, as policy.yaml has them."""
    return list(_in_folders())


def find_family(name: str) -> Family:
    """A family's declaration.

    Raises:
        ValueError: there is none of this name; the message lists those that there are.
    """
    return _find(name)[1]


def family_of(dims: PolicyDims) -> list[Family]:
    """Families whose dimensions are of this kind."""
    return [family for _, family in _in_folders().values() if type(dims) is family.dims]


def build_network(name: str, dims: PolicyDims) -> FlowNetwork:
    """An untrained network of a family; imports PyTorch.

    Raises:
        ValueError: unknown family.
    """
    module = importlib.import_module(f'{__name__}.{_find(name)[0]}.networks')
    build: Callable[[PolicyDims], FlowNetwork] = module.NETWORKS[name]
    return build(dims)


def _find(name: str) -> tuple[str, Family]:
    families = _in_folders()
    if name not in families:
        raise ValueError(f"family '{name}' is not served; known are {', '.join(families)}")
    return families[name]
