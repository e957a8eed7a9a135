"""Poses that are commanded through the joints of the robot's URDF."""

import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from reported_states import report
from tiny_policy import tiny_spec

from vla_runtime.bundle.schema import ActionSpec, BundleSpec, PoseSpec, StateSpec
from vla_runtime.execution.command import ChunkRefusal, CommandKind
from vla_runtime.execution.guard import ClampLatch
from vla_runtime.nodes.executor.parameters import EXECUTOR_PARAMETERS
from vla_runtime.nodes.executor.setup import make_core
from vla_runtime.processing.actions import ActionSpace, PoseColumns
from vla_runtime.processing.poses import from_matrix, rotation_width, to_matrix
from vla_runtime.robot.file import RobotError, load_robot
from vla_runtime.robot.kinematics import ArmKinematics, KinematicsError
from vla_runtime.robot.match import MatchError, RobotMatch, match_robot
from vla_runtime.types import ActionChunk, ChunkHeader

GIVEN = {row.name: row.default for row in EXECUTOR_PARAMETERS}
ROS_NS, STEPS, STEP_S, PERIOD_S = 10**18, 16, 0.05, 0.01
# Name, place in the link before, axis; an arm of six joints whose wrist is one point.
CHAIN = (
    ('pan', (0.0, 0.0, 0.1), 'z'),
    ('lift', (0.0, 0.0, 0.05), 'y'),
    ('elbow', (0.0, 0.0, 0.3), 'y'),
    ('roll', (0.0, 0.0, 0.25), 'z'),
    ('bend', (0.0, 0.0, 0.0), 'y'),
    ('turn', (0.0, 0.0, 0.0), 'z'),
)
TOOL_M, LIMIT = 0.1, 2.6
JOINTS = tuple(name for name, _, _ in CHAIN)
HOME = np.array([0.2, 0.4, 1.2, 0.3, 0.7, -0.2])


def urdf() -> str:
    links, joints, parent = ['<link name="base"/>'], [], 'base'
    for name, place, axis in CHAIN:
        way = ' '.join(map(str, place))
        vector = ' '.join('1' if one == axis else '0' for one in 'xyz')
        links.append(f'<link name="{name}_link"/>')
        joints.append(
            f'<joint name="{name}" type="revolute"><parent link="{parent}"/>'
            f'<child link="{name}_link"/><origin xyz="{way}" rpy="0 0 0"/><axis xyz="{vector}"/>'
            f'<limit lower="{-LIMIT}" upper="{LIMIT}" effort="1" velocity="3"/></joint>'
        )
        parent = f'{name}_link'
    links.append('<link name="tool"/>')
    joints.append(
        f'<joint name="flange" type="fixed"><parent link="{parent}"/><child link="tool"/>'
        f'<origin xyz="0 0 {TOOL_M}" rpy="0 0 0"/></joint>'
    )
    return f'<robot name="arm">{"".join(links)}{"".join(joints)}</robot>'


