"""Holds a denoise loop, so that something else can be done meanwhile."""

from __future__ import annotations

import threading

import numpy as np

# Far longer than anything here takes: a test that waits so long has failed.
PATIENCE_S = 60.0


class Gate:
    """An `on_step` that holds a denoise loop at its first step until `open` is called."""

    def __init__(self) -> None:
        self._entered = threading.Event()
        self._opened = threading.Event()

    def __call__(self, index: int, x: np.ndarray, velocity: np.ndarray) -> None:
        if index == 0:
            self._entered.set()
            assert self._opened.wait(PATIENCE_S)

    def wait(self) -> None:
        assert self._entered.wait(PATIENCE_S)

    def open(self) -> None:
        self._opened.set()
