"""A run on a GPU machine: what the device is, and limits of time.

Imports the standard library alone, so that a machine that lacks the rest is told so.
"""

from __future__ import annotations

import argparse
import faulthandler
import platform
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from types import FrameType
from typing import Any

PACKAGES = ['torch', 'triton', 'numpy', 'pyyaml', 'safetensors']
# Repeat: a library may swallow the first interruption.
_AGAIN_S = 5.0


class OverTimeError(BaseException):
    """A part took longer than it may; no `Exception`, which fallbacks would catch."""


class Clock:
    """Progress lines with the time since the start, and the rest of `budget_s`."""

    def __init__(self, budget_s: float) -> None:
        self._start = perf_counter()
        self.budget_s = budget_s

    @property
    def left_s(self) -> float:
        """Seconds of the budget that are left; negative after it."""
        return self.budget_s - (perf_counter() - self._start)

    def say(self, text: str) -> None:
        """Print a line at once."""
        print(f'[{perf_counter() - self._start:5.0f} s] {text}', flush=True)


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise OverTimeError in the block after `seconds`; for the main thread.

    It interrupts Python code and its waits, but no call into a library (`ended_after`).
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise OverTimeError(f'cut off after {seconds:.0f} s')

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3), _AGAIN_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def ended_after(seconds: float) -> Iterator[None]:
    """End the process with code 1 after `seconds` in the block, printing all threads' stacks."""
    # Not sys.stderr: a test's has no descriptor.
    faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def described(error: BaseException) -> str:
    """Return an error's kind and its first line; some have no text."""
    lines = str(error).splitlines() or ['']
    return f'{type(error).__name__}: {lines[0][:200]}'.removesuffix(': ')


def device_fault(device: str) -> str:
    """Explain why PyTorch cannot run on this device here; empty where it can."""
    from vla_runtime.engines.preflight import check_backend

    try:
        # The driver is asked first: PyTorch takes seconds to import.
        check_backend('torch', device)
    except ValueError as error:
        return str(error)
    return pytorch_without_gpu() if device == 'cuda' else ''


def pytorch_without_gpu() -> str:
    """Explain why PyTorch sees no GPU on a machine that has one; empty where it sees it."""
    import torch

    if torch.cuda.is_available():
        return ''
    built = torch.version.cuda or 'no CUDA'
    return (
        f'PyTorch {torch.__version__} ({built}) does not see the GPU that the driver shows; '
        'install a CUDA build of PyTorch that is no newer than the driver'
    )


def device_facts(device: str) -> dict[str, Any]:
    """Name, memory, capability, driver and CUDA version of the device, for the JSON."""
    import torch

    if device == 'cpu':
        return {'name': platform.processor() or platform.machine(), 'cuda': None}
    properties = torch.cuda.get_device_properties(0)
    return {
        'name': properties.name,
        'memory_gib': properties.total_memory / 2**30,
        'capability': f'{properties.major}.{properties.minor}',
        'multiprocessors': properties.multi_processor_count,
        # Both off: sums of products in full precision.
        'reduced_bfloat16_sums': torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        'tf32_convolutions': torch.backends.cudnn.allow_tf32,
        'cuda': torch.version.cuda,
        'driver': driver_version(),
    }


def driver_version() -> str | None:
    """Version of the NVIDIA driver; None where its tool is missing."""
    query = ['nvidia-smi', '--query-gpu=driver_version', '--format=csv,noheader']
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.split('\n')[0].strip()


def described_parser(text: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help is a module's docstring."""
    summary, _, rest = str(text).partition('\n')
    return argparse.ArgumentParser(
        description=summary,
        epilog=rest.strip(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
