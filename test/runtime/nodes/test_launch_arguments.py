"""Launch arguments that would have no effect; the launch files themselves are in `test/launch`."""

from __future__ import annotations

import ast

import pytest
from paths import ROOT

from vla_runtime.nodes.launch_arguments import check_arguments, starts_here
from vla_runtime.nodes.node_parameters import NODE_PARAMETERS, is_live
from vla_tabletop.nodes.parameters import TABLETOP_PARAMETERS

KNOWN = ('bundle', 'robot', 'dry_run', 'replan_interval')


def declared(file: str) -> set[str]:
    """Names that a launch file declares, read off its text: `launch` may not be here."""
    tree = ast.parse((ROOT / 'launch' / file).read_text(encoding='utf-8'))
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    return {
        call.args[0].value
        for call in calls
        if isinstance(call.func, ast.Name)
        and call.func.id == 'DeclareLaunchArgument'
        and isinstance(call.args[0], ast.Constant)
    }


def test_a_dry_run_and_the_recorded_images_are_arguments_of_both_files() -> None:
    names = declared('vla.launch.py')
    assert {'dry_run', 'record_images'} <= names
    tree = ast.parse((ROOT / 'launch/demo.launch.py').read_text(encoding='utf-8'))
    (passed_on,) = (
        {ast.literal_eval(key) for key in node.value.keys if key is not None}
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Dict)
        and ast.unparse(node.targets[0]) == 'PASSED_ON'
    )
    assert passed_on == names - {'robot'}


@pytest.mark.parametrize('all_are_meant', [True, False])
def test_every_parameter_of_a_node_is_refused_with_a_way_to_set_it(all_are_meant: bool) -> None:
    for name in {name for names in NODE_PARAMETERS.values() for name in names} - set(KNOWN):
        with pytest.raises(ValueError, match=f'launch argument {name} ') as caught:
            check_arguments({*KNOWN, name}, KNOWN, '/left', all_are_meant=all_are_meant)
        text = str(caught.value)
        owners = [node for node, names in NODE_PARAMETERS.items() if name in names]
        assert 'params_file' in text and all(f"'/**/{node}'" in text for node in owners)
        live = [node for node in owners if is_live(node, name)]
        assert ('ros2 param set /left/' in text) == bool(live)
        assert ('forwarding=False' in text) != all_are_meant


def test_an_unknown_one_is_refused_with_the_nearest_or_all() -> None:
    with pytest.raises(ValueError, match='dry_rum'):
        check_arguments({*KNOWN, 'dry_rum'}, KNOWN, '', all_are_meant=True)
    with pytest.raises(ValueError, match='dry_run'):
        check_arguments({*KNOWN, 'lab'}, KNOWN, '', all_are_meant=True)


def test_in_a_persons_own_launch_file_an_unknown_one_is_let_be_and_a_near_one_said() -> None:
    given = {*KNOWN, 'lab', 'dry_rum'}
    (warning,) = check_arguments(given, KNOWN, '', all_are_meant=False)
    assert "'dry_rum'" in warning and "did you mean 'dry_run'" in warning


def test_what_is_declared_passes() -> None:
    assert check_arguments(KNOWN, KNOWN, '', all_are_meant=True) == []


@pytest.mark.parametrize(
    ('words', 'here'),
    [
        ('ros2 launch vla_runtime vla.launch.py bundle:=x', True),
        ('ros2 launch /opt/share/vla_runtime/launch/demo.launch.py', True),
        ('ros2 launch my_lab lab.launch.py bundle:=vla', False),
        ('python my_test.py', False),
    ],
)
def test_a_launch_file_of_the_package_on_the_command_line(words: str, here: bool) -> None:
    assert starts_here(words.split()) == here


def test_the_names_of_the_simulated_robots_parameters_are_those_of_its_table() -> None:
    assert NODE_PARAMETERS['tabletop'] == tuple(row.name for row in TABLETOP_PARAMETERS)
