"""Files around the package agree, ./run does what its help promises, Dockerfiles install it."""

from __future__ import annotations

import functools
import importlib
import json
import os
import re
import runpy
import shutil
import stat
import subprocess
import sys
import tempfile
from email import message_from_string
from email.message import Message
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml
from import_graph import imports
from paths import PACKAGES, ROOT

import vla_runtime
from vla_runtime.messages.trajectories import typed_messages
from vla_runtime.processes.domains import claim_domain

NODES = ('policy_node', 'executor_node', 'recorder_node', 'task_node', 'tabletop_node')
ROS_PACKAGES = {
    'action_msgs',
    'ament_index_python',
    'builtin_interfaces',
    'diagnostic_msgs',
    'geometry_msgs',
    'launch',
    'launch_ros',
    'lifecycle_msgs',
    'rcl_interfaces',
    'rclpy',
    'rosgraph_msgs',
    'sensor_msgs',
    'std_msgs',
    'std_srvs',
    'trajectory_msgs',
    'visualization_msgs',
}
# Import name to the name that pip knows.
PIP_NAMES = {
    'OpenGL': 'pyopengl',
    'PIL': 'pillow',
    'cuda': 'cuda-bindings',
    'cv2': 'opencv-python-headless',
    'markdown_it': 'markdown-it-py',
    'rerun': 'rerun-sdk',
    'yaml': 'pyyaml',
    'pinocchio': 'pin',
    'prometheus_client': 'prometheus-client',
    'zmq': 'pyzmq',
}
# ./run does not install them: a GPU machine's CUDA or the cluster's Ray says which release.
NOT_PINNED = {
    'cuda-bindings',
    'ray',
    'tensorrt',
    'tensorrt-rtx-cu13-bindings',
    'tensorrt-rtx-cu13-libs',
    'triton',
}


