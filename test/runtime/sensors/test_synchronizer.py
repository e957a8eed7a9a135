"""The newest messages that belong together, or a reason for every one that is missing."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thorough import EXAMPLES

from vla_runtime.execution.column_model import ColumnModel
from vla_runtime.execution.columns import Column, CommandColumns
from vla_runtime.execution.command import Reason
from vla_runtime.execution.state import OTHER_CLOCK, MeasuredState
from vla_runtime.execution.watchdog import StateWatch, WatchdogParameters
from vla_runtime.sensors.camera_buffer import Frame
from vla_runtime.sensors.future_stamp import AHEAD_NS, describe_ahead
from vla_runtime.sensors.joint_buffer import JointSource
from vla_runtime.sensors.synchronizer import MissingInput, Selection, Synchronizer, SyncLimits

S = 1_000_000_000
MS = 1_000_000
NOW = 100 * S
LIMITS = SyncLimits(tolerance_ns=20 * MS, max_age_ns=500 * MS)
ARM, HAND = '/joint_states', '/hand/joint_states'


def a_synchronizer(cameras=('top', 'wrist'), limits=LIMITS):
    return Synchronizer(
        {name: f'/{name}' for name in cameras},
        [JointSource(ARM, 'elbow'), JointSource(HAND, 'finger'), JointSource(ARM, 'base')],
        limits,
    )


def feed_frames(made, **stamps):
    for camera, times in stamps.items():
        for time in times:
            made.add_frame(camera, Frame(NOW + time * MS, 0, None), NOW + max(0, time) * MS)


def feed_joints(made, *times, base=0.0, elbow=1.0, finger=2.0):
    for time in times:
        stamp, now = NOW + time * MS, NOW + max(0, time) * MS
        made.add_joints(ARM, ['base', 'elbow', 'other'], [base, elbow, 9.0], stamp, now)
        made.add_joints(HAND, ['finger'], [finger], stamp, now)


def selected(made, now_ms=0):
    selection = made.select(NOW + now_ms * MS)
    assert isinstance(selection, Selection), selection
    return selection


def refused(made, now_ms=0):
    refusals = made.select(NOW + now_ms * MS)
    assert not isinstance(refusals, Selection)
    return {refusal.source: refusal.text for refusal in refusals}


def times(selection):
    return {name: (frame.stamp_ns - NOW) // MS for name, frame in selection.frames.items()}


def test_newest_frames_within_the_tolerance_are_chosen():
    made = a_synchronizer()
    feed_frames(made, top=[-70, -40, -10], wrist=[-80, -45, -15])
    feed_joints(made, -100, -5)
    assert times(selected(made)) == {'top': -10, 'wrist': -15}


def test_camera_that_lags_is_matched_with_an_older_frame_of_the_other():
    made = a_synchronizer()
    feed_frames(made, top=[-160, -130, -100, -70, -40, -10], wrist=[-190, -125])
    feed_joints(made, -200, -5)
    selection = selected(made)
    assert times(selection) == {'top': -130, 'wrist': -125}
    assert selection.stamp_ns == NOW - 125 * MS


def test_frames_that_are_never_close_enough_are_refused_with_the_distance():
    made = a_synchronizer()
    feed_frames(made, top=[-100, -10], wrist=[-60])
    feed_joints(made, -100, -5)
    assert "newest of 'top' and 'wrist' are 0.050 s apart" in refused(made)['cameras']


@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=12, unique=True),
    st.lists(st.integers(1, 300), min_size=1, max_size=12, unique=True),
    st.lists(st.integers(1, 300), min_size=1, max_size=12, unique=True),
    st.integers(0, 60),
)
def test_choice_is_the_newest_of_all_combinations(a, b, c, tolerance_ms):
    limits = SyncLimits(tolerance_ms * MS, 500 * MS)
    made = Synchronizer({name: name for name in 'abc'}, [], limits)
    ages = {'a': sorted(a), 'b': sorted(b), 'c': sorted(c)}
    feed_frames(made, **{name: [-age for age in reversed(ages[name])] for name in ages})
    possible = [
        (x, y, z)
        for x in ages['a']
        for y in ages['b']
        for z in ages['c']
        if max(x, y, z) - min(x, y, z) <= tolerance_ms
    ]
    selection = made.select(NOW)
    if not possible:
        assert selection[0].source == 'cameras'
        return
    chosen = times(selection)
    best = tuple(-chosen[name] for name in 'abc')
    assert best in possible
    # No possible set has a newer frame of any camera.
    assert all(all(mine <= theirs for mine, theirs in zip(best, p, strict=True)) for p in possible)


def test_state_is_interpolated_to_the_newest_frame_and_ordered_by_source():
    made = a_synchronizer()
    feed_frames(made, top=[-20], wrist=[-20])
    feed_joints(made, -30, elbow=1.0, base=0.0, finger=4.0)
    feed_joints(made, -10, elbow=2.0, base=1.0, finger=4.0)
    selection = selected(made)
    np.testing.assert_allclose(selection.state, [1.5, 4.0, 0.5], rtol=0, atol=1e-12)
    assert selection.state_stamp_ns == NOW - 10 * MS


def test_state_is_held_when_the_frame_is_newer():
    made = a_synchronizer()
    feed_frames(made, top=[-5], wrist=[-5])
    feed_joints(made, -100, elbow=1.0)
    feed_joints(made, -50, elbow=3.0)
    assert selected(made).state[0] == 3.0


def test_continuous_joint_is_interpolated_the_short_way_round():
    made = Synchronizer({'top': '/top'}, [JointSource(ARM, 'wheel', continuous=True)], LIMITS)
    feed_frames(made, top=[-20])
    made.add_joints(ARM, ['wheel'], [3.1], NOW - 30 * MS, NOW)
    made.add_joints(ARM, ['wheel'], [-3.1], NOW - 10 * MS, NOW)
    assert abs(selected(made).state[0]) == pytest.approx(np.pi)


def test_nothing_is_interpolated_over_a_gap():
    made = a_synchronizer()
    feed_joints(made, -600)
    feed_joints(made, 0)
    feed_frames(made, top=[-100], wrist=[-100])
    assert 'no positions for 0.600 s around the frames' in refused(made)['joint elbow']


def test_state_that_begins_after_the_frames_is_not_used():
    made = a_synchronizer()
    feed_frames(made, top=[-100], wrist=[-100])
    feed_joints(made, -10)
    assert '0.090 s newer than the frames' in refused(made)['joint elbow']
    feed_frames(made, top=[-25], wrist=[-25])
    assert selected(made).state[0] == 1.0


def test_every_missing_source_is_named_at_once():
    refusals = refused(a_synchronizer())
    assert set(refusals) == {
        'camera top',
        'camera wrist',
        'joint elbow',
        'joint finger',
        'joint base',
    }
    assert refusals['camera top'] == "camera 'top': no frame yet on /top"
    assert refusals['joint base'] == f'no joint states yet on {ARM}'


def test_old_frame_is_refused_and_a_new_one_mends_it():
    made = a_synchronizer()
    feed_frames(made, top=[-10], wrist=[-10])
    feed_joints(made, -10, 590)
    assert 'last frame is 0.61 s old, limit 0.5 s' in refused(made, 600)['camera top']
    feed_frames(made, top=[595], wrist=[595])
    assert times(selected(made, 600)) == {'top': 595, 'wrist': 595}


def test_age_limit_may_change_at_any_time():
    made = a_synchronizer()
    feed_frames(made, top=[-300], wrist=[-300])
    feed_joints(made, -300)
    assert times(selected(made)) == {'top': -300, 'wrist': -300}
    made.limits = SyncLimits(20 * MS, 100 * MS)
    assert 'camera top' in refused(made)


def test_missing_joint_is_named_with_those_that_were_seen():
    made = a_synchronizer()
    made.add_joints(ARM, ['base', 'elbw'], [0.0, 1.0], NOW, NOW)
    assert refused(made)['joint elbow'].startswith(
        f"joint 'elbow' is not in {ARM} (seen: base, elbw); mend"
    )


def test_messages_that_name_no_joint_are_told_from_a_silent_topic():
    made = a_synchronizer()
    made.add_joints(ARM, [], [], NOW, NOW)
    refusals = refused(made)
    assert refusals['joint elbow'] == (
        f'{ARM}: its messages name no joint; mend the node that publishes them'
    )
    assert refusals['joint finger'] == f'no joint states yet on {HAND}'


def test_joints_may_come_in_parts_on_one_topic():
    made = a_synchronizer()
    feed_frames(made, top=[0], wrist=[0])
    made.add_joints(ARM, ['base'], [5.0], NOW, NOW)
    made.add_joints(ARM, ['elbow'], [6.0], NOW, NOW)
    made.add_joints(HAND, ['finger'], [7.0], NOW, NOW)
    np.testing.assert_array_equal(selected(made).state, [6.0, 7.0, 5.0])


@pytest.mark.parametrize(
    ('message', 'words'),
    [
        ((['elbow'], [1.0, 2.0], NOW), 'position has 2 numbers for 1 names'),
        ((['elbow'], [], NOW), 'position has 0 numbers for 1 names'),
        ((['elbow'], [1.0], 0), 'header.stamp is zero'),
        ((['elbow'], [1.0], NOW + 9 * S), '9.000 s in the future'),
        ((['elbow'], [float('inf')], NOW), 'its position is inf'),
        ((['elbow'], [1e300], NOW), 'its position is 1e+300'),
        ((['elbow', 'elbow'], [1.0, 2.0], NOW), "the message names 'elbow' twice"),
    ],
)
def test_joint_message_that_cannot_be_used_is_named(message, words):
    made = a_synchronizer()
    made.add_joints(ARM, *message, NOW)
    assert words in refused(made)['joint elbow']


def test_joint_states_ahead_of_the_clock_are_used_and_said():
    made = a_synchronizer()
    made.add_joints(ARM, ['elbow', 'base'], [1.0, 2.0], NOW + 40 * MS, NOW)
    made.add_joints(HAND, ['finger'], [3.0], NOW + 40 * MS, NOW)
    assert made.joint_problems(NOW) == made.joint_warnings() == ()
    made.add_joints(ARM, ['elbow', 'base'], [1.0, 2.0], NOW + 200 * MS, NOW)
    assert made.joint_problems(NOW) == ()
    assert made.joint_warnings() == (
        f'{ARM}: stamp is 0.200 s in the future, and frames are paired with older positions: '
        "synchronise the driver's clock, check use_sim_time, or give the topic 'stamp: receive' in "
        'the robot file',
    )
    made.add_joints(ARM, ['elbow', 'base'], [1.0, 2.0], NOW + 210 * MS, NOW + 200 * MS)
    assert made.joint_warnings() == ()


def test_states_and_frames_are_named_from_where_the_executor_refuses_them():
    parameters = WatchdogParameters()
    model = ColumnModel(CommandColumns([Column('elbow')]))
    watch, state = StateWatch(parameters, model), MeasuredState(model)
    for ahead_ns in (AHEAD_NS, AHEAD_NS + MS):
        state.observe(['elbow'], [0.0], NOW + ahead_ns)
        refused = watch.check(state, NOW) is Reason.STATE_FROM_FUTURE
        assert refused == (describe_ahead(ahead_ns, 'and so') is not None)


def test_a_fast_driver_is_kept_for_as_long_as_a_state_may_be_old():
    made = Synchronizer(
        {'top': '/top'}, [JointSource(ARM, 'elbow')], replace(LIMITS, max_age_ns=10 * S)
    )
    for time_ms in range(10_000):
        stamp = NOW + time_ms * MS
        made.add_joints(ARM, ['elbow'], [float(time_ms)], stamp, stamp)
    made.add_frame('top', Frame(NOW + 500 * MS, 0, None), NOW + 10 * S)
    assert selected(made, 10_000).state.tolist() == [500.0]


@pytest.mark.parametrize(
    ('away_s', 'other'), [(2000, False), (-3000, False), (4000, True), (-4000, True)]
)
def test_joint_states_of_another_clock_are_said_to_be(away_s, other):
    made = a_synchronizer()
    made.add_joints(ARM, ['elbow'], [1.0], NOW, NOW + away_s * S)
    refusal = refused(made, away_s * 1000)['joint elbow']
    assert refusal.endswith(f'; {OTHER_CLOCK}') is other


def test_joint_that_the_policy_does_not_use_may_be_named_twice():
    made = a_synchronizer()
    feed_frames(made, top=[0], wrist=[0])
    made.add_joints(ARM, ['elbow', 'waist', 'waist', 'base'], [7.0, 1.0, 2.0, 6.0], NOW, NOW)
    made.add_joints(HAND, ['finger'], [5.0], NOW, NOW)
    np.testing.assert_array_equal(selected(made).state, [7.0, 5.0, 6.0])


def test_driver_that_stops_naming_its_joints_is_said_in_words():
    made = a_synchronizer()
    feed_joints(made, 0, elbow=1.0)
    made.limits = replace(made.limits, max_age_ns=S)
    made.add_joints(ARM, [], [], NOW + 2 * S, NOW + 2 * S)
    problems = made.joint_problems(NOW + 2 * S)
    assert any('without it (with: no joint at all)' in problem for problem in problems)


def test_joint_stamps_that_do_not_advance_are_dropped():
    made = a_synchronizer()
    feed_frames(made, top=[0], wrist=[0])
    feed_joints(made, 0, elbow=1.0)
    feed_joints(made, 0, -10, elbow=5.0)
    assert selected(made).state[0] == 1.0


def test_a_driver_whose_clock_was_set_back_is_told_what_mends_it_at_once():
    made = a_synchronizer()
    feed_joints(made, 0, elbow=1.0)
    for now_ns in (NOW + 2 * S, NOW + 3 * S):
        made.add_joints(ARM, ['elbow', 'base'], [1.0, 2.0], now_ns - 60 * S, now_ns)
        problems = [text for text in made.joint_problems(now_ns) if text.startswith(ARM)]
        # One for all of the topic's joints.
        assert len(set(problems)) == 1 and 'stamp: receive' in problems[0]


def test_clock_that_goes_back_empties_everything():
    made = a_synchronizer()
    feed_frames(made, top=[0], wrist=[0])
    feed_joints(made, 0)
    selected(made)
    assert set(refused(made, -10_000)) >= {'camera top', 'joint elbow'}
    assert made.clock_jumps == 1
    # The looped bag's messages are older than those before, and welcome.
    made.add_frame('top', Frame(NOW - 10 * S, 0, None), NOW - 10 * S)
    assert 'camera top' not in refused(made, -10_000)


def test_threads_that_read_the_clock_in_turn_are_no_jump():
    made = a_synchronizer()
    feed_frames(made, top=[0], wrist=[0])
    made.select(NOW + 5 * MS)
    made.select(NOW)
    assert made.clock_jumps == 0


def test_frame_that_turned_out_damaged_is_not_chosen_again():
    made = a_synchronizer()
    feed_frames(made, top=[-40, -10], wrist=[-30])
    feed_joints(made, -100, -5)
    frame = selected(made).frames['top']
    made.discard_frame('top', frame, 'cannot be decoded')
    assert times(selected(made)) == {'top': -40, 'wrist': -30}


def test_statuses_count_and_tell_usable_from_silent_cameras():
    made = a_synchronizer()
    feed_frames(made, top=[0])
    made.refuse_frame('top', 'wrong encoding')
    top, wrist = made.camera_statuses(NOW)
    assert (top.usable, top.problem, top.counters.received) == (True, 'wrong encoding', 2)
    assert (wrist.usable, wrist.problem) == (False, "camera 'wrist': no frame yet on /wrist")
    assert len(made.joint_problems(NOW)) == 3


@settings(max_examples=EXAMPLES)
@given(st.data())
def test_whatever_comes_a_selection_keeps_its_promises(data):
    made = a_synchronizer()
    now = NOW
    for _ in range(data.draw(st.integers(1, 40))):
        now += data.draw(st.integers(-300, 200)) * MS
        stamp = max(0, now + data.draw(st.integers(-700, 700)) * MS)
        source = data.draw(st.sampled_from(['top', 'wrist', ARM, HAND]))
        if source in ('top', 'wrist'):
            made.add_frame(source, Frame(stamp, 0, None), now)
        else:
            value = data.draw(st.floats())
            made.add_joints(source, ['elbow', 'finger', 'base'], [value] * 3, stamp, now)
        found = made.select(now)
        if not isinstance(found, Selection):
            assert all(isinstance(refusal, MissingInput) and refusal.text for refusal in found)
            continue
        stamps = [frame.stamp_ns for frame in found.frames.values()]
        assert max(stamps) - min(stamps) <= LIMITS.tolerance_ns
        assert all(abs(now - stamp) <= LIMITS.max_age_ns for stamp in stamps)
        assert np.isfinite(found.state).all()


@pytest.mark.parametrize('behind_s', [4.3, 4300.0])
def test_joint_states_of_a_clock_that_is_behind_name_what_mends_it(behind_s):
    made = a_synchronizer()
    stamp = NOW - round(behind_s * S)
    made.add_joints(ARM, ['elbow', 'base'], [1.0, 2.0], stamp, NOW)
    (problem, *_) = made.joint_problems(NOW)
    assert "'stamp: receive'" in problem
    # Of a driver that has ended the stamps are old as well.
    made = a_synchronizer()
    made.add_joints(ARM, ['elbow', 'base'], [1.0, 2.0], NOW, NOW)
    (problem, *_) = made.joint_problems(NOW + 5 * S)
    assert "'stamp: receive'" not in problem
