"""One CUDA device through cuda-python, over a fake whose stream runs as late as CUDA allows."""

from __future__ import annotations

import numpy as np
import pytest
from fake_cuda import FakeCuda

from vla_runtime.engines import cuda_runtime
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
    real = late.cudaStreamSynchronize
    monkeypatch.setattr(
        late, 'cudaStreamSynchronize', lambda stream: waits.append(stream) or real(stream)
    )
    runtime = CudaRuntime(0, late)
    image = np.zeros((3, 224, 224), np.float32)
    address = runtime.allocate(image.nbytes)
    for _ in range(3):
        runtime.upload(address, image)
    assert waits == []
    # What a wait has shown to be over is free again.
    runtime.synchronize()
    for _ in range(6):
        runtime.upload(address, image)
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
    assert late.streams == 0


def test_a_time_is_taken_on_the_runtimes_own_device(late):
    runtime = CudaRuntime(1, late)
    # As on another thread, or after somebody else has chosen.
    late.cudaSetDevice(0)
    assert runtime.milliseconds(lambda: None) == 1.0


def test_why_cuda_python_cannot_be_imported_is_told(monkeypatch):
    def fail(name: str) -> None:
        raise ImportError("No module named 'cuda.pathfinder'")

    monkeypatch.setattr(cuda_runtime.importlib, 'import_module', fail)
    with pytest.raises(
        ValueError, match=r"cannot be imported \(No module named 'cuda.pathfinder'\)"
    ):
        cuda_runtime.import_cuda()
