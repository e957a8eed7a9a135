"""Option `triton`: the head's layers in this package's Triton kernels. Imports no PyTorch."""

from __future__ import annotations

from vla_runtime.engines.preflight import AUTO

ON, OFF = 'on', 'off'
WORDS = (ON, OFF)


def check_triton(word: str, backend: str) -> None:
    """Refuse an unknown word, and any but `off` where PyTorch does not run (ValueError)."""
    if word not in WORDS:
        raise ValueError(f"triton '{word}' is unknown; known are: {', '.join(WORDS)}")
    if word != OFF and backend not in (AUTO, 'torch'):
        raise ValueError(
            f"triton '{word}': backend '{backend}' does not run PyTorch's networks; choose "
            "backend 'torch', or triton 'off'"
        )