def pose_of(joints: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where the tool is, by matrices multiplied by hand: (3,) and (3, 3)."""
    place, turned = np.zeros(3), np.eye(3)
    for angle, (_, way, axis) in zip(joints, CHAIN, strict=True):
        cosine, sine = math.cos(angle), math.sin(angle)
        turn = {
            'y': [[cosine, 0.0, sine], [0.0, 1.0, 0.0], [-sine, 0.0, cosine]],
            'z': [[cosine, -sine, 0.0], [sine, cosine, 0.0], [0.0, 0.0, 1.0]],
        }[axis]
        place, turned = place + turned @ np.array(way), turned @ np.array(turn)
    return place + turned @ np.array([0.0, 0.0, TOOL_M]), turned


def pose_spec(form: str = 'quaternion_wxyz') -> BundleSpec:
    rotation = tuple(f'r{number}' for number in range(rotation_width(form)))
    pose = PoseSpec('tool', ('x', 'y', 'z'), rotation, form, 'absolute', 'base')
    unit = {'axis_angle': 'rad'}.get(form, '1')
    units = dict.fromkeys(('x', 'y', 'z'), 'm') | dict.fromkeys(rotation, unit)
    spec = tiny_spec()
    return replace(
        spec,
        dims=replace(spec.dims, action_dim=12),
        state=tuple(replace(one, name=name) for one, name in zip(spec.state, JOINTS, strict=False)),
        actions=tuple(ActionSpec(name, units[name], 'absolute') for name in pose.actions),
        step_time_s=STEP_S,
        poses=(pose,),
    )


def robot_text(unit: str = 'rad', workspace: str = 'reject') -> str:
    size = 180.0 / math.pi if unit == 'deg' else 1.0
    joints = '\n'.join(
        f'  - {{name: {name}, unit: {unit}, lower: {-2.5 * size}, upper: {2.5 * size}, '
        f'velocity: {2.0 * size}, acceleration: {40.0 * size}}}'
        for name in JOINTS
    )
    cameras = [{'name': one.name, 'topic': f'{one.name}/image'} for one in tiny_spec().cameras]
    return f"""
format: 1
name: arm
urdf: arm.urdf
joints:
{joints}
cameras: {cameras}
poses:
  - {{name: hand, aliases: [tool], frame_id: base, link: tool, lower: [-0.8, -0.8, 0.0],
     upper: [0.8, 0.8, 0.9], velocity: 0.5, angular_velocity: 1.0}}
outputs:
  - {{kind: joint_trajectory, topic: arm/joint_trajectory, joints: [{', '.join(JOINTS)}]}}
on_violation: {{workspace: {workspace}}}
"""


def matched(folder: Path, spec: BundleSpec | None = None, text: str = '', **words: str) -> tuple:
    (folder / 'arm.urdf').write_text(urdf())
    path = folder / 'arm.yaml'
    path.write_text(text or robot_text(**words))
    robot = load_robot(path)
    return robot, match_robot(robot, spec or pose_spec(), folder)


class Arm:
    """An executor and joints that go where they are commanded."""

    def __init__(self, robot, match: RobotMatch, start: np.ndarray) -> None:
        self.match, self.joints, self.tick = match, start.copy(), 0
        self.core = make_core(GIVEN, robot, match, ClampLatch(0), use_sim_time=False)
        self.results, self.sent = [], []
        report(self.core.observe_state, match.column_names, self.joints.tolist(), ROS_NS)
        self._measure()
        self.core.tick(0.0, ROS_NS)
        assert self.core.start(0.0, ROS_NS).started

    def _measure(self) -> None:
        ros_ns = ROS_NS + round(PERIOD_S * 1e9) * self.tick
        self.core.observe_state(self.match.column_names, self.joints.tolist(), ros_ns)

    def run(self, ticks: int, rows) -> None:
        """Tick; each request is answered by `rows()`."""
        for _ in range(ticks):
            self.tick += 1
            now_s, ros_ns = PERIOD_S * self.tick, ROS_NS + round(PERIOD_S * 1e9) * self.tick
            self._measure()
            command = self.core.tick(now_s, ros_ns)
            if command.kind is not CommandKind.IDLE:
                self.joints = command.setpoints.copy()
                self.sent.append(self.joints)
            asked = self.core.poll_request(now_s, ros_ns)
            if asked is None:
                continue
            names, kinds = self.match.action_names, self.match.action_kinds
            chunk = ActionChunk(rows(), names, kinds, STEP_S, np.zeros((STEPS, 0)))
            header = ChunkHeader(ros_ns, 0, len(self.results) + 1, request=asked.request)
            self.results.append(self.core.submit_chunk(chunk, header, now_s, ros_ns))


def rows_to(match: RobotMatch, place: np.ndarray, turned: np.ndarray, form: str, joints) -> object:
    """Chunks that go on from where the arm is, 1 cm a row."""

    def rows() -> np.ndarray:
        here, _ = pose_of(joints())
        way = place - here
        parts = np.minimum(1.0, np.arange(1, STEPS + 1) * 0.01 / max(np.linalg.norm(way), 1e-9))
        written = np.repeat(from_matrix(turned[None], form), STEPS, axis=0)
        return np.hstack([here + parts[:, None] * way, written])

    return rows


needs_pinocchio = pytest.mark.skipif(
    'pinocchio' not in sys.modules and not __import__('importlib').util.find_spec('pinocchio'),
    reason='the extra kinematics (pin) is not installed',
)


@needs_pinocchio
@pytest.mark.parametrize('unit', ['rad', 'deg'])
@pytest.mark.parametrize('form', ['quaternion_wxyz', 'rotation_6d_rows', 'axis_angle'])
def test_a_pose_policy_moves_the_joints_until_the_tool_is_there(tmp_path, form, unit):
    robot, match = matched(tmp_path, pose_spec(form), unit=unit)
    assert match.column_names == JOINTS
    assert match.action_names == pose_spec(form).action_names
    size = 180.0 / math.pi if unit == 'deg' else 1.0
    arm = Arm(robot, match, HOME * size)
    begin, turned = pose_of(HOME)
    goal = begin + np.array([0.05, -0.08, 0.06])
    arm.run(300, rows_to(match, goal, turned, form, lambda: arm.joints / size))
    assert all(result.accepted for result in arm.results) and len(arm.results) > 3
    place, held = pose_of(arm.joints / size)
    np.testing.assert_allclose(place, goal, atol=2e-3)
    np.testing.assert_allclose(held, turned, atol=0.02)


@needs_pinocchio
def test_a_pose_out_of_reach_is_a_refused_chunk_and_no_motion(tmp_path):
    robot, match = matched(tmp_path)
    arm = Arm(robot, match, HOME)
    _, turned = pose_of(HOME)
    written = from_matrix(turned[None], 'quaternion_wxyz')
    # Within the workspace box, and further than the arm is long.
    far = np.hstack([np.tile([0.75, 0.0, 0.75], (STEPS, 1)), np.repeat(written, STEPS, axis=0)])
    arm.run(100, lambda: far)
    assert {result.refusal for result in arm.results} == {ChunkRefusal.OUT_OF_REACH}
    np.testing.assert_array_equal(arm.joints, HOME)


@needs_pinocchio
@pytest.mark.parametrize('workspace', ['reject', 'clamp'])
def test_the_workspace_holds_through_joints_too(tmp_path, workspace):
    robot, match = matched(tmp_path, workspace=workspace)
    begin, turned = pose_of(HOME)
    robot_pose = replace(robot.poses[0], upper=(begin[0] + 0.02, 0.8, 0.9))
    robot = replace(robot, poses=(robot_pose,))
    match = match_robot(robot, pose_spec(), tmp_path)
    arm = Arm(robot, match, HOME)
    goal = begin + np.array([0.05, 0.0, 0.0])
    arm.run(200, rows_to(match, goal, turned, 'quaternion_wxyz', lambda: arm.joints))
    place, _ = pose_of(arm.joints)
    assert place[0] <= begin[0] + 0.02 + 2e-3
    refused = {result.refusal for result in arm.results if not result.accepted}
    if workspace == 'reject':
        assert ChunkRefusal.OUT_OF_REACH in refused
    else:
        assert place[0] == pytest.approx(begin[0] + 0.02, abs=2e-3)
        assert not refused


@needs_pinocchio
def test_plans_are_told_to_the_policy_as_poses(tmp_path):
    _, match = matched(tmp_path)
    joints = HOME + np.linspace(0.0, 0.3, 5)[:, None]
    chunk = match.written.to_chunk(joints, None)
    for row, angles in zip(chunk, joints, strict=True):
        place, turned = pose_of(angles)
        np.testing.assert_allclose(row[:3], place, atol=1e-9)
        np.testing.assert_allclose(to_matrix(row[3:], 'quaternion_wxyz'), turned, atol=1e-9)
    back = match.written.to_columns(chunk, HOME)
    np.testing.assert_allclose(back, joints, atol=1e-4)


def kinematics() -> ArmKinematics:
    return ArmKinematics(urdf(), 'base', 'tool', JOINTS)


class Between:
    """Pinocchio, with another thread's call between two of its own."""

    def __init__(self, library, call) -> None:
        self._library, self._call = library, call

    def __getattr__(self, name):
        return getattr(self._library, name)

    def updateFramePlacements(self, model, data):  # noqa: N802 (pinocchio's name)
        call, self._call = self._call, lambda: None
        call()
        self._library.updateFramePlacements(model, data)


@needs_pinocchio
def test_a_chunk_that_is_checked_meanwhile_leaves_a_plans_poses_alone(monkeypatch):
    chain = kinematics()
    other = np.tile(HOME + 0.5, (3, 1))
    between = Between(chain._pin, lambda: chain.forward(other))
    monkeypatch.setattr(chain, '_pin', between)
    (place,), _ = chain.forward(HOME[None])
    np.testing.assert_allclose(place, pose_of(HOME)[0], atol=1e-9)


@needs_pinocchio
def test_joints_are_found_within_their_limits_from_any_place_nearby():
    chain, random = kinematics(), np.random.default_rng(2)
    lower, upper = np.full(6, -2.5), np.full(6, 2.5)
    for _ in range(40):
        wanted = random.uniform(-1.8, 1.8, 6)
        place, turned = pose_of(wanted)
        start = wanted + random.uniform(-0.25, 0.25, 6)
        try:
            (found,) = chain.inverse(
                place[None], turned[None], start, lower, upper, np.full(6, 0.1)
            )
        except ValueError:
            # Nearly stretched, or the wrist in line: the search may end beside it.
            assert abs(wanted[2]) < 0.5 or abs(wanted[4]) < 0.5
            continue
        reached, held = pose_of(found)
        assert np.linalg.norm(reached - place) < 1.1e-3
        assert np.abs(held - turned).max() < 0.011
        assert (found >= lower).all() and (found <= upper).all()


@needs_pinocchio
def test_a_joint_at_its_limit_is_never_asked_beyond():
    chain = kinematics()
    wanted = np.array([0.2, 0.4, 1.2, 0.3, 0.7, -0.2])
    place, turned = pose_of(wanted)
    upper = np.array([2.5, 2.5, 1.0, 2.5, 2.5, 2.5])
    with pytest.raises(ValueError, match='row 0'):
        chain.inverse(place[None], turned[None], wanted, np.full(6, -2.5), upper, np.full(6, 9.0))


@needs_pinocchio
def test_another_way_of_holding_the_pose_is_a_jump():
    chain = kinematics()
    poses = [pose_of(HOME), pose_of(HOME + np.array([0.6, 0.0, 0.0, 0.0, 0.0, 0.0]))]
    places, turns = (np.array(part) for part in zip(*poses, strict=True))
    bounds = (np.full(6, -2.5), np.full(6, 2.5))
    found = chain.inverse(places, turns, HOME, *bounds, np.full(6, 1.0))
    np.testing.assert_allclose(found[1] - found[0], [0.6, 0, 0, 0, 0, 0], atol=1e-2)
    with pytest.raises(ValueError, match="'pan'"):
        chain.inverse(places, turns, HOME, *bounds, np.full(6, 0.2))


@needs_pinocchio
def test_a_joint_that_may_not_move_is_the_one_that_is_named():
    chain, bounds = kinematics(), (np.full(6, -2.5), np.full(6, 2.5))
    ways = np.array([0.0, 1.0, 1.0, 1.0, 1.0, 1.0])
    turns = (np.array([0.6, 0, 0, 0, 0, 0]), np.array([0, 0, 0, 0, 0, 0.3]))
    for way, refused in zip(turns, (True, False), strict=True):
        poses = [pose_of(HOME), pose_of(HOME + way)]
        places, held = (np.array(part) for part in zip(*poses, strict=True))
        if refused:
            with pytest.raises(ValueError, match="'pan'"), np.errstate(all='raise'):
                chain.inverse(places, held, HOME, *bounds, ways)
        else:
            found = chain.inverse(places, held, HOME, *bounds, ways)
            np.testing.assert_allclose(found[1] - found[0], way, atol=1e-2)


@needs_pinocchio
def test_joints_with_the_names_of_links_are_told_from_them():
    # The joint at the elbow is named as the end effector, the one at the base as the base's link.
    named = urdf().replace('joint name="elbow"', 'joint name="tool"')
    named = named.replace('joint name="pan"', 'joint name="base"')
    joints = ('base', 'lift', 'tool', *JOINTS[3:])
    chain = ArmKinematics(named, 'base', 'tool', joints)
    assert chain.joints == joints
    (place,), (held,) = chain.forward(HOME[None])
    for found, wanted in zip((place, held), pose_of(HOME), strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-9)


@needs_pinocchio
@pytest.mark.parametrize(
    ('base', 'tip', 'known', 'named'),
    [
        ('base', 'hand', JOINTS, "'hand'"),
        ('world', 'tool', JOINTS, "'world'"),
        ('base', 'tool', JOINTS[1:], 'pan'),
        ('tool', 'base', JOINTS, "'tool'"),
        ('tool', 'turn_link', JOINTS, "'tool'"),
    ],
)
def test_links_and_joints_that_make_no_chain_are_named(base, tip, known, named):
    with pytest.raises(KinematicsError, match=named):
        ArmKinematics(urdf(), base, tip, known)


def test_without_pinocchio_a_pose_through_joints_is_refused_with_what_installs_it(
    tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, 'pinocchio', None)
    with pytest.raises(MatchError, match=r'pin'):
        matched(tmp_path)


def test_a_link_needs_a_urdf(tmp_path):
    with pytest.raises(RobotError, match=r'poses\[0\]\.link'):
        matched(tmp_path, text=robot_text().replace('urdf: arm.urdf\n', ''))


@needs_pinocchio
@pytest.mark.parametrize('kind', ['pose_stamped', 'twist_stamped'])
def test_the_state_of_a_pose_that_an_output_carries_is_measured_through_the_joints(tmp_path, kind):
    spec = pose_spec('axis_angle')
    pose = replace(
        spec.poses[0],
        kind='velocity' if kind == 'twist_stamped' else 'absolute',
        state_position=('px', 'py', 'pz'),
        state_rotation=('pa', 'pb', 'pc'),
    )
    names = (*pose.state_position, *pose.state_rotation)
    rate = '/s' if pose.kind == 'velocity' else ''
    spec = replace(
        spec,
        dims=replace(spec.dims, action_dim=12),
        state=tuple(StateSpec(name, 'm' if at < 3 else 'rad') for at, name in enumerate(names)),
        actions=tuple(ActionSpec(one.name, one.unit + rate, pose.kind) for one in spec.actions),
        poses=(pose,),
    )
    text = robot_text().replace(
        'outputs:\n', f'outputs:\n  - {{kind: {kind}, topic: tool, pose: hand}}\n'
    )
    if kind == 'twist_stamped':
        text = text.replace('frame_id: base', 'frame_id: base, topic: tool_pose')
    _, match = matched(tmp_path, spec, text)
    # The output has the pose's numbers; no joint is commanded.
    assert [one.output.kind for one in match.outputs] == [kind]
    assert not set(match.column_names) & set(JOINTS)
    joints = np.array([0.3, -0.4, 0.9, 0.2, -0.5, 0.1])
    measured = np.array([joints[JOINTS.index(name)] for name in match.measured_joints])
    place, turned = pose_of(joints)
    state = match.policy_state(measured)
    np.testing.assert_allclose(state[:3], place, atol=1e-9)
    np.testing.assert_allclose(to_matrix(state[3:], 'axis_angle'), turned, atol=1e-9)


def step_spec() -> BundleSpec:
    """A policy of step deltas whose state is a pose, a joint and nothing else."""
    spec = pose_spec()
    position, turn = ('x', 'y', 'z'), ('rx', 'ry', 'rz')
    units = dict.fromkeys(position, 'm') | dict.fromkeys(turn, 'rad')
    pose = PoseSpec(
        'tool',
        tuple(f'd{name}' for name in position),
        tuple(f'd{name}' for name in turn),
        'axis_angle',
        'delta',
        'base',
        state_position=position,
        state_rotation=turn,
        delta_from='step',
    )
    return replace(
        spec,
        state=(StateSpec('elbow', 'rad'), *(StateSpec(name, unit) for name, unit in units.items())),
        actions=tuple(ActionSpec(f'd{name}', unit, 'delta') for name, unit in units.items()),
        poses=(pose,),
    )


@needs_pinocchio
@pytest.mark.parametrize('unit', ['rad', 'deg'])
def test_a_pose_of_the_state_is_computed_from_the_measured_joints(tmp_path, unit):
    _, match = matched(tmp_path, step_spec(), unit=unit)
    # Each joint is measured once, the elbow's number of the state too.
    assert sorted(match.measured_joints) == sorted(JOINTS)
    assert len(match.state_joints) == len(set(match.state_joints)) == 7
    size = 180.0 / math.pi if unit == 'deg' else 1.0
    order = [JOINTS.index(name) for name in match.measured_joints]
    state = match.policy_state(HOME[order] * size)
    place, turned = pose_of(HOME)
    assert state[0] == pytest.approx(HOME[JOINTS.index('elbow')])
    np.testing.assert_allclose(state[1:4], place, atol=1e-9)
    np.testing.assert_allclose(to_matrix(state[4:], 'axis_angle'), turned, atol=1e-9)


@needs_pinocchio
def test_steps_from_the_computed_pose_move_the_tool_by_so_much(tmp_path):
    spec = step_spec()
    robot, match = matched(tmp_path, spec)
    arm = Arm(robot, match, HOME)
    space = ActionSpace(
        spec.action_names,
        ('delta',) * 6,
        (None,) * 6,
        (
            PoseColumns(
                name='tool',
                position=(0, 1, 2),
                rotation=(3, 4, 5),
                form='axis_angle',
                kind='delta',
                frame='base',
                state_position=(1, 2, 3),
                state_rotation=(4, 5, 6),
                delta_from='step',
            ),
        ),
    )
    begin, turned = pose_of(HOME)
    goal = begin + np.array([0.0, -0.06, 0.05])

    def rows() -> np.ndarray:
        measured = arm.joints[[JOINTS.index(name) for name in match.measured_joints]]
        state = match.policy_state(measured)
        way, steps = goal - state[1:4], np.zeros((STEPS, 6))
        for row in steps:
            length = np.linalg.norm(way)
            row[:3] = way * min(1.0, 0.01 / length) if length > 1e-9 else 0.0
            way = way - row[:3]
        return space.to_robot(steps, state)

    arm.run(300, rows)
    assert all(result.accepted for result in arm.results) and len(arm.results) > 3
    place, held = pose_of(arm.joints)
    np.testing.assert_allclose(place, goal, atol=2e-3)
    np.testing.assert_allclose(held, turned, atol=0.02)
