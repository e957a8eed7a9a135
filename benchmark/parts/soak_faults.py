"""Faults of the soak, each from its begin to its end.

A fault gets the `Rig` and a random generator, lasts as long as its function, and returns what it
did. The operator then starts the robot again.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from parts.camera_drivers import blank_image
from parts.graph_rig import RELIABLE, SENSOR
from parts.soak_rig import Child, Rig
from parts.soak_robot import OTHER
from rclpy.serialization import serialize_message
from sensor_msgs.msg import Image, JointState
from std_srvs.srv import Trigger

from vla_runtime.messages.trajectories import chunk_type, ns_to_stamp, stamp_to_ns, trajectory_of

_MATCH_S = 5.0
# `restart_after_outage_s`, with what a busy machine adds.
_OUTAGE_S, _RESTS_S = 2.0, 2.5
# A false reading that is further off than this is plain to see.
_PLAIN_RAD = 0.2
# A participant that subscribes to images.
_LISTENER = """
import sys
import rclpy
from rclpy.qos import qos_profile_sensor_data
from rclpy.serialization import serialize_message
from sensor_msgs.msg import Image
rclpy.init()
node = rclpy.create_node('onlooker')
for topic in sys.argv[1:]:
    node.create_subscription(Image, topic, lambda message: None, qos_profile_sensor_data)
print('listening', flush=True)
rclpy.spin(node)
"""

_Play = Callable[['Rig', np.random.Generator], str]


@dataclass(frozen=True)
class FaultKind:
    """One kind of fault; `stops`: the robot may stand still while it lasts."""

    play: _Play
    stops: bool = True


def _last(random: np.random.Generator, low_s: float, high_s: float) -> float:
    seconds = float(random.uniform(low_s, high_s))
    time.sleep(seconds)
    return seconds


# ---------------------------------------------------------------- the policy


def policy_frozen(rig: Rig, random: np.random.Generator) -> str:
    rig.policy.freeze()
    seconds = _last(random, 0.5, 4.0)
    rig.policy.thaw()
    return f'SIGSTOP for {seconds:.2f} s'


def policy_killed(rig: Rig, random: np.random.Generator) -> str:
    rig.kill_policy()
    seconds = _last(random, 0.0, 2.0)
    rig.start_policy()
    return f'SIGKILL, started again after {seconds:.2f} s'


# ---------------------------------------------------------------- cameras


def _some_cameras(rig: Rig, random: np.random.Generator) -> list[str]:
    topics = rig.camera_topics
    return topics if random.random() < 0.3 else [str(random.choice(topics))]


def cameras_frozen(rig: Rig, random: np.random.Generator) -> str:
    topics = _some_cameras(rig, random)
    for topic in topics:
        rig.change_camera(topic, frozen=True)
    seconds = _last(random, 0.2, 3.0)
    for topic in topics:
        rig.change_camera(topic, frozen=False)
    return f'{", ".join(topics)} for {seconds:.2f} s'


def camera_slow(rig: Rig, random: np.random.Generator) -> str:
    topic, rate_hz = str(random.choice(rig.camera_topics)), float(random.uniform(5.0, 8.0))
    rig.change_camera(topic, rate_hz=rate_hz)
    seconds = _last(random, 2.0, 4.0)
    rig.change_camera(topic, rate_hz=rig.camera_setup.rate_hz)
    return f'{topic} at {rate_hz:.1f} Hz for {seconds:.2f} s'


def malformed_images(rig: Rig, random: np.random.Generator) -> str:
    """A second driver on a camera's topic, whose messages are no images of this camera."""
    topic = str(random.choice(rig.camera_topics))
    publisher = rig.graph.node.create_publisher(Image, '/' + topic, SENSOR)
    _wait_for_match(publisher)
    for _ in range(10):
        message = blank_image()
        message.header.stamp = ns_to_stamp(time.time_ns())
        fault = random.integers(4)
        if fault == 0:
            message.encoding = 'no_encoding'
        elif fault == 1:
            message.height, message.width = 240, 320
        elif fault == 2:
            message.data = message.data[:1000]
        else:
            message.header.stamp = ns_to_stamp(time.time_ns() - 10_000_000_000)
        publisher.publish(message)
        time.sleep(0.1)
    rig.graph.node.destroy_publisher(publisher)
    return topic


