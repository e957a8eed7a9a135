"""Reference networks in PyTorch: building blocks, and one file a family."""

from __future__ import annotations

from collections.abc import Callable

from vla_runtime.dimensions import PolicyDims
from vla_runtime.models.flow_policy import FlowPolicy
from vla_runtime.models.pi0 import Pi0
from vla_runtime.models.pi05 import Pi05

_FAMILIES: dict[str, Callable[[PolicyDims], FlowPolicy]] = {'pi05': Pi05, 'pi0': Pi0}


def policy_network(family: str, dims: PolicyDims) -> FlowPolicy:
    """Build an untrained network of a family.

    Raises:
        ValueError: unknown family.
    """
    if family not in _FAMILIES:
        raise ValueError(f"family '{family}' is unknown; known are {', '.join(_FAMILIES)}")
    return _FAMILIES[family](dims)