def run(*arguments: str, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ['bash', str(cwd / 'run'), *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=600,
    )


def setup_py(*arguments: str) -> str:
    return subprocess.run(
        [sys.executable, 'setup.py', '--quiet', *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    ).stdout


@functools.cache
def metadata() -> Message:
    """Metadata of setup.py, as pip and the package index read it."""
    with tempfile.TemporaryDirectory() as folder:
        setup_py('egg_info', '--egg-base', folder)
        text = (Path(folder) / 'vla_runtime.egg-info' / 'PKG-INFO').read_text()
    return message_from_string(text)


def requirements_of_setup() -> set[str]:
    """Names in install_requires and extras_require."""
    lines = metadata().get_all('Requires-Dist') or []
    return {re.match(r'[\w-]+', line)[0].lower() for line in lines}  # type: ignore[index]


def pinned(file: str) -> set[str]:
    lines = (ROOT / 'requirements' / file).read_text().splitlines()
    return {line.split('==')[0] for line in lines if line and not line.startswith('#')}


def package_xml() -> ElementTree.Element:
    return ElementTree.parse(ROOT / 'package.xml').getroot()


def test_package_xml_is_what_colcon_accepts() -> None:
    root = package_xml()
    assert root.get('format') == '3'
    assert root.findtext('name') == 'vla_runtime'
    assert root.findtext('version') == vla_runtime.__version__
    assert root.findtext('export/build_type') == 'ament_python'
    maintainer = root.find('maintainer')
    assert maintainer is not None
    assert re.fullmatch(r'[\w.-]+@[\w-]+(\.[\w-]+)+', maintainer.get('email', ''))


@pytest.fixture(scope='module')
def unpacked_sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp('sdist')
    base = str(folder / 'egg')
    (folder / 'egg').mkdir()
    setup_py('egg_info', '--egg-base', base, 'sdist', '--dist-dir', str(folder))
    (archive,) = folder.glob('*.tar.gz')
    shutil.unpack_archive(archive, folder)
    return folder / f'vla_runtime-{vla_runtime.__version__}'


@pytest.mark.thorough
@pytest.mark.skipif(not (ROOT / '.git').exists(), reason='not a git checkout')
def test_the_source_distribution_has_every_file(unpacked_sdist: Path) -> None:
    listed = subprocess.run(
        ['git', 'ls-files'], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    missing = [name for name in listed if not (unpacked_sdist / name).exists()]
    assert missing == ['.gitignore']


def test_every_import_is_declared() -> None:
    # The simulator is in an environment of its own, whose interpreter runs these files.
    apart = ROOT / 'vla_tabletop' / 'metaworld'
    imported = set()
    folders = (*PACKAGES, 'launch')
    for file in (path for folder in folders for path in (ROOT / folder).rglob('*.py')):
        names = {name.split('.')[0] for name in imports(file)}
        imported |= names - {'metaworld'} if file.is_relative_to(apart) else names
    foreign = imported - set(sys.stdlib_module_names) - {*PACKAGES}
    # `./run metaworld` installs it, in an environment of its own; the nodes do without the other.
    foreign -= {'metaworld', 'vla_interfaces'}
    in_package_xml = {element.text for element in package_xml().findall('exec_depend')}
    assert foreign & ROS_PACKAGES <= in_package_xml
    assert {PIP_NAMES.get(name, name) for name in foreign - ROS_PACKAGES} <= requirements_of_setup()


def extras_of_run() -> set[str]:
    extras = re.search(r"^EXTRAS='(.+)'$", (ROOT / 'run').read_text(), re.MULTILINE)
    assert extras is not None
    return set(extras[1].split(','))


def test_remedies_install_from_the_source_folder_and_name_extras_that_there_are() -> None:
    extras = set(metadata().get_all('Provides-Extra') or [])
    assert extras_of_run() <= extras
    files = [
        *(file for package in PACKAGES for file in (ROOT / package).rglob('*.py')),
        *(ROOT / 'docs').rglob('*.md'),
        ROOT / 'README.md',
    ]
    text = '\n'.join(file.read_text() for file in files)
    # No package index has it.
    assert re.findall(r'pip install .*vla_runtime\[.*', text) == []
    named = set(','.join(re.findall(r"'\.\[([\w,-]+)\]'", text)).split(','))
    assert {'ray', 'torch'} <= named <= extras


def test_every_requirement_is_pinned_for_both_kinds_of_ros() -> None:
    torch = re.search(r'VLA_RUNTIME_TORCH:-(\w+)==', (ROOT / 'run').read_text())
    assert torch is not None
    for kind in ('wheels.txt', 'sourced-ros.txt'):
        assert requirements_of_setup() - NOT_PINNED == (
            pinned('versions.txt') | (pinned(kind) & requirements_of_setup()) | {torch.group(1)}
        )


@pytest.fixture(scope='module')
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prefix with the data files of setup.py."""
    prefix = tmp_path_factory.mktemp('data') / 'a prefix'
    setup_py('install_data', '--install-dir', str(prefix))
    return prefix


def test_every_requirement_has_its_rosdep_key_or_none_and_why(tmp_path: Path) -> None:
    """Keys that package.xml names are those that the release page says it does."""
    page = (ROOT / 'docs' / 'howto' / 'release.md').read_text(encoding='utf-8')
    table = page.partition('<!-- keys -->')[2].partition('<!-- end -->')[0]
    rows = [
        [cell.strip() for cell in line.split('|')[1:4]] for line in table.splitlines()[3:] if line
    ]
    keys = {name: (key.strip('`'), named) for name, key, named in rows}
    listed = re.findall(r"'([A-Za-z0-9_-]+)(?:\[[^]]*\])?>=", (ROOT / 'setup.py').read_text())
    assert {*listed} <= keys.keys()
    manifest = (ROOT / 'package.xml').read_text(encoding='utf-8')
    named = {*re.findall(r'_depend>(python3-[a-z0-9-]+)<', manifest)}
    assert {key for key, how in keys.values() if how.startswith('yes')} == named


def test_data_files_install_what_ros_looks_for(installed: Path) -> None:
    share = installed / 'share' / 'vla_runtime'
    assert (installed / 'share/ament_index/resource_index/packages/vla_runtime').is_file()
    assert (share / 'package.xml').is_file()
    for folder in ('launch', 'config'):
        expected = {
            file.relative_to(ROOT) for file in (ROOT / folder).rglob('*.*') if file.suffix != '.pyc'
        }
        assert {file.relative_to(share) for file in (share / folder).rglob('*.*')} == expected


def test_installed_files_are_found_without_ros(installed: Path) -> None:
    site = installed / 'lib' / 'python3' / 'site-packages'
    shutil.copytree(ROOT / 'vla_runtime' / 'files', site / 'vla_runtime' / 'files')
    shutil.copy(ROOT / 'vla_runtime' / '__init__.py', site / 'vla_runtime')
    script = (
        'import sys\n'
        'sys.modules["ament_index_python"] = None\n'
        'from vla_runtime.files.package_files import share_folder\n'
        'print(share_folder())\n'
    )
    said = subprocess.run(
        [sys.executable, '-c', script],
        env={**os.environ, 'PYTHONPATH': str(site)},
        cwd=installed,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert Path(said.strip()) == (installed / 'share' / 'vla_runtime').resolve()


def test_node_executables_start_the_entry_point_of_their_prefix(installed: Path) -> None:
    (installed / 'bin').mkdir()
    for node in NODES:
        entry = installed / 'bin' / node
        entry.write_text('#!/bin/sh\nprintf "%s|" "$0" "$@"\n')
        entry.chmod(0o755)
        executable = installed / 'lib' / 'vla_runtime' / node
        said = subprocess.run(
            [executable, '--ros-args', '-p', 'x:=a b'], capture_output=True, text=True, check=True
        ).stdout.split('|')
        assert Path(said[0]).resolve() == entry
        assert said[1:-1] == ['--ros-args', '-p', 'x:=a b']


def test_models_of_the_simulator_are_package_data(tmp_path: Path) -> None:
    setup_py('build', '--build-base', str(tmp_path / 'base'), '--build-lib', str(tmp_path / 'lib'))
    built = {file.name for file in (tmp_path / 'lib/vla_tabletop/sim').glob('*.xml')}
    assert built == {file.name for file in (ROOT / 'vla_tabletop/sim').glob('*.xml')} != set()


def test_installed_starters_find_what_they_start(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr('setuptools.setup', lambda **words: given.update(words))
    monkeypatch.chdir(ROOT)
    runpy.run_path(str(ROOT / 'setup.py'))
    starters = given['entry_points']['console_scripts']
    assert {line.partition(' = ')[0] for line in starters} == {'vla_runtime', *NODES}
    for line in starters:
        module, _, function = line.partition(' = ')[2].partition(':')
        assert callable(getattr(importlib.import_module(module), function)), line


@pytest.mark.parametrize('file', ['policy', 'executor'])
def test_parameter_files_give_every_parameter_its_default(file: str) -> None:
    module = importlib.import_module(f'vla_runtime.nodes.{file}.parameters')
    table = getattr(module, f'{file.upper()}_PARAMETERS')
    document = yaml.safe_load((ROOT / 'config' / f'{file}.yaml').read_text())
    assert list(document) == ['/**']
    given = document['/**']['ros__parameters']
    from_launch = {'bundle', 'server', 'robot', 'backend'}
    assert given == {row.name: row.default for row in table if row.name not in from_launch}
    # 2 instead of 2.0 would be refused by ROS as an integer.
    assert {name: type(value) for name, value in given.items()} == {
        row.name: type(row.default) for row in table if row.name in given
    }


def test_fast_dds_profile_makes_segments_that_hold_many_images() -> None:
    script = (
        'import os, rclpy\n'
        'def size(name):\n'
        '    try:\n'
        '        return os.stat("/dev/shm/" + name).st_size\n'
        # Of another test's process, which has ended.
        '    except FileNotFoundError:\n'
        '        return 0\n'
        'before = set(os.listdir("/dev/shm"))\n'
        'rclpy.init()\n'
        'node = rclpy.create_node("profile_test")\n'
        'new = set(os.listdir("/dev/shm")) - before\n'
        'print(max(map(size, new)))\n'
        'node.destroy_node()\n'
        'rclpy.shutdown()\n'
    )
    profile = str(ROOT / 'config' / 'fastdds.xml')
    environment = {
        **os.environ,
        'RMW_IMPLEMENTATION': 'rmw_fastrtps_cpp',
        'FASTRTPS_DEFAULT_PROFILES_FILE': profile,
        'FASTDDS_DEFAULT_PROFILES_FILE': profile,
        'ROS_DOMAIN_ID': str(claim_domain()),
        'ROS_AUTOMATIC_DISCOVERY_RANGE': 'LOCALHOST',
    }
    done = subprocess.run(
        [sys.executable, '-c', script], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert 'XMLPARSER' not in done.stderr
    assert int(done.stdout.split()[-1]) >= 64 * 2**20


def test_run_is_good_bash() -> None:
    for script in ('run', '.ci/run'):
        subprocess.run(['bash', '-n', str(ROOT / script)], check=True)
        assert (ROOT / script).stat().st_mode & stat.S_IXUSR


@pytest.fixture
def bare_checkout(tmp_path: Path) -> Path:
    """A checkout without an environment, so that nothing here touches the one in use."""
    checkout = tmp_path / 'a checkout'
    checkout.mkdir()
    shutil.copy(ROOT / 'run', checkout)
    return checkout


def test_run_says_what_to_install_when_there_is_no_python(
    bare_checkout: Path, tmp_path: Path
) -> None:
    tools = tmp_path / 'bin'
    tools.mkdir()
    for name in ('bash', 'dirname', 'sed', 'mkdir', 'sha256sum', 'cut'):
        (tools / name).symlink_to(shutil.which(name) or name)
    done = run('setup', cwd=bare_checkout, PATH=str(tools), ROS_DISTRO='', VLA_RUNTIME_PYTHON='')
    assert done.returncode == 1
    assert 'no Python 3.10 to 3.13 found' in done.stderr
    assert 'sudo apt install python3.11' in done.stderr
    assert not (bare_checkout / '.venv').exists()


def test_run_refuses_a_sourced_ros_that_it_cannot_use(bare_checkout: Path) -> None:
    done = run('setup', cwd=bare_checkout, ROS_DISTRO='foxy', PYTHONPATH='')
    assert done.returncode == 1
    assert 'ROS_DISTRO=foxy is sourced, but no Python' in done.stderr
    assert 'Humble or Jazzy' in done.stderr
    assert not (bare_checkout / '.venv').exists()


@pytest.mark.thorough
def test_run_shows_the_log_of_a_step_that_fails(bare_checkout: Path) -> None:
    shutil.copytree(ROOT / 'requirements', bare_checkout / 'requirements')
    shutil.copy(ROOT / 'setup.cfg', bare_checkout)
    (bare_checkout / 'setup.py').write_text('')
    nowhere = 'http://127.0.0.1:9'
    done = run(
        'setup',
        cwd=bare_checkout,
        ROS_DISTRO='',
        PIP_CONFIG_FILE=os.devnull,
        PIP_INDEX_URL=nowhere,
        PIP_FIND_LINKS='',
        PIP_RETRIES='0',
        VLA_RUNTIME_NO_APT='1',
    )
    assert done.returncode == 1
    assert '2/6 pip and setuptools' in done.stderr
    assert 'FAILED' in done.stderr
    assert 'the first setup needs the network' in done.stderr


def was_made_here() -> bool:
    """Return whether `./run` of this very checkout made the environment; it remakes any other."""
    stamps = ROOT / '.venv' / 'setup.stamps'
    return stamps.is_file() and f'root={ROOT}' in stamps.read_text(encoding='utf-8').splitlines()


made_here = pytest.mark.skipif(
    not was_made_here(), reason='this environment was not made by ./run of this checkout'
)


@made_here
def test_run_works_a_second_time_without_the_network() -> None:
    nowhere = 'http://127.0.0.1:9'
    done = run('setup', PIP_NO_INDEX='1', HTTPS_PROXY=nowhere, HTTP_PROXY=nowhere)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1].startswith('ready: ')
    assert 'PyTorch' not in done.stderr


@made_here
@pytest.mark.skipif(not shutil.which('c++'), reason='no C++ compiler is installed')
def test_run_has_built_the_typed_messages() -> None:
    # Else every test of them is skipped, here and in CI.
    assert typed_messages() is not None, run('setup').stderr


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
