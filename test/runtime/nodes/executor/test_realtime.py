"""Asking for real time: what is said when it is not to be had."""

import gc
import os
import subprocess
import sys

import pytest

from vla_runtime.nodes.executor.realtime import QuietGarbage, parse_cpus, prefer_this_thread


def test_cpus_are_read_from_text():
    available = sorted(os.sched_getaffinity(0))
    assert parse_cpus('') == ()
    assert parse_cpus(','.join(map(str, available))) == tuple(available)


@pytest.mark.parametrize('text', ['two', '1;2', '4096'])
def test_cpus_that_cannot_be_used_are_named(text):
    with pytest.raises(ValueError, match='cpu_affinity'):
        parse_cpus(text)


def test_what_is_not_permitted_is_one_line_that_says_how_to_mend_it(monkeypatch):
    def refuse(*_):
        raise PermissionError(1, 'Operation not permitted')

    monkeypatch.setattr(os, 'sched_setscheduler', refuse)
    (line,) = prefer_this_thread(50, ())
    assert 'realtime_priority 50' in line
    assert 'limits.d' in line
    assert '\n' not in line


PREFERRED = """
import os, threading
from vla_runtime.nodes.executor.realtime import prefer_this_thread
wait = threading.Event()
threading.Thread(target=wait.wait, daemon=True).start()
print(*prefer_this_thread(3, ()))
for thread in sorted(map(int, os.listdir('/proc/self/task'))):
    print(os.sched_getscheduler(thread) == os.SCHED_FIFO, os.sched_getparam(thread).sched_priority)
"""


def test_the_other_threads_of_the_process_run_before_other_processes_too():
    found = subprocess.run(
        [sys.executable, '-c', PREFERRED], capture_output=True, text=True, check=True
    )
    problem, *threads = found.stdout.splitlines()
    if problem:
        pytest.skip(problem)
    # The main thread asks; the other may hold the interpreter lock.
    assert threads == ['True 3', 'True 2']


BOTH_PREFERRED = """
import os, threading
from vla_runtime.nodes.executor.realtime import prefer_this_thread
asked, end = threading.Barrier(3), threading.Event()
def ask():
    print(*prefer_this_thread(3, ()))
    asked.wait()
    end.wait()
threads = [threading.Thread(target=ask) for _ in range(2)]
for thread in threads:
    thread.start()
asked.wait()
print(os.sched_getparam(0).sched_priority)
for thread in threads:
    print(os.sched_getparam(thread.native_id).sched_priority)
end.set()
"""


def test_all_threads_that_ask_keep_the_priority_whichever_asks_last():
    found = subprocess.run(
        [sys.executable, '-c', BOTH_PREFERRED], capture_output=True, text=True, check=True
    )
    *problems, main, first, second = found.stdout.splitlines()
    if any(problems):
        pytest.skip(problems[0])
    assert (main, first, second) == ('2', '3', '3')


def test_garbage_is_only_collected_when_asked():
    quiet = QuietGarbage()
    quiet.begin()
    try:
        assert not gc.isenabled()
        cycle = []
        cycle.append(cycle)
        del cycle
        quiet.collect(everything=True)
    finally:
        quiet.end()
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
