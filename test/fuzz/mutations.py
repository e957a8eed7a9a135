"""Seeded mutations of good input, and what every one of them is held to.

Whatever comes in, the answer is a result or one of the package's own errors, in one short message,
within a second of CPU time and 200 MB of memory, and without a warning of NumPy.
"""

from __future__ import annotations

import re
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest

# A few seconds in all by default; the four fuzzers do 100,000 under the marker `slow`.
COUNTS = [120, pytest.param(25_000, marks=pytest.mark.slow)]
LONGEST_S = 1.0
MOST_BYTES = 200_000_000
LONGEST_MESSAGE = 4000
_NUMBER = re.compile(rb'-?\d+(\.\d+)?')
_NUMBERS = [
    *b'0 -1 1e308 -1e308 1e400 .nan .inf 4294967296 0x_ 0b_ 1:99:99 2026-13-45'.split(),
    b'9' * 5000,
    b'',
]
_TOKENS = [
    *b'<< : *a|<<: [*a, *a]|&a|*a|!!int ""|!!bool x|!!timestamp x|!!python/name:os|!x'.split(b'|'),
    *b'{ } [ ] , : - ? | > " \' # % @ ` ~ --- ... = null true'.split(),
    *b'\n|\n  |\n- |: |\t|\x00|\xff|\xc3|\xe2\x80\xa8|\xef\xbb\xbf|\\ud800|\r'.split(b'|'),
    b'[' * 500,
    b'a: ' * 50,
    b'x' * 2000,
]


def mutated(data: bytes, random: Random, tokens: list[bytes] | None = None) -> bytes:
    """The data with one to four changes: bytes, numbers, tokens, parts lost, moved or repeated."""
    for _ in range(random.randint(1, 4)):
        here, there = sorted(random.randint(0, len(data)) for _ in range(2))
        there = min(there, here + random.choice((1, 8, 200)))
        part = data[here:there]
        change = random.randrange(7)
        if change == 0:
            numbers = list(_NUMBER.finditer(data))
            if numbers:
                number = random.choice(numbers)
                here, there = number.span()
            part = random.choice(_NUMBERS)
        elif change == 1:
            part = bytes(byte ^ (1 << random.randrange(8)) for byte in part)
        elif change == 2:
            part = b''
        elif change == 3:
            part *= random.choice((2, 3, 50))
        elif change == 4:
            there = here
            part = random.choice(tokens or _TOKENS)
        elif change == 5:
            elsewhere = random.randint(0, len(data))
            part = data[elsewhere : elsewhere + len(part)]
        elif random.random() < 0.1:
            there, part = len(data), b''
        data = data[:here] + part + data[there:]
    return data


def fuzz(
    count: int,
    seed: str,
    one: Callable[[Random], object],
    own: type[Exception] | tuple[type[Exception], ...],
) -> tuple[int, int]:
    """Run mutations and hold each to what the module promises.

    Args:
        count: number of tries.
        seed: names the series; mutation i is made from `seed/i`.
        one: makes a mutation from its random numbers and hands it in.
        own: the errors that may come of it.

    Returns:
        How many were accepted and how many refused.
    """
    refused = 0
    with _memory_watched(), warnings.catch_warnings():
        warnings.simplefilter('error')
        for index in range(count):
            try:
                with _cpu_limited():
                    one(Random(f'{seed}/{index}'))
            except own as error:
                refused += 1
                assert len(str(error)) <= LONGEST_MESSAGE, f'{seed}/{index}: {str(error)[:500]}'
            except Exception as error:
                raise AssertionError(f'{seed}/{index}: {type(error).__name__}: {error}') from error
    return count - refused, refused


@contextmanager
def _cpu_limited() -> Iterator[None]:
    """CPU time, so that no verdict depends on how busy the machine is."""

    def over(*_: Any) -> None:
        raise TimeoutError(f'more than {LONGEST_S} s of CPU time')

    before = signal.signal(signal.SIGPROF, over)
    signal.setitimer(signal.ITIMER_PROF, LONGEST_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


@contextmanager
def _memory_watched() -> Iterator[None]:
    # Linux: sets the peak back to what is resident now.
    Path('/proc/self/clear_refs').write_text('5')
    before = _peak_bytes()
    yield
    grown = _peak_bytes() - before
    assert grown <= MOST_BYTES, f'{grown / 1e6:.0f} MB more memory'


def _peak_bytes() -> int:
    lines = Path('/proc/self/status').read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith('VmHWM'))
