"""Workers end with the block that started them, whatever ends it, and are silent about it."""

import errno
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
from contextlib import suppress
from multiprocessing import popen_spawn_posix
from pathlib import Path

import psutil
import pytest
from thorough import thorough_but

from vla_runtime.engines.cuda_driver import CudaError
from vla_runtime.files.atomic_write import WriteError, atomic_write
from vla_runtime.files.field_error import FieldError
from vla_runtime.processes.workers import workers
from vla_runtime.recording.topics import missing_topic
from vla_runtime.robot.file import RobotError

_PATIENCE_S = 120.0
_BUSY = """
import sys, time
from vla_runtime.processes.workers import workers

if __name__ == '__main__':
    try:
        with workers(2) as submit:
            submit(max, 1, 2).result()
            for _ in range(4):
                last = submit(time.sleep, 1200)
            print('busy', flush=True)
            last.result()
    except KeyboardInterrupt:
        sys.exit('interrupted')
"""
# A thread other than the main one takes the signal while the first worker is being started; what is
# submitted is more than a pipe holds.
_INTERRUPTED_AT_THE_START = """
import signal, sys, threading, time
import psutil
from vla_runtime.processes.workers import workers

def interrupt():
    while not any('spawn_main' in str(child.cmdline()) for child in psutil.Process().children()):
        pass
    time.sleep(float(sys.argv[1]))
    signal.pthread_kill(threading.get_ident(), signal.SIGINT)

if __name__ == '__main__':
    threading.Thread(target=interrupt, daemon=True).start()
    try:
        with workers(2) as submit:
            for _ in range(40):
                submit(len, bytes(300_000))
            while True:  # A signal that another thread takes does not wake a sleeping one.
                time.sleep(0.01)
    except KeyboardInterrupt:
        sys.exit('interrupted')
"""


def _write_where_there_is_no_room() -> None:
    with atomic_write('/tmp/no_room') as file:
        raise OSError(errno.ENOSPC, f'No space left on device {file.name}')


def test_a_full_disk_in_a_worker_is_the_error_of_the_file():
    full = '/tmp/no_room: cannot be written: No space left'
    with pytest.raises(WriteError, match=full), workers(1) as submit:
        submit(_write_where_there_is_no_room).result()


