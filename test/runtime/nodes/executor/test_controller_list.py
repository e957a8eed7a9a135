"""What the list of controller_manager says of the controllers; its messages are stood in for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from rclpy.task import Future

from vla_runtime.nodes.executor import controller_watch
from vla_runtime.nodes.executor.controller_watch import ControllerWatch, why_refused
from vla_runtime.robot.match import MatchedOutput
from vla_runtime.robot.schema import RobotOutput

TOPICS = {
    'joint_trajectory': '/arm_controller/joint_trajectory',
    'gripper_command': '/gripper_controller/gripper_cmd',
    'parallel_gripper_command': '/gripper_controller/gripper_cmd',
    'pose_stamped': '/cartesian_controller/target_frame',
    'twist_stamped': '/servo_node/delta_twist_cmds',
}


class Manager:
    """controller_manager: answers every request at once.

    Attributes:
        entries: of its list.
    """

    def __init__(self) -> None:
        self.entries: list[SimpleNamespace] = []

    def add(self, name: str, state: str = 'active', below: tuple[str, ...] = (), chained=False):
        connections = [SimpleNamespace(name=one) for one in below]
        entry = SimpleNamespace(
            name=name,
            type='',
            state=state,
            chain_connections=connections,
            is_chained=chained,
        )
        self.entries.append(entry)
        return entry

    def service_is_ready(self) -> bool:
        return True

    def call_async(self, request) -> Future:
        answer = Future()
        answer.set_result(SimpleNamespace(controller=list(self.entries)))
        return answer


class Silent:
    """Topics and parameters that say nothing, whatever they are asked."""

    def __init__(self, *_) -> None:
        self.values: dict[str, object] = {}

    def subscribe(self, *_) -> Silent:
        return self

    def __getattr__(self, _: str):
        return lambda *_: None


@pytest.fixture
def manager(monkeypatch) -> Manager:
    monkeypatch.setattr(controller_watch, 'PolledTopics', Silent)
    monkeypatch.setattr(controller_watch, 'ControllerParameters', Silent)
    monkeypatch.setattr(
        controller_watch,
        '_message_type',
        lambda package, part, name: (
            SimpleNamespace(Request=object) if name == 'ListControllers' else None
        ),
    )
    return Manager()


def looked(manager: Manager, *kinds: str):
    """Return the verdicts, by their topics."""
    node = SimpleNamespace(
        create_client=lambda kind, name: manager, count_publishers=lambda topic: 0
    )
    outputs = [
        (
            MatchedOutput(RobotOutput(kind=kind, topic=TOPICS[kind], joints=('j',)), (0,), ('j',)),
            TOPICS[kind],
        )
        for kind in kinds
    ]
    watch = ControllerWatch(node, outputs, None, use_sim_time=False, now_ns=lambda: 0)
    for now_s in (0.0, 0.2):
        watch.look(now_s)
    return {one.topic: one for one in watch.verdicts}


@pytest.mark.parametrize('kind', [kind for kind in TOPICS if kind != 'twist_stamped'])
def test_an_inactive_controller_is_named_whatever_it_takes(manager, kind):
    name = TOPICS[kind].split('/')[1]
    entry = manager.add(name, 'inactive')
    (verdict,) = looked(manager, kind).values()
    assert verdict.active is False and f'/{name}' in verdict.refusal
    assert f'--activate {name}' in verdict.refusal and why_refused([verdict])
    entry.state = 'active'
    (verdict,) = looked(manager, kind).values()
    assert verdict.active and not verdict.refusal


def test_only_a_gripper_behind_an_action_goes_on_by_itself(manager):
    for name in ('arm_controller', 'gripper_controller'):
        manager.add(name, 'inactive')
    found = looked(manager, 'joint_trajectory', 'gripper_command')
    arm, gripper = (found[TOPICS[kind]] for kind in ('joint_trajectory', 'gripper_command'))
    assert gripper.of_action and not arm.of_action
    assert '~/start' in arm.refusal and '~/start' not in gripper.refusal


def test_a_node_that_is_no_controller_is_required_nothing_of(manager):
    manager.add('arm_controller')
    (verdict,) = looked(manager, 'twist_stamped').values()
    assert verdict.active is None and not verdict.asked and not verdict.refusal


def test_an_inactive_controller_below_in_a_chain_is_named(manager):
    manager.add('arm_controller', below=('admittance_controller',))
    manager.add('admittance_controller', below=('pid_controller',), chained=True)
    pid = manager.add('pid_controller', 'inactive', chained=True)
    (verdict,) = looked(manager, 'joint_trajectory').values()
    assert verdict.active and '/pid_controller' in verdict.refusal
    assert '--activate pid_controller' in verdict.refusal
    pid.state = 'active'
    (verdict,) = looked(manager, 'joint_trajectory').values()
    assert not verdict.refusal


def test_a_controller_that_another_one_commands_takes_nothing_from_its_topic(manager):
    upper = manager.add('upper_controller', below=('cartesian_controller',))
    lower = manager.add('cartesian_controller', chained=True)
    (verdict,) = looked(manager, 'pose_stamped').values()
    assert 'upper_controller' in verdict.refusal
    upper.state, lower.is_chained = 'inactive', False
    (verdict,) = looked(manager, 'pose_stamped').values()
    assert not verdict.refusal


def test_a_circle_of_chains_ends(manager):
    manager.add('arm_controller', below=('pid_controller',))
    manager.add('pid_controller', below=('arm_controller',))
    (verdict,) = looked(manager, 'joint_trajectory').values()
    assert not verdict.refusal
