"""The newest job is done, in a thread of its own, and nothing after it was stopped."""

import threading

import pytest

from vla_runtime.nodes.worker import LatestJobWorker

WAIT_S = 20.0


class Bench:
    """A worker whose jobs wait for the test to let them go on."""

    def __init__(self):
        self.begun = []
        self.done = []
        self.errors = []
        self.ready = True
        self.gate = threading.Event()
        self.gate.set()
        self.changed = threading.Condition()
        self.worker = LatestJobWorker(self.attempt, self.errors.append, poll_s=0.01, name='test')

    def attempt(self, job):
        with self.changed:
            self.begun.append(job)
            self.changed.notify_all()
        assert self.gate.wait(WAIT_S)
        if job == 'bad':
            raise RuntimeError('it is bad')
        if not self.ready:
            return False
        with self.changed:
            self.done.append(job)
            self.changed.notify_all()
        return True

    def wait_for(self, condition):
        with self.changed:
            assert self.changed.wait_for(condition, WAIT_S)


@pytest.fixture
def bench():
    made = Bench()
    yield made
    made.gate.set()
    made.worker.stop()


def test_job_that_comes_while_one_runs_replaces_the_waiting_one(bench):
    bench.gate.clear()
    bench.worker.submit(1)
    bench.wait_for(lambda: bench.begun == [1])
    bench.worker.submit(2)
    bench.worker.submit(3)
    bench.gate.set()
    bench.wait_for(lambda: len(bench.done) == 2)
    assert bench.done == [1, 3]


def test_job_that_cannot_be_done_yet_is_tried_again(bench):
    bench.ready = False
    bench.worker.submit(1)
    bench.wait_for(lambda: len(bench.begun) >= 3)
    bench.ready = True
    bench.wait_for(lambda: bench.done == [1])
    assert set(bench.begun) == {1}


def test_newer_job_replaces_one_that_waits_for_something(bench):
    bench.ready = False
    bench.worker.submit(1)
    bench.wait_for(lambda: bench.begun)
    bench.worker.submit(2)
    bench.wait_for(lambda: 2 in bench.begun)
    bench.ready = True
    bench.wait_for(lambda: bench.done)
    assert bench.done == [2]


def test_dropped_job_is_not_tried_again(bench):
    bench.ready = False
    bench.worker.submit(1)
    bench.wait_for(lambda: bench.begun)
    bench.worker.drop()
    bench.ready = True
    bench.worker.submit(2)
    bench.wait_for(lambda: bench.done)
    assert bench.done == [2]


def test_exception_ends_its_job_and_not_the_thread(bench):
    bench.worker.submit('bad')
    bench.wait_for(lambda: bench.begun)
    bench.worker.submit(2)
    bench.wait_for(lambda: bench.done == [2])
    assert [str(error) for error in bench.errors] == ['it is bad']


def test_stop_finishes_the_running_job_and_forgets_the_waiting_one(bench):
    bench.gate.clear()
    bench.worker.submit(1)
    bench.wait_for(lambda: bench.begun == [1])
    bench.worker.submit(2)
    stopper = threading.Thread(target=bench.worker.stop)
    stopper.start()
    bench.gate.set()
    stopper.join(WAIT_S)
    assert not stopper.is_alive()
    assert bench.begun == [1]
