"""Topics of cameras and joint states: alive, of which type and rate, how old, how much is lost."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from rclpy.node import Node
from rclpy.topic_endpoint_info import TopicEndpointInfo

from vla_runtime.execution.watchdog import WatchdogParameters
from vla_runtime.messages.images import ImageError, check_image, describe_encoding
from vla_runtime.nodes.doctor.drivers import environment_of, lacks_profile
from vla_runtime.nodes.doctor.findings import Finding, note, ok, problem
from vla_runtime.nodes.doctor.streams import IMAGE_TYPES, Source, Stream
from vla_runtime.nodes.graph_faults import (
    describe_publishers,
    publisher_names,
    several_publishers,
    type_name,
    why_silent,
)
from vla_runtime.robot.schema import JointStateTopic, LeaderButton, RobotCamera, RobotLeader
from vla_runtime.sensors.future_stamp import AHEAD_NS, OWN_CLOCK

AREA = 'topics'
# Ages that policy and executor take by default (max_observation_age_s, max_state_age_s).
_OLDEST_FRAME_S, OLDEST_STATE_S = 0.5, WatchdogParameters.max_state_age_s
# A stream slower than this share of what it should be is slow.
_SLOW = 0.75
_LOST = 0.05
# A stream that was silent for so many of its periods has stopped.
_STOPPED = 5.0
# Bytes of an image that travel in one piece in Fast DDS's own shared memory.
_ONE_PIECE = 500_000
# A silent publisher may be a latched one, or have just ended.
_DRIVER = "start its driver again, look at the driver's log, cable and power"
_JOY = (
    'start the joystick, with autorepeat (autorepeat_rate of joy_node): it has to speak while '
    'nobody touches it'
)
_CLOCKS = f'set the clocks right (chrony), check use_sim_time, or {OWN_CLOCK}'
# Fields of the robot file.
_FIELDS = {
    RobotCamera: 'cameras',
    JointStateTopic: 'joint_states',
    RobotLeader: 'leader',
    LeaderButton: 'leader.button',
}
_PROFILE = (
    'start the camera driver with FASTRTPS_DEFAULT_PROFILES_FILE and FASTDDS_DEFAULT_PROFILES_FILE '
    '= config/fastdds.xml of this package (docs/howto/cameras.md#images-without-loss)'
)


@dataclass(frozen=True)
class Pace:
    """How often a topic has to bring something.

    Attributes:
        rate_hz: that it should have, and who says so; None where nobody does.
        gap_s: longest time between two messages, and what a longer one does; likewise.
    """

    rate_hz: tuple[float, str] | None = None
    gap_s: tuple[float, str] | None = None


def topic_findings(node: Node, stream: Stream, domain: int, pace: Pace) -> list[Finding]:
    """Judge what came on one topic; `domain` is the graph's."""
    source = stream.source
    what = _called(source)
    faults: Iterator[Finding]
    if not stream.arrivals_s:
        faults = iter([_silence(node, stream, what)])
    else:
        bad = partial(problem, AREA, what)
        faults = (
            found
            for judge in (_clock, _content, partial(pace_findings, pace=pace))
            for found in judge(stream, bad)
        )
    found = list(faults)
    if isinstance(source, RobotCamera) and source.type == 'raw':
        found += _profile(node, stream, what, domain)
    if isinstance(source, JointStateTopic) and (two := several_publishers(node, stream.topic)):
        found.append(
            note(AREA, what, two, 'one joint from two publishers stops the robot: end one of them')
        )
    if any(one.level == 'problem' for one in found):
        return found
    return [ok(AREA, what, _describe(node, stream)), *found]


def _called(source: Source) -> str:
    if isinstance(source, RobotCamera):
        return f'camera {source.name}'.strip()
    if isinstance(source, LeaderButton):
        return 'leader button'
    return 'leader' if isinstance(source, RobotLeader) else 'joint states'


def _driver(source: Source) -> str:
    return _JOY if isinstance(source, LeaderButton) else _DRIVER


def _describe(node: Node, stream: Stream) -> str:
    infos = node.get_publishers_info_by_topic(stream.topic)
    offered = {one.qos_profile.reliability.name.lower().replace('_', ' ') for one in infos}
    parts = [f'{stream.topic} [{stream.kind}]', f'{stream.rate_hz:.1f} a second']
    if stream.age_s is not None:
        parts.append(f'{stream.age_s * 1e3:.0f} ms old')
    if isinstance(stream.source, RobotCamera):
        message = stream.newest
        if isinstance(message, IMAGE_TYPES['raw']):
            parts.append(f'{message.width}x{message.height} {describe_encoding(message)}')
    if offered:
        names = describe_publishers(node, publisher_names(node, stream.topic, 0))
        parts.append(f'{" and ".join(sorted(offered))} from {names}')
    return ', '.join(parts)