@pytest.mark.parametrize(
    'error',
    [
        CudaError('cuMemAlloc', 'OUT_OF_MEMORY', 'out of memory'),
        FieldError('cameras[1].name', 'expected a name'),
        RobotError(Path('arm.yaml'), 'joints[0].upper', 'expected more than lower'),
        WriteError(Path('full/results.json'), OSError(errno.ENOSPC, 'No space left on device')),
        missing_topic(Path('bag'), Path('arm.yaml'), 'front/image_raw', 'camera front', []),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_with_fields_of_its_own_comes_back_whole(error):
    found = pickle.loads(pickle.dumps(error))
    assert type(found) is type(error)
    assert (str(found), vars(found)) == (str(error), vars(error))


def test_what_is_submitted_is_run_elsewhere():
    with workers(1) as submit:
        assert submit(os.getpid).result(_PATIENCE_S) != os.getpid()
        assert submit(max, 3, 5).result(_PATIENCE_S) == 5
    assert not multiprocessing.active_children()


def test_an_error_ends_them_in_the_middle_of_their_work():
    with pytest.raises(ZeroDivisionError), workers(2) as submit:
        submit(os.getpid).result(_PATIENCE_S)
        # Far longer than this test would wait for them.
        for _ in range(8):
            submit(time.sleep, 10 * _PATIENCE_S)
        raise ZeroDivisionError
    assert not multiprocessing.active_children()


@pytest.mark.skipif(
    sys.version_info[:2] != (3, 11),
    reason='the pool is told of the end once the start is over, as of 3.12 and before 3.11',
)
def test_one_that_is_killed_while_another_is_started_is_the_same_error(monkeypatch):
    real = popen_spawn_posix.util.spawnv_passfds
    started = []

    def start(path, words, descriptors):
        if any('spawn_main' in str(word) for word in words):
            if started:
                os.kill(started[0], signal.SIGKILL)
                first.exception(_PATIENCE_S)
                # The end of the queue that was closed is a new pipe's.
                return real(path, words, [*descriptors, descriptors[0]])
            started.append(real(path, words, descriptors))
            return started[0]
        return real(path, words, descriptors)

    monkeypatch.setattr(popen_spawn_posix.util, 'spawnv_passfds', start)
    with pytest.raises(ChildProcessError, match='killed'), workers(2) as submit:
        first = submit(time.sleep, 10 * _PATIENCE_S)
        submit(time.sleep, 10 * _PATIENCE_S)
    assert not multiprocessing.active_children()


def test_one_that_is_killed_is_an_error_not_a_hang():
    with pytest.raises(ChildProcessError, match='killed'), workers(1) as submit:
        pid = submit(os.getpid).result(_PATIENCE_S)
        busy = submit(time.sleep, 10 * _PATIENCE_S)
        os.kill(pid, signal.SIGKILL)
        busy.result(_PATIENCE_S)


class Terminal:
    """A process and its children, which a Ctrl-C reaches all at once."""

    def __init__(self, *command: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def workers(self) -> list[int]:
        """Process ids of the spawned children."""
        found = []
        for child in psutil.Process(self._process.pid).children():
            # Not every child is a worker: git, asked for the code's version, ends while it is read.
            with suppress(psutil.NoSuchProcess):
                if 'spawn_main' in str(child.cmdline()):
                    found.append(child.pid)
        return found

    def wait_for_workers(self, count: int) -> list[int]:
        end_s = time.monotonic() + _PATIENCE_S
        while len(found := self.workers()) < count:
            assert time.monotonic() < end_s and self._process.poll() is None
            time.sleep(0.005)
        return found

    def interrupt(self) -> tuple[int, str]:
        """The exit code and the output."""
        os.killpg(self._process.pid, signal.SIGINT)
        return self.end()

    def end(self) -> tuple[int, str]:
        """The exit code and the output of a process that ends by itself."""
        try:
            output, _ = self._process.communicate(timeout=_PATIENCE_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            raise
        return self._process.returncode, output


@pytest.mark.parametrize('verb', thorough_but(['study'], ['train-demo', 'study']))
def test_ctrl_c_ends_a_command_whose_workers_are_starting(tmp_path, verb):
    arguments = {
        'train-demo': ['--out', str(tmp_path / 'bundle'), '--work', str(tmp_path)],
        'study': ['replan_moving', '--out', str(tmp_path), '--work', str(tmp_path / 'work')],
    }[verb]
    terminal = Terminal('-m', 'vla_runtime', verb, *arguments, '--processes', '2')
    pids = terminal.wait_for_workers(2)
    code, output = terminal.interrupt()
    assert code == 130, output
    assert 'interrupted; the same command goes on where it was' in output
    assert 'Traceback' not in output
    assert not any(map(psutil.pid_exists, pids))


def test_ctrl_c_ends_workers_in_the_middle_of_their_work(tmp_path):
    script = tmp_path / 'busy.py'
    script.write_text(_BUSY)
    terminal = Terminal(str(script))
    assert terminal._process.stdout.readline() == 'busy\n'
    code, output = terminal.interrupt()
    assert (code, output) == (1, 'interrupted\n')


@pytest.mark.parametrize('delay_s', [0.0, 3e-4, 6e-4])
def test_ctrl_c_that_another_thread_takes_ends_workers_that_are_starting(tmp_path, delay_s):
    script = tmp_path / 'starting.py'
    script.write_text(_INTERRUPTED_AT_THE_START)
    code, output = Terminal(str(script), str(delay_s)).end()
    assert (code, output) == (1, 'interrupted\n')


@pytest.mark.skipif(sys.platform != 'linux', reason='only the kernel of Linux ends them then')
@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGKILL])
def test_a_command_that_a_signal_ends_takes_its_workers_along(tmp_path, number):
    script = tmp_path / 'busy.py'
    script.write_text(_BUSY)
    terminal = Terminal(str(script))
    assert terminal._process.stdout.readline() == 'busy\n'
    pids = terminal.wait_for_workers(2)
    os.kill(terminal._process.pid, number)
    terminal._process.communicate(timeout=_PATIENCE_S)
    end_s = time.monotonic() + _PATIENCE_S
    while any(map(_runs, pids)):
        assert time.monotonic() < end_s
        time.sleep(0.005)


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
