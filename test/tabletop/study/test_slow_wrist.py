"""A wrist camera of a lower rate: which frames the policy sees, and when they were taken."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from vla_tabletop.sim.closed_loop import observe
from vla_tabletop.study.condition import Condition
from vla_tabletop.study.episode import run_episode
from vla_tabletop.study.smoothness import CacheUse
from vla_tabletop.study.tabletop_world import SlowWrist

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


def test_a_frame_is_taken_at_multiples_of_the_period_alone(world):
    world.reset(3)
    wrist = SlowWrist(world, 2 * STEP_NS)
    wrist.tick(0)
    first = wrist.put_into(observe(world, 'touch the red block'))
    for _ in range(10):
        world.step(world.joint_positions + 0.1)
    wrist.tick(STEP_NS)
    now = observe(world, 'touch the red block')
    held = wrist.put_into(now)
    np.testing.assert_array_equal(held.images['wrist'], first.images['wrist'])
    assert held.stamps_ns == {**now.stamps_ns, 'wrist': first.stamps_ns['wrist']}
    np.testing.assert_array_equal(held.images['front'], now.images['front'])
    wrist.tick(2 * STEP_NS)
    taken = wrist.put_into(now)
    np.testing.assert_array_equal(taken.images['wrist'], now.images['wrist'])
    assert taken.stamps_ns == now.stamps_ns


def test_every_step_is_every_frame(world, expert):
    looking = Looking(expert)
    run_episode(world, looking, Condition(wrist_every=1, replan_interval=1), 1000)
    assert all(np.array_equal(seen.images['wrist'], now) for _, seen, now in looking.seen)


def test_a_camera_without_a_rate_is_an_error():
    with pytest.raises(ValueError, match='wrist_every'):
        replace(Condition(), wrist_every=0)
