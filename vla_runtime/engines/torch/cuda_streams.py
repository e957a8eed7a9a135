"""CUDA streams of a torch engine: one for each camera, one for the prefix, one for denoising.

Two threads can encode one prefix while denoising over another, and views are encoded side by side.
Invariants:
- the prefix reads views after all earlier queued writes to them; a view is written after all
  earlier queued reads of it; so it is with a slot, whichever stream is ahead;
- `synchronize` waits for the streams that its thread has used, not for the others;
- allocations and copies from before the streams existed are complete when they begin.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import local
from typing import Any

import torch

# Number of prompt rows, and slot.
PrefixSlot = tuple[int, int]
# A kind of work, and the slot or the camera that it was on.
Mark = tuple[str, PrefixSlot | int | None]


class CudaStreams:
    """Queues work of one device on streams, ordered by events where they share a view or a slot."""

    def __init__(self, device: torch.device, cameras: int, cuda: Any = torch.cuda) -> None:
        self._cuda, self._cameras = cuda, range(cameras)
        self._streams = {
            name: cuda.Stream(device)
            for name in (*map(_view, self._cameras), 'encoding', 'denoising')
        }
        # Of the newest work.
        self._events: dict[Mark, Any] = {}
        self._used = local()
        # Torch's own streams do not wait for the default stream, where the weights were loaded.
        cuda.synchronize(device)

    @contextmanager
    def vision(self, camera: int) -> Iterator[None]:
        """Queue vision work of a camera, which writes its view."""
        with self._queue(_view(camera), [('views read', None)], [('seen', camera)]):
            yield

    @contextmanager
    def encode(self, place: PrefixSlot) -> Iterator[None]:
        """Queue prefix work, which reads every view and writes a slot."""
        after = [('seen', camera) for camera in self._cameras]
        marks = [('encoded', place), ('views read', None)]
        with self._queue('encoding', [('read', place), *after], marks):
            yield

    @contextmanager
    def denoise(self, place: PrefixSlot | None = None) -> Iterator[None]:
        """Queue the expert's work; `place` is the slot that it reads."""
        after, marks = ([(what, place)] if place else [] for what in ('encoded', 'read'))
        with self._queue('denoising', after, marks):
            yield

    def synchronize(self) -> None:
        """Wait until all that this thread has queued is done."""
        for stream in vars(self._used).values():
            stream.synchronize()

    @contextmanager
    def _queue(self, name: str, after: Sequence[Mark], marks: Sequence[Mark]) -> Iterator[None]:
        stream = self._streams[name]
        setattr(self._used, name, stream)
        with self._cuda.stream(stream):
            for one in after:
                if one in self._events:
                    stream.wait_event(self._events[one])
            yield
            for one in marks:
                if one not in self._events:
                    self._events[one] = self._cuda.Event()
                self._events[one].record(stream)


def _view(camera: int) -> str:
    return f'view {camera}'
