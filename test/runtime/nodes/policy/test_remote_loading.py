"""What is refused before a policy on a server moves anything, and what is not loaded for it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT
from served_process import ServedProcess
from tiny_policy import tiny_spec, write_tiny_policy
from tiny_robot import ROBOT, write_robot

from vla_runtime.cli.main import main
from vla_runtime.nodes.executor.parameters import EXECUTOR_PARAMETERS
from vla_runtime.nodes.executor.setup import read_files
from vla_runtime.nodes.parameter_table import ParameterError
from vla_runtime.nodes.policy.loading import load_policy
from vla_runtime.nodes.policy.parameters import POLICY_PARAMETERS
from vla_runtime.nodes.policy.settings import settings_from
from vla_runtime.remote.connection import ServerAddress, ServerLostError
from vla_runtime.remote.link import fetch_contract
from vla_runtime.robot.file import load_robot
from vla_runtime.robot.match import MatchError

NOBODY = 'ws://127.0.0.1:9'


@pytest.fixture(scope='module')
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedProcess]:
    """A server of a policy that resizes its images, and of one that does not."""
    folder = tmp_path_factory.mktemp('bundles')
    process = ServedProcess(
        write_tiny_policy(folder / 'tiny', tiny_spec()),
        str(write_tiny_policy(folder / 'fixed', tiny_spec('act'))),
    )
    yield process
    process.kill()


def load_by_policy_node(robot: Path, **given: object) -> None:
    defaults = {row.name: row.default for row in POLICY_PARAMETERS}
    values = {**defaults, 'backend': 'remote', 'server_timeout_s': 60.0, **given}
    loaded = load_policy(values, load_robot(robot), settings_from(values), lambda _: None)
    loaded.policy.close()


def load_by_executor_node(robot: Path, **given: object) -> None:
    defaults = {row.name: row.default for row in EXECUTOR_PARAMETERS}
    read_files({**defaults, 'server_timeout_s': 60.0, 'robot': str(robot), **given})


Loader = Callable[..., None]
LOADERS = (load_by_policy_node, load_by_executor_node)
# What is replaced in the robot file, by what, and the name in the refusal.
WRONG: Mapping[str, tuple[str, str, str]] = {
    'unit': ('{name: elbow, unit: rad', '{name: elbow, unit: m', 'elbow'),
    'camera': ('{name: wrist, topic', '{name: hand, topic', 'wrist'),
    'joint': ('shoulder', 'hip', 'shoulder'),
    'size': ('topic: top/image', 'topic: top/image, width: 32, height: 32', 'top'),
}


@pytest.mark.parametrize('load', LOADERS)
def test_a_robot_file_that_fits_is_taken(
    server: ServedProcess, tmp_path: Path, load: Loader
) -> None:
    for path in ('', '/policies/tiny', '/policies/fixed'):
        load(write_robot(tmp_path / 'tiny.yaml'), server=server.url + path)


@pytest.mark.parametrize('load', LOADERS)
@pytest.mark.parametrize('what', WRONG)
def test_one_that_does_not_fit_is_refused_with_the_name_and_the_server(
    server: ServedProcess, tmp_path: Path, load: Loader, what: str
) -> None:
    before, after, named = WRONG[what]
    robot = write_robot(tmp_path / 'tiny.yaml', ROBOT.replace(before, after))
    url = f'{server.url}/policies/{"fixed" if what == "size" else "tiny"}'
    with pytest.raises(MatchError, match=named) as refused:
        load(robot, server=url)
    assert f'{url}/policy.yaml' in str(refused.value)


@pytest.mark.parametrize(
    ('given', 'names'),
    [
        ({}, 'server'),
        ({'server': 'box:8000'}, 'ws://'),
        ({'server': NOBODY, 'bundle': '/x'}, 'bundle'),
        ({'server': NOBODY, 'device': 'cuda'}, 'device'),
        ({'server': NOBODY, 'torch_threads': 3}, 'torch_threads'),
        ({'server': NOBODY, 'backend': 'torch'}, 'remote'),
        ({'server': NOBODY, 'server_key_file': '/nowhere'}, 'server_key_file'),
        ({'server': 'wss://127.0.0.1:9', 'server_ca_file': '/nowhere'}, 'server_ca_file'),
        ({'jpeg_quality': 80, 'backend': 'torch', 'bundle': '/x'}, 'jpeg_quality'),
        ({'backend': 'torch'}, 'bundle'),
    ],
)
def test_parameters_that_do_not_go_together_are_refused_by_name(
    tmp_path: Path, given: dict[str, Any], names: str
) -> None:
    with pytest.raises(ValueError, match=names):
        load_by_policy_node(write_robot(tmp_path / 'tiny.yaml'), **given)


def test_a_server_that_is_not_there_is_named(tmp_path: Path) -> None:
    robot = write_robot(tmp_path / 'tiny.yaml')
    with pytest.raises(ServerLostError, match=NOBODY):
        load_by_policy_node(robot, server=NOBODY)
    with pytest.raises(ParameterError, match=NOBODY):
        load_by_executor_node(robot, server=NOBODY)


def test_no_such_policy_is_said(server: ServedProcess, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match='tiny, fixed'):
        load_by_policy_node(write_robot(tmp_path / 'r.yaml'), server=f'{server.url}/policies/x')


@pytest.mark.parametrize('verb', ['info', 'check'])
def test_the_command_line_asks_a_server_like_a_folder(
    server: ServedProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    words = [verb] if verb == 'info' else [verb, str(write_robot(tmp_path / 'tiny.yaml'))]
    assert main([*words, server.url]) == 0
    asked = capsys.readouterr().out
    assert 'tiny pi05' in asked and server.url in asked
    if verb == 'info':
        assert fetch_contract(ServerAddress(server.url, 60.0)).bundle_sha256 in asked
    assert main([*words, NOBODY]) == 2
    assert NOBODY in capsys.readouterr().err


def test_the_nodes_need_no_networks_and_without_a_server_no_wire() -> None:
    source = (
        'import sys\n'
        "sys.modules['msgpack'] = sys.modules['websockets'] = None\n"
        'import vla_runtime.nodes.policy.node, vla_runtime.nodes.executor.node\n'
        "print({'torch', 'onnxruntime', 'tensorrt'} & {*sys.modules})\n"
    )
    done = subprocess.run(
        [sys.executable, '-c', source], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.stdout == 'set()\n', done.stderr