def _silence(node: Node, stream: Stream, what: str) -> Finding:
    images = [type_name(one) for one in IMAGE_TYPES.values()]
    near = images if stream.kind in images else [stream.kind]
    if why := why_silent(node, stream.topic, stream.kind, stream.qos, near):
        where = _FIELDS[type(stream.source)]
        mend = f'mend topic, type or reliability in {where} of the robot file, or start the driver'
        leads = isinstance(stream.source, RobotLeader | LeaderButton)
        if leads and not node.count_publishers(stream.topic):
            # Leaders are plugged in when they are needed.
            return note(AREA, what, f'{stream.topic}: {why}: nobody can take over by it', mend)
        return problem(AREA, what, f'{stream.topic}: {why}', mend)
    names = describe_publishers(node, publisher_names(node, stream.topic, 0))
    text = f'{stream.topic}: nothing comes, though {names} publishes'
    return problem(AREA, what, text, _driver(stream.source))


_Judge = Callable[[str, str], Finding]


def _clock(stream: Stream, bad: _Judge) -> Iterator[Finding]:
    if isinstance(stream.source, LeaderButton) or stream.source.stamp == 'receive':
        return
    if stream.unstamped:
        yield bad(f'{stream.topic}: messages without a stamp', OWN_CLOCK)
        return
    age_s = stream.age_s
    is_camera = isinstance(stream.source, RobotCamera)
    oldest_s = _OLDEST_FRAME_S if is_camera else OLDEST_STATE_S
    if age_s is None or -AHEAD_NS * 1e-9 <= age_s <= oldest_s:
        return
    off = f'{abs(age_s):.2f} s {"ago" if age_s > 0.0 else "ahead"}'
    sent_s = stream.sender_age_s
    whose = "its driver's stamps are off, its computer's clock is not"
    if sent_s is not None and abs(sent_s - age_s) < abs(age_s) / 2.0:
        whose = f"the sender's computer is {abs(sent_s):.2f} s off"
    yield bad(f'{stream.topic}: messages that come now are stamped {off}: {whose}', _CLOCKS)


def _content(stream: Stream, bad: _Judge) -> Iterator[Finding]:
    source = stream.source
    if isinstance(source, RobotCamera):
        try:
            check_image(
                stream.newest, width=source.width, height=source.height, encoding=source.encoding
            )
        except ImageError as error:
            text = str(error).partition('; mend')[0]
            yield bad(f'{stream.topic}: {text}', 'mend the driver, or the camera in the robot file')
    elif isinstance(source, LeaderButton):
        if source.number >= (there := len(stream.newest.buttons)):
            yield bad(
                f'{stream.topic}: it has {there} buttons, and number {source.number} is not one',
                'mend leader.button.number of the robot file; it counts from 0',
            )
    elif broken := [name for name, value in stream.names.items() if not math.isfinite(value)]:
        yield bad(f'{stream.topic}: no finite position of {", ".join(broken)}', _DRIVER)


def pace_findings(stream: Stream, bad: _Judge, pace: Pace) -> Iterator[Finding]:
    """Judge whether messages come often enough, to the end of the listening."""
    longest_s, then = pace.gap_s or (_OLDEST_FRAME_S, '')
    mend = _driver(stream.source)
    if stream.silent_s > max(longest_s, _STOPPED * stream.period_s):
        text = f'{stream.topic}: has stopped: nothing for the last {stream.silent_s:.1f} s'
        yield bad(text, mend)
        return
    if pace.gap_s is not None and stream.longest_gap_s > longest_s:
        yield bad(
            f'{stream.topic}: up to {stream.longest_gap_s:.2f} s between two messages '
            f'({stream.rate_hz:.1f} a second come), and {then} after {longest_s:g} s',
            f"raise the driver's rate; {mend}",
        )
    yield from _rate(stream, bad, pace.rate_hz)


def _rate(stream: Stream, bad: _Judge, expected_hz: tuple[float, str] | None) -> Iterator[Finding]:
    lost = stream.lost_share
    if lost > _LOST:
        yield bad(
            f'{stream.topic}: {lost:.0%} of the messages are lost on their way '
            f'({stream.rate_hz:.1f} a second come)',
            f'{_PROFILE}; from another computer take compressed images',
        )
    if expected_hz is None or stream.rate_hz >= _SLOW * expected_hz[0]:
        return
    rate_hz, says = expected_hz
    sent_hz = stream.rate_hz / (1.0 - lost)
    if lost > _LOST and sent_hz >= _SLOW * rate_hz:
        return
    yield bad(
        f'{stream.topic}: {sent_hz:.1f} frames a second, and {says} {rate_hz:g}',
        "a dark scene's long exposure, USB bandwidth or the driver's frame rate; where it is "
        'meant, give the camera this rate_hz in the robot file',
    )


def _profile(node: Node, stream: Stream, what: str, domain: int) -> Iterator[Finding]:
    """Look at how the drivers of large images were started, where they run on this machine."""
    message = stream.newest
    if message is not None and len(message.data) < _ONE_PIECE:
        return
    started: Mapping[str, str] | None
    for info in node.get_publishers_info_by_topic(stream.topic):
        started = environment_of(info, domain)
        if started is not None and lacks_profile(started):
            yield problem(
                AREA,
                what,
                f'{stream.topic}: {_node_of(info)} was started without the profile for large '
                'images: Fast DDS gives it 512 KiB of shared memory, and frames are lost',
                _PROFILE,
            )


def _node_of(info: TopicEndpointInfo) -> str:
    return f'{info.node_namespace.rstrip("/")}/{info.node_name}'
