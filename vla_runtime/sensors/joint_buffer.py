"""The last positions of every joint that the policy's state is made of, mapped by name.

Pure: times come in as integer nanoseconds. Joints may come on several topics, and some of them in a
message, so every joint has samples of its own.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import pi

from vla_runtime.execution.state import FURTHEST, UNSTAMPED, clock_hint
from vla_runtime.files.quotes import one_line
from vla_runtime.sensors.future_stamp import describe_ahead, describe_future, old_hint

# Ten seconds (the longest `max_observation_age_s`) of a 1 kHz driver.
_DEPTH = 10_240
_SEEN_NAMES = 32


@dataclass(frozen=True)
class JointSource:
    """Topic and joint of one state number; `continuous`: an angle in rad without end stops."""

    topic: str
    joint: str
    continuous: bool = False


class JointBuffer:
    """Samples of one joint, oldest first, with strictly increasing stamps."""

    def __init__(self, source: JointSource) -> None:
        self.source = source
        self.samples: deque[tuple[int, float]] = deque(maxlen=_DEPTH)
        # Why the latest message gave no sample; None when it did.
        self.fault: str | None = None
        self.last_ns: int | None = None

    def clear(self) -> None:
        self.samples.clear()
        self.fault = None
        self.last_ns = None

    def add(self, stamp_ns: int, value: float) -> None:
        if self.last_ns is not None and stamp_ns <= self.last_ns:
            step_s = (self.last_ns - stamp_ns) * 1e-9
            self.fault = f'stamps do not advance (by {step_s:.3f} s back in time)'
            return
        # Not-a-number is not within anything.
        if not abs(value) <= FURTHEST:
            self.fault = f'its position is {value:g}'
            return
        self.last_ns = stamp_ns
        self.fault = None
        self.samples.append((stamp_ns, value))

    def at(self, stamp_ns: int, tolerance_ns: int, max_gap_ns: int) -> tuple[int, float] | str:
        """Return the joint at a time: interpolated between two samples, or held after the last one.

        Args:
            stamp_ns: the time asked for; the buffer must not be empty.
            tolerance_ns: time before the first sample for which the first one still counts.
            max_gap_ns: longest span that is interpolated or held over.

        Returns:
            Stamp of the newest sample used and the value, or why there is none.
        """
        after: tuple[int, float] | None = None
        for sample in reversed(self.samples):
            if sample[0] <= stamp_ns:
                return self._between(sample, after, stamp_ns, max_gap_ns)
            after = sample
        assert after is not None
        early_ns = after[0] - stamp_ns
        if early_ns <= tolerance_ns:
            return after
        return f'its first position is {early_ns * 1e-9:.3f} s newer than the frames'

    def _between(
        self,
        before: tuple[int, float],
        after: tuple[int, float] | None,
        stamp_ns: int,
        max_gap_ns: int,
    ) -> tuple[int, float] | str:
        if before[0] == stamp_ns:
            return before
        gap_ns = (after[0] if after is not None else stamp_ns) - before[0]
        if gap_ns > max_gap_ns:
            return f'there are no positions for {gap_ns * 1e-9:.3f} s around the frames'
        if after is None:
            return before
        fraction = (stamp_ns - before[0]) / gap_ns
        way = after[1] - before[1]
        if self.source.continuous:
            way = (way + pi) % (2.0 * pi) - pi
        return after[0], before[1] + fraction * way


class JointTopic:
    """One joint-state topic: its joints, and the names that were seen on it.

    Attributes:
        received, refused: counts of messages, and of those that could not be used.
        fault: why the latest message was refused; None when it was not.
        ahead: description of a latest stamp that lies ahead of the clock; None when it does not.
        silence: why no message can come, from the graph; '' where one can.
    """

    def __init__(self, name: str, joints: Sequence[JointBuffer]) -> None:
        self.name = name
        self.joints = tuple(joints)
        self.received = 0
        self.refused = 0
        self.fault: str | None = None
        self.ahead: str | None = None
        self.silence = ''
        self._by_name: dict[str, list[JointBuffer]] = {}
        for joint in joints:
            self._by_name.setdefault(joint.source.joint, []).append(joint)
        self._seen: dict[str, None] = {}
        self._latest: Sequence[str] = ()
        self._latest_ns = 0
        self._arrived_ns = 0

    def clear(self) -> None:
        self.fault = self.ahead = None
        self._seen.clear()
        self._latest, self._latest_ns = (), 0
        for joint in self.joints:
            joint.clear()

    def add(
        self,
        names: Sequence[str],
        positions: Sequence[float],
        stamp_ns: int,
        now_ns: int,
        max_age_ns: int,
    ) -> bool:
        """Take one message; return whether its header and shape were right."""
        self.received += 1
        age_ns = now_ns - stamp_ns
        self.fault = self.ahead = None
        if stamp_ns == 0:
            self.fault = UNSTAMPED
        elif age_ns < -max_age_ns:
            self.fault = describe_future(-age_ns * 1e-9)
        elif len(positions) != len(names):
            self.fault = f'position has {len(positions)} numbers for {len(names)} names'
        elif twice := self._named_twice(names):
            self.fault = f"the message names '{twice}' twice; mend the node that publishes it"
        if self.fault is not None:
            self.refused += 1
            return False
        self.ahead = describe_ahead(-age_ns, 'and frames are paired with older positions')
        self._latest, self._latest_ns, self._arrived_ns = names, stamp_ns, now_ns
        for name, position in zip(names, positions, strict=True):
            if len(self._seen) < _SEEN_NAMES:
                self._seen[name] = None
            for joint in self._by_name.get(name, ()):
                joint.add(stamp_ns, position)
        return True

    def _named_twice(self, names: Sequence[str]) -> str | None:
        if len(set(names)) == len(names):
            return None
        mine = [name for name in names if name in self._by_name]
        return next((name for name, count in Counter(mine).items() if count > 1), None)

    def expire(self, now_ns: int, max_age_ns: int) -> None:
        """Drop samples too old to be used; the last one before the limit stays to start from."""
        for joint in self.joints:
            samples = joint.samples
            while len(samples) > 1 and now_ns - samples[1][0] > max_age_ns:
                samples.popleft()

    def why_not(self, joint: JointBuffer, now_ns: int, max_age_ns: int) -> str | None:
        name, last_ns = joint.source.joint, joint.last_ns
        if last_ns is not None and joint.samples and now_ns - last_ns <= max_age_ns:
            return None
        if self.fault is not None:
            return f'{self.name}: {self.fault}'
        silent_ns = now_ns - self._latest_ns
        # By their stamps, whichever way they went: what is wrong with all joints is said once.
        if joint.fault is not None and (last_ns is None or silent_ns <= max_age_ns):
            return f"joint '{name}' ({self.name}): {joint.fault}"
        if not self._seen and self._latest_ns:
            return f'{self.name}: its messages name no joint; mend the node that publishes them'
        if not self._seen:
            return f'no joint states yet on {self.name}{self._why()}'
        if last_ns is None:
            seen = one_line(', '.join(self._seen), 300) or 'none'
            return (
                f"joint '{name}' is not in {self.name} (seen: {seen}); mend the joint's name in "
                'the robot file, or the driver'
            )
        limit = f'limit {max_age_ns * 1e-9:g} s'
        if silent_ns > max_age_ns:
            # The same for all of the topic's joints: a status says it once.
            silent_s = silent_ns * 1e-9
            came = now_ns - self._arrived_ns <= max_age_ns
            hint = f'; they come all the time{old_hint(silent_s)}' if came else clock_hint(silent_s)
            text = f'{self.name}: last joint states are {silent_s:.2f} s old, {limit}{hint}'
            return text + self._why()
        text = (
            f"joint '{name}' ({self.name}): last position is {(now_ns - last_ns) * 1e-9:.2f} s "
            f'old, {limit}'
        )
        if name not in self._latest:
            latest = one_line(', '.join(self._latest), 300) or 'no joint at all'
            text += f'; messages still come, without it (with: {latest})'
        return text

    def _why(self) -> str:
        return f': {self.silence}' if self.silence else ''
