"""Dockerfiles, as far as no Docker goes: shell lines, files and what is installed."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
from paths import ROOT

FILES = sorted((ROOT / 'docker').glob('*.Dockerfile'))
APT_NAMES = {'numpy': 'python3-numpy', 'pyyaml': 'python3-yaml'}
each_file = pytest.mark.parametrize('path', FILES, ids=lambda path: path.stem)


def arguments_of(path: Path, instruction: str) -> list[str]:
    """What stands behind an instruction, continued lines joined as Docker joins them."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith('#')]
    joined = re.sub(r'\\\n', '', '\n'.join(lines))
    return re.findall(rf'^{instruction}\s+(.*)$', joined, re.MULTILINE)


@each_file
def test_shell_lines_are_good_bash_and_files_that_are_named_are_there(path: Path) -> None:
    commands = [json.loads(rest)[-1] for rest in arguments_of(path, 'CMD')]
    for line in (*arguments_of(path, 'RUN'), *commands):
        subprocess.run(['bash', '-n', '-c', line], check=True)
    named = re.findall(r'src/vla_runtime/(\S+)', path.read_text())
    assert named and all((ROOT / name).exists() for name in named)


@each_file
def test_it_installs_every_requirement_of_the_package(path: Path) -> None:
    (listed,) = re.findall(
        r'install_requires=\[(.*?)\]', (ROOT / 'setup.py').read_text(), re.DOTALL
    )
    needed = re.findall(r"'([a-z0-9-]+)>=", listed)
    parts = [part for line in arguments_of(path, 'RUN') for part in line.split('&&')]
    installing = [part for part in parts if re.search('(pip|apt-get) install', part)]
    installed = {word for part in installing for word in part.split()}
    assert len(needed) > 5
    assert [name for name in needed if APT_NAMES.get(name, name) not in installed] == []


@each_file
def test_pip_and_apt_are_not_in_each_others_way(path: Path) -> None:
    """On Ubuntu 24.04 pip fails at what apt installed: 'RECORD file not found'."""
    (ubuntu,) = re.findall(r'ros2/ubuntu (jammy|noble) main', path.read_text())
    (line,) = [line for line in arguments_of(path, 'RUN') if ' pip install' in line]
    assert re.search(r"python3 -c 'import cv2, numpy", line)
    assert ('--ignore-installed' in line.split()) is (ubuntu == 'noble')
    if ubuntu == 'noble':
        # No release lies upon another.
        removed = line.split(' pip uninstall ')[0]
        assert {'numpy', 'opencv-python', 'opencv-python-headless'} <= set(removed.split())
