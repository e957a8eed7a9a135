"""A person's parameter file: what would do nothing is an error before any node is started."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import rclpy
import yaml
from paths import ROOT
from rclpy._rclpy_pybind11 import RCLError

from vla_runtime.nodes.executor.parameters import EXECUTOR_PARAMETERS
from vla_runtime.nodes.parameter_file import check_files_on_command_line, check_parameter_file
from vla_runtime.nodes.parameter_table import ParameterError
from vla_runtime.nodes.parameters import declare


def write(folder: Path, text: str) -> Path:
    file = folder / 'mine.yaml'
    file.write_text(text, encoding='utf-8')
    return file


def section(key: str, *parameters: str) -> str:
    below = ''.join(f'    {parameter}\n' for parameter in parameters)
    return f'{key}:\n  ros__parameters:\n{below}'


def of_ros(*arguments: str) -> list[str]:
    return ['node', '--ros-args', *arguments]


@pytest.mark.parametrize(
    ('key', 'namespace'),
    [
        ('vla_policy', 'left'),
        ('/vla_policy', 'left'),
        ('/*/vla_policy', ''),
        ('/**/vla_polcy', ''),
        ('/right/vla_polcy', 'left'),
        # 15 s where each `**` may be any part of the namespace.
        ('/**' * 30 + '/vla_polcy', 'lab/cell/left/arm/one'),
    ],
)
def test_a_section_that_misses_the_node_it_is_called_after_is_an_error(
    tmp_path: Path, key: str, namespace: str
) -> None:
    with pytest.raises(ParameterError):
        check_parameter_file(write(tmp_path, section(key, 'seed: 3')), namespace)


@pytest.mark.parametrize(
    ('key', 'namespace'),
    [
        ('vla_policy', ''),
        ('/left/vla_policy', 'left'),
        ('/left/vla_policy', '/left/'),
        ('/*/vla_policy', 'left'),
        ('/**/vla_policy', 'cell/left'),
        ('/**/**/vla_policy', 'cell/left'),
        ('/**/left/**/vla_policy', 'cell/left'),
        ('left:\n  vla_policy', 'left'),
        ('/**', 'left'),
    ],
)
def test_a_section_that_ros_gives_to_the_node_is_taken(
    tmp_path: Path, key: str, namespace: str
) -> None:
    text = (
        section(key, 'seed: 3')
        if '\n' not in key
        else ('left:\n  vla_policy:\n    ros__parameters: {seed: 3}\n')
    )
    check_parameter_file(write(tmp_path, text), namespace)


@pytest.mark.parametrize(
    ('key', 'part'),
    [
        ('/**/vla_*', 'vla_*'),
        ('/***', '***'),
        ('/cell*/vla_policy', 'cell*'),
        ('/**/my-camera', 'my-camera'),
        ('/2nd/vla_policy', '2nd'),
        ('/left//camera', ''),
    ],
)
def test_a_name_that_ros_cannot_read_is_refused_as_ros_does(
    tmp_path: Path, key: str, part: str
) -> None:
    file = write(tmp_path, section(key, 'seed: 3'))
    with pytest.raises(ParameterError, match=re.escape(f"'{part}'")):
        check_parameter_file(file, '')
    context = rclpy.Context()
    with pytest.raises(RCLError):
        rclpy.init(args=['--ros-args', '--params-file', str(file)], context=context)


def test_what_one_node_of_the_package_has_may_stand_in_a_section_for_all(tmp_path: Path) -> None:
    parameters = ('use_sim_time: true', 'replan_interval: 3', 'seed: 1', 'camera_rate_hz: 10.0')
    check_parameter_file(write(tmp_path, section('/**', *parameters)), '')


@pytest.mark.parametrize('namespace', ['left', 'right'])
def test_one_file_may_be_for_two_robots_and_is_checked_whole_for_each(
    tmp_path: Path, namespace: str
) -> None:
    left, right = (f'/{side}/vla_executor' for side in ('left', 'right'))
    text = section(left, 'replan_interval: 4') + section(right, 'replan_interval: 5')
    other = right if namespace == 'left' else left
    assert check_parameter_file(write(tmp_path, text), namespace) == (other,)
    for wrong in ('replan_intervl: 4', 'replan_interval: four'):
        file = write(tmp_path, text + section('/third/vla_executor', wrong))
        with pytest.raises(ParameterError, match='/third/vla_executor'):
            check_parameter_file(file, namespace)


@pytest.mark.parametrize(
    ('key', 'parameter', 'words'),
    [
        ('/**/vla_executor', 'replan_intervall: 3', "did you mean 'replan_interval'?"),
        ('/**', 'clamp_lach: 3', "did you mean 'clamp_latch'?"),
        ('/**/tabletop', 'camera_rate: 3', "did you mean 'camera_rate_hz'?"),
        ('/**/vla_policy', 'replan_interval: 3', "That belongs in a section '/**/vla_executor'"),
        ('/**/vla_executor', 'replan_interval: four', "'four': it must be of type integer"),
        ('/**/vla_executor', 'replan_interval: 4.0', '4.0: it must be of type integer'),
        ('/**/vla_executor', 'replan_interval: [4, 5]', 'it must be of type integer'),
        ('/**/vla_executor', 'replan_interval: 0', 'it must be 1 to'),
        ('/**/vla_executor', 'control_rate_hz: 50', 'type double (write 2.0, not 2)'),
        ('/**/vla_executor', 'overrun: wait', 'it must be one of hold, continue'),
        ('/**/vla_policy', 'instruction: 12', 'type string (put it in quotes)'),
        ('/**/vla_policy', 'cfg_enabled: maybe', 'it must be of type bool'),
        ('/**/vla_policy', 'cfg_beta: 1e9', 'it must be '),
        ('/**/vla_policy', 'triton: none', 'it must be one of on, off'),
        # Both nodes have one, and the policy's ends earlier.
        ('/**', 'max_observation_age_s: 30.0', '30.0: it must be 0.01 to 10.0'),
        ('/**', 'use_sim_time: 1', 'it must be of type bool'),
        ('/**/vla_executor', 'robot: my_arm.yaml', 'give the launch argument robot:=...'),
        ('/**', 'bundle: mine', 'give the launch argument bundle:=...'),
    ],
)
def test_what_a_node_would_refuse_is_an_error_with_file_section_and_name(
    tmp_path: Path, key: str, parameter: str, words: str
) -> None:
    file = write(tmp_path, section(key, parameter))
    name = parameter.partition(':')[0]
    with pytest.raises(ParameterError) as error:
        check_parameter_file(file, '')
    assert str(error.value).startswith(f'{file}: field {key}.ros__parameters.{name}: ')
    assert words in str(error.value)


@pytest.mark.parametrize('word', ['on', 'off', "'on'"])
def test_words_that_yaml_reads_as_booleans_pass(tmp_path: Path, word: str) -> None:
    assert (
        check_parameter_file(write(tmp_path, section('/**/vla_policy', f'triton: {word}')), '')
        == ()
    )


def test_values_that_the_nodes_take_pass(tmp_path: Path) -> None:
    text = section('/**/vla_executor', 'replan_interval: 4', 'control_rate_hz: 5e1')
    text += section('/**/vla_policy', "instruction: '12'", 'autostart: false', 'cfg_beta: 2.0')
    text += section('/**/tabletop', 'seed: 3')
    assert check_parameter_file(write(tmp_path, text), '') == ()


def test_sections_of_other_nodes_are_theirs(tmp_path: Path) -> None:
    text = section('/**/camera', 'fps: 30') + section('controller_manager', 'update_rate: 100')
    foreign = check_parameter_file(write(tmp_path, text), 'left')
    assert foreign == ('/**/camera', 'controller_manager')


@pytest.mark.parametrize(
    ('name', 'keys'),
    [
        ('policy_node', "'/**/vla_policy'"),
        ('executor_node', "'/**/vla_executor'"),
        ('tabletop_node', "'/**/tabletop'"),
        ('recorder_node', "'/**/vla_recorder'"),
        ('vla', "'/**/vla_policy' or '/**/vla_executor'"),
        ('vla_runtime', "'/**/vla_policy' or '/**/vla_executor'"),
    ],
)
def test_a_section_called_after_the_executable_is_an_error_with_the_nodes_name(
    tmp_path: Path, name: str, keys: str
) -> None:
    file = write(tmp_path, section(f'/**/{name}', 'seed: 3'))
    with pytest.raises(ParameterError) as error:
        check_parameter_file(file, '')
    assert str(error.value).endswith(f"none is called '{name}'; write {keys}")


def test_what_is_no_regular_file_or_too_large_is_not_read(tmp_path: Path) -> None:
    fifo, large = tmp_path / 'fifo.yaml', tmp_path / 'large.yaml'
    os.mkfifo(fifo)
    large.write_text('#' * 600_000, encoding='utf-8')
    for file, words in ((fifo, 'a FIFO'), (large, 'larger than'), (Path('/dev/zero'), 'a device')):
        with pytest.raises(ParameterError, match=f'{file}: .*{words}'):
            check_parameter_file(file, '')
        with pytest.raises(ParameterError, match=f'{file}: .*{words}'):
            check_files_on_command_line(of_ros('--params-file', str(file)), 'vla_policy')


def test_an_alias_which_rcl_does_not_read_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path, section('/**', 'seed: &one 3') + section('/**/vla_policy', 'seed: *one'))
    with pytest.raises(ParameterError, match=f"{file}: line 6.*alias 'one': write the value out"):
        check_parameter_file(file, '')


def test_on_a_command_line_only_the_files_of_ros_are_looked_at(tmp_path: Path) -> None:
    good = ('--params-file', str(write(tmp_path, section('/**', 'seed: 3'))))
    none = ('--params-file', 'none.yaml')
    for arguments in (['node', *none], of_ros(*good, '--', *none), []):
        assert check_files_on_command_line(arguments, 'vla_policy') == []
    with pytest.raises(ParameterError, match=r'none\.yaml'):
        check_files_on_command_line(of_ros(*good, *none), 'vla_policy')


@pytest.mark.parametrize(
    ('keys', 'arguments', 'wrong', 'full_name'),
    [
        (['/**/vla_executer'], [], '/**/vla_executer', '/vla_executor'),
        (['/**/executor_node'], [], '/**/executor_node', '/vla_executor'),
        (['/**/vla_runtime'], [], '/**/vla_runtime', '/vla_executor'),
        (['/**/vla_policy', '/**/executor'], [], '/**/executor', '/vla_executor'),
        # What is for every node does not stand for a section of its own.
        (['/**', '/**/vla_executer'], [], '/**/vla_executer', '/vla_executor'),
        (['vla_executor'], ['-r', '__ns:=/left'], 'vla_executor', '/left/vla_executor'),
        (['/**/my_ar'], ['--remap', '__node:=my_arm'], '/**/my_ar', '/my_arm'),
        (['/**/my_ar'], ['-r', 'vla_executor:__name:=my_arm'], '/**/my_ar', '/my_arm'),
    ],
)
def test_a_section_that_misses_a_node_started_by_hand_is_an_error(
    tmp_path: Path, keys: list[str], arguments: list[str], wrong: str, full_name: str
) -> None:
    file = write(tmp_path, ''.join(section(key, 'seed: 3') for key in keys))
    with pytest.raises(ParameterError) as error:
        given = of_ros(*arguments, '--params-file', str(file))
        check_files_on_command_line(given, 'vla_executor')
    name = full_name.rpartition('/')[2]
    assert str(error.value) == (
        f"{file}: field {wrong}: matches no node: {name} is {full_name} here; write '/**/{name}' "
        'for it'
    )


@pytest.mark.parametrize(
    ('keys', 'arguments'),
    [
        (['/**'], []),
        (['/**', '/**/vla_policy', '/**/camera'], []),
        (['/**/vla_executor', '/**/vla_policy'], []),
        # Robots of one name in several namespaces, and of several names.
        (['/**', '/right/vla_executor'], ['-r', '__ns:=/left']),
        (['/left/vla_executor', '/right/vla_executor'], ['-r', '__ns:=/left']),
        (['/**/left_executor', '/**/right_executor'], ['-r', '__node:=left_executor']),
        # ROS 2 takes the first rule, and none of another node.
        (['/**/one'], ['-r', 'other:__node:=two', '-r', '__node:=one', '-r', '__node:=two']),
    ],
)
def test_a_file_with_something_for_a_node_started_by_hand_may_be_for_others_too(
    tmp_path: Path, keys: list[str], arguments: list[str]
) -> None:
    file = write(tmp_path, ''.join(section(key, 'seed: 3') for key in keys))
    given = of_ros('--params-file', str(file), *arguments)
    assert check_files_on_command_line(given, 'vla_executor') == []


@pytest.mark.parametrize('key', ['/**/vla_policy', '/**/camera', '/right/vla_executor'])
def test_a_file_with_nothing_for_a_node_is_said(tmp_path: Path, key: str) -> None:
    file = write(tmp_path, section(key, 'seed: 3'))
    given = of_ros('-r', '__ns:=/left', '--params-file', str(file))
    assert check_files_on_command_line(given, 'vla_executor') == [
        f"{file}: no section is for this node, /left/vla_executor, but for '{key}'; "
        "'/**/vla_executor' would be"
    ]


def test_qos_overrides_are_every_nodes(tmp_path: Path) -> None:
    override = 'qos_overrides: {/action_chunk: {publisher: {depth: 1}}}'
    check_parameter_file(write(tmp_path, section('/**/vla_policy', override)), '')


@pytest.mark.parametrize(
    ('text', 'words'),
    [
        ('', "expected sections like '/**/vla_policy'"),
        ('/**/vla_policy: {}\n', "no 'ros__parameters' in it"),
        ('seed: 3\n', "field seed: parameters stand below 'ros__parameters'"),
        ('/**/vla_policy:\n  seed: 3\n', "parameters stand below 'ros__parameters'"),
        ('/**/vla_policy:\n  ros__parameters: 3\n', 'no parameters below it'),
        ('ros__parameters: {seed: 3}\n', 'stands below no node'),
        (section('/**/vla_executor/', 'clamp_latch: 3'), 'stands below no node'),
        (section('/**/vla_executor', 'clamp_latch:'), 'clamp_latch: has no value'),
        (section('/**', 'use_sim_tme: true'), "did you mean 'use_sim_time'?"),
        ('/**: {ros__parameters: {seed: [}}\n', 'line 1'),
        (section('/**', 'seed: 1', 'seed: 2'), "'seed' is given twice"),
    ],
)
def test_a_file_that_is_none_says_where_it_goes_wrong(
    tmp_path: Path, text: str, words: str
) -> None:
    file = write(tmp_path, text)
    with pytest.raises(ParameterError) as error:
        check_parameter_file(file, '')
    assert str(error.value).startswith(f'{file}: ')
    assert words in str(error.value)


def test_a_file_that_is_missing_or_no_text_is_named(tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match=r'none\.yaml'):
        check_parameter_file(tmp_path / 'none.yaml', '')
    with pytest.raises(ParameterError):
        check_parameter_file(tmp_path, '')
    (tmp_path / 'image.yaml').write_bytes(b'\xff\xd8\xff')
    with pytest.raises(ParameterError):
        check_parameter_file(tmp_path / 'image.yaml', '')


@pytest.mark.parametrize('name', ['policy', 'executor'])
def test_the_files_that_come_with_the_package_pass(name: str) -> None:
    check_parameter_file(ROOT / 'config' / f'{name}.yaml', 'left')


@pytest.mark.parametrize('namespace', ['', '/left'])
def test_a_dump_of_a_node_is_accepted(tmp_path: Path, namespace: str) -> None:
    """`ros2 param dump` writes every parameter of a node, those of the launch too."""
    rclpy.init()
    try:
        node = rclpy.create_node('vla_executor', namespace=namespace)
        declare(node, EXECUTOR_PARAMETERS)
        names = list(node.get_parameters_by_prefix('').keys())
        values = {name: node.get_parameter(name).value for name in names}
        node.destroy_node()
    finally:
        rclpy.shutdown()
    values |= {'bundle': '/b', 'robot': 'so101'}
    dump = {f'{namespace}/vla_executor': {'ros__parameters': values}}
    file = write(tmp_path, yaml.dump(dump, default_flow_style=False))
    assert check_parameter_file(file, namespace) == ()
    # One that is left out was not dumped: then `bundle` would do nothing, unnoticed.
    del values['replan_interval']
    with pytest.raises(ParameterError):
        check_parameter_file(write(tmp_path, yaml.dump(dump)), namespace)
