"""Only regular files are read, up to a size; a Hub id for a folder is answered with a command."""

import os
import socket
from pathlib import Path

import pytest

from vla_runtime.files.atomic_write import file_sha256
from vla_runtime.files.checkpoint_folders import download_hint
from vla_runtime.files.input_files import UnreadableFileError, read_text, regular_file


@pytest.fixture
def file(tmp_path):
    path = tmp_path / 'file.txt'
    path.write_text('héllo')
    return path


def linked(path: Path, target: Path | str) -> Path:
    path.symlink_to(target)
    return path


def test_links_are_followed_to_the_end_of_the_chain(file, tmp_path):
    link = linked(tmp_path / 'b', linked(tmp_path / 'a', 'file.txt'))
    assert regular_file(link) == file.resolve()
    assert read_text(link, 10) == 'héllo'


def test_a_missing_file_is_missing(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_text(tmp_path / 'none', 10)


@pytest.mark.parametrize(
    ('target', 'reason'),
    [
        ('none', r'is a link to none, which is not there'),
        ('file.txt/none', 'file.txt'),
        ('link', r'is a link to link, which cannot be followed'),
        ('.', r'is a link to \., which is a folder; expected a regular file'),
        ('/dev/zero', r'is a link to /dev/zero, which is a device'),
        ('fifo', r'is a link to fifo, which is a FIFO \(named pipe\)'),
    ],
)
def test_a_link_that_leads_to_no_file_says_where_it_leads(file, tmp_path, target, reason):
    os.mkfifo(tmp_path / 'fifo')
    link = linked(tmp_path / 'link', target)
    for read in (regular_file, file_sha256, lambda path: read_text(path, 10)):
        with pytest.raises(UnreadableFileError, match=reason):
            read(link)


def test_a_socket_is_no_file(tmp_path, monkeypatch):
    # Sockets have short names only.
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind('s')
        with pytest.raises(UnreadableFileError):
            regular_file('s')


def test_a_file_that_is_too_large_is_refused_with_the_limit(file):
    assert read_text(file, 6) == 'héllo'
    with pytest.raises(UnreadableFileError):
        read_text(file, 5)


def test_a_file_without_a_size_of_its_own_is_read_all_the_same():
    assert 'VmRSS' in read_text('/proc/self/status', 1 << 16)


def test_bytes_that_are_no_text_are_refused_with_their_place(tmp_path):
    path = tmp_path / 'bytes'
    path.write_bytes(b'ok \xff')
    with pytest.raises(UnreadableFileError):
        read_text(path, 100)


# --- A Hub id in the place of a folder is answered with the command that downloads it


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize('text', ['lerobot/pi05_base', 'https://huggingface.co/lerobot/pi05_base'])
def test_an_id_is_told_from_a_folder(elsewhere, text):
    hint = download_hint(Path(text))
    assert hint.endswith('hf download lerobot/pi05_base --local-dir pi05_base')


@pytest.mark.parametrize('text', ['pick', '/engines/pick', './pick', '../a/b', '~/a', 'a/b/c', ''])
def test_what_is_no_id_gets_no_hint(elsewhere, text):
    assert download_hint(Path(text)) == ''


def test_a_name_in_a_folder_that_is_there_is_no_id(elsewhere):
    Path('engines').mkdir()
    assert download_hint(Path('engines/pick')) == ''
