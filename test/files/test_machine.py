"""Software versions and the processor in a result."""

from __future__ import annotations

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
