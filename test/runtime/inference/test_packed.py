"""Packed requests: each answer is that of the request alone, whatever else is open."""

from __future__ import annotations

import gc
from concurrent.futures import Future
from pathlib import Path
from threading import Event

import numpy as np
import pytest
from thorough import thorough_but
from token_streams import (
    DIMS,
    END,
    INSTRUCTIONS,
    keys_of,
    known_answers,
    request_of,
    token_engine,
)

from vla_runtime.inference.packed import DroppedError, PackedAnswer, PackedPipeline
from vla_runtime.inference.prefix_cache import PrefixCache

# A tick of the tiny network takes a millisecond.
PATIENCE_S = 60.0


class Rig:
    """A pipeline of a random network, with what it answered in order."""

    def __init__(self) -> None:
        self.engine = token_engine()
        self.pipeline: PackedPipeline[PackedAnswer] = self.make()
        self.answered: list[int] = []

    def make(self) -> PackedPipeline[PackedAnswer]:
        cache = PrefixCache(self.engine, ('camera',))
        return PackedPipeline(self.engine, cache, DIMS.answer_tokens, END)

    def submit(self, key: tuple[int, str], number: int) -> Future[PackedAnswer]:
        def finish(answer: PackedAnswer) -> PackedAnswer:
            self.answered.append(number)
            return answer

        self.pipeline.turn_to(key[1])
        return self.pipeline.submit(request_of(*key, number), finish)

    def close(self) -> None:
        self.pipeline.close()
        self.engine.close()


@pytest.fixture(scope='module')
def rig():
    made = Rig()
    yield made
    made.close()


def run_stream(rig: Rig, seed: int) -> int:
    """Run a random stream of arrivals, waits, resets and new instructions; return its answers."""
    random = np.random.default_rng(seed)
    instruction = INSTRUCTIONS[0]
    open_ones: list[tuple[int, tuple[int, str], Future[PackedAnswer]]] = []
    kept: list[tuple[int, tuple[int, str], Future[PackedAnswer]]] = []
    rig.answered.clear()
    for number in range(int(random.integers(3, 12))):
        event = random.choice(['submit', 'wait', 'reset', 'instruction'], p=[0.6, 0.2, 0.1, 0.1])
        if event == 'wait' and open_ones:
            # Ticks without a new request go on meanwhile.
            open_ones[random.integers(len(open_ones))][2].exception(PATIENCE_S)
            continue
        if event in ('reset', 'instruction'):
            if event == 'reset':
                rig.pipeline.flush('a new episode began')
            else:
                instruction = INSTRUCTIONS[random.integers(len(INSTRUCTIONS))]
        keys = keys_of(instruction)
        key = keys[random.integers(len(keys))]
        future = rig.submit(key, number)
        if event != 'submit':
            kept += open_ones
            same = event == 'instruction' and open_ones and open_ones[-1][1][1] == instruction
            for _, _, old in () if same else open_ones:
                # Answered before, or dropped: nothing comes of it any more.
                assert old.done()
            open_ones = []
        open_ones.append((number, key, future))
    answers, last = 0, -1
    for number, key, future in (*kept, *open_ones):
        if isinstance(future.exception(PATIENCE_S), DroppedError):
            assert number not in rig.answered
            continue
        found = future.result()
        assert found.tokens == known_answers()[key], (seed, number)
        assert found.ticks == len(found.tokens) - 1 or found.ticks < DIMS.answer_tokens
        answers += 1
        assert number > last
        last = number
    assert rig.answered == sorted(rig.answered)
    rig.pipeline.flush('the stream is over')
    return answers


@pytest.mark.parametrize('part', thorough_but([0], range(10)))
def test_packed_equals_alone_for_random_streams(rig, part: int):
    """A thousand streams in all ten parts."""
    answers = sum(run_stream(rig, 100 * part + number) for number in range(100))
    assert answers > 100


