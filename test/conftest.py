"""Shared by all tests: plain helper modules beside this file can be imported by name."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# Tiny networks gain nothing from threads, and threads that spin on a busy machine lose tenfold.
os.environ.setdefault('OMP_NUM_THREADS', '1')

# What `auto` chose for this user's own bundles is no business of the tests, nor the other way
# round. Fonts that were laid out once are taken from where they are.
if 'PYTEST_XDIST_WORKER' not in os.environ:
    os.environ.setdefault('MPLCONFIGDIR', str(Path.home() / '.cache' / 'matplotlib'))
    os.environ['XDG_CACHE_HOME'] = tempfile.mkdtemp(prefix='vla_runtime_cache_')
    # Files that take seconds to make are made once, by whichever worker needs them first.
    os.environ['VLA_RUNTIME_TEST_SCRATCH'] = tempfile.mkdtemp(prefix='vla_runtime_tests_')
    for name in ('XDG_CACHE_HOME', 'VLA_RUNTIME_TEST_SCRATCH'):
        atexit.register(shutil.rmtree, os.environ[name], ignore_errors=True)

# `nohup` and a shell's `&` let a process ignore these, and all that it starts.
for number, usual in ((signal.SIGHUP, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler)):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, usual)

# Collecting garbage after every 700 objects is a twentieth of the time of all tests.
gc.set_threshold(10_000)

# PyTorch's CUDA build imports Triton, whose own functions are then compiled or interpreted for the
# rest of the process. Without a GPU only the interpreter runs them.
if not Path('/dev/nvidia0').exists():
    os.environ.setdefault('TRITON_INTERPRET', '1')

# Helper modules that tests of several folders share.
_SHARED = (
    '',
    'convert/readers',
    'fuzz',
    'launch',
    'lerobot_releases',
    'runtime/nodes',
    'runtime/robot',
    'tools/dataset',
)
sys.path[:0] = [str(Path(__file__).parent / folder) for folder in _SHARED]

# A worker has PyTorch, ONNX Runtime and the largest networks of its tests.
_WORKER_BYTES = 3 << 30
_MOST_WORKERS = 8


def pytest_configure(config: pytest.Config) -> None:
    """Prepare this process.

    Hypothesis tries the same examples every time, fewer where thorough tests are left out, and
    without a deadline: no verdict depends on how busy the machine is.
    """
    from read_once import read_yaml_once
    from thorough import EXAMPLES, QUICK_EXAMPLES

    read_yaml_once()
    count = QUICK_EXAMPLES if 'not thorough' in config.getoption('markexpr') else EXAMPLES
    settings.register_profile('vla_runtime', derandomize=True, deadline=None, max_examples=count)
    settings.load_profile('vla_runtime')


def pytest_collection_finish() -> None:
    """Leave what was imported out of every collection of garbage: each took a third of a second."""
    gc.freeze()


class _LeftOut(pytest.Collector):
    """Collects nothing: a module that skips itself while it is imported."""

    reason: BaseException

    def collect(self) -> Any:
        raise self.reason


@pytest.hookimpl(hookwrapper=True)
def pytest_pycollect_makemodule(parent: pytest.Collector) -> Iterator[Any]:
    """Let a module that skips itself skip nothing but itself.

    The plugin of `launch_testing` imports modules while their folder is listed. A skip there would
    end the listing, and with it every test.
    """
    outcome = yield
    if outcome.excinfo is not None and isinstance(outcome.excinfo[1], pytest.skip.Exception):
        left_out = _LeftOut.from_parent(parent, name='a module that skips itself')
        left_out.reason = outcome.excinfo[1]
        outcome.force_result(left_out)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One worker more than cores, because tests that start nodes mostly wait.

    Fewer where memory is short: three work on any machine that runs a policy.
    """
    memory = os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')
    return max(3, min(len(os.sched_getaffinity(0)) + 1, memory // _WORKER_BYTES, _MOST_WORKERS))
