"""Dockerfiles, as far as no Docker goes: instructions, sources, shell lines, and who names them."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
from paths import ROOT

FILES = sorted((ROOT / 'docker').glob('*.Dockerfile'))
KNOWN = {'ARG', 'FROM', 'SHELL', 'ENV', 'RUN', 'WORKDIR', 'COPY', 'CMD'}


def instructions(path: Path) -> list[tuple[str, str]]:
    """Instructions and their arguments, continued lines joined as Docker joins them."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith('#')]
    joined = re.sub(r'\\\n', '', '\n'.join(lines))
    pairs = [line.split(maxsplit=1) for line in joined.splitlines() if line.strip()]
    return [(name, rest) for name, rest in pairs]


def shell_lines(path: Path) -> list[str]:
    return [rest for name, rest in instructions(path) if name == 'RUN']


@pytest.mark.parametrize('path', FILES, ids=lambda path: path.stem)
def test_a_dockerfile_is_well_formed(path: Path) -> None:
    found = instructions(path)
    assert {name for name, _ in found} <= KNOWN
    assert [name for name, _ in found[:2]] == ['ARG', 'FROM']
    assert found[0][1].startswith('BASE=nvcr.io/nvidia/') and ':' in found[0][1]
    for name, rest in found:
        if name == 'RUN':
            subprocess.run(['bash', '-n', '-c', rest], check=True)
        if name in ('CMD', 'SHELL'):
            assert all(isinstance(word, str) for word in json.loads(rest))
    (command,) = (json.loads(rest) for name, rest in found if name == 'CMD')
    subprocess.run(['bash', '-n', '-c', command[-1]], check=True)


@pytest.mark.parametrize('path', FILES, ids=lambda path: path.stem)
def test_files_that_a_dockerfile_names_are_there(path: Path) -> None:
    text = path.read_text()
    named = re.findall(r'src/vla_runtime/(\S+)', text)
    assert named and all((ROOT / name).exists() for name in named)
    assert f'docker/{path.name}' in text
    assert f'docker/{path.name}' in (ROOT / 'docs' / 'howto' / 'jetson.md').read_text()


APT_NAMES = {'numpy': 'python3-numpy', 'pyyaml': 'python3-yaml'}


@pytest.mark.parametrize('path', FILES, ids=lambda path: path.stem)
def test_a_dockerfile_installs_every_requirement_of_the_package(path: Path) -> None:
    setup = (ROOT / 'setup.py').read_text()
    (listed,) = re.findall(r'install_requires=\[(.*?)\]', setup, re.DOTALL)
    needed = re.findall(r"'([a-z0-9-]+)>=", listed)
    installed = set()
    for line in shell_lines(path):
        for part in line.split('&&'):
            if 'pip install' in part or 'apt-get install' in part:
                installed |= set(part.split())
    assert len(needed) > 5
    assert [name for name in needed if APT_NAMES.get(name, name) not in installed] == []


@pytest.mark.parametrize('path', FILES, ids=lambda path: path.stem)
def test_what_was_installed_is_imported_and_no_release_lies_upon_another(path: Path) -> None:
    (line,) = [line for line in shell_lines(path) if ' pip install' in line]
    assert re.search(r"python3 -c 'import cv2, numpy", line)
    if '--ignore-installed' in line:
        removed = line.split(' pip uninstall ')[0]
        assert {'numpy', 'opencv-python', 'opencv-python-headless'} <= set(removed.split())


@pytest.mark.parametrize('path', FILES, ids=lambda path: path.stem)
def test_on_ubuntu_2404_pip_does_not_uninstall_what_apt_installed(path: Path) -> None:
    """pip fails there: 'Cannot uninstall typing_extensions, RECORD file not found'."""
    (ubuntu,) = re.findall(r'ros2/ubuntu (jammy|noble) main', path.read_text())
    (line,) = [line for line in shell_lines(path) if ' pip install' in line]
    assert ('--ignore-installed' in line.split()) is (ubuntu == 'noble')
