"""The two CUDA streams of a torch engine: one for encoding, one for denoising.

With them two threads can encode one prefix while denoising over another. Invariants:
- a slot is read after all earlier queued writes to it, and written after all earlier queued reads
  of it, whichever stream is ahead;
- `synchronize` waits for the work of its own thread, not for the other stream's;
- allocations and copies from before the streams existed are complete when they begin.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import local
from typing import Any

import torch

# Number of prompt rows, and slot.
Place = tuple[int, int]


class CudaStreams:
    """Queues work of one device on two streams, ordered by events where they share a slot.

    Args:
        device: a CUDA device.
        cuda: `torch.cuda`, or a test's stand-in for it.
    """

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._cuda = cuda
        self._encoding = cuda.Stream(device)
        self._denoising = cuda.Stream(device)
        self._encoded: dict[Place, Any] = {}
        self._read: dict[Place, Any] = {}
        self._used = local()
        # Torch's own streams do not wait for the default stream, where the weights were loaded.
        cuda.synchronize(device)

    @contextmanager
    def encode(self, place: Place | None = None) -> Iterator[None]:
        """Queue vision or prefix work; `place` is the slot that it writes."""
        with self._queue(self._encoding, place, after=self._read, marks=self._encoded):
            yield

    @contextmanager
    def denoise(self, place: Place | None = None) -> Iterator[None]:
        """Queue the expert's work; `place` is the slot that it reads."""
        with self._queue(self._denoising, place, after=self._encoded, marks=self._read):
            yield

    def synchronize(self) -> None:
        """Wait until all that this thread has queued is done."""
        for stream in vars(self._used).values():
            stream.synchronize()

    @contextmanager
    def _queue(
        self, stream: Any, place: Place | None, after: dict[Place, Any], marks: dict[Place, Any]
    ) -> Iterator[None]:
        setattr(self._used, 'encoding' if stream is self._encoding else 'denoising', stream)
        with self._cuda.stream(stream):
            if place is None:
                yield
                return
            if place in after:
                stream.wait_event(after[place])
            yield
            if place not in marks:
                marks[place] = self._cuda.Event()
            marks[place].record(stream)
