"""The closed loop: the expert through the executor, delays, controls and what is recorded."""

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from vla_runtime.execution.columns import Column
from vla_runtime.processing.fast_tokens import AnswerError
from vla_runtime.types import ActionChunk, PlanRequest
from vla_tabletop.sim.tasks import Outcome
from vla_tabletop.study.chunk_sources import PolicySource
from vla_tabletop.study.condition import Condition
from vla_tabletop.study.episode import run_episode
from vla_tabletop.study.smoothness import CacheUse
from vla_tabletop.study.world import Asked

EXPERT = Condition(chunk_source='expert')


class Watching:
    """Passes everything on to a source and keeps what it was asked."""

    def __init__(self, source, needs_images=False):
        self._source = source
        self.needs_images = needs_images
        self.action_names = source.action_names
        self.horizon = source.horizon
        self.asked = []

    @property
    def cache_use(self):
        return self._source.cache_use

    def begin(self, condition, seed):
        self._source.begin(condition, seed)

    def chunk(self, world, observation, plan):
        chunk, tied = self._source.chunk(world, observation, plan)
        self.asked.append((observation, plan, chunk))
        return chunk, tied


@pytest.mark.thorough
@pytest.mark.parametrize(
    'changes',
    [
        {},
        {'replan_interval': 16, 'handover': 'switch', 'delay_steps': 0.0},
        {'replan_interval': 2, 'handover': 'ensemble'},
        {'delay_steps': 6.0, 'handover': 'switch'},
        {'delay_steps': 2.5},
        {'variant': 'moving'},
        {'families': ('push',)},
    ],
    ids=str,
)
def test_the_expert_does_every_task_through_the_executor(world, expert, changes):
    condition = replace(EXPERT, **changes)
    for index in range(4):
        result = run_episode(world, expert, condition, 1000 + index, index)
        assert result.success, result
        assert result.refused == 0 and not result.halted
        assert result.starved_ticks == 0


@pytest.mark.parametrize('delay', [0, 3, 8])
def test_a_delay_is_what_the_executor_counts(world, expert, delay):
    result = run_episode(world, expert, replace(EXPERT, delay_steps=float(delay)), 7)
    assert result.delay_steps == delay
    assert result.starved_ticks == 0


