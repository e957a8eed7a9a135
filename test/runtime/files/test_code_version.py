"""The code version is the commit, marked where files differ from it, or the package's version."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from paths import PACKAGES, ROOT

from vla_runtime import __version__
from vla_runtime.files.package_files import code_version, source_digest

needs_git = pytest.mark.skipif(shutil.which('git') is None, reason='git is not installed')


def _git(folder: Path, *arguments: str) -> str:
    who = ['-c', 'user.name=test', '-c', 'user.email=test@example.org']
    command = ['git', '-C', str(folder), *who, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def package(tmp_path: Path) -> Path:
    package = tmp_path / 'vla_runtime'
    package.mkdir()
    (package / '__init__.py').write_text('')
    _git(tmp_path, 'init', '--quiet')
    return package


@needs_git
def test_a_commit_is_named_and_marked_when_a_file_differs_or_is_new(package: Path) -> None:
    _git(package, 'add', '.')
    _git(package, 'commit', '--quiet', '-m', 'first')
    commit = _git(package, 'rev-parse', 'HEAD')
    folder = package.parent
    assert code_version(folder) == commit
    (folder / 'notes.txt').write_text('beside the package')
    assert code_version(folder) == commit
    (package / 'new.py').write_text('')
    assert code_version(folder) == f'{commit}-dirty'
    (package / 'new.py').unlink()
    assert code_version(folder) == commit
    (folder / 'vla_tabletop').mkdir()
    (folder / 'vla_tabletop' / 'new.py').write_text('')
    assert code_version(folder) == f'{commit}-dirty'
    (folder / 'vla_tabletop' / 'new.py').unlink()
    (package / '__init__.py').write_text('changed = True\n')
    assert code_version(folder) == f'{commit}-dirty'


@needs_git
def test_a_package_that_no_repository_tracks_has_its_version(package: Path) -> None:
    assert code_version(package.parent) == __version__


def test_the_digest_changes_with_any_module_its_place_and_the_scene(tmp_path: Path) -> None:
    folder = tmp_path / 'one'
    package, tabletop = folder / 'vla_runtime', folder / 'vla_tabletop'
    package.mkdir(parents=True)
    (tabletop / 'sim').mkdir(parents=True)
    (package / 'a.py').write_text('one = 1\n')
    (tabletop / 'sim' / 'scene.xml').write_text('<mujoco/>')
    first = source_digest(folder)
    assert first == source_digest(shutil.copytree(folder, tmp_path / 'elsewhere'))
    found = {first}
    (package / 'a.py').write_text('one = 2\n')
    found.add(source_digest(folder))
    (package / 'a.py').rename(tabletop / 'sim' / 'a.py')
    found.add(source_digest(folder))
    (tabletop / 'sim' / 'scene.xml').write_text('<mujoco model="other"/>')
    found.add(source_digest(folder))
    assert len(found) == 4


def test_what_running_leaves_behind_is_no_source(tmp_path: Path) -> None:
    package = tmp_path / 'vla_runtime'
    package.mkdir()
    (package / 'a.py').write_text('one = 1\n')
    before = source_digest(tmp_path)
    (package / '__pycache__').mkdir()
    (package / '__pycache__' / 'a.cpython-312.pyc').write_bytes(b'compiled')
    assert source_digest(tmp_path) == before


def test_the_running_code_is_all_packages(tmp_path: Path) -> None:
    for name in PACKAGES:
        shutil.copytree(ROOT / name, tmp_path / name)
    assert source_digest() == source_digest(tmp_path)
    (tmp_path / 'vla_tabletop' / 'sim' / 'world.py').unlink()
    assert source_digest() != source_digest(tmp_path)