def still_image(rig: Rig, random: np.random.Generator) -> str:
    """A driver that sends one picture under new stamps: a warning, and no reason to stop."""
    topic = str(random.choice(rig.camera_topics))
    rig.change_camera(topic, still=True)
    seconds = _last(random, 2.0, 5.0)
    rig.change_camera(topic, still=False)
    return f'{topic} for {seconds:.2f} s'


# ---------------------------------------------------------------- joint states


def joint_states_silent(rig: Rig, random: np.random.Generator) -> str:
    rig.robot.silent = True
    seconds = _last(random, 0.1, 2.0)
    rig.robot.silent = False
    return f'for {seconds:.2f} s'


def joint_states_jump(rig: Rig, random: np.random.Generator) -> str:
    """A sensor that errs: the joint is where it was, what is published of it is not."""
    joint, by = _arm_joint(rig, random), float(random.uniform(0.1, 1.0) * random.choice([-1, 1]))
    rig.robot.sensor_error[joint] = by
    seconds = _last(random, 0.02, 0.5)
    rig.robot.sensor_error[joint] = 0.0
    return f'joint {joint} by {by:+.2f} rad for {seconds:.2f} s'


def malformed_joint_states(rig: Rig, random: np.random.Generator) -> str:
    """A second publisher of joint states: no numbers, unknown names, too few, old stamps."""
    side = rig.robot_file.joint_states[int(random.integers(len(rig.robot_file.joint_states)))]
    publisher = rig.graph.node.create_publisher(JointState, '/' + side.topic, SENSOR)
    _wait_for_match(publisher)
    names = [rig.robot_file.joint(name).in_messages for name in side.joints]
    for _ in range(10):
        numbers = rig.robot.positions[: len(names)].tolist()
        message = JointState(name=names, position=numbers)
        message.header.stamp = ns_to_stamp(time.time_ns())
        fault = random.integers(4)
        if fault == 0:
            message.position = [float('nan')] * len(names)
        elif fault == 1:
            message.name = [f'{name}_of_nobody' for name in names]
        elif fault == 2:
            message.position = numbers[:2]
        else:
            message.header.stamp = ns_to_stamp(time.time_ns() - 10_000_000_000)
        publisher.publish(message)
        time.sleep(0.05)
    rig.graph.node.destroy_publisher(publisher)
    return side.topic


def glitch(rig: Rig, random: np.random.Generator) -> str:
    """One to fifty false readings of a joint: zero, one turn off, or anything."""
    stopped = _stop_first(rig, random)
    joint, samples = _arm_joint(rig, random), int(random.integers(1, 51))
    by = [-float(rig.robot.positions[joint]), 2.0 * np.pi, float(random.uniform(-2.0, 2.0))]
    rig.robot.sensor_error[joint] = by[int(random.integers(len(by)))]
    rig.robot.errs_for = samples
    while rig.robot.errs_for > 0:
        time.sleep(0.005)
    text = f'{samples} samples of joint {joint} by {rig.robot.sensor_error[joint]:+.2f} rad'
    rig.robot.sensor_error[joint] = 0.0
    rig.robot.errs_for = -1
    _last(random, 0.2, 1.0)
    return text + stopped


def reading_stays_wrong(rig: Rig, random: np.random.Generator) -> str:
    """A reading that stays wrong while a person calls ~/start once; it must be refused.

    Nobody saw the arm go there. Then the true reading is back.
    """
    stopped = _stop_first(rig, random)
    joint, place = _arm_joint(rig, random), rig.robot.positions
    by = [-float(place[joint]), 2.0 * np.pi, float(random.choice([-1.0, 1.0]))]
    by = [one for one in by if abs(one) > _PLAIN_RAD]
    rig.robot.sensor_error[joint] = by[int(random.integers(len(by)))]
    seconds = _last(random, 0.8, 2.0)
    text = f'joint {joint} by {rig.robot.sensor_error[joint]:+.2f} rad for {seconds:.2f} s'
    if not rig.runs:
        answer = rig.services.insist(Trigger, f'{rig.EXECUTOR}/start', Trigger.Request())
        if answer.success:
            rig.problems.append(f'~/start believed a reading that jumped: {text}{stopped}')
        time.sleep(0.3)
    rig.robot.sensor_error[joint] = 0.0
    _last(random, 0.8, 1.5)
    return text + stopped


