"""Messages of ros2_control for tests where it is not installed: the part that the nodes read."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from made_once import made_once
from paths import ROOT

_SOURCES = ROOT / 'test' / 'interfaces'
# Beside the wheels of ROS 2, as ./run builds vla_interfaces.
_WHEELS = ROOT / 'interfaces' / 'wheels.cmake'
_NAMES = ('control_msgs', 'controller_manager_msgs')


def ros2_control_messages() -> dict[str, str]:
    """Variables of a process that is to import them; skips the test where none can be built."""
    if all(find_spec(name) for name in _NAMES):
        return {}
    generators = Path(sys.prefix) / 'share' / 'rosidl_default_generators'
    missing = [name for name in ('cmake', 'cc', 'c++') if shutil.which(name) is None]
    missing += [str(path) for path in (generators, _WHEELS) if not path.exists()]
    if missing:
        pytest.skip(f'ros2_control is not installed, nor what builds its messages: {missing}')
    prefix = made_once('ros2_control_messages', _build)
    (packages,) = prefix.glob('lib/python*/site-packages')
    added = {'PYTHONPATH': packages, 'LD_LIBRARY_PATH': prefix / 'lib', 'AMENT_PREFIX_PATH': prefix}
    return {
        name: os.pathsep.join([str(path), *filter(None, [os.environ.get(name)])])
        for name, path in added.items()
    }


def _build(prefix: Path) -> None:
    for name in _NAMES:
        build = prefix.with_name(f'{prefix.name}.{name}')
        for step in (
            [
                *('cmake', '-S', str(_SOURCES / name), '-B', str(build)),
                *(f'-DCMAKE_INSTALL_PREFIX={prefix}', f'-DCMAKE_PREFIX_PATH={sys.prefix}'),
                *(f'-DPython3_EXECUTABLE={sys.executable}', '-DPython3_FIND_VIRTUALENV=ONLY'),
                f'-DCMAKE_PROJECT_{name}_INCLUDE={_WHEELS}',
            ],
            ['cmake', '--build', str(build)],
            ['cmake', '--install', str(build)],
        ):
            environment = {**os.environ, 'VIRTUAL_ENV': sys.prefix, 'AMENT_PREFIX_PATH': sys.prefix}
            done = subprocess.run(step, env=environment, capture_output=True, text=True)
            assert done.returncode == 0, f'{step}\n{done.stdout}\n{done.stderr}'
        shutil.rmtree(build)
