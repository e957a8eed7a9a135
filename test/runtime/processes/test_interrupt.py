"""Signals while one program takes the place of another."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest
from paths import ROOT

# The program before: a signal comes when it no longer looks, then the next program begins.
BEFORE = """
import os, select, signal, sys, threading
from vla_runtime.processes.interrupt import interruptible, keep_signals
who, number, after = sys.argv[1], int(sys.argv[2]), sys.argv[3]
with interruptible() as interrupt:
    if who == 'another thread':
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    keep_signals()
    assert not interrupt.wanted
    if number:
        os.kill(os.getpid(), number)
    if who == 'another thread':
        # Taken: exec would end a thread that is still about to.
        select.select([int(os.environ['VLA_RUNTIME_SIGNALS'])], [], [])
    else:
        assert signal.sigpending() == {number} - {0}
    os.execv(sys.executable, [sys.executable, '-c', after])
"""
AFTER = """
import os, signal, subprocess, sys
from vla_runtime.processes.interrupt import interruptible
mask = 'import signal; print(signal.pthread_sigmask(signal.SIG_BLOCK, ()))'
with interruptible() as interrupt:
    print(interrupt.how or 'nothing', flush=True)
    for run in (subprocess.check_call, lambda words: os.execv(words[0], words)):
        run([sys.executable, '-c', mask])
"""


def said_after(who: str, number: int) -> list[str]:
    words = [sys.executable, '-c', BEFORE, who, f'{number:d}', AFTER]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60.0)
    assert (done.returncode, done.stderr) == (0, '')
    return done.stdout.splitlines()


@pytest.mark.parametrize('who', ['no other thread', 'another thread'])
@pytest.mark.parametrize(
    ('name', 'how'),
    [
        ('SIGINT', 'ended with Ctrl-C'),
        ('SIGTERM', 'ended by SIGTERM'),
        ('SIGHUP', 'ended by SIGHUP: its terminal was closed'),
    ],
)
def test_a_signal_between_two_programs_is_the_next_ones(who: str, name: str, how: str) -> None:
    # Neither its children nor itself keep a mask.
    assert said_after(who, getattr(signal, name)) == [how, 'set()', 'set()']


def test_without_a_signal_the_next_program_starts_as_any() -> None:
    assert said_after('no other thread', 0) == ['nothing', 'set()', 'set()']
