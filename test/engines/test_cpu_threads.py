"""How many CPU threads the networks get: one core is left for the messages where there is one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from threading import Thread

import pytest
import torch

from vla_runtime.engines.loading import limit_threads
from vla_runtime.engines.onnx.session import cpu_threads
from vla_runtime.inference.settings import PolicySettings


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = torch.get_num_threads()
    monkeypatch.setenv('OMP_NUM_THREADS', '1')
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ('cores', 'given', 'pipeline', 'expected'),
    [
        (8, 0, 'latency', 7),
        # Two networks at a time, each with as many.
        (8, 0, 'throughput', 3),
        (2, 0, 'latency', 1),
        (2, 0, 'throughput', 1),
        (1, 0, 'latency', 1),
        (8, 5, 'latency', 5),
        (8, 5, 'throughput', 5),
    ],
)
@pytest.mark.parametrize('backend', ['torch', 'onnxruntime'])
def test_the_networks_of_a_pipeline_leave_a_core(
    monkeypatch: pytest.MonkeyPatch,
    backend: str,
    cores: int,
    given: int,
    pipeline: str,
    expected: int,
) -> None:
    monkeypatch.setattr(os, 'sched_getaffinity', lambda _: set(range(cores)))
    settings = PolicySettings(pipeline=pipeline)  # type: ignore[arg-type]
    limit_threads(backend, given, settings.networks_at_once)
    assert (torch.get_num_threads() if backend == 'torch' else cpu_threads()) == expected


def test_a_thread_that_begins_later_has_as_many() -> None:
    """The pipeline's is one: its network runs on as many threads as the other."""
    limit_threads('torch', 3, 2)
    found: list[int] = []

    def work() -> None:
        torch.ones(64, 64) @ torch.ones(64, 64)
        found.append(torch.get_num_threads())

    thread = Thread(target=work)
    thread.start()
    thread.join()
    assert found == [3]
