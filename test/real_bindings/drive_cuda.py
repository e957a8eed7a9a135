"""Drives `CudaRuntime` through the bindings of this Python; prints what it found as JSON.

    python drive_cuda.py          # over libcuda.so.1 of the machine, or the one of fake_libcuda.c

It touches every function that the runtime calls: memory, copies in pieces, a graph that is
replayed on other data, events, errors, a second thread, and whether a wait lets threads run.
"""

from __future__ import annotations

import json
import sys
import threading
import time

import numpy as np

from vla_runtime.engines.cuda_driver import CudaError, import_cuda
from vla_runtime.engines.cuda_runtime import CudaRuntime


def drive() -> dict[str, object]:
    """Use every function of the runtime; raise where one gives wrong numbers."""
    runtime = CudaRuntime(0, import_cuda())
    found = {'bindings': runtime.driver.release, 'driver': runtime.driver.version}
    found |= vars(runtime.info)
    # More than the pinned memory, so that it is used again.
    data = np.arange(3 << 20, dtype=np.float32)
    source, target = (runtime.allocate(data.nbytes) for _ in range(2))
    zeros = runtime.download(source, np.empty_like(data))
    runtime.upload(source, data)
    runtime.copy(target, source, data.nbytes)
    copied = runtime.download(target, np.empty_like(data))
    graph = runtime.capture(lambda: runtime.copy(target, source, data.nbytes))
    runtime.upload(source, data + 1)
    before = runtime.download(target, np.empty_like(data))
    runtime.launch(graph)
    after = runtime.download(target, np.empty_like(data))
    equal = np.array_equal
    assert equal(zeros, 0 * data) and equal(copied, data), 'copies'
    assert equal(before, data) and equal(after, data + 1), 'a captured copy'
    assert runtime.milliseconds(lambda: runtime.launch(graph)) > 0.0
    assert runtime.free_bytes() > 0 and runtime.stream != 0
    try:
        runtime.allocate(1 << 50)
    except CudaError as error:
        assert error.out_of_memory, error
        found['out_of_memory'] = str(error)
    try:
        runtime.capture(lambda: 1 // 0)  # type: ignore[arg-type]
    except ZeroDivisionError:
        # The stream takes work again.
        runtime.copy(target, source, data.nbytes)
    on_thread(lambda: runtime.upload(source, data))
    assert equal(runtime.download(source, np.empty_like(data)), data), 'another thread'
    found['turns_during_a_wait'] = turns_while(runtime.synchronize)
    runtime.free(source)
    runtime.destroy(graph)
    runtime.close()
    runtime.close()
    return found


def on_thread(work) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def turns_while(wait) -> int:
    """Milliseconds-long naps that another thread takes while this one waits."""
    turns, over = [0], threading.Event()

    def count() -> None:
        while not over.is_set():
            time.sleep(0.001)
            turns[0] += 1

    thread = threading.Thread(target=count)
    thread.start()
    time.sleep(0.02)
    before = turns[0]
    wait()
    taken = turns[0] - before
    over.set()
    thread.join()
    return taken


def main() -> int:
    """Print the findings, or the refusal with exit code 2."""
    try:
        print(json.dumps(drive()))
    except ValueError as error:
        print(error)
        return 2
    return 0


if __name__ == '__main__':
    sys.exit(main())
