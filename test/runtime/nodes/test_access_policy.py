"""The SROS 2 policy gives each node what it uses in a running graph, and nothing else."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
from graph import Graph, graph
from paths import ROOT

from vla_runtime.messages.trajectories import typed_messages

pytestmark = pytest.mark.graph

POLICY = ElementTree.parse(ROOT / 'config' / 'sros2' / 'policy.xml')
NODES = {'executor': 'vla_executor', 'policy': 'vla_policy', 'recorder': 'vla_recorder'}
if typed_messages() is not None:
    NODES['task'] = 'vla_task'
# Used where ros2_control is installed; and of Jazzy and later.
ELSEWHERE = {
    ('topic', 'subscribe', '/arm_controller/controller_state'),
    ('service', 'request', '/controller_manager/list_controllers'),
}
SINCE_JAZZY = 'get_type_description'
# Used where `vla_interfaces` is built.
TYPED = ('/state', '/set_instruction', '/get_action_chunk')
# What the server of an action publishes and replies to.
ACTION = (
    ('topic', 'publish', 'feedback'),
    ('topic', 'publish', 'status'),
    ('service', 'reply', 'cancel_goal'),
    ('service', 'reply', 'get_result'),
    ('service', 'reply', 'send_goal'),
)
Right = tuple[str, str, str]


def granted(enclave: str) -> set[Right]:
    """Rights of an enclave: kind, direction, full name."""
    found = set()
    for profile in POLICY.iterfind(f'.//enclave[@path="/vla_runtime/{enclave}"]/profiles/profile'):
        for rules in profile:
            (direction,) = rules.attrib
            assert rules.attrib[direction] == 'ALLOW'
            for one in rules:
                name = str(one.text)
                full = f'/{profile.get("node")}{name[1:]}' if name[0] == '~' else f'/{name}'
                if one.tag == 'action':
                    assert direction == 'execute'
                    found |= {(kind, how, f'{full}/_action/{part}') for kind, how, part in ACTION}
                else:
                    found.add((one.tag, direction, full))
    return found


def used(made: Graph, node: str) -> set[Right]:
    """Rights that a node of the graph and the hidden ones beside it use."""
    found = set()
    asker = made.node
    for name, namespace in asker.get_node_names_and_namespaces():
        if name != node and not name.startswith(f'_{node}_'):
            continue
        for kind, direction, ask in (
            ('topic', 'publish', asker.get_publisher_names_and_types_by_node),
            ('topic', 'subscribe', asker.get_subscriber_names_and_types_by_node),
            ('service', 'reply', asker.get_service_names_and_types_by_node),
            ('service', 'request', asker.get_client_names_and_types_by_node),
        ):
            found |= {(kind, direction, topic) for topic, _ in ask(name, namespace)}
    return found


def comparable(rights: set[Right]) -> set[Right]:
    left_out = (SINCE_JAZZY, *(TYPED if typed_messages() is None else ()))
    return {right for right in rights - ELSEWHERE if not right[2].endswith(left_out)}


def test_each_node_has_the_rights_that_it_uses(bundle: Path, tmp_path: Path) -> None:
    robot = ('-p', 'robot:=tabletop')
    with graph() as made:
        made.start('vla_tabletop.nodes.node', name='robot')
        for module in ('executor', 'policy'):
            words = (*robot, '-p', f'bundle:={bundle}', '-p', 'autostart:=true')
            made.start(f'vla_runtime.nodes.{module}.node', '--ros-args', *words, name=module)
        words = (*robot, '-p', f'folder:={tmp_path / "bag"}')
        made.start('vla_runtime.nodes.recorder.node', '--ros-args', *words, name='recorder')
        if 'task' in NODES:
            made.start('vla_runtime.nodes.task.node', name='task')
        for node in ('vla_executor', 'vla_policy'):
            made.wait_for(lambda node=node: made.state(f'/{node}') == 'active', f'{node} active')
        for enclave, node in NODES.items():
            wanted = comparable(granted(enclave))

            def differs(wanted: set[Right] = wanted, node: str = node) -> set[Right]:
                return comparable(used(made, node)) ^ wanted

            # What a node uses is discovered one by one; what differs for good is told.
            try:
                made.wait_for(lambda differs=differs: not differs(), f'the rights of {node}')
            except AssertionError as error:
                raise AssertionError(f'{node} differs in {sorted(differs())}') from error
