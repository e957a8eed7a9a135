"""CUDA graphs of PyTorch where there is no GPU: operations recorded at capture, and run again.

Stands in for `CudaGraphCapture`. As in a graph, the tensors of the capture stay what is read and
written: a choice that Python made at capture, and a buffer made anew since, are seen as they were.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# What makes the host wait for a number, which ends a capture.
_WAITING = ('_local_scalar_dense', 'item', 'is_nonzero', 'nonzero', 'equal')


class RecordedGraphs:
    """Records work on a CPU.

    Args:
        device: not used.
    """

    captured = 0

    def __init__(self, device: torch.device) -> None:
        pass

    def __call__(self, work: Callable[[], Any]) -> Callable[[], None]:
        """Run as often as a capture does, and return the replay of the last time."""
        for _ in range(2):
            work()
        with _Recorder() as recorder:
            work()
        if not recorder.operations:
            # As PyTorch warns.
            warnings.warn('The CUDA Graph is empty.', stacklevel=2)
        RecordedGraphs.captured += 1
        return recorder.replay


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, list[Any]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in _WAITING:
            raise RuntimeError(f'operation not permitted when stream is capturing: {func}')
        result = func(*args, **(kwargs or {}))
        # Detached: what autograd knows of a tensor is no part of a graph.
        tensors = [leaf.detach() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.operations.append((func, args, kwargs or {}, tensors))
        return result

    def replay(self) -> None:
        for func, args, kwargs, tensors in self.operations:
            results = [x for x in tree_leaves(func(*args, **kwargs)) if isinstance(x, torch.Tensor)]
            for tensor, result in zip(tensors, results, strict=True):
                # A view, or a tensor that was written in place, is there already.
                if result.data_ptr() != tensor.data_ptr():
                    tensor.copy_(result)