def test_all_of_a_full_ring_are_answered_in_order(rig):
    rig.answered.clear()
    keys = keys_of('lift')
    futures = [rig.submit(keys[n % len(keys)], n) for n in range(4 * DIMS.answer_tokens)]
    for number, future in enumerate(futures):
        assert future.result(PATIENCE_S).tokens == known_answers()[keys[number % len(keys)]]
    assert rig.answered == list(range(len(futures)))


def test_a_request_is_dropped_at_reset_and_with_another_instruction(monkeypatch):
    rig = Rig()
    gate, inside = Event(), Event()
    tick = rig.engine.tick

    def slow(*arguments):
        inside.set()
        assert gate.wait(PATIENCE_S)
        tick(*arguments)

    monkeypatch.setattr(rig.engine, 'tick', slow)
    first = rig.submit(keys_of('lift')[0], 0)
    second = rig.submit(keys_of('lift')[1], 1)
    assert inside.wait(PATIENCE_S)
    gate.set()
    third = rig.submit(keys_of('push')[0], 2)
    for future in (first, second):
        # The first may have ended early.
        if future.exception(PATIENCE_S) is not None:
            assert isinstance(future.exception(), DroppedError)
    assert third.result(PATIENCE_S).tokens == known_answers()[keys_of('push')[0]]
    gate.clear()
    inside.clear()
    fourth = rig.submit(keys_of('push')[1], 3)
    assert inside.wait(PATIENCE_S)
    gate.set()
    rig.pipeline.flush('a new episode began')
    assert fourth.done()
    rig.close()


def test_an_error_of_the_engine_goes_to_all_that_are_open_and_the_next_is_answered(monkeypatch):
    rig = Rig()
    key = next(key for key in keys_of('lift') if len(known_answers()[key]) > 1)
    tick, failing = rig.engine.tick, [True]

    def broken(*arguments):
        if failing[0]:
            raise RuntimeError('the device is gone')
        tick(*arguments)

    monkeypatch.setattr(rig.engine, 'tick', broken)
    futures = [rig.submit(key, number) for number in range(2)]
    assert isinstance(futures[0].exception(PATIENCE_S), RuntimeError)
    futures[1].exception(PATIENCE_S)
    failing[0] = False
    assert rig.submit(key, 2).result(PATIENCE_S).tokens == known_answers()[key]
    rig.close()


def test_an_error_of_one_answer_goes_to_its_own_request(rig):
    def refuse(answer: PackedAnswer) -> PackedAnswer:
        raise ValueError('no chunk')

    key = keys_of('lift')[0]
    bad = rig.pipeline.submit(request_of(*key), refuse)
    good = rig.submit(key, 1)
    assert isinstance(bad.exception(PATIENCE_S), ValueError)
    assert good.result(PATIENCE_S).tokens == known_answers()[key]


def resident_bytes() -> int:
    pages = int(Path('/proc/self/statm').read_text().split()[1])
    return pages * 4096


@pytest.mark.parametrize('requests', thorough_but([1000], [1000, 10_000]))
def test_memory_is_flat_over_many_requests(rig, requests: int):
    keys = keys_of('lift')

    def run(count: int) -> None:
        futures: list[Future[PackedAnswer]] = []
        for number in range(count):
            futures.append(rig.submit(keys[number % len(keys)], number))
            if len(futures) > DIMS.answer_tokens:
                futures.pop(0).result(PATIENCE_S)
        rig.pipeline.drain()
        rig.answered.clear()

    run(requests // 10)
    gc.collect()
    before = resident_bytes()
    run(requests)
    gc.collect()
    # A request holds 5 kB.
    assert resident_bytes() - before < 4 << 20


def test_a_closed_pipeline_drops_what_is_open():
    rig = Rig()
    futures = [rig.submit(keys_of('lift')[n], n) for n in range(DIMS.answer_tokens)]
    rig.close()
    assert all(future.done() for future in futures)
