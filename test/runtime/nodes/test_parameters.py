"""One table declares, judges and documents a node's parameters."""

import pytest
import rclpy
from rcl_interfaces.msg import SetParametersResult
from rclpy.node import Node
from rclpy.parameter import Parameter

from vla_runtime.nodes.parameter_table import ParameterError, ParameterSpec
from vla_runtime.nodes.parameters import declare, values
from vla_runtime.nodes.policy.parameters import POLICY_PARAMETERS

TABLE = (
    ParameterSpec('gain', 1.5, 'a number', minimum=1.0, maximum=5.0),
    ParameterSpec('steps', 4, 'a whole number', minimum=0, maximum=100),
    ParameterSpec('mode', 'fast', 'a word', words=('fast', 'exact')),
    ParameterSpec('enabled', False, 'a switch'),
    ParameterSpec('file', '', 'a path', read_only=True),
)


@pytest.fixture(scope='module')
def context():
    made = rclpy.Context()
    rclpy.init(context=made)
    yield made
    rclpy.shutdown(context=made)


@pytest.fixture
def make_node(context):
    nodes = []

    def make(**overrides):
        given = [Parameter(name, value=value) for name, value in overrides.items()]
        nodes.append(Node('parameters', context=context, parameter_overrides=given))
        return nodes[-1]

    yield make
    for node in nodes:
        node.destroy_node()


def set_one(node, name, value):
    return node.set_parameters([Parameter(name, value=value)])[0]


def test_values_given_at_start_are_in_force(make_node):
    node = make_node(gain=2.0, mode='exact')
    declare(node, TABLE)
    assert values(node, TABLE) == {
        'gain': 2.0,
        'steps': 4,
        'mode': 'exact',
        'enabled': False,
        'file': '',
    }


@pytest.mark.parametrize(
    ('given', 'reason'),
    [
        ({'gain': 2}, r'gain: expected double \(write 2.0, not 2\), 1.0 to 5.0'),
        ({'gain': 9.0}, r'gain: expected double .*1.0 to 5.0'),
        (
            {'steps': 1.5},
            r"steps: expected integer \(write 2, not 2.0\), 0 to 100: Trying to set [^(]*INTEGER'$",
        ),
        ({'mode': 'slow'}, "'slow'"),
        ({'enabled': 'yes'}, 'enabled: expected bool'),
    ],
)
def test_value_at_start_that_does_not_fit_names_what_does(make_node, given, reason):
    with pytest.raises(ParameterError, match=reason):
        declare(make_node(**given), TABLE)


@pytest.mark.parametrize(
    ('name', 'value', 'words'),
    [
        ('gain', 5.1, ('1.0', '5.0')),
        ('gain', 0.9999999, ('1.0', '5.0')),
        ('gain', float('nan'), ('1.0', '5.0')),
        ('gain', float('inf'), ('1.0', '5.0')),
        ('steps', 101, ('0', '100')),
        ('mode', 'slow', ('fast', 'exact')),
        ('steps', 2.0, ('parameter type',)),
        ('file', 'other', ('read-only', 'file')),
    ],
)
def test_value_that_does_not_fit_is_refused_and_the_old_one_stays(make_node, name, value, words):
    node = make_node()
    declare(node, TABLE)
    before = values(node, TABLE)
    result = set_one(node, name, value)
    assert not result.successful
    assert all(word in result.reason for word in words), result.reason
    assert values(node, TABLE) == before


SWITCH = (ParameterSpec('kernels', 'off', 'which', words=('auto', 'on', 'off')),)


@pytest.mark.parametrize(
    ('typed', 'word'), [('on', 'on'), ('off', 'off'), ("'on'", 'on'), ('auto', 'auto')]
)
def test_on_and_off_are_words_although_ros_reads_booleans(context, typed, word, tmp_path):
    """From a file, as a person writes it, and on the command line."""
    file = tmp_path / 'mine.yaml'
    file.write_text(f'/**:\n  ros__parameters:\n    kernels: {typed}\n')
    for arguments in (['--params-file', str(file)], ['-p', f'kernels:={typed}']):
        node = Node('a_switch', context=context, cli_args=['--ros-args', *arguments])
        declare(node, SWITCH)
        assert values(node, SWITCH) == {'kernels': word}
        node.destroy_node()


