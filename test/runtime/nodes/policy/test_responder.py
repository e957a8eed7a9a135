"""A request becomes a chunk in the robot's names and units, or the reasons why not."""

from __future__ import annotations

import array
from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import pytest
from sensor_msgs.msg import CompressedImage, Image
from tiny_policy import tiny_spec, write_tiny_policy
from tiny_robot import ROBOT, write_robot

from vla_runtime.inference.settings import PolicySettings
from vla_runtime.nodes.policy.responder import Responder
from vla_runtime.nodes.policy.robot_policy import Answer
from vla_runtime.nodes.policy.status import report
from vla_runtime.policy import Policy
from vla_runtime.robot.file import load_robot
from vla_runtime.robot.match import match_robot
from vla_runtime.sensors.camera_buffer import Frame
from vla_runtime.sensors.joint_buffer import JointSource
from vla_runtime.sensors.synchronizer import Synchronizer, SyncLimits
from vla_runtime.types import CommittedPlan, Observation, PlanRequest

MS = 1_000_000
NOW = 50_000_000_000
TASK = 'pick up the red cup'
IMAGE = np.random.default_rng(0).integers(0, 256, (24, 32, 3), dtype=np.uint8)
# The policy says rad; this robot's drivers speak degrees, and call the elbow something else.
DEGREES = ROBOT.replace('unit: rad', 'unit: deg').replace(
    '{name: elbow,', '{name: elbow_deg, aliases: [elbow], message_name: joint2,'
)
DEGREES = DEGREES.replace('[elbow, shoulder]', '[elbow_deg, shoulder]').replace(
    '[shoulder, elbow, gripper]', '[shoulder, elbow_deg, gripper]'
)
DEFAULT, TIED = PolicySettings(), PolicySettings(rtc_mode='guided')
NO_PLAN = np.zeros((0, 3))
STATE = np.array([0.3, -0.4, 0.5])


class Scene:
    """A responder with a real policy, and messages as they would have come."""

    def __init__(self, bundle, robot_file):
        self.policy = Policy.load(bundle)
        self.match = match_robot(load_robot(robot_file), self.policy.spec, bundle)
        self.synchronizer = Synchronizer(
            {'top': '/top/image', 'wrist': '/wrist/image'},
            [
                JointSource('/joint_states', 'shoulder'),
                JointSource('/joint_states', 'joint2'),
                JointSource('/hand', 'gripper'),
            ],
            SyncLimits(20 * MS, 500 * MS),
        )
        self.responder = Responder(
            self.policy, self.match, self.synchronizer, now_ns=NOW - 1, steady_ns=0
        )

    def look(self, stamp_ns=NOW, wrist=None):
        top = Image(height=24, width=32, encoding='rgb8', step=96)
        top.data = array.array('B', IMAGE.tobytes())
        self.synchronizer.add_frame('top', Frame(stamp_ns, 7, top), stamp_ns)
        self.synchronizer.add_frame('wrist', Frame(stamp_ns, 9, wrist or top), stamp_ns)
        shoulder, elbow, gripper = np.degrees(STATE)
        self.synchronizer.add_joints(
            '/joint_states', ['joint2', 'shoulder'], [elbow, shoulder], stamp_ns, stamp_ns
        )
        self.synchronizer.add_joints('/hand', ['gripper'], [gripper], stamp_ns, stamp_ns)

    def ask(
        self,
        now_ns=NOW,
        *,
        rows=NO_PLAN,
        episode=0,
        certain=0,
        instruction=TASK,
        settings=DEFAULT,
    ):
        plan = PlanRequest(
            rows, self.match.action_names, ('position',) * 3, 0.05, NOW, episode, certain
        )
        plan = replace(plan, arrived_ns=8)
        found = self.responder.answer(plan, instruction, settings, now_ns=now_ns)
        return found.result() if isinstance(found, Future) else found


@pytest.fixture(scope='module')
def bundle(tmp_path_factory):
    return write_tiny_policy(tmp_path_factory.mktemp('bundle') / 'tiny', tiny_spec())


@pytest.fixture
def scene(bundle, tmp_path):
    return Scene(bundle, write_robot(tmp_path / 'degrees.yaml', DEGREES))


def test_chunk_is_the_policys_in_the_robots_names_and_units(scene, bundle):
    scene.look()
    answer = scene.ask()
    expected, _ = Policy.load(bundle).infer(
        Observation({'top': IMAGE, 'wrist': IMAGE}, STATE, TASK)
    )
    assert answer.chunk.names == ('shoulder', 'elbow_deg', 'gripper')
    np.testing.assert_allclose(answer.chunk.actions, np.degrees(expected.actions), atol=1e-4)
    assert answer.header.observation_ns == NOW
    assert answer.ready_ns == 9
    assert answer.overhead_ms(9 + 10**12) == pytest.approx(
        10**6 - answer.report.milliseconds['total']
    )


def test_plan_is_tied_in_the_policys_units(scene, bundle):
    scene.look()
    rows = np.tile([10.0, 20.0, 30.0], (4, 1))
    assert scene.ask(rows=rows).plan is None
    answer = scene.ask(NOW + 1, rows=rows, certain=2, settings=TIED)
    policy = Policy.load(bundle, settings=TIED)
    observation = Observation({'top': IMAGE, 'wrist': IMAGE}, STATE, TASK)
    policy.infer(observation)
    plan = CommittedPlan(np.radians(rows), delay_steps=2, execution_horizon=4)
    expected, _ = policy.infer(observation, plan=plan)
    np.testing.assert_allclose(answer.chunk.actions, np.degrees(expected.actions), atol=1e-4)
    np.testing.assert_array_equal(answer.plan.actions, rows)
    assert answer.header.tied


