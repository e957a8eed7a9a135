"""Device names (`cpu`, `cuda:1`, `tensorrt`) and the backends that accept them."""

from __future__ import annotations

import re

_KINDS = {
    'torch': ('cpu', 'cuda'),
    'onnxruntime': ('cpu', 'cuda', 'tensorrt'),
    'tensorrt': ('cuda',),
}
_USE = {
    'torch': 'cpu, cuda or cuda:N',
    'onnxruntime': 'cpu, cuda, cuda:N, tensorrt or tensorrt:N',
    'tensorrt': 'cuda or cuda:N',
}
_DEVICE = re.compile(r'cpu|(cuda|tensorrt)(:([0-9]{1,3}))?')


def default_device(backend: str) -> str:
    """Default device of a backend or `auto`: `cuda` for TensorRT, `cpu` for the rest."""
    return 'cuda' if backend == 'tensorrt' else 'cpu'


def accepts_device(device: str, backend: str) -> bool:
    return device.partition(':')[0] in _KINDS[backend]


def check_device(device: str) -> None:
    """Refuse a name that is no device's with any backend (ValueError)."""
    if not _DEVICE.fullmatch(device):
        raise ValueError(f"device '{device}' is unknown; use {_USE['onnxruntime']}")


def parse_device(device: str, backend: str) -> tuple[str, int]:
    """Split a device's name into kind and index (ValueError: unknown to this backend)."""
    found = _DEVICE.fullmatch(device)
    kind = found[1] or 'cpu' if found else ''
    kinds = _KINDS[backend]
    if not found or kind not in kinds:
        what = 'not supported by' if found else 'unknown to'
        raise ValueError(f"device '{device}' is {what} backend '{backend}'; use {_USE[backend]}")
    return kind, int(found[3] or 0)
