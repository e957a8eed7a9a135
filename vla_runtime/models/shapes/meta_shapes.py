"""Operators on PyTorch's `meta` device, each combination of shapes computed once a process.

There PyTorch finds most shapes in Python, in a millisecond each, and layers are alike.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# Size, stride and dtype of a tensor.
_Form = tuple[torch.Size, tuple[int, ...], torch.dtype]
# By operator and arguments; a list where an operator has several results.
_FOUND: dict[Hashable, _Form | list[_Form]] = {}


class DispatchMode(TorchDispatchMode):
    """A dispatch mode for which PyTorch does not import its compiler."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Or the compiler is imported for the first operator, for two seconds.
        return False


class OperatorShapeCache(DispatchMode):
    """Context in which operators without numbers take their results' shapes from earlier runs.

    Views and what writes in place run as ever, and so does everything with numbers.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if _is_composite(func):
            with self:
                return func.decompose(*args, **kwargs)
        result = _result(func, args, kwargs)
        self.ran(func, args, kwargs, result)
        return result

    def ran(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """Take note of an operator that ran; by default nothing is noted."""


def _result(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an operator, or make its results from what it gave for arguments of the same shapes."""
    key = _key(func, args, kwargs) if _makes_new_tensors(func) else None
    if key is None:
        return func(*args, **kwargs)
    form = _FOUND.get(key)
    if form is None:
        result = func(*args, **kwargs)
        several = isinstance(result, (tuple, list))
        tensors = result if several else (result,)
        if all(isinstance(one, Tensor) and one.is_meta for one in tensors):
            forms = [(one.shape, one.stride(), one.dtype) for one in tensors]
            _FOUND[key] = forms if several else forms[0]
        return result
    return [_empty(one) for one in form] if isinstance(form, list) else _empty(form)


@cache
def _is_composite(func: Any) -> bool:
    """Return whether an operator is written in others, which count and are known one by one."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), 'CompositeImplicitAutograd')


@cache
def _makes_new_tensors(func: Any) -> bool:
    """Return whether no result of an operator is an argument or a view of one."""
    schema = func._schema
    return not schema.is_mutable and not any(one.alias_info for one in schema.returns)


def _key(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Hashable | None:
    """Make a key of all that the shapes of an operator's results depend on; None if unknown."""
    parts = [_part(argument) for argument in (*args, *kwargs.values())]
    return None if _UNKNOWN in parts else (func, torch.get_default_dtype(), *kwargs, *parts)


_UNKNOWN = object()


def _part(argument: Any) -> Any:
    if isinstance(argument, Tensor):
        if not argument.is_meta:
            return _UNKNOWN
        return argument.shape, argument.stride(), argument.dtype
    if isinstance(argument, (list, tuple)):
        parts = tuple(_part(item) for item in argument)
        return _UNKNOWN if _UNKNOWN in parts else parts
    # 1, 1.0 and True are equal.
    return type(argument), argument


def _empty(form: _Form) -> Tensor:
    size, stride, dtype = form
    return torch.empty_strided(size, stride, dtype=dtype, device='meta')
