"""One CUDA device through cuda-python, over a fake whose stream runs as late as CUDA allows."""

from __future__ import annotations

import numpy as np
import pytest
from fake_cuda import ContextFlags, CUresult, FakeCuda

from vla_runtime.engines import cuda_runtime
from vla_runtime.engines.cuda_driver import CudaError
from vla_runtime.engines.cuda_runtime import CudaRuntime


@pytest.fixture
def late() -> FakeCuda:
    return FakeCuda(late=True, devices=2)


def on_device(cuda: FakeCuda, address: int, like: np.ndarray) -> np.ndarray:
    return cuda.array(address, like.shape, like.dtype.type).copy()


def test_an_uploaded_array_may_be_changed_before_the_device_gets_to_it(late):
    runtime = CudaRuntime(0, late)
    array = np.arange(100, dtype=np.float32)
    address = runtime.allocate(array.nbytes)
    expected = array.copy()
    runtime.upload(address, array)
    array[:] = -1.0
    runtime.synchronize()
    assert np.array_equal(on_device(late, address, expected), expected)


def test_what_is_uploaded_need_not_be_contiguous(late):
    runtime = CudaRuntime(0, late)
    array = np.arange(12, dtype=np.int64).reshape(3, 4).T
    address = runtime.allocate(array.nbytes)
    runtime.upload(address, array)
    assert np.array_equal(runtime.download(address, np.empty((4, 3), np.int64)), array)


def test_uploads_beyond_the_pinned_memory_arrive_whole(late, monkeypatch):
    monkeypatch.setattr(cuda_runtime, '_STAGING_BYTES', 1000)
    runtime = CudaRuntime(0, late)
    random = np.random.default_rng(0)
    # Some fit beside each other, some do not, and one takes several pieces of its own.
    arrays = [random.integers(0, 256, size, np.uint8) for size in (600, 300, 600, 2500, 1000, 1, 0)]
    addresses = [runtime.allocate(array.nbytes) for array in arrays]
    for address, array in zip(addresses, arrays, strict=True):
        runtime.upload(address, array)
    runtime.synchronize()
    for address, array in zip(addresses, arrays, strict=True):
        assert np.array_equal(on_device(late, address, array), array)


def test_uploads_that_fit_do_not_wait_for_the_device(late, monkeypatch):
    waits = []
    real = late.cuEventSynchronize
    monkeypatch.setattr(
        late, 'cuEventSynchronize', lambda event: waits.append(event) or real(event)
    )
    runtime = CudaRuntime(0, late)
    image = np.zeros((3, 224, 224), np.float32)
    text = np.zeros((2, 200, 2048), np.float32)
    address = runtime.allocate(text.nbytes)
    # A guided inference of pi0.5.
    for array in (image, image, image, text):
        runtime.upload(address, array)
    assert waits == []
    # What a wait has shown to be over is free again.
    runtime.synchronize()
    for array in (image, image, image, text):
        runtime.upload(address, array)
    assert len(waits) == 1


def test_close_frees_graphs_that_nobody_destroyed_pinned_memory_and_the_stream(late):
    runtime = CudaRuntime(0, late)
    address = runtime.allocate(64)
    runtime.upload(address, np.ones(16, np.float32))
    graphs = [runtime.capture(lambda: runtime.copy(address, address + 32, 32)) for _ in range(2)]
    runtime.destroy(graphs[0])
    assert late.live == (2, 1)
    runtime.close()
    runtime.close()
    assert late.live == (0, 0)
    assert (late.streams, late.events) == (0, 0)


def test_close_frees_what_it_can_and_raises_the_first_error(late):
    runtime = CudaRuntime(0, late)
    address = runtime.allocate(64)
    runtime.upload(address, np.ones(16, np.float32))
    runtime.capture(lambda: runtime.copy(address, address + 32, 32))
    late.failing['cuMemFree'] = CUresult.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(CudaError, match='cuMemFree: CUDA_ERROR_INVALID_VALUE'):
        runtime.close()
    assert late.live == (1, 0)
    assert (late.streams, late.events) == (0, 0)
    runtime.close()


def test_a_runtime_whose_context_broke_is_closed_after_the_first_error(late):
    runtime = CudaRuntime(0, late)
    runtime.allocate(64)
    late.broken = CUresult.CUDA_ERROR_LAUNCH_FAILED
    with pytest.raises(CudaError, match='cuCtxSetCurrent: CUDA_ERROR_LAUNCH_FAILED'):
        runtime.close()
    runtime.close()


def test_a_time_is_taken_in_the_context_of_the_runtimes_own_device(late):
    runtime = CudaRuntime(1, late)
    # As on another thread, or after another library made its context current.
    late.cuCtxSetCurrent(0)
    assert runtime.milliseconds(lambda: None) == 1.0
    late.cuCtxSetCurrent(0)
    runtime.synchronize()


def test_threads_that_wait_for_the_device_sleep(late):
    CudaRuntime(1, late)
    # The fake refuses events whose wait polls; TensorRT waits in the context.
    assert late.context_flags == {1: ContextFlags.CU_CTX_SCHED_BLOCKING_SYNC}


def test_work_that_waits_cannot_be_captured(late):
    runtime = CudaRuntime(0, late)
    with pytest.raises(CudaError, match='CAPTURE_UNSUPPORTED'):
        runtime.capture(runtime.synchronize)
    assert late.live[1] == 0
    runtime.synchronize()


def test_the_device_is_described_by_its_attributes(late):
    late.processors = 4
    info = CudaRuntime(0, late).info
    assert (info.name, info.capability, info.processors) == ('Orin', '8.7', 4)
    assert info.integrated and info.total_bytes == 1 << 32
