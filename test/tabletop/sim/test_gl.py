"""The rendering backend is chosen once, and its absence is explained."""

from __future__ import annotations

import ctypes.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from paths import ROOT
from triton_package import environment, needs_triton

from vla_tabletop.sim import gl


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
    with pytest.raises(gl.RenderingUnavailableError):
        gl.choose_backend({})


needs_osmesa = pytest.mark.skipif(
    ctypes.util.find_library('OSMesa') is None, reason='libosmesa6 is not installed'
)
RENDER = """
from vla_tabletop.sim.world import Tabletop
world = Tabletop()
world.reset(0)
assert world.render('front', 64, 48).std() > 1.0
"""
TRITON = 'import triton, torch.utils.flop_counter'


def with_osmesa(*steps: str) -> subprocess.CompletedProcess[str]:
    """Run the steps in one process of their own, whatever this machine would choose."""
    return subprocess.run(
        [sys.executable, '-X', 'faulthandler', '-c', '\n'.join(steps)],
        env={**environment(), 'MUJOCO_GL': 'osmesa'},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_ctrl_c_that_a_loader_takes_for_its_own_failure_stays_ctrl_c(tmp_path: Path) -> None:
    (tmp_path / 'mujoco.py').write_text(
        'try:\n    raise KeyboardInterrupt\n'
        "except KeyboardInterrupt:\n    raise RuntimeError('cannot load')\n"
    )
    done = subprocess.run(
        [sys.executable, '-c', 'import vla_tabletop.sim.gl'],
        env={**os.environ, 'PYTHONPATH': f'{tmp_path}{os.pathsep}{ROOT}', 'MUJOCO_GL': 'egl'},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stderr.splitlines()[-1] == 'KeyboardInterrupt'


@needs_osmesa
def test_what_is_loaded_after_osmesa_does_not_see_mesas_symbols() -> None:
    seen = (
        'import ctypes, sys',
        'everything = ctypes.CDLL(None)',
        "names = ('OSMesaCreateContext', 'LLVMContextCreate')",
        'sys.exit([name for name in names if hasattr(everything, name)] or None)',
    )
    done = with_osmesa(RENDER, *seen)
    assert done.returncode == 0, done.stderr


@pytest.mark.thorough
@needs_osmesa
@needs_triton
@pytest.mark.parametrize(
    'steps',
    [
        (TRITON, RENDER),
        (RENDER, TRITON, RENDER),
        ('import vla_tabletop.sim.gl', TRITON, RENDER),
    ],
    ids=['triton first', 'rendered first', 'mujoco first'],
)
def test_triton_and_osmesa_are_beside_each_other_in_either_order(steps: tuple[str, ...]) -> None:
    done = with_osmesa(*steps)
    assert done.returncode == 0, done.stderr
