"""Starts the executables as plain processes, listens to them, and ends them in order.

Invariants:
- each child has a session of its own: a Ctrl-C in the terminal reaches only the supervisor, which
  then ends the children one after the other;
- a child that does not follow SIGINT in time gets SIGKILL;
- on Linux the kernel kills the children when the supervisor's process dies without ending them;
- whatever a child wrote is in a log file, and its last lines are at hand for an error message;
- a log that cannot be written ends that log alone; the child never waits for a reader.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from vla_runtime.processes.parent_death import dies_with_this_process

_LAST_LINES = 15
# A node ends its teardown within 16 s, and takes no notice of a second signal meanwhile.
_PATIENCE_S = ((signal.SIGINT, 20.0), (signal.SIGKILL, 5.0))


class ChildDiedError(RuntimeError):
    """A process ended that should be running; the message has its last output."""


class Child:
    """One running `python -m module`. The thread that starts it must live at least as long.

    `on_failure` is called once with why the log cannot be written.
    """

    def __init__(
        self,
        name: str,
        module: str,
        arguments: Sequence[str],
        log: Path,
        on_failure: Callable[[str], None],
    ) -> None:
        self.name = name
        self.log = log
        self._on_failure = on_failure
        self._last: deque[str] = deque(maxlen=_LAST_LINES)
        self._process = subprocess.Popen(
            [sys.executable, '-m', module, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors='replace',
            start_new_session=True,
            preexec_fn=dies_with_this_process(),
        )
        self._reader = threading.Thread(target=self._read, name=f'{name} output', daemon=True)
        self._reader.start()

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def last_output(self) -> str:
        """Return the last lines of output, and the path of the others."""
        lines = '\n'.join(self._last)
        return f'its last output ({self.log}):\n{lines}'

    def stop(self) -> int:
        """End it and return its exit code; negative is the signal that ended it."""
        for number, patience_s in _PATIENCE_S:
            if self._process.poll() is not None:
                break
            self._process.send_signal(number)
            try:
                self._process.wait(patience_s)
            except subprocess.TimeoutExpired:
                continue
        code = self._process.wait()
        self._reader.join(timeout=1.0)
        return code

    def death(self) -> str:
        code = self._process.poll()
        how = f'was ended by signal {-code}' if code and code < 0 else f'ended with code {code}'
        return f'{self.name} {how}; {self.last_output()}'

    def _read(self) -> None:
        assert self._process.stdout is not None
        log = _Log(self.log, self._on_failure)
        for line in self._process.stdout:
            self._last.append(line.rstrip('\n'))
            log.write(line)
        log.close()


class _Log:
    """Log file that ends when the disk is full, and says so once; never raises."""

    def __init__(self, path: Path, on_failure: Callable[[str], None]) -> None:
        self._path, self._on_failure = path, on_failure
        self._file: TextIO | None = None
        try:
            self._file = path.open('w', encoding='utf-8')
        except OSError as error:
            self._fail(error)

    def write(self, line: str) -> None:
        if self._file is None:
            return
        try:
            self._file.write(line)
            self._file.flush()
        except OSError as error:
            self.close()
            self._fail(error)

    def close(self) -> None:
        if self._file is not None:
            # What is still buffered fails again.
            with suppress(OSError):
                self._file.close()
        self._file = None

    def _fail(self, error: OSError) -> None:
        self._on_failure(f'{self._path}: cannot be written: {error.strerror}; the log ends here')


class Supervisor:
    """All children of one session, with their logs in `log_folder`; use as a context.

    `on_failure` is called in another thread for every log that cannot be written.
    """

    def __init__(self, log_folder: Path, on_failure: Callable[[str], None]) -> None:
        self._log_folder = log_folder
        self._on_failure = on_failure
        self._children: list[Child] = []

    def __enter__(self) -> Supervisor:
        self._log_folder.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, name: str, module: str, arguments: Sequence[str]) -> Child:
        log = self._log_folder / f'{name}.log'
        child = Child(name, module, arguments, log, self._on_failure)
        self._children.append(child)
        return child

    def check(self, *names: str) -> None:
        """Raise `ChildDiedError` unless those of these names, or all, are running."""
        for child in self._children:
            if not child.running and (not names or child.name in names):
                raise ChildDiedError(child.death())

    def end(self, name: str) -> Child:
        """End one; all of its output is at hand then."""
        child = next(child for child in self._children if child.name == name)
        child.stop()
        return child

    def stop(self) -> None:
        """End all, the newest first."""
        while self._children:
            self._children.pop().stop()
