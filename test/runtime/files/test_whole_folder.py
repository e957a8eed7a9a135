"""A folder appears complete or not at all, and what a killed command left is removed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from vla_runtime.files.atomic_write import whole_folder

NOTHING_WRONG = print


def test_a_folder_takes_the_place_of_another(tmp_path: Path) -> None:
    target = tmp_path / 'made'
    for text in ('first', 'second'):
        with whole_folder(target, NOTHING_WRONG) as folder:
            (folder / 'file').write_text(text)
        assert (target / 'file').read_text() == text
    assert list(tmp_path.iterdir()) == [target]


def test_an_error_leaves_what_was_there(tmp_path: Path) -> None:
    target = tmp_path / 'made'
    target.mkdir()
    with pytest.raises(KeyboardInterrupt), whole_folder(target, NOTHING_WRONG):
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == [target]


def test_what_a_killed_command_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / 'a.b'
    kept = [tmp_path / name for name in ('.a.b.12345678.partly', '.aXb.12345678.part', '.a.b.part')]
    for path in kept:
        path.mkdir()
    code = (
        'import sys, time; from pathlib import Path\n'
        'from vla_runtime.files.atomic_write import whole_folder\n'
        'with whole_folder(Path(sys.argv[1]), print):\n'
        '    print("begun", flush=True); time.sleep(600)\n'
    )
    other = subprocess.Popen(
        [sys.executable, '-c', code, str(target)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert other.stdout is not None and other.stdout.readline() == 'begun\n'
        (left,) = set(tmp_path.iterdir()) - set(kept)
        # It is still written to.
        with whole_folder(target, NOTHING_WRONG):
            assert left.is_dir()
        assert left.is_dir()
    finally:
        os.kill(other.pid, signal.SIGKILL)
        other.wait()
    with whole_folder(target, NOTHING_WRONG):
        assert not left.exists()
    assert set(tmp_path.iterdir()) == {*kept, target}