def state_from_future(rig: Rig, random: np.random.Generator) -> str:
    """Joint states whose stamps are ahead of the clock, one or a few."""
    stopped = _stop_first(rig, random)
    ahead_s, samples = float(random.uniform(0.5, 6.0)), int(random.integers(1, 20))
    rig.robot.stamp_ahead(ahead_s, samples)
    _last(random, 0.5, 1.0)
    return f'{samples} samples by {ahead_s:.1f} s{stopped}'


def bus_repeats(rig: Rig, random: np.random.Generator) -> str:
    """A servo bus that repeats old positions under new stamps, and goes on."""
    rig.robot.repeats = True
    seconds = _last(random, 0.05, 0.12)
    rig.robot.repeats = False
    _last(random, 0.5, 1.0)
    return f'for {seconds:.2f} s'


def slow_joint_states(rig: Rig, random: np.random.Generator) -> str:
    rig.robot.every = 10
    seconds = _last(random, 2.0, 4.0)
    rig.robot.every = 1
    return f'at 10 Hz for {seconds:.2f} s'


def second_publisher(rig: Rig, random: np.random.Generator) -> str:
    """Another node publishes zeros of the same joints, as `joint_state_publisher` does."""
    stopped = _stop_first(rig, random)
    side = rig.robot_file.joint_states[int(random.integers(len(rig.robot_file.joint_states)))]
    names = [rig.robot_file.joint(name).in_messages for name in side.joints]
    publisher = rig.graph.node.create_publisher(JointState, '/' + side.topic, SENSOR)
    _wait_for_match(publisher)
    rate_hz, end_s = float(random.choice([10.0, 50.0, 200.0])), time.monotonic() + 2.0
    while time.monotonic() < end_s:
        message = JointState(name=names, position=[0.0] * len(names))
        message.header.stamp = ns_to_stamp(time.time_ns())
        publisher.publish(message)
        time.sleep(1.0 / rate_hz)
    rig.graph.node.destroy_publisher(publisher)
    return f'zeros on {side.topic} at {rate_hz:g} Hz{stopped}'


def power_lost(rig: Rig, random: np.random.Generator) -> str:
    """Motors and joint states are away together; a hand may move the arm meanwhile."""
    stopped = _stop_first(rig, random)
    seconds = float(np.exp(random.uniform(np.log(0.2), np.log(30.0))))
    rig.robot.powered, rig.robot.silent = False, True
    end_s = time.monotonic() + seconds
    guided = random.random() < 0.5
    if guided:
        rig.robot.guide(_by_hand(rig, random, 0.6 * seconds), 0.6 * seconds)
    time.sleep(max(0.0, end_s - time.monotonic()))
    if guided and seconds <= _OUTAGE_S:
        # A new position after a short outage may be a failed read: the arm must rest there.
        rig.robot.silent = False
        time.sleep(_RESTS_S)
    rig.robot.power_on()
    while not rig.robot.powered:
        time.sleep(0.05)
    _last(random, 0.5, 1.5)
    return f'for {seconds:.2f} s{", moved by hand" if guided else ""}{stopped}'


def guided_while_stopped(rig: Rig, random: np.random.Generator) -> str:
    """A hand moves an arm without power whose joint states go on; then the motors come on."""
    rig.services.insist(Trigger, f'{rig.EXECUTOR}/stop', Trigger.Request())
    time.sleep(0.5)
    rig.robot.powered = False
    seconds = float(random.uniform(0.5, 2.0))
    rig.robot.guide(_by_hand(rig, random, seconds), seconds)
    # It rests, and its hold follows.
    rests = _last(random, 1.5, 3.0)
    rig.robot.powered = True
    time.sleep(1.0)
    return f'for {seconds:.2f} s, at rest for {rests:.2f} s'


