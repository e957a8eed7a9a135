"""CPU: threads of the networks, one core left for the messages, and memory that is kept."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from threading import Thread

import onnxruntime
import pytest
import torch
from onnx_bundles import tiny_onnx_bundle

from vla_runtime.engines.devices import cpu_threads
from vla_runtime.engines.onnx.session import session_options
from vla_runtime.files import machine
from vla_runtime.inference.settings import PolicySettings
from vla_runtime.policy import Policy
from vla_tools.replay import batch


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = torch.get_num_threads()
    monkeypatch.setenv('OMP_NUM_THREADS', '1')
    # The machine of the tests may be a container with a quota.
    monkeypatch.setattr(machine, '_quotas', lambda: iter(()))
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
def test_the_networks_of_a_pipeline_leave_a_core(
    monkeypatch: pytest.MonkeyPatch, cores: int, given: int, pipeline: str, expected: int
) -> None:
    monkeypatch.setattr(os, 'sched_getaffinity', lambda _: set(range(cores)))
    settings = PolicySettings(pipeline=pipeline)  # type: ignore[arg-type]
    assert cpu_threads(given, settings.networks_at_once) == expected


@pytest.mark.parametrize(
    ('said', 'expected'),
    # A list is OpenMP's: one number for each depth of nesting.
    [('3', 3), ('', 7), ('0', 7), ('many', 7), ('2,1', 2), (' 2 , 1', 2), ('0,2', 7)],
)
def test_without_a_number_the_environments_counts(
    monkeypatch: pytest.MonkeyPatch, said: str, expected: int
) -> None:
    monkeypatch.setattr(os, 'sched_getaffinity', lambda _: set(range(8)))
    monkeypatch.setenv('OMP_NUM_THREADS', said)
    assert cpu_threads(None) == expected
    assert cpu_threads(0) == 7


def test_a_quota_counts_as_cores_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, 'sched_getaffinity', lambda _: set(range(64)))
    monkeypatch.setattr(machine, '_quotas', lambda: iter((8.0, 4.5)))
    assert cpu_threads(0) == 3
    assert batch.cores(2) == 2


@pytest.mark.parametrize('said', ['257', '5000', '9' * 5000])
def test_more_threads_than_any_network_needs_are_refused_by_the_variables_name(
    monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    monkeypatch.setenv('OMP_NUM_THREADS', said)
    with pytest.raises(ValueError, match='256') as error:
        cpu_threads(None)
    assert str(error.value).startswith('OMP_NUM_THREADS=')
    assert len(str(error.value)) < 200
    assert cpu_threads(256) == 256


def test_every_backend_is_given_the_same_number(monkeypatch: pytest.MonkeyPatch) -> None:
    sessions = []

    def options(threads: int | None = None) -> onnxruntime.SessionOptions:
        sessions.append(session_options(threads))
        return sessions[-1]

    monkeypatch.setattr('vla_runtime.engines.onnx.graphs.session_options', options)
    bundle = tiny_onnx_bundle()
    for threads in (2, 1):
        for backend in ('torch', 'onnxruntime'):
            policy = Policy.load(bundle, backend, precision='float32', threads=threads)
            assert policy.threads == threads
            policy.close()
        assert torch.get_num_threads() == threads
        assert {one.intra_op_num_threads for one in sessions} == {threads}
        sessions.clear()


def test_a_thread_that_begins_later_has_as_many() -> None:
    """The pipeline's is one: its network runs on as many threads as the other."""
    Policy.load(tiny_onnx_bundle(), 'torch', precision='float32', threads=3).close()
    found: list[int] = []

    def work() -> None:
        torch.ones(64, 64) @ torch.ones(64, 64)
        found.append(torch.get_num_threads())

    thread = Thread(target=work)
    thread.start()
    thread.join()
    assert found == [3]


_FAULTS = """
import resource, sys
from vla_runtime.engines.devices import keep_freed_memory

if sys.argv[1] == 'keep':
    keep_freed_memory()
b'x' * (24 << 20)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(8):
    blocks = [b'x' * (20 << 20) for _ in range(4)]
    del blocks
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != 'glibc', reason='of the GNU C library')
def test_memory_that_was_freed_is_not_taken_back_page_by_page():
    given, kept = (
        int(subprocess.check_output([sys.executable, '-c', _FAULTS, word]))
        for word in ('give', 'keep')
    )
    # Pages of 80 MB: once, and eight times.
    assert kept < 30_000 < 120_000 < given