def test_a_request_whose_answer_is_no_chunk_is_answered_at_its_repeat(world, expert):
    class Stammering(Watching):
        def chunk(self, world, observation, plan):
            found = super().chunk(world, observation, plan)
            if len(self.asked) % 3 == 1:
                raise AnswerError('it holds no action')
            return found

    source = Stammering(expert)
    result = run_episode(world, source, replace(EXPERT, delay_steps=3.0), 7)
    assert result.success
    assert result.refused == -(-len(source.asked) // 3) and result.inferences > result.refused


@pytest.mark.parametrize('ticks', [2, 3, 5])
@pytest.mark.parametrize('delay', [0, 1, 4, 8, 12])
def test_a_delay_is_counted_alike_at_any_control_rate(ticks, delay):
    """One number that grows by a millimetre a step; Meta-World has two ticks a step."""

    class Line:
        columns = (Column('x'),)
        limits = None
        step_time_s, tick_s = 0.03, 0.03 / ticks

        def begin(self, condition, seed, index, sees):
            self.x, self.ticks = np.zeros(1), 0
            return Asked('go on', 'colour', 0)

        def measured(self):
            return self.x

        def proprioception(self):
            return self.x

        def step(self, command):
            self.x, self.ticks = command, self.ticks + 1

        def judge(self):
            over = self.ticks == 80 * ticks
            return Outcome('timeout', self.ticks * self.tick_s, None) if over else None

    class Ahead:
        needs_images, action_names, horizon, cache_use = False, ('x',), 32, CacheUse()

        def begin(self, condition, seed):
            pass

        def chunk(self, world, observation, plan):
            rows = world.x + 1e-3 * np.arange(1, 33)[:, None]
            kinds = ('position',)
            return ActionChunk(rows, ('x',), kinds, 0.03, rows.astype(np.float32)), False

    condition = Condition(delay_steps=float(delay), handover='switch')
    result = run_episode(Line(), Ahead(), condition, 7)
    assert result.delay_steps == delay and result.refused == 0


def test_chunks_that_come_later_than_the_overrun_allows_starve_the_robot(world, expert):
    late = replace(EXPERT, delay_steps=12.0, overrun='hold')
    result = run_episode(world, expert, late, 7)
    # At every seam 4 steps of 5 ticks longer than the replan interval.
    assert result.starved_ticks > 0
    assert result.starved_ticks % 20 == 0


def test_the_same_seed_is_the_same_episode(world, expert):
    results = [run_episode(world, expert, EXPERT, seed) for seed in (5, 6, 5)]
    assert results[0] == results[2]
    assert results[0] != results[1]


def test_faster_blocks_are_another_scene_of_the_same_seed(world, expert):
    still, slow, fast = (
        run_episode(world, expert, replace(EXPERT, variant=variant, belt_speed=speed), 12)
        for variant, speed in (('still', 1.0), ('moving', 0.0), ('moving', 1.5))
    )
    assert still == slow
    assert fast != slow


def test_every_request_has_the_plan_and_it_begins_at_the_observation(world, expert):
    watching = Watching(expert)
    run_episode(world, watching, replace(EXPERT, delay_steps=3.0, handover='switch'), 7)
    (_, first, chunk), (_, second, _) = watching.asked[:2]
    assert first is None  # nothing is planned at the start
    # Asked 3 steps before the 8th: rows 5 to 31 of the first chunk are still to come, and the
    # first 3 of them are executed whatever the new chunk says.
    np.testing.assert_array_equal(second.actions, chunk.actions[5:])
    assert (second.delay_steps, second.execution_horizon) == (3, 27)


def test_the_policy_is_given_the_plan_that_the_node_would_give_it(world, expert, monkeypatch):
    """Past steps and all, through the node's own alignment."""
    messages = pytest.importorskip('vla_runtime.messages.trajectories')
    from vla_runtime.execution.executor import ChunkExecutor
    from vla_runtime.nodes.policy.robot_policy import align_plan

    given, aligned = [], []
    poll_request = ChunkExecutor.poll_request

    def poll(self, now_s, now_ros_ns, past_steps=0):
        request = poll_request(self, now_s, now_ros_ns, past_steps)
        if request is None:
            return None
        sent = self.committed_plan(now_ros_ns, past_steps=8)
        message = messages.plan_to_message(
            PlanRequest(
                sent.rows,
                sent.names,
                ('position',) * len(sent.names),
                sent.step_time_s,
                stamp_ns=sent.stamp_ns,
                episode=sent.episode,
                certain=sent.certain,
            )
        )
        aligned.append(
            align_plan(
                messages.message_to_plan(message),
                stamp_ns=now_ros_ns,
                names=expert.action_names,
                kinds=('position',) * len(expert.action_names),
                step_time_s=0.05,
                horizon=expert.horizon,
            )
        )
        return request

    monkeypatch.setattr(ChunkExecutor, 'poll_request', poll)
    for changes in ({'delay_steps': 3.0}, {'delay_steps': 12.0, 'overrun': 'hold'}):
        watching = Watching(expert)
        run_episode(world, watching, replace(EXPERT, **changes), 7)
        given += [plan for _, plan, _ in watching.asked]
    assert len(given) == len(aligned) > 8
    for mine, theirs in zip(given, aligned, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            np.testing.assert_array_equal(mine.actions, theirs.actions)
            assert mine.delay_steps == theirs.delay_steps
            assert mine.execution_horizon == theirs.execution_horizon


def test_under_rtc_a_chunk_that_nothing_tied_is_blended(world, expert):
    """The expert looks at no plan, so its chunks are never tied."""
    blended = run_episode(world, expert, replace(EXPERT, delay_steps=3.0), 7)
    under_rtc = replace(EXPERT, delay_steps=3.0, handover='rtc', rtc_mode='guided')
    assert run_episode(world, expert, under_rtc, 7) == blended
    switched = run_episode(world, expert, replace(EXPERT, delay_steps=3.0, handover='switch'), 7)
    assert switched.trajectory != blended.trajectory


def test_chunks_are_recorded_with_the_step_of_their_observation(world, expert):
    recorded = []
    run_episode(
        world,
        expert,
        replace(EXPERT, delay_steps=2.0),
        7,
        on_chunk=lambda step, chunk: recorded.append((step, chunk)),
    )
    assert [step for step, _ in recorded[:4]] == [0, 6, 14, 22]
    assert all(isinstance(chunk, ActionChunk) for _, chunk in recorded)


def test_jumps_are_the_disagreement_of_chunks(world, expert):
    """The expert's chunks begin where the arm is, so they disagree by how far it lags behind."""
    result = run_episode(world, expert, replace(EXPERT, handover='switch'), 7)
    assert 0.001 < result.position_jump < 0.2
    blended = run_episode(world, expert, EXPERT, 7)
    assert blended.velocity_jump < result.velocity_jump
    assert blended.jerk.seams < result.jerk.seams


@pytest.fixture(scope='module')
def source(untrained):
    return PolicySource(untrained)


def test_an_untrained_policy_runs_to_the_time_limit(world, source):
    result = run_episode(world, source, Condition(), 3)
    assert result.outcome == 'timeout' and not result.obeyed
    assert result.steps == pytest.approx(120.0, abs=0.3)  # ticks are 0.2 of a step
    assert result.inferences >= 15
    assert math.isfinite(result.jerk.seams)


@pytest.mark.usefixtures('short_tasks')
class TestUntrainedPolicy:
    """A real policy in the loop, though one that knows nothing."""

    def test_each_of_its_settings_is_another_episode(self, world, source):
        tied = {'handover': 'rtc', 'delay_steps': 3.0}
        ways = [
            {},
            {'beta': 2.0},
            {'denoise_steps': 1},
            *({**tied, 'rtc_mode': mode} for mode in ('guided', 'jacobian', 'hard_prefix')),
        ]
        found = {run_episode(world, source, Condition(**way), 3).trajectory for way in ways}
        assert len(found) == len(ways)

    def test_a_hard_prefix_of_no_steps_is_blended(self, world, source):
        hard = Condition(handover='rtc', rtc_mode='hard_prefix', delay_steps=0.0)
        blend = Condition(delay_steps=0.0)
        assert run_episode(world, source, hard, 3) == run_episode(world, source, blend, 3)

    def test_beta_1_is_guidance_off(self, world, source):
        assert run_episode(world, source, Condition(beta=1.0), 3) == run_episode(
            world, source, Condition(), 3
        )

    def test_an_absent_camera_is_none(self, world, source):
        watching = Watching(source, needs_images=True)
        run_episode(world, watching, Condition(absent_cameras=('wrist',)), 3)
        for observation, _, _ in watching.asked:
            assert observation.images['wrist'] is None
            assert observation.images['front'] is not None


STEP_NS = 50_000_000


class Looking:
    """The expert, asked with images."""

    needs_images = True
    cache_use = CacheUse()

    def __init__(self, expert):
        self._expert = expert
        self.action_names, self.horizon = expert.action_names, expert.horizon
        self.seen = []

    def begin(self, condition, seed):
        self.seen.clear()

    def chunk(self, world, observation, plan):
        now = world.render('wrist', *observation.images['wrist'].shape[1::-1])
        self.seen.append((round(world.sim_time_s * 1e9), observation, now))
        return self._expert.chunk(world, observation, plan)


@pytest.mark.parametrize(('replan_interval', 'repeated'), [(1, 2 / 3), (2, 1 / 3)])
def test_the_wrist_is_seen_as_it_was_at_every_third_step(world, expert, replan_interval, repeated):
    looking = Looking(expert)
    condition = Condition(wrist_every=3, replan_interval=replan_interval, delay_steps=0.0)
    run_episode(world, looking, condition, 1000)
    frames = {}
    for now_ns, observation, wrist_now in looking.seen:
        stamp_ns = observation.stamps_ns['wrist']
        assert stamp_ns == now_ns - now_ns % (3 * STEP_NS)
        assert observation.stamps_ns['front'] == now_ns
        frame = observation.images['wrist']
        assert np.array_equal(frame, frames.setdefault(stamp_ns, frame))
        # The arm is on its way: what is held is not what the camera would see now.
        assert np.array_equal(frame, wrist_now) == (stamp_ns == now_ns)
    stamps = [observation.stamps_ns['wrist'] for _, observation, _ in looking.seen]
    again = np.mean([a == b for a, b in pairwise(stamps)])
    assert again == pytest.approx(repeated, abs=0.06)


def test_an_absent_wrist_camera_stays_absent(world, expert):
    class Absent(Looking):
        def chunk(self, world, observation, plan):
            assert observation.images['wrist'] is None
            self.seen.append(observation)
            return self._expert.chunk(world, observation, plan)

    looking = Absent(expert)
    run_episode(world, looking, Condition(wrist_every=3, absent_cameras=('wrist',)), 1000)
    assert looking.seen


def test_every_step_is_every_frame(world, expert):
    looking = Looking(expert)
    run_episode(world, looking, Condition(wrist_every=1, replan_interval=1), 1000)
    assert all(np.array_equal(seen.images['wrist'], now) for _, seen, now in looking.seen)


def test_a_camera_without_a_rate_is_an_error():
    with pytest.raises(ValueError, match='wrist_every'):
        replace(Condition(), wrist_every=0)