def _by_hand(rig: Rig, random: np.random.Generator, seconds: float) -> np.ndarray:
    """Motion (joints,) of a hand, at 1 rad/s at most."""
    by = np.zeros(len(rig.robot_file.joints))
    for _ in range(3):
        by[_arm_joint(rig, random)] = random.uniform(-1.0, 1.0) * min(seconds, 0.8)
    return by


def other_commander(rig: Rig, random: np.random.Generator) -> str:
    """Another node sends on a command topic, to hold the robot where it is."""
    stopped = _stop_first(rig, random)
    output = rig.robot_file.outputs[int(random.integers(len(rig.robot_file.outputs)))]
    order = [joint.name for joint in rig.robot_file.joints]
    columns = [order.index(name) for name in output.joints]
    publisher = rig.graph.node.create_publisher(JointState, '/' + output.topic, RELIABLE)
    _wait_for_match(publisher)
    end_s = time.monotonic() + float(random.uniform(0.2, 2.0))
    while time.monotonic() < end_s:
        place = rig.robot.positions[columns].tolist()
        message = JointState(name=list(output.joints), position=place)
        message.header.frame_id = OTHER
        message.header.stamp = ns_to_stamp(time.time_ns())
        publisher.publish(message)
        time.sleep(0.05)
    rig.graph.node.destroy_publisher(publisher)
    return f'on {output.topic}{stopped}'


def _stop_first(rig: Rig, random: np.random.Generator) -> str:
    """Stop the robot, every other time, and wait until it is at rest; how it was done."""
    if random.random() < 0.5:
        return ''
    rig.services.insist(Trigger, f'{rig.EXECUTOR}/stop', Trigger.Request())
    time.sleep(1.0)
    return ', after ~/stop'


def push(rig: Rig, random: np.random.Generator) -> str:
    """Somebody holds a joint where it was not commanded to."""
    joint, by = _arm_joint(rig, random), float(random.uniform(0.3, 1.0) * random.choice([-1, 1]))
    rig.robot.push(joint, by)
    seconds = _last(random, 0.3, 1.5)
    rig.robot.let_go()
    return f'joint {joint} by {by:+.2f} rad for {seconds:.2f} s'


def _arm_joint(rig: Rig, random: np.random.Generator) -> int:
    radians = [i for i, joint in enumerate(rig.robot_file.joints) if joint.unit == 'rad']
    return int(random.choice(radians))


# ---------------------------------------------------------------- chunks


def stray_chunks(rig: Rig, random: np.random.Generator) -> str:
    """Another publisher of chunks: old ones, of other episodes and joints, and no chunks at all."""
    publisher = rig.graph.node.create_publisher(chunk_type(), '/action_chunk', RELIABLE)
    _wait_for_match(publisher)
    sent = []
    for _ in range(10):
        if rig.newest_chunk is None:
            break
        name = str(random.choice(list(_SPOILERS)))
        message = copy.deepcopy(rig.newest_chunk)
        _SPOILERS[name](message)
        rig.strays.add(serialize_message(message))
        publisher.publish(message)
        sent.append(name)
        time.sleep(0.05)
    rig.graph.node.destroy_publisher(publisher)
    return ', '.join(sent)


def _older(message: Any) -> None:
    header = trajectory_of(message).header
    header.stamp = ns_to_stamp(stamp_to_ns(header.stamp) - 5_000_000_000)


def _other_episode(message: Any) -> None:
    if trajectory_of(message) is not message:
        message.episode += 7
        return
    _, episode, *rest = message.header.frame_id.split()
    number = int(episode.partition('=')[2]) + 7
    message.header.frame_id = ' '.join(['chunk', f'episode={number}', *rest])


def _wrong_joint(message: Any) -> None:
    trajectory = trajectory_of(message)
    trajectory.joint_names = ['tail', *trajectory.joint_names[1:]]


def _no_number(message: Any) -> None:
    trajectory_of(message).points[3].positions[2] = float('nan')


def _nothing(message: Any) -> None:
    trajectory_of(message).points = []


def _wrong_rate(message: Any) -> None:
    for point in trajectory_of(message).points:
        ns = point.time_from_start.sec * 1_000_000_000 + point.time_from_start.nanosec
        point.time_from_start.sec, point.time_from_start.nanosec = divmod(2 * ns, 1_000_000_000)


