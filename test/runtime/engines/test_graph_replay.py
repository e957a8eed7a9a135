"""Captured graphs whose trial goes wrong: what is not kept is given back, and nothing is lost."""

from __future__ import annotations

import numpy as np
import pytest
from fake_cuda import CUresult, FakeCuda

from vla_runtime.engines.cuda_driver import CudaError
from vla_runtime.engines.cuda_runtime import CudaRuntime
from vla_runtime.engines.graphed_work import GraphedWork
from vla_runtime.engines.tensorrt.cuda_graph import GraphCapturer

FAILURE = CUresult.CUDA_ERROR_LAUNCH_FAILED


class Doubling:
    """Work of two arrays on the device, and its probe: the second becomes the first.

    Args:
        cuda: the device.
        hook: called with the number of every `vary`, from 1.
    """

    def __init__(self, cuda: FakeCuda, hook=lambda number: None) -> None:
        self.runtime = CudaRuntime(0, cuda)
        self.source, self.target = (self.runtime.allocate(16) for _ in range(2))
        self.runs = self.varied = 0
        self._hook = hook

    def __call__(self) -> None:
        self.runs += 1
        self.runtime.copy(self.target, self.source, 16)

    def vary(self, seed: int) -> None:
        self.varied += 1
        self._hook(self.varied)
        self.runtime.upload(self.source, np.full(4, seed, np.float32))

    def outputs(self) -> np.ndarray:
        return self.runtime.download(self.target, np.empty(4, np.float32))


@pytest.fixture
def cuda() -> FakeCuda:
    return FakeCuda(late=True)


def test_a_graph_whose_timing_fails_is_destroyed(cuda):
    work = Doubling(cuda)
    cuda.failing['cuEventElapsedTime'] = FAILURE
    capturer = GraphCapturer('prefix', work.runtime, captures=3)
    assert capturer.capture(work) is None
    assert cuda.live[1] == 0
    assert capturer.status == 'eager: failed while capturing'


def test_the_graph_before_the_one_whose_timing_fails_is_kept(cuda):
    work = Doubling(cuda)

    def failing_from_the_second_capture() -> None:
        work()
        # Once plainly, then once a capture.
        if work.runs == 3:
            cuda.failing['cuEventElapsedTime'] = FAILURE

    capturer = GraphCapturer('prefix', work.runtime, captures=3)
    graph = capturer.capture(failing_from_the_second_capture)
    assert graph is not None
    assert cuda.live[1] == 1
    assert capturer.active
    work.runtime.launch(graph)


def test_a_graph_whose_replay_fails_is_destroyed_and_tried_again(cuda):
    def break_the_first_replay(number: int) -> None:
        # Two plain runs come before it.
        if number == 3:
            cuda.failing['cuGraphLaunch'] = FAILURE

    work = Doubling(cuda, break_the_first_replay)
    graphed = GraphedWork(work, GraphCapturer('denoise', work.runtime, captures=1))
    with pytest.raises(CudaError, match='CUDA_ERROR_LAUNCH_FAILED'):
        graphed.prepare(work)
    assert cuda.live[1] == 0
    assert (graphed.prepared, graphed.status) == (False, 'eager')
    cuda.failing.clear()
    graphed.prepare(work)
    assert (graphed.prepared, graphed.status) == (True, 'captured')
    varied = work.varied
    graphed.prepare(work)
    assert work.varied == varied, 'it was tried'
    work.vary(9)
    graphed()
    assert work.outputs().tolist() == [9.0] * 4
    graphed.close()
    assert cuda.live[1] == 0


def test_without_a_probe_the_first_run_captures_and_all_replay(cuda):
    work = Doubling(cuda)
    graphed = GraphedWork(work, GraphCapturer('denoise', work.runtime, captures=1))
    assert graphed.captures
    for number in (3, 4, 5):
        work.vary(number)
        graphed.run()
        assert work.outputs().tolist() == [float(number)] * 4
    # Once plainly before the capture, and once in it.
    assert work.runs == 2 and not graphed.captures
    assert (graphed.prepared, graphed.status) == (True, 'captured')
    graphed.close()
    assert cuda.live[1] == 0
