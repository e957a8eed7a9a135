"""What a result says of the machine and of the code that made it."""

import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
from paths import PACKAGES, ROOT

from vla_runtime import __version__
from vla_runtime.files import machine as machine_module
from vla_runtime.files.machine import cpu_instructions, machine, versions
from vla_runtime.files.package_files import code_version, source_digest


def test_an_imported_module_names_its_build(monkeypatch):
    monkeypatch.setitem(sys.modules, 'safetensors', SimpleNamespace(__version__='0.0.1+cu130'))
    assert versions(['safetensors'])['safetensors'] == '0.0.1+cu130'


def test_what_is_not_imported_has_its_packages_version(monkeypatch):
    monkeypatch.delitem(sys.modules, 'pytest')
    assert versions(['pytest'])['pytest'] == metadata.version('pytest')


def test_what_is_not_installed_is_left_out():
    assert list(versions(['no-such-package'])) == ['python']


@pytest.mark.parametrize(
    ('field', 'expected'),
    [
        (
            'flags\t\t: fpu avx avx2 avx512f amx_bf16 avx512_vnni',
            'avx2 avx512f avx512_vnni amx_bf16',
        ),
        ('flags\t\t: fpu avx avx2', 'avx2'),
        ('Features\t: fp asimd asimddp bf16', 'asimddp bf16'),
    ],
)
def test_cpus_of_one_name_are_told_apart_by_their_instructions(
    tmp_path, monkeypatch, field, expected
):
    kernel = tmp_path / 'cpuinfo'
    kernel.write_text(f'processor\t: 0\nmodel name\t: AMD EPYC\n{field}\n')
    monkeypatch.setattr(machine_module, '_CPU', kernel)
    assert cpu_instructions() == machine()['cpu_instructions'] == expected
    assert machine()['cpu'] == 'AMD EPYC'


def groups(monkeypatch, folder, lines: str, files: dict[str, str]) -> None:
    """Let this process be in these control groups, of a machine with 16 cores."""
    (folder / 'cgroup').write_text(lines)
    for name, text in files.items():
        path = folder / 'mount' / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(machine_module, '_GROUPS', folder / 'cgroup')
    monkeypatch.setattr(machine_module, '_MOUNT', folder / 'mount')
    monkeypatch.setattr(os, 'sched_getaffinity', lambda _: set(range(16)))


V1 = {'cpu.cfs_quota_us': '300000\n', 'cpu.cfs_period_us': '100000\n'}


@pytest.mark.parametrize(
    ('lines', 'files', 'expected'),
    [
        ('0::/\n', {'cpu.max': '250000 100000\n'}, 2),
        ('0::/\n', {'cpu.max': 'max 100000\n'}, 16),
        ('0::/\n', {'cpu.max': '50000 100000\n'}, 1),
        ('0::/\n', {'cpu.max': '9900000 100000\n'}, 16),
        # The least of a group and its parents.
        ('0::/a/b\n', {'a/b/cpu.max': 'max 100000', 'a/cpu.max': '500000 100000'}, 5),
        ('0::/a/b\n', {'a/b/cpu.max': '200000 100000', 'a/cpu.max': '500000 100000'}, 2),
        # Version 1; in a container the path is the host's, and the mount the group.
        ('3:cpuset:/\n1:cpu,cpuacct:/docker/x\n', {f'cpu/{n}': t for n, t in V1.items()}, 3),
        ('1:cpu:/x\n', {f'cpu/x/{n}': t for n, t in V1.items()}, 3),
        ('1:cpu:/\n', {'cpu/cpu.cfs_quota_us': '-1', 'cpu/cpu.cfs_period_us': '100000'}, 16),
        ('1:cpuacct:/\n', {f'cpu/{n}': t for n, t in V1.items()}, 16),
        ('', {}, 16),
        ('\nno group\n0::/\n', {'cpu.max': '250000 100000\n'}, 2),
    ],
)
def test_cores_are_those_that_a_containers_quota_allows(
    monkeypatch, tmp_path, lines, files, expected
):
    groups(monkeypatch, tmp_path, lines, files)
    assert machine_module.available_cores() == expected


def test_without_control_groups_all_cores_count(monkeypatch, tmp_path):
    monkeypatch.setattr(machine_module, '_GROUPS', tmp_path / 'none')
    assert machine_module.available_cores() == len(os.sched_getaffinity(0))


# --- The code version is the commit, marked where files differ from it, or the package's version

needs_git = pytest.mark.skipif(shutil.which('git') is None, reason='git is not installed')


def _git(folder: Path, *arguments: str) -> str:
    who = ['-c', 'user.name=test', '-c', 'user.email=test@example.org']
    command = ['git', '-C', str(folder), *who, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def package(tmp_path):
    package = tmp_path / 'vla_runtime'
    package.mkdir()
    (package / '__init__.py').write_text('')
    _git(tmp_path, 'init', '--quiet')
    return package


@needs_git
def test_a_commit_is_named_and_marked_when_a_file_differs_or_is_new(package):
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
def test_a_package_that_no_repository_tracks_has_its_version(package):
    assert code_version(package.parent) == __version__


def test_the_digest_changes_with_any_module_its_place_and_the_scene(tmp_path):
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


def test_what_running_leaves_behind_is_no_source(tmp_path):
    package = tmp_path / 'vla_runtime'
    package.mkdir()
    (package / 'a.py').write_text('one = 1\n')
    before = source_digest(tmp_path)
    (package / '__pycache__').mkdir()
    (package / '__pycache__' / 'a.cpython-312.pyc').write_bytes(b'compiled')
    assert source_digest(tmp_path) == before


def test_the_running_code_is_all_packages(tmp_path):
    for name in PACKAGES:
        shutil.copytree(ROOT / name, tmp_path / name)
    assert source_digest() == source_digest(tmp_path)
    (tmp_path / 'vla_tabletop' / 'sim' / 'world.py').unlink()
    assert source_digest() != source_digest(tmp_path)