def _no_chunk(message: Any) -> None:
    if trajectory_of(message) is message:
        message.header.frame_id = 'world'
    else:
        message.number = 2**64 - 1


_SPOILERS: dict[str, Callable[[Any], None]] = {
    'older': _older,
    'other episode': _other_episode,
    'wrong joint': _wrong_joint,
    'no number': _no_number,
    'no points': _nothing,
    'no chunk': _no_chunk,
    'wrong rate': _wrong_rate,
    'twice': lambda message: None,
}


# ---------------------------------------------------------------- participants and operator


def participants(rig: Rig, random: np.random.Generator) -> str:
    """Subscribers of all images join and are killed."""
    count = int(random.integers(1, 3))
    topics = ['/' + topic for topic in rig.camera_topics]
    onlookers = [
        Child(['-c', _LISTENER, *topics], rig.folder / 'onlooker.log', profile=rig.profiles.nodes)
        for _ in range(count)
    ]
    seconds = _last(random, 1.5, 3.0)
    for onlooker in onlookers:
        onlooker.kill()
    return f'{count} for {seconds:.2f} s, then SIGKILL'


def second_launch(rig: Rig, random: np.random.Generator) -> str:
    """The same robot is launched again, under the same name or another one."""
    name = str(random.choice(['vla_executor', 'vla_executor_2']))
    beside = rig.launch_again(name)
    seconds = _last(random, 5.0, 8.0)
    beside.end()
    return f'as {name} for {seconds:.2f} s'


def stop_and_start(rig: Rig, random: np.random.Generator) -> str:
    rig.services.insist(Trigger, f'{rig.EXECUTOR}/stop', Trigger.Request())
    seconds = _last(random, 0.3, 1.5)
    return f'~/stop, ~/start after {seconds:.2f} s'


def reset(rig: Rig, random: np.random.Generator) -> str:
    """A new episode: of the executor, or of the policy and then the executor."""
    nodes = [rig.POLICY, rig.EXECUTOR] if random.random() < 0.5 else [rig.EXECUTOR]
    return _reset(rig, nodes)


def policy_reset(rig: Rig, random: np.random.Generator) -> str:
    """Reset the policy alone, which drops the request that waits there."""
    return _reset(rig, [rig.POLICY])


def _reset(rig: Rig, nodes: list[str]) -> str:
    for node in nodes:
        rig.services.insist(Trigger, f'{node}/reset', Trigger.Request())
    return ', '.join(f'{node}/reset' for node in nodes)


def _wait_for_match(publisher: Any) -> None:
    end_s = time.monotonic() + _MATCH_S
    while not publisher.get_subscription_count() and time.monotonic() < end_s:
        time.sleep(0.01)


def fault_kinds() -> dict[str, FaultKind]:
    return {
        'policy_frozen': FaultKind(policy_frozen),
        'policy_killed': FaultKind(policy_killed),
        'cameras_frozen': FaultKind(cameras_frozen),
        'camera_slow': FaultKind(camera_slow, stops=False),
        'still_image': FaultKind(still_image, stops=False),
        'malformed_images': FaultKind(malformed_images, stops=False),
        'joint_states_silent': FaultKind(joint_states_silent),
        'joint_states_jump': FaultKind(joint_states_jump),
        'malformed_joint_states': FaultKind(malformed_joint_states),
        'glitch': FaultKind(glitch),
        'reading_stays_wrong': FaultKind(reading_stays_wrong),
        'state_from_future': FaultKind(state_from_future),
        'bus_repeats': FaultKind(bus_repeats),
        'slow_joint_states': FaultKind(slow_joint_states),
        'second_publisher': FaultKind(second_publisher),
        'power_lost': FaultKind(power_lost),
        'guided_while_stopped': FaultKind(guided_while_stopped),
        'other_commander': FaultKind(other_commander),
        'push': FaultKind(push),
        'stray_chunks': FaultKind(stray_chunks, stops=False),
        'participants': FaultKind(participants, stops=False),
        'second_launch': FaultKind(second_launch, stops=False),
        'stop_and_start': FaultKind(stop_and_start),
        'reset': FaultKind(reset),
        'policy_reset': FaultKind(policy_reset),
    }
