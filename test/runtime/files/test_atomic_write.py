"""A file or folder appears complete or not at all: what was there is kept otherwise."""

import hashlib
import io
import json
import os
import resource
import signal
import stat
import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest
from full_disk import fill, small_disk

from vla_runtime.bundle.folder import BundleError
from vla_runtime.bundle.writer import new_bundle
from vla_runtime.cli.main import main
from vla_runtime.files import atomic_write as atomic_write_module
from vla_runtime.files.atomic_write import WriteError, atomic_write, whole_folder, write_text

OLD, NEW = 'old\n', 'new\n' * 10_000


@contextmanager
def files_no_larger_than(size):
    """The limit of the shell's `ulimit -f`: writing beyond it fails, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_file_takes_the_place_of_the_one_that_was_there(tmp_path):
    path = tmp_path / 'result.json'
    write_text(path, OLD)
    write_text(path, NEW)
    assert path.read_text() == NEW
    assert os.listdir(tmp_path) == ['result.json']


def test_its_mode_is_that_of_any_new_file(tmp_path):
    write_text(tmp_path / 'mine', OLD)
    (tmp_path / 'theirs').write_text(OLD)
    modes = {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ('mine', 'theirs')}
    assert len(modes) == 1


@pytest.mark.parametrize('there_before', [True, False])
def test_a_file_that_grows_too_large_leaves_what_was_there(tmp_path, there_before):
    path = tmp_path / 'result.json'
    if there_before:
        write_text(path, OLD)
    with files_no_larger_than(4096), pytest.raises(WriteError) as raised:
        write_text(path, NEW)
    assert raised.value.filename == str(path)
    assert str(raised.value).startswith(f'{path}: cannot be written: File too large')
    assert ('what was there is kept' in str(raised.value)) == there_before
    assert [p.read_text() for p in tmp_path.iterdir()] == ([OLD] if there_before else [])


def test_a_full_disk_leaves_what_was_there(tmp_path):
    with small_disk(tmp_path / 'disk', 256) as disk:
        path = disk / 'result.json'
        write_text(path, OLD)
        filler = fill(disk, leave_bytes=8192)
        with pytest.raises(WriteError, match=rf'{path}: .*No space left on device; what was there'):
            write_text(path, NEW)
        assert path.read_text() == OLD
        assert sorted(p.name for p in disk.iterdir()) == [filler.name, 'result.json']


def test_an_error_on_the_way_leaves_what_was_there(tmp_path):
    path = tmp_path / 'result.json'
    write_text(path, OLD)
    with pytest.raises(KeyboardInterrupt), atomic_write(path) as file:
        file.write(NEW.encode())
        raise KeyboardInterrupt
    assert path.read_text() == OLD
    assert os.listdir(tmp_path) == ['result.json']


def test_a_missing_folder_is_named_with_the_file(tmp_path):
    path = tmp_path / 'nowhere' / 'result.json'
    with pytest.raises(WriteError, match=f'{path}: cannot be written: No such file'):
        write_text(path, NEW)


def test_a_link_is_replaced_and_what_it_leads_to_stays(tmp_path):
    path, link = tmp_path / 'blob', tmp_path / 'policy.yaml'
    path.write_text(OLD)
    link.symlink_to(path)
    write_text(link, NEW)
    assert (path.read_text(), link.read_text()) == (OLD, NEW)


def test_a_link_on_the_command_line_stays(tmp_path, capsys):
    path, link = tmp_path / 'there' / 'result.json', tmp_path / 'newest.json'
    path.parent.mkdir()
    link.symlink_to(path)
    assert main(['roofline', 'act', '--device', 'thor', '--json', str(link)]) == 0
    assert link.is_symlink()
    assert path.read_text().startswith('{')


@pytest.mark.thorough
def test_standard_output_that_is_a_file_stays_that_file(tmp_path):
    path = tmp_path / 'said'
    with path.open('w') as said:
        inode = os.fstat(said.fileno()).st_ino
        command = [sys.executable, '-m', 'vla_runtime', 'roofline', 'act', '--device', 'thor']
        subprocess.run([*command, '--json', '/dev/stdout'], stdout=said, check=True)
    assert path.stat().st_ino == inode
    assert path.read_text().startswith('{')
    assert os.path.islink('/dev/stdout')


@pytest.mark.parametrize('named', ['-', '/dev/stdout'])
def test_figures_on_standard_output_stand_there_alone(named, capfd):
    words = ['roofline', 'act', '--device', 'thor']
    assert main([*words, '--json', named]) == 0
    figures, said = capfd.readouterr()
    assert isinstance(json.loads(figures), dict)
    assert main(words) == 0
    assert said.startswith(capfd.readouterr().out)


def test_a_pipe_is_written_to_and_stays_a_pipe(tmp_path):
    path, read = tmp_path / 'pipe', []
    os.mkfifo(path)
    reader = threading.Thread(target=lambda: read.append(path.read_text()))
    reader.start()
    write_text(path, OLD)
    reader.join()
    assert read == [OLD]
    assert stat.S_ISFIFO(path.stat().st_mode)


def test_what_a_command_writes_with_json_survives_a_full_disk(tmp_path, capsys):
    command = ['roofline', 'act', '--device', 'thor', '--json']
    with small_disk(tmp_path / 'disk', 256) as disk:
        path = disk / 'roofline.json'
        assert main([*command, str(path)]) == 0
        before = path.read_text()
        fill(disk)
        capsys.readouterr()
        assert main([*command, str(path)]) == 2
        printed = capsys.readouterr().err
        assert f'{path}: cannot be written: No space left on device' in printed
        assert path.read_text() == before


def test_a_bundle_without_room_names_its_folder_and_leaves_nothing(tmp_path):
    target = tmp_path / 'bundle'
    with (
        files_no_larger_than(4096),
        pytest.raises(BundleError, match=f'{target}: cannot be written: File too large'),
        new_bundle(target) as folder,
    ):
        (folder / 'weights.safetensors').write_bytes(bytes(8192))
    assert os.listdir(tmp_path) == []


# --- A folder appears complete or not at all, and what a killed command left is removed

NOTHING_WRONG = print


def test_a_folder_takes_the_place_of_another(tmp_path):
    target = tmp_path / 'made'
    for text in ('first', 'second'):
        with whole_folder(target, NOTHING_WRONG) as folder:
            (folder / 'file').write_text(text)
        assert (target / 'file').read_text() == text
    assert list(tmp_path.iterdir()) == [target]


def test_an_error_leaves_what_was_there(tmp_path):
    target = tmp_path / 'made'
    target.mkdir()
    with pytest.raises(KeyboardInterrupt), whole_folder(target, NOTHING_WRONG):
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == [target]


def test_what_a_killed_command_left_is_removed_and_nothing_else(tmp_path):
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


# --- Hashing a large file


def test_without_a_terminal_a_large_file_is_hashed_without_a_progress_bar(tmp_path, monkeypatch):
    """A machine that only builds engines has no tqdm."""
    monkeypatch.setattr(atomic_write_module, '_PROGRESS_BYTES', 0)
    monkeypatch.setattr(sys, 'stderr', io.StringIO())
    monkeypatch.setitem(sys.modules, 'tqdm', None)
    path = tmp_path / 'weights.data'
    path.write_bytes(b'weights')
    assert atomic_write_module.file_sha256(path) == hashlib.sha256(b'weights').hexdigest()
