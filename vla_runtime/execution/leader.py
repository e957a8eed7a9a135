"""A leader: another arm, in a person's hands, whose joints the robot follows within its limits.

Invariants:
- what is followed is plausible: every joint, finite, stamped, in order, and near to the message
  before. A few messages that are not are left out; where they stay, or none comes, the leader is
  lost;
- it takes over where the command is. `offset` keeps the distance between leader and robot;
  `absolute` brings the robot to the leader's own position, slowly until each joint is there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from vla_runtime.execution.column_model import ColumnModel
from vla_runtime.execution.state import FURTHEST
from vla_runtime.files.field_error import FieldError

LeaderMode = Literal['offset', 'absolute']
Engage = Literal['service', 'button', 'motion']

_FULL_TURN = 2.0 * math.pi
# A hand goes no further from one message to the next: rad, and rad/s of the time between them, of
# which no more counts. So a glitch does not become plausible by waiting.
_JUMP, _HAND_SPEED, _LONGEST_NS = 0.1, 6.0, 100_000_000
# So many messages in a row that are near to each other, and far from those before, are no glitch.
_MOVED_AFTER = 3
# A stamp may be so far ahead of the ROS clock.
_AHEAD_NS = 50_000_000
# The way between two messages takes as long as they are apart, and at most so long.
_LONGEST_WAY_NS = 250_000_000
# So near to an absolute leader, as a share of `hold_follows`, the robot is there.
_THERE_SHARE = 0.2
# Engaged by motion: the way from its rest that begins, the way that counts as none, the time
# without any that ends.
_SETS_OUT, _STILL, _RESTS_NS = 0.08, 0.02, 1_000_000_000


@dataclass(frozen=True)
class LeaderParameters:
    """How a leader is followed.

    Attributes:
        columns: what each number of its messages leads.
        mode: `offset` or `absolute`; see the module.
        engage: what lets it take over beside `~/take_over`: nothing, a button that is held, or its
            own motion, until it rests.
        timeout_s: without a plausible message for so long it is lost.
    """

    columns: tuple[str, ...]
    mode: LeaderMode = 'offset'
    engage: Engage = 'service'
    timeout_s: float = 0.3

    def __post_init__(self) -> None:
        if not 0.02 <= self.timeout_s <= 2.0:
            raise FieldError('leader.timeout_s', f'{self.timeout_s:g} where 0.02 to 2 is expected')
        for name, words in (('mode', get_args(LeaderMode)), ('engage', get_args(Engage))):
            if getattr(self, name) not in words:
                raise FieldError(f'leader.{name}', f'expected one of {", ".join(words)}')


class Leader:
    """Newest plausible positions of a leader, and the way of the command that follows them.

    Arrays are (columns of the leader,), but for those that say otherwise.

    Args:
        parameters: None: there is no leader, and it never engages.

    Attributes:
        engaged: the robot follows it.
        refused: messages that were left out.
    """

    def __init__(self, model: ColumnModel, parameters: LeaderParameters | None) -> None:
        columns = model.columns
        self.parameters = parameters
        self._names = parameters.columns if parameters is not None else ()
        for name in self._names:
            if name not in columns.names:
                raise ValueError(f"leader: '{name}' is not commanded: {list(columns.names)} are")
        self._index = np.array([columns.names.index(name) for name in self._names], dtype=np.int64)
        if (columns.is_velocity | columns.in_rotation)[self._index].any():
            raise ValueError('leader: it leads the positions of joints alone')
        self._turns = columns.is_continuous[self._index]
        scale, grips = columns.scale[self._index], model.grips[self._index]
        # A trigger is pulled as fast as it likes.
        self._jump = np.where(grips, np.inf, _JUMP * scale)
        self._hand_speed = np.where(grips, np.inf, _HAND_SPEED * scale)
        self._still, self._sets_out = _STILL * scale, _SETS_OUT * scale
        self._lowest, self._highest = model.lowest[self._index], model.highest[self._index]
        self._approach_speed = model.approach_speed
        self._near = _THERE_SHARE * model.follows[self._index]
        count = len(self._names)
        self.engaged = False
        self.refused = 0
        self._fault = 'it has said nothing yet'
        self._moved = False
        self._last = np.full(count, np.nan)
        self._stamp_ns = 0
        # Those that are far from the last one, and near to each other.
        self._strange = np.zeros(count)
        self._strange_ns = self._strange_count = 0
        # Since when it has been where it is, and where it was at rest last.
        self._place, self._rest = np.zeros(count), np.zeros(count)
        self._still_ns = 0
        self.moves = False
        # It has given back, and takes over by its motion once it has rested.
        self._rests_first = False
        self._offset = np.zeros(count)
        self._from, self._to, self._now = (np.zeros(count) for _ in range(3))
        self._way_s = self._gone_s = 0.0
        self._heard_ns = 0
        self._speed = np.full(columns.count, np.inf)
        self._ask_s = -math.inf

    # ------------------------------------------------------------ what comes in

    def observe(self, positions: np.ndarray, stamp_ns: int, now_ros_ns: int) -> None:
        """Take the positions of one message, in the robot's units; bad ones are left out."""
        why = self._why_bad(positions, stamp_ns, now_ros_ns)
        if why:
            self.refused += 1
            self._fault = why
            return
        if stamp_ns <= self._stamp_ns:
            return
        values = np.asarray(positions, dtype=np.float64)
        if self._stamp_ns and self._is_fresh(now_ros_ns):
            values = self._unturned(values, self._last)
            if self._jumps(values, self._last, stamp_ns - self._stamp_ns):
                self._note_strange(values, stamp_ns)
                return
        self._accept(values, stamp_ns)

    def clear(self) -> None:
        """Forget the stamps so far, after a jump of the clock."""
        self._stamp_ns = self._strange_count = 0

    def _why_bad(self, positions: np.ndarray, stamp_ns: int, now_ros_ns: int) -> str:
        if len(positions) != len(self._names):
            return f'it has {len(positions)} positions for {len(self._names)} joints'
        if not (np.abs(positions) <= FURTHEST).all():
            worst = int(np.argmin(np.abs(positions) <= FURTHEST))
            return f"its '{self._names[worst]}' is not a number that a joint can have"
        if stamp_ns <= 0:
            return 'its messages have no stamp'
        if stamp_ns > now_ros_ns + _AHEAD_NS:
            return f'its messages are {(stamp_ns - now_ros_ns) * 1e-9:.3f} s in the future'
        return ''

    def _unturned(self, values: np.ndarray, near: np.ndarray) -> np.ndarray:
        """Count turns of angles without end so that they lie nearest to others."""
        turns = np.where(self._turns, np.round((near - values) / _FULL_TURN), 0.0)
        return values + turns * _FULL_TURN

    def _jumps(self, values: np.ndarray, before: np.ndarray, span_ns: int) -> bool:
        span_s = min(span_ns, _LONGEST_NS) * 1e-9
        return bool((np.abs(values - before) > self._jump + self._hand_speed * span_s).any())

    def _note_strange(self, values: np.ndarray, stamp_ns: int) -> None:
        self.refused += 1
        span_ns = stamp_ns - self._strange_ns
        follows = self._strange_count and not self._jumps(values, self._strange, span_ns)
        self._strange_count = self._strange_count + 1 if follows else 1
        self._strange, self._strange_ns = values, stamp_ns
        worst = int(np.argmax(np.abs(values - self._last) / self._jump))
        self._fault = (
            f"its '{self._names[worst]}' jumped from {self._last[worst]:.3g} to {values[worst]:.3g}"
        )
        if self._strange_count >= _MOVED_AFTER:
            self._moved, self._fault = True, f'{self._fault}, and stays there'
            self._accept(values, stamp_ns)

    def _accept(self, values: np.ndarray, stamp_ns: int) -> None:
        silent_ns = stamp_ns - self._stamp_ns
        begins = not self._stamp_ns or silent_ns > self._timeout_ns
        if begins and self.engaged and not self._moved:
            self._moved, self._fault = True, f'it said nothing for {silent_ns * 1e-9:.2f} s'
        if begins or self._moved:
            self._place, self._rest = values.copy(), values.copy()
            self._still_ns, self.moves = stamp_ns, False
        self._last, self._stamp_ns = values, stamp_ns
        self._strange_count = 0
        self._note_motion(values, stamp_ns)
        if not self.engaged:
            self._moved = False

    def _note_motion(self, values: np.ndarray, stamp_ns: int) -> None:
        """Note whether it sets out from its rest, or has come to rest."""
        if (np.abs(values - self._place) > self._still).any():
            self._place, self._still_ns = values.copy(), stamp_ns
        elif stamp_ns - self._still_ns >= _RESTS_NS:
            self._rest, self.moves, self._rests_first = values.copy(), False, False
        if not self._rests_first:
            self.moves |= bool((np.abs(values - self._rest) > self._sets_out).any())

    @property
    def _timeout_ns(self) -> int:
        return round(self.parameters.timeout_s * 1e9) if self.parameters is not None else 0

    def _is_fresh(self, now_ros_ns: int) -> bool:
        return 0 <= now_ros_ns - self._stamp_ns + _AHEAD_NS <= self._timeout_ns + _AHEAD_NS

    # ------------------------------------------------------------ taking over

    def why_lost(self, now_ros_ns: int) -> str:
        """Describe why it cannot be followed now; empty where it can."""
        if self.parameters is None:
            return "the robot file has no 'leader'"
        if self._moved:
            return self._fault
        if self._stamp_ns and self._is_fresh(now_ros_ns):
            return ''
        if not self._stamp_ns:
            return f'nothing of the leader can be used: {self._fault}'
        age_s = (now_ros_ns - self._stamp_ns) * 1e-9
        fault = f'; since then {self._fault}' if self._strange_count else ''
        return (
            f'the last usable message of the leader is {age_s:.2f} s old, at most '
            f'{self.parameters.timeout_s:g} s allowed (timeout_s){fault}'
        )

    def engage(self, setpoints: np.ndarray) -> None:
        """Take over where the command (all columns,) is."""
        assert self.parameters is not None
        here = setpoints[self._index]
        self.engaged, self._moved = True, False
        absolute = self.parameters.mode == 'absolute'
        self._last = self._unturned(self._last, here)
        self._offset = np.zeros_like(here) if absolute else here - self._last
        for way in (self._from, self._to, self._now):
            np.copyto(way, here)
        self._way_s = self._gone_s = 0.0
        self._heard_ns = self._stamp_ns if not absolute else 0
        self._speed[:] = np.inf
        if absolute:
            self._speed[self._index] = self._approach_speed[self._index]

    def disengage(self) -> None:
        self.engaged = self._moved = False

    def rest_first(self) -> None:
        """Let no motion take over before the leader has come to rest."""
        self.moves, self._rests_first = False, True

    def advance(
        self, dt_s: float, setpoints: np.ndarray, target: np.ndarray, velocity: np.ndarray
    ) -> np.ndarray:
        """Let time pass; return the largest speed of each column, (columns,).

        Messages come at another rate than ticks: the way to each takes as long as it is after the
        one before it, so that the command neither waits for the next one nor jumps to it.

        Args:
            setpoints, target, velocity: (columns,) last command, and what is wanted; the columns
                that are led are overwritten in the last two.
        """
        if self._stamp_ns != self._heard_ns:
            span_ns = min(self._stamp_ns - self._heard_ns, _LONGEST_WAY_NS)
            self._heard_ns = self._stamp_ns
            np.copyto(self._from, self._now)
            # What is beyond a limit is not wound up.
            np.clip(self._last + self._offset, self._lowest, self._highest, out=self._to)
            self._way_s, self._gone_s = max(span_ns * 1e-9, dt_s), 0.0
        self._gone_s += dt_s
        share = min(self._gone_s / self._way_s, 1.0) if self._way_s else 1.0
        np.copyto(self._now, self._from + share * (self._to - self._from))
        target[self._index] = self._now
        velocity[self._index] = (self._to - self._from) / self._way_s if 0.0 < share < 1.0 else 0.0
        there = np.abs(self._to - setpoints[self._index]) <= self._near
        self._speed[self._index[there]] = np.inf
        return self._speed

    def asks(self, now_s: float, every_s: float) -> bool:
        """Return whether to ask what the policy would do now: once in so long, steady clock."""
        if now_s - self._ask_s < every_s:
            return False
        self._ask_s = now_s
        return True
