"""Files that a test run makes once, for all of its processes."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path


def scratch_folder() -> Path:
    """Shared by the workers of a test run; removed when it ends."""
    return Path(os.environ['VLA_RUNTIME_TEST_SCRATCH'])


def made_once(name: str, make: Callable[[Path], object]) -> Path:
    """A folder that is made by the first test that asks for it, in whichever worker.

    Args:
        name: name of the folder.
        make: called with a path; leaves the folder there.
    """
    folder, partial = scratch_folder() / name, scratch_folder() / f'{name}.partial'
    with open(scratch_folder() / f'{name}.lock', 'w') as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            shutil.rmtree(partial, ignore_errors=True)
            make(partial)
            partial.rename(folder)
    return folder
