"""The order of work on several streams, on a device that runs them in every order it may."""

from __future__ import annotations

import random
import threading
from collections import deque
from contextlib import contextmanager
from itertools import count

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vla_runtime.engines.torch.cuda_graph import CudaStreams

DEVICE = torch.device('cuda')


class FakeEvent:
    """Numbers its records; a wait is for the newest record at the time of the wait."""

    def __init__(self) -> None:
        self.recorded = 0
        self.reached = 0

    def record(self, stream: FakeStream) -> None:
        self.recorded += 1
        number = self.recorded
        stream.queue.append(lambda: setattr(self, 'reached', number) or True)


class FakeStream:
    """Work in order; a piece that returns False cannot go on yet."""

    def __init__(self, device: object = None) -> None:
        self.queue: deque = deque()
        self.synchronized = 0

    def wait_event(self, event: FakeEvent) -> None:
        number = event.recorded
        self.queue.append(lambda: event.reached >= number)

    def synchronize(self) -> None:
        self.synchronized += 1


class FakeCuda:
    """Streams and events of `torch.cuda`, as CUDA documents them."""

    Event = FakeEvent

    def __init__(self) -> None:
        self.streams: list[FakeStream] = []
        self.current: list[FakeStream] = []
        self.synchronized: list[object] = []

    def Stream(self, device: object) -> FakeStream:  # noqa: N802
        stream = FakeStream()
        self.streams.append(stream)
        return stream

    @contextmanager
    def stream(self, stream: FakeStream):
        self.current.append(stream)
        try:
            yield
        finally:
            self.current.pop()

    def synchronize(self, device: object) -> None:
        self.synchronized.append(device)

    def do(self, work) -> None:
        self.current[-1].queue.append(lambda: work() or True)

    def run(self, seed: int) -> None:
        """Everything, piece by piece of a stream that can go on, in a seeded order."""
        choose = random.Random(seed).choice
        while waiting := [stream for stream in self.streams if stream.queue]:
            stuck = []
            while waiting:
                stream = choose(waiting)
                if stream.queue[0]():
                    stream.queue.popleft()
                    break
                stuck.append(stream)
                waiting.remove(stream)
            assert waiting, 'streams wait for each other'


CAMERAS = 2


class Slots:
    """Work of an engine: numbers are seen by cameras, encoded with what they see, and read."""

    def __init__(self, cuda: FakeCuda, streams: CudaStreams, steps: int = 3) -> None:
        self._cuda, self._streams, self._steps = cuda, streams, steps
        self.views: list[int] = [0] * CAMERAS
        self.held: dict[tuple[int, int], tuple] = {}
        self.read: list[list[tuple | None]] = []

    def look(self, camera: int, number: int) -> None:
        with self._streams.vision(camera):
            self._cuda.do(lambda: self.views.__setitem__(camera, -1))
            self._cuda.do(lambda: self.views.__setitem__(camera, number))

    def encode(self, place: tuple[int, int], number: int) -> None:
        with self._streams.encode(place):
            seen: list[int] = []
            for camera in range(CAMERAS):
                self._cuda.do(lambda camera=camera: seen.append(self.views[camera]))
            self._cuda.do(lambda: self.held.update({place: (-1,)}))
            self._cuda.do(lambda: self.held.update({place: (number, *seen)}))

    def denoise(self, place: tuple[int, int]) -> None:
        self.read.append([])
        seen = self.read[-1]
        with self._streams.denoise(place):
            for _ in range(self._steps):
                self._cuda.do(lambda: seen.append(self.held.get(place)))


class Unordered(CudaStreams):
    """Without the events: the fault that they are there for."""

    def _queue(self, name, after, marks):
        return super()._queue(name, (), ())


def play(kind: type[CudaStreams], asked: list[tuple[str, int]], seed: int) -> tuple[list, list]:
    """Numbers read, and those of the same calls one after the other."""
    cuda = FakeCuda()
    slots = Slots(cuda, kind(DEVICE, CAMERAS, cuda))
    numbers, latest, expected, views = count(1), {}, [], [0] * CAMERAS
    for what, which in [('encode', 0), ('encode', 1), *asked]:
        place = (1, which)
        if what == 'look':
            views[which] = next(numbers)
            slots.look(which, views[which])
        elif what == 'encode':
            number = next(numbers)
            latest[place] = (number, *views)
            slots.encode(place, number)
        else:
            expected.append([latest[place]] * 3)
            slots.denoise(place)
    cuda.run(seed)
    return slots.read, expected


kinds = st.sampled_from(['look', 'encode', 'denoise'])
asked = st.lists(st.tuples(kinds, st.integers(0, 1)), max_size=20)


@given(asked=asked, seed=st.integers(0, 1000))
def test_every_view_and_slot_is_read_as_it_was_when_that_was_asked_for(asked, seed):
    read, expected = play(CudaStreams, asked, seed)
    assert read == expected


@pytest.mark.parametrize(
    'asked',
    [
        [('denoise', 0), ('encode', 0)] * 5,
        [('look', 0), ('encode', 0), ('denoise', 0)],
    ],
    ids=['a slot', 'a view'],
)
def test_without_events_what_is_read_is_overwritten(asked):
    results = [play(Unordered, asked, seed) for seed in range(20)]
    assert any(read != expected for read, expected in results)


def run_alone(stream: FakeStream) -> None:
    """All work of a stream that can be done while the others stand still."""
    while stream.queue and stream.queue[0]():
        stream.queue.popleft()


def test_a_slot_is_encoded_while_the_other_is_denoised_over():
    cuda = FakeCuda()
    slots = Slots(cuda, CudaStreams(DEVICE, CAMERAS, cuda))
    slots.encode((1, 0), 10)
    slots.denoise((1, 0))
    slots.encode((1, 1), 11)
    run_alone(cuda.streams[-2])
    assert slots.held == {(1, 0): (10, 0, 0), (1, 1): (11, 0, 0)}
    assert slots.read == [[]]


def test_views_wait_for_no_other_view():
    cuda = FakeCuda()
    slots = Slots(cuda, CudaStreams(DEVICE, CAMERAS, cuda))
    slots.look(0, 1)
    slots.look(1, 2)
    run_alone(cuda.streams[1])
    assert slots.views == [0, 2]


def test_a_thread_waits_for_its_own_work_alone():
    cuda = FakeCuda()
    streams = CudaStreams(DEVICE, CAMERAS, cuda)
    assert cuda.synchronized == [DEVICE], 'the weights are there when the streams begin'

    def waits() -> list[int]:
        return [stream.synchronized for stream in cuda.streams]

    def encode() -> None:
        with streams.vision(1):
            pass
        with streams.encode((1, 0)):
            pass
        streams.synchronize()

    thread = threading.Thread(target=encode)
    thread.start()
    thread.join()
    assert waits() == [0, 1, 1, 0]
    with streams.encode((1, 0)), streams.denoise():
        pass
    streams.synchronize()
    assert waits() == [0, 1, 2, 1]


def test_work_that_fails_marks_nothing():
    """The slot is no entry of the cache then, and the next that is put there waits as it should."""
    cuda = FakeCuda()
    streams = CudaStreams(DEVICE, CAMERAS, cuda)
    slots = Slots(cuda, streams)
    slots.encode((1, 0), 1)
    slots.denoise((1, 0))
    with pytest.raises(RuntimeError), streams.encode((1, 0)):
        raise RuntimeError('out of memory')
    slots.encode((1, 0), 2)
    slots.denoise((1, 0))
    cuda.run(seed=3)
    assert slots.read == [[(1, 0, 0)] * 3, [(2, 0, 0)] * 3]
