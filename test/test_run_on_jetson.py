"""`./run` on aarch64: which PyTorch it takes, by `uname` and /etc/nv_tegra_release of a Jetson.

Both are faked by programs that stand first in PATH. A file lies where the virtual environment wants
a folder, so that a setup ends at its first step, after it has said what it takes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from paths import ROOT

JETPACK_6 = '# R36 (release), REVISION: 4.3, GCID: 38968081, BOARD: generic, EABI: aarch64'
JETPACK_5 = '# R35 (release), REVISION: 4.1, GCID: 33958178, BOARD: t186ref, EABI: aarch64'
JETPACK_7_2 = '# R39 (release), REVISION: 2.0, GCID: 41651299, BOARD: generic, EABI: aarch64'
JETPACK_7 = '# R38 (release), REVISION: 4.0, GCID: 41651299, BOARD: generic, EABI: aarch64'


@pytest.fixture
def setup(tmp_path: Path):
    """Runs `./run setup` on a faked machine; returns what it said."""
    checkout = tmp_path / 'checkout'
    checkout.mkdir()
    for name in ('run', 'setup.cfg'):
        shutil.copy(ROOT / name, checkout)
    shutil.copytree(ROOT / 'requirements', checkout / 'requirements')
    (checkout / 'setup.py').write_text('')
    (checkout / '.venv').mkdir()
    (checkout / '.venv' / 'include').touch()
    tools = tmp_path / 'tools'
    tools.mkdir()

    def tool(name: str, lines: str) -> None:
        path = tools / name
        path.write_text(f'#!/bin/sh\n{lines}\nexec {shutil.which(name)} "$@"\n')
        path.chmod(0o755)

    def run(
        release: str = '',
        machine: str = 'aarch64',
        kernel: str = '6.8.0-generic',
        installed: bool = False,
        **environment: str,
    ) -> str:
        tool('uname', f'case "$1" in -m) echo {machine}; exit ;; -r) echo {kernel}; exit ;; esac')
        answer = f"printf '%s\\n' '{release}'" if release else 'exit 1'
        tool('head', f'case "$*" in *nv_tegra_release) {answer}; exit ;; esac')
        packages = tmp_path / 'packages'
        (packages / 'torch').mkdir(parents=True, exist_ok=True)
        if installed:
            (packages / 'torch' / '__init__.py').write_text("__version__ = '2.5.0'\n")
        else:
            shutil.rmtree(packages / 'torch')
            # The Python of these tests has one in its virtual environment alone.
            environment['PYTHONNOUSERSITE'] = '1'
        done = subprocess.run(
            ['bash', str(checkout / 'run'), 'setup'],
            env={
                **os.environ,
                'PATH': f'{tools}:{os.environ["PATH"]}',
                'PYTHONPATH': str(packages),
                'ROS_DISTRO': '',
                'PIP_CONFIG_FILE': os.devnull,
                'PIP_INDEX_URL': 'http://127.0.0.1:9',
                'PIP_FIND_LINKS': '',
                'PIP_RETRIES': '0',
                'VLA_RUNTIME_NO_APT': '1',
                'VLA_RUNTIME_TORCH': '',
                'VLA_RUNTIME_PYTHON': 'python3',
                **environment,
            },
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 1
        return done.stderr

    return run


WHEELS = ('torch-2.5.0-linux_aarch64.whl', 'https://a.b/torch.whl')
BEGUN, REFUSED = True, False
CASES = [
    # JetPack 6 takes the installed one or a wheel that is named, and never that of the index.
    ({'release': JETPACK_6, 'installed': True}, BEGUN, 'a Jetson with CUDA 12: PyTorch is system'),
    *(
        ({'release': JETPACK_6, 'VLA_RUNTIME_TORCH': wheel}, BEGUN, f'CUDA 12: PyTorch is {wheel}')
        for wheel in WHEELS
    ),
    ({'release': JETPACK_6}, REFUSED, "NVIDIA's wheel for JetPack 6"),
    *(
        (
            {'release': JETPACK_6, 'installed': installed, 'VLA_RUNTIME_TORCH': 'torch==2.13.0'},
            REFUSED,
            "VLA_RUNTIME_TORCH='torch==2.13.0' would come from the package index",
        )
        for installed in (True, False)
    ),
    # A container is known by the kernel.
    ({'kernel': '5.15.148-tegra'}, REFUSED, 'CUDA 12 (JetPack 6): no PyTorch'),
    ({'kernel': '6.8.12-tegra'}, BEGUN, 'CUDA 13: PyTorch is torch=='),
    # JetPack 7 takes the installed one and else the index.
    ({'release': JETPACK_7, 'installed': True}, BEGUN, 'CUDA 13: PyTorch is system'),
    ({'release': JETPACK_7}, BEGUN, 'CUDA 13: PyTorch is torch==2.13.0'),
    ({'release': JETPACK_7_2, 'installed': True}, BEGUN, 'CUDA 13: PyTorch is system'),
    ({'release': JETPACK_5, 'installed': True}, REFUSED, 'R35 (JetPack 5 or older) has CUDA 11'),
]


@pytest.mark.parametrize(('machine', 'begins', 'told'), CASES)
def test_a_jetson_takes_the_pytorch_that_works_there(setup, machine, begins, told) -> None:
    said = setup(**machine)
    assert told in said
    assert ('FAILED' in said and '1/6 virtual environment' in said) is begins


def test_a_release_file_on_another_processor_is_no_jetson(setup) -> None:
    assert 'Jetson' not in setup(JETPACK_6, machine='x86_64')
