"""Reference networks in PyTorch: building blocks, and one file a family."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from vla_runtime.families.pi.dimensions import PolicyDims
from vla_runtime.families.pi.network import FlowPolicy
from vla_runtime.families.pi.pi0 import Pi0
from vla_runtime.families.pi.pi05 import Pi05

_FAMILIES: dict[str, Callable[[PolicyDims], FlowPolicy]] = {'pi05': Pi05, 'pi0': Pi0}


def policy_network(family: str, dims: PolicyDims) -> FlowPolicy:
    """Build an untrained network of a family.

    Raises:
        ValueError: unknown family.
    """
    if family not in _FAMILIES:
        raise ValueError(f"family '{family}' is unknown; known are {', '.join(_FAMILIES)}")
    return _FAMILIES[family](dims)


def empty_network(family: str, dims: PolicyDims) -> FlowPolicy:
    """A network's shapes without its numbers, on the `meta` device.

    Raises:
        ValueError: unknown family.
    """
    with torch.device('meta'), _NothingDrawn():
        return policy_network(family, dims)


class _NothingDrawn(TorchFunctionMode):
    """Leaves out drawing normal numbers, for which PyTorch imports its compiler on `meta`: 3 s."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.init.normal_:
            return kwargs['tensor']
        return func(*args, **kwargs)
