"""Memory of a server over many requests: robots that stay, come back, reset and go."""

from __future__ import annotations

import gc
import multiprocessing
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from policy_servers import Client, request, running, tiny_bundle

ROBOTS = 8
# A robot connects again after so many requests; what it asks for changes at each.
_EACH = 250


def serve_many(url: str, requests: int) -> int:
    """Send so many requests, each robot its share; return the chunks."""

    def robot(number: int) -> int:
        chunks = 0
        for begin in range(0, requests // ROBOTS, _EACH):
            with Client(url) as client:
                client.ask({'endpoint': 'reset', 'seed': number})
                for turn in range(min(_EACH, requests // ROBOTS - begin)):
                    look = request(100 * number + turn % 7, number=turn)
                    chunks += len(client.actions(look)) > 0
        return chunks

    with ThreadPoolExecutor(ROBOTS) as pool:
        return sum(pool.map(robot, range(ROBOTS)))


def memory_bytes() -> int:
    gc.collect()
    return psutil.Process().memory_info().rss


def serve_and_weigh(folder: Path, requests: int) -> tuple[int, int]:
    """Serve so many requests; return the answers of the whole server, and the bytes it grew by."""
    with running(tiny_bundle(folder)) as server:
        # What is made once: sessions' prefixes, percentiles, threads.
        serve_many(server.url, 2000)
        before = memory_bytes()
        assert serve_many(server.url, requests) == requests
        return server.served.statistics.answers, memory_bytes() - before


@pytest.mark.parametrize('requests', [800, pytest.param(8000, marks=pytest.mark.thorough)])
def test_memory_is_flat_over_many_requests(requests: int, tmp_path: Path) -> None:
    # A process of its own: this one's heap is full of holes that other tests have left.
    with ProcessPoolExecutor(1, multiprocessing.get_context('spawn')) as process:
        answers, grown = process.submit(serve_and_weigh, tmp_path / 'tiny', requests).result()
    assert answers == 2000 + requests
    assert grown < 16e6
