"""Software versions and the processor in a result."""

from __future__ import annotations

import os
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from vla_runtime.files import machine as machine_module
from vla_runtime.files.machine import cpu_instructions, machine, versions


def test_an_imported_module_names_its_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, 'safetensors', SimpleNamespace(__version__='0.0.1+cu130'))
    assert versions(['safetensors'])['safetensors'] == '0.0.1+cu130'


def test_what_is_not_imported_has_its_packages_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, 'pytest')
    assert versions(['pytest'])['pytest'] == metadata.version('pytest')


def test_what_is_not_installed_is_left_out() -> None:
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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: str, expected: str
) -> None:
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
