"""Parameters given at start that no node knows, and names that are misspelt while one runs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from graph import Graph, graph
from rcl_interfaces.srv import SetParameters, SetParametersAtomically
from rclpy.parameter import Parameter

from vla_runtime.nodes.node_main import MODULES
from vla_runtime.nodes.parameter_table import COULD_NOT_START

pytestmark = pytest.mark.graph


@pytest.fixture(scope='module')
def made() -> Iterator[Graph]:
    with graph() as running:
        running.start('vla_runtime.nodes.executor.node')
        yield running


def start_with(made: Graph, node: str, folder: Path, parameters: dict[str, Any]) -> Any:
    """A node of its own, started by hand with a file for every node."""
    file = folder / 'mine.yaml'
    lines = ''.join(f'    {name}: {value}\n' for name, value in parameters.items())
    file.write_text(f'/**:\n  ros__parameters:\n{lines}', encoding='utf-8')
    arguments = ('--ros-args', '-r', '__ns:=/alone', '--params-file', str(file))
    return made.start(MODULES[f'{node}_node'], *arguments)


@pytest.mark.parametrize(
    ('node', 'given', 'nearest'),
    [
        ('policy', 'denoise_stepps', "'denoise_steps'"),
        ('executor', 'replan_intervall', "'replan_interval'"),
    ],
)
def test_a_node_does_not_start_with_a_parameter_that_no_node_has(
    made: Graph, tmp_path: Path, node: str, given: str, nearest: str
) -> None:
    process = start_with(made, node, tmp_path, {given: 3})
    made.wait_for(lambda: not process.running, 'the node to give up')
    assert process.stop() == COULD_NOT_START
    assert f'parameter {given}, given on the command line' in process.text()
    assert f'did you mean {nearest}?' in process.text()
    assert 'Traceback' not in process.text()


def test_a_file_with_nothing_for_the_node_is_said_and_the_node_runs(
    made: Graph, tmp_path: Path
) -> None:
    file = tmp_path / 'mine.yaml'
    file.write_text('/**/vla_policy: {ros__parameters: {seed: 3}}\n', encoding='utf-8')
    arguments = ('--ros-args', '-r', '__ns:=/alone', '--params-file', str(file))
    process = made.start(MODULES['executor_node'], *arguments)
    assert made.state('/alone/vla_executor') == 'unconfigured'
    said = f'warning: {file}: no section is for this node, /alone/vla_executor'
    made.wait_for(lambda: said in process.text(), 'the warning')
    assert process.stop() == 0


def test_a_node_starts_with_parameters_of_the_others_and_says_that_it_ignores_them(
    made: Graph, tmp_path: Path
) -> None:
    given = {'use_sim_time': False, 'denoise_steps': 3, 'camera_rate_hz': 10.0, 'delay_window': 5}
    process = start_with(made, 'executor', tmp_path, given)
    assert made.state('/alone/vla_executor') == 'unconfigured'
    ignored = 'parameters of other nodes are ignored: denoise_steps (vla_policy), camera_rate_hz'
    made.wait_for(lambda: ignored in process.text(), 'what is ignored')
    assert process.stop() == 0


def test_setting_a_misspelt_parameter_names_the_nearest(made: Graph) -> None:
    result = made.set_parameter('/vla_executor', 'replan_intervall', 4)
    assert not result.successful
    assert result.reason == (
        "parameter replan_intervall is unknown; did you mean 'replan_interval'?"
    )


@pytest.mark.parametrize(
    ('given', 'meant'),
    [('cfg_bet', "'cfg_beta' of vla_policy"), ('use_sim_tme', "'use_sim_time'")],
)
def test_setting_a_parameter_of_another_node_or_of_every_node_names_it(
    made: Graph, given: str, meant: str
) -> None:
    result = made.set_parameter('/vla_executor', given, 4)
    assert result.reason == f'parameter {given} is unknown; did you mean {meant}?'


def test_of_several_parameters_the_known_ones_are_set_and_the_others_named(made: Graph) -> None:
    wanted = [
        Parameter(name, value=value).to_parameter_msg()
        for name, value in (('blend_steps', 5), ('overun', 'hold'), ('delay_window', 0))
    ]
    request = SetParameters.Request(parameters=wanted)
    first, second, third = made.call(SetParameters, '/vla_executor/set_parameters', request).results
    assert (first.successful, first.reason) == (True, '')
    assert "did you mean 'overrun'?" in second.reason
    assert '1' in third.reason and 'unknown' not in third.reason
    assert made.set_parameter('/vla_executor', 'blend_steps', 4).successful


def test_several_parameters_at_once_are_refused_with_the_unknown_ones(made: Graph) -> None:
    wanted = [Parameter(name, value=5).to_parameter_msg() for name in ('blend_steps', 'blend_stps')]
    answer = made.call(
        SetParametersAtomically,
        '/vla_executor/set_parameters_atomically',
        SetParametersAtomically.Request(parameters=wanted),
    )
    assert not answer.result.successful
    assert answer.result.reason == "parameter blend_stps is unknown; did you mean 'blend_steps'?"


@pytest.mark.parametrize(
    ('arguments', 'words'),
    [
        (('--params-file', 'none.yaml'), 'none.yaml: No such file or directory'),
        (('-p', 'seed'), '-p seed'),
    ],
)
def test_a_command_line_that_cannot_be_read_is_an_error_in_words(
    tmp_path: Path, arguments: tuple[str, str], words: str
) -> None:
    done = subprocess.run(
        [sys.executable, '-m', MODULES['executor_node'], '--ros-args', *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == COULD_NOT_START
    (line,) = [line for line in done.stderr.splitlines() if line.startswith('error: cannot start')]
    assert words in line
    assert 'Traceback' not in done.stderr
