"""Software versions in a result."""

from __future__ import annotations

import sys
from importlib import metadata
from types import SimpleNamespace

import pytest

from vla_runtime.files.machine import versions


def test_an_imported_module_names_its_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, 'safetensors', SimpleNamespace(__version__='0.0.1+cu130'))
    assert versions(['safetensors'])['safetensors'] == '0.0.1+cu130'


def test_what_is_not_imported_has_its_packages_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, 'pytest')
    assert versions(['pytest'])['pytest'] == metadata.version('pytest')


def test_what_is_not_installed_is_left_out() -> None:
    assert list(versions(['no-such-package'])) == ['python']
