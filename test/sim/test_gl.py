"""The rendering backend is chosen once, and its absence is explained."""

from __future__ import annotations

import ctypes.util

import pytest

from vla_runtime.sim import gl


def test_the_users_choice_is_kept() -> None:
    assert gl.choose_backend({'MUJOCO_GL': 'glfw'}) == 'glfw'


def test_without_a_gpu_osmesa_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gl.glob, 'glob', lambda pattern: [])
    monkeypatch.setattr(ctypes.util, 'find_library', lambda name: f'lib{name}.so')
    assert gl.choose_backend({}) == 'osmesa'


def test_a_missing_library_is_named_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gl.glob, 'glob', lambda pattern: [])
    monkeypatch.setattr(ctypes.util, 'find_library', lambda name: None)
    with pytest.raises(gl.RenderingUnavailableError, match='apt install libosmesa6'):
        gl.choose_backend({})