def test_a_switch_that_is_set_to_a_boolean_is_the_word_and_to_another_word_refused(make_node):
    node = make_node()
    declare(node, SWITCH)
    for value, word in ((True, 'on'), (False, 'off'), ('auto', 'auto')):
        assert set_one(node, 'kernels', value).successful
        assert values(node, SWITCH) == {'kernels': word}
    for value in ('triton', 1, 1.0):
        assert not set_one(node, 'kernels', value).successful
    assert values(node, SWITCH) == {'kernels': 'auto'}


@pytest.mark.parametrize(('name', 'value'), [('gain', 1.0), ('gain', 5.0), ('steps', 0)])
def test_the_range_includes_its_ends(make_node, name, value):
    node = make_node()
    declare(node, TABLE)
    assert set_one(node, name, value).successful
    assert values(node, TABLE)[name] == value


def test_joint_check_sees_the_values_as_they_would_be(make_node):
    node, seen = make_node(), []

    def check(given):
        seen.append(dict(given))
        return 'not both' if given['enabled'] and given['mode'] == 'exact' else None

    declare(node, TABLE, check)
    assert set_one(node, 'enabled', True).successful
    assert set_one(node, 'mode', 'exact').reason == 'not both'
    assert values(node, TABLE)['mode'] == 'fast'
    assert seen[-1] == {**values(node, TABLE), 'mode': 'exact'}


class Storing(dict):
    """Dictionary of a node's parameters in rclpy; calls back after each one that is stored."""

    def __init__(self, stored, then):
        super().__init__(stored)
        self._then = then

    def __setitem__(self, name, parameter):
        super().__setitem__(name, parameter)
        self._then()


def test_values_of_one_change_are_seen_all_together_or_not_at_all(make_node):
    node, seen = make_node(), []
    declare(node, TABLE)
    assert set_one(node, 'steps', 7).successful
    before = values(node, TABLE)
    changed = {'gain': 2.0, 'mode': 'exact', 'enabled': True}
    node._parameters = Storing(node._parameters, lambda: seen.append(values(node, TABLE)))
    change = [Parameter(name, value=value) for name, value in changed.items()]
    assert node.set_parameters_atomically(change).successful
    assert seen == [before, before, {**before, **changed}]
    assert values(node, TABLE) == seen[-1]


def test_a_change_that_another_callback_refuses_leaves_the_values_and_later_changes_alone(
    make_node,
):
    node, refused = make_node(), []

    def judge(parameters):
        good = all(parameter.value != 3.0 for parameter in parameters)
        refused.append(not good)
        return SetParametersResult(successful=good, reason='not three')

    declare(node, TABLE)
    # rclpy asks the one that was added last first.
    own = list(node._on_set_parameters_callbacks)
    node.add_on_set_parameters_callback(judge)
    for callback in own:
        node.remove_on_set_parameters_callback(callback)
        node.add_on_set_parameters_callback(callback)
    before = values(node, TABLE)
    assert not set_one(node, 'gain', 3.0).successful
    assert refused == [True]
    assert values(node, TABLE) == before
    assert set_one(node, 'steps', 9).successful
    assert values(node, TABLE) == {**before, 'steps': 9}


def test_other_parameters_of_the_node_are_none_of_the_tables_business(make_node):
    node = make_node()
    declare(node, TABLE, lambda given: 'never')
    node.declare_parameter('other', 1)
    assert set_one(node, 'other', 2).successful


def test_descriptor_says_what_the_table_says():
    for row in (*TABLE, *POLICY_PARAMETERS):
        descriptor = row.descriptor()
        assert descriptor.description == row.description
        assert descriptor.read_only == row.read_only
        ranges = [*descriptor.floating_point_range, *descriptor.integer_range]
        assert [(r.from_value, r.to_value) for r in ranges] == (
            [] if row.minimum is None else [(row.minimum, row.maximum)]
        )