def test_a_plan_s_angle_without_end_stops_is_written_by_the_turn_that_the_state_is_on(
    bundle, tmp_path
):
    text = DEGREES.replace(
        '{name: shoulder, unit: deg, lower: -3.0, upper: 3.0,',
        '{name: shoulder, unit: rad, continuous: true,',
    )
    scene = Scene(bundle, write_robot(tmp_path / 'endless.yaml', text))
    scene.look()
    # Measured at 17.2 rad; the executor counts from where another driver's numbers began.
    rows = np.array([17.0 - 4 * np.pi, 20.0, 30.0]) + np.array([[0.0], [0.1], [0.2]])
    answer = scene.ask(rows=rows, certain=2, settings=TIED)
    assert answer.header.tied
    expected = rows + np.array([4 * np.pi, 0.0, 0.0])
    np.testing.assert_allclose(answer.plan.actions, expected)


def test_a_plan_that_had_no_say_is_not_told(scene):
    scene.look()
    answer = scene.ask(
        rows=np.tile([10.0, 20.0, 30.0], (4, 1)), settings=replace(TIED, max_guidance_weight=0.0)
    )
    assert (answer.plan, answer.header.tied, answer.report.rtc_mode) == (
        None,
        False,
        'off',
    )


def test_inference_numbers_count_within_an_episode(scene):
    scene.look()
    numbers = [scene.ask(NOW + i, episode=3).report.number for i in range(3)]
    assert numbers == [0, 1, 2]
    assert scene.ask(NOW + 3, episode=4).report.number == 0
    scene.ask(NOW + 4, episode=4)
    scene.responder.begin(4, anew=True)
    assert scene.ask(NOW + 5, episode=4).report.number == 0


def test_nothing_is_inferred_twice_at_one_time(scene):
    scene.look()
    assert isinstance(scene.ask(), Answer)
    (refusal,) = scene.ask()
    assert 'stands still at 50.000 s' in refusal.text
    assert isinstance(scene.ask(NOW + 1), Answer)


def test_instruction_of_blanks_is_none(scene):
    scene.look()
    (refusal,) = scene.ask(instruction='  ')
    assert refusal.source == 'instruction'


def test_every_reason_is_given_at_once(scene):
    refusals = scene.ask(instruction='')
    assert [refusal.source for refusal in refusals] == [
        'instruction',
        'camera top',
        'camera wrist',
        'joint shoulder',
        'joint joint2',
        'joint gripper',
    ]


def test_damaged_image_is_refused_and_the_frame_before_it_serves(scene):
    scene.look(NOW - 15 * MS)
    damaged = CompressedImage(format='jpeg', data=array.array('B', [1, 2, 3]))
    scene.look(NOW, wrist=damaged)
    (refusal,) = scene.ask()
    assert refusal.source == 'camera wrist'
    assert "3 bytes of 'jpeg' cannot be decoded" in refusal.text
    answer = scene.ask()
    assert answer.report.stamps_ns['wrist'] == NOW - 15 * MS


def test_refused_request_leaves_no_trace(scene, bundle):
    (refusal, *_) = scene.ask()
    assert refusal.source == 'camera top'
    scene.look()
    assert scene.ask().report.number == 0


def test_readiness_tells_a_coarse_clock_from_a_paused_one(scene):
    scene.look()
    assert scene.responder.readiness(NOW, 10**9, TASK) == ()
    assert scene.responder.readiness(NOW, 10**9 + 500 * MS, TASK) == ()
    (refusal,) = scene.responder.readiness(NOW, 10**9 + 700 * MS, TASK)
    assert refusal.source == 'clock'
    assert scene.responder.readiness(NOW + 1, 2 * 10**9, TASK) == ()


def test_the_report_has_the_inputs_that_no_other_topic_has(scene):
    scene.look()
    answer = scene.ask(rows=np.tile([10.0, 20.0, 30.0], (4, 1)), certain=2, episode=5)
    values = report(answer, {'cfg_beta': 1.23456}, overhead_ms=0.0).values
    state = np.array([float(text) for text in values['state'].split()])
    # As it went in, to the last bit.
    np.testing.assert_array_equal(state, answer.observation.state)
    np.testing.assert_allclose(state, STATE)
    assert (values['episode'], values['request']) == (5, '')
    asked = values['request.stamp_ns'], values['request.certain'], values['request.rows']
    assert asked == (NOW, 2, 4)
    assert values['parameter.cfg_beta'] == 1.23456


def test_a_policy_without_language_answers_without_an_instruction(tmp_path):
    spec = tiny_spec('act')
    spec = replace(spec, dims=replace(spec.dims, images=((24, 32),)))
    bundle = write_tiny_policy(tmp_path / 'act', spec)
    scene = Scene(bundle, write_robot(tmp_path / 'degrees.yaml', DEGREES))
    scene.look()
    assert scene.responder.readiness(NOW, 0, '') == ()
    silent = scene.ask(instruction='')
    assert isinstance(silent, Answer) and report(silent, {}, 1.0).values['tokens'] == ''
    scene.look(NOW + 100 * MS)
    told = scene.ask(NOW + 100 * MS, instruction=TASK)
    np.testing.assert_array_equal(told.chunk.actions, silent.chunk.actions)
