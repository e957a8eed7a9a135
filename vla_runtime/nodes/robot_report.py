"""What the nodes in a graph say, put together: does each robot move, and if not, why.

A robot is right whose executor runs or waits for `~/start` alone, and whose policy misses nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from vla_runtime.execution.command import Reason
from vla_runtime.nodes.graph_faults import NOTHING_THERE
from vla_runtime.nodes.polled_topics import HeardItem
from vla_runtime.nodes.twins import ITEM, Claim, read_claim

# Exit codes of `vla_runtime status`.
RIGHT, WRONG, NOTHING = 0, 1, 2
_LEVELS = ('ok', 'warning', 'error', 'stale')
_WHY, _MESSAGES = 'docs/howto/why_stopped.md', 'docs/reference/messages.md'
# Holds of a robot that goes on with the next answer.
_MOMENTS = ('waiting_for_chunk', 'synchronous_wait')
# Items whose warning keeps a robot from moving as it should.
_SERIOUS = ('control', 'observation', 'requests')
# What a person looks for first.
_ORDER = ('control', 'observation', 'inference', 'joint states')
# The slowest node says everything once a second.
_OLD_S = 1.5
_SECOND_MS = 1e3
_NO_CHUNK = f'{_MESSAGES}#no-chunk-comes'
_DIED = 'docs/howto/launch.md#when-a-node-has-died'
_PERSON = f'{_WHY}#a-person-has-to-act'
_BY_ITSELF = f'{_WHY}#the-robot-goes-on-by-itself'
_NO_MOTION = f'{_WHY}#no-reason-and-no-motion'
_REMEDIES: dict[str, str] = {
    Reason.TRACKING: _NO_MOTION,
    Reason.OVERRUN: _BY_ITSELF,
    Reason.APPROACHING: _NO_MOTION,
    Reason.LEADING: _NO_MOTION,
    Reason.BRAKING: _NO_MOTION,
    Reason.NOT_STARTED: _PERSON,
    Reason.STOPPED: _PERSON,
    Reason.PAUSED: _PERSON,
    Reason.RELEASED: _PERSON,
    Reason.WAITING_FOR_CHUNK: _NO_CHUNK,
    Reason.SYNCHRONOUS_WAIT: _NO_CHUNK,
    Reason.SPEED_SCALED_TO_ZERO: _BY_ITSELF,
    Reason.STARVED: _NO_CHUNK,
    Reason.STATE_MISSING: _BY_ITSELF,
    Reason.STATE_STALE: _BY_ITSELF,
    Reason.STATE_FROM_FUTURE: _BY_ITSELF,
    Reason.STATE_NOT_FINITE: _BY_ITSELF,
    Reason.STATE_IMPLAUSIBLE: _BY_ITSELF,
    Reason.STATE_DOUBLED: _PERSON,
    Reason.TRACKING_ERROR: _PERSON,
    Reason.STEP_FROM_MEASURED: _BY_ITSELF,
    Reason.APPROACH_TIMEOUT: _PERSON,
    Reason.TICK_LATE: _BY_ITSELF,
    Reason.CLOCK_JUMP: _BY_ITSELF,
    Reason.CLOCK_STOPPED: _BY_ITSELF,
    Reason.CLOCK_INVALID: _BY_ITSELF,
    Reason.CLAMP_LATCH: _PERSON,
    Reason.CONTROLLER: 'docs/howto/ros2_control.md#what-the-executor-finds-out',
    Reason.INTERNAL_ERROR: _PERSON,
}
_NO_POLICY = 'no policy node here'


@dataclass
class NodeReport:
    """One node; its `claim` is None where it is in the graph and says nothing.

    `items` are lines of its status, the most important first.
    """

    name: str
    claim: Claim | None
    items: list[HeardItem] = field(default_factory=list)

    def item(self, name: str) -> HeardItem | None:
        return next((item for item in self.items if item.item == name), None)

    @property
    def is_executor(self) -> bool:
        return self.item('control') is not None

    @property
    def may_answer(self) -> bool:
        """Whether it is a policy node, or may be one that is not active yet."""
        if self.claim is None or self.item('observation') is not None:
            return True
        return not self.is_executor and self.claim.lifecycle != 'active'

    def problems(self) -> Iterator[HeardItem]:
        for item in self.items:
            if item.level > 1 or (item.level and item.item in _SERIOUS):
                yield item


@dataclass
class RobotReport:
    """The nodes of one namespace, given by its full name; the executor is first."""

    namespace: str
    nodes: list[NodeReport]

    @property
    def executor(self) -> NodeReport | None:
        """The executor; of several the one that is furthest."""
        found = [
            (node.claim.order, index, node)
            for index, node in enumerate(self.nodes)
            if node.claim is not None and node.is_executor
        ]
        return min(found)[2] if found else None

    @property
    def is_moving(self) -> bool:
        """Whether the robot is commanded along a plan, or to where one begins."""
        return self._value('kind') in ('track', 'approach', 'lead')

    @property
    def is_paused(self) -> bool:
        """Whether nothing but a pause keeps the robot from moving."""
        executor = self.executor
        control = None if executor is None else executor.item('control')
        if control is None or control.level or self._value('reason') != Reason.PAUSED:
            return False
        return self.why() == control.text

    def why(self) -> str:
        """Return why the robot does not move, or not as it should; '' where nothing is wrong."""
        executor = self.executor
        control = None if executor is None else executor.item('control')
        if control is None:
            return 'no executor node says anything in this namespace'
        mode, reason = control.values.get('mode'), control.values.get('reason', '')
        if control.level:
            # A robot that runs has asked, and says itself that nobody answers.
            is_told = mode == 'running' or not self._lacks_policy
            return control.text if is_told else f'{control.text}; {_NO_POLICY}'
        if self._lacks_policy:
            begins = 'not started; ' if mode == 'idle' else ''
            return f'{begins}{_NO_POLICY}'
        names = [node.name for node in self.nodes]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            return f'two nodes have one name, {", ".join(twice)}: end one of them'
        problems = [
            f'{node.name}, {item.item}: {item.text}'
            for node in self.nodes
            for item in node.problems()
        ]
        silent = [f'{node.name} says nothing' for node in self.nodes if node.claim is None]
        late = [
            f'{node.name} is {node.claim.lifecycle}'
            for node in self.nodes
            if node.claim is not None and node.claim.lifecycle != 'active' and node.may_answer
        ]
        if problems or silent or late:
            return '; '.join([*problems, *silent, *late])
        is_held = control.values.get('kind') == 'hold' and reason not in _MOMENTS
        if mode == 'inactive' or (mode == 'running' and is_held):
            return control.text
        return ''

    def state(self) -> str:
        mode = self._value('mode')
        if self.is_moving:
            return 'moving'
        if mode == 'running':
            return 'held'
        if mode in ('idle', 'stopped'):
            return 'not started' if self.why() else 'ready: call ~/start'
        return 'not active'

    def remedy(self) -> str:
        if not self.why():
            return ''
        executor = self.executor
        if executor is None or self._value('mode') == 'inactive':
            return _DIED
        refused, reason = self._value('start_refused'), self._value('reason')
        if refused.startswith(NOTHING_THERE):
            return f'{_WHY}#nothing-in-the-graph'
        if self._value('policy_waits') and not refused:
            return _NO_CHUNK
        if refused and reason == Reason.NOT_STARTED:
            return f'{_WHY}#start-is-refused'
        if self._lacks_policy:
            return _DIED
        return _REMEDIES.get(reason, _WHY)

    @property
    def _lacks_policy(self) -> bool:
        """Whether no node answers the executor: none here, and none that publishes its chunks."""
        executor = self.executor
        if executor is None or self._value('mode') == 'inactive':
            return False
        chunks = executor.item('chunks')
        publishers = '0' if chunks is None else chunks.values.get('publishers', '0')
        return publishers == '0' and not any(node.may_answer for node in self.nodes)

    def _value(self, key: str) -> str:
        executor = self.executor
        control = None if executor is None else executor.item('control')
        return '' if control is None else control.values.get(key, '')

    def lines(self, now_s: float) -> list[str]:
        why, state = self.why(), self.state()
        if state == 'held' and not why and self.executor is not None:
            why = next(item.text for item in self.executor.items if item.item == 'control')
        headline = f'{state}; {why}' if why and self.is_moving else why or state
        lines = [f'{self.namespace or "/"}: {headline}']
        refused = self._value('start_refused')
        if refused and '~/start' not in headline:
            lines.append(f'  ~/start would be refused: {refused}')
        if ages := self._ages():
            lines.append(f'  ages: {ages}')
        for node in self.nodes:
            lines.append(f'  {node.claim.describe() if node.claim else _silent(node.name)}')
            # What the first line has said already.
            items = [one for one in node.items if one.item != ITEM and not _is_said(one, why)]
            width = max((len(one.item) for one in items), default=0)
            lines += [f'    {one.item:<{width}}  {_line_of(one, now_s)}' for one in items]
        if remedy := self.remedy():
            lines.append(f'  what to do: {remedy}')
        return lines

    def _ages(self) -> str:
        found = {}
        for node in self.nodes:
            for item in node.items:
                for key, value in item.values.items():
                    if key.startswith('age_ms.') and value:
                        found[key.removeprefix('age_ms.')] = value
                    elif key == 'age_ms' and value:
                        found[item.item] = value
        observation = self._value('observation_age_ms')
        if observation and self.is_moving:
            found['observation behind the action'] = observation
        return ', '.join(f'{what} {_age(float(ms))}' for what, ms in found.items())

    def as_json(self, now_s: float) -> dict[str, Any]:
        """Return everything, of plain types."""
        return {
            'namespace': self.namespace or '/',
            'state': self.state(),
            'moving': self.is_moving,
            'mode': self._value('mode'),
            'reason': self._value('reason'),
            'why': self.why(),
            'start_refused': self._value('start_refused'),
            'policy_waits': self._value('policy_waits'),
            'remedy': self.remedy(),
            'nodes': [
                {
                    'name': node.name,
                    'process': node.claim.process if node.claim else '',
                    'lifecycle': node.claim.lifecycle if node.claim else '',
                    'items': [
                        {
                            'item': item.item,
                            'level': _LEVELS[item.level],
                            'text': item.text,
                            'heard_s_ago': round(now_s - item.heard_s, 3),
                            'values': dict(item.values),
                        }
                        for item in node.items
                    ],
                }
                for node in self.nodes
            ],
        }


def robot_reports(
    heard: Iterable[HeardItem], silent: Iterable[str], namespace: str | None = None
) -> list[RobotReport]:
    """Put together what was heard.

    `silent` are full names of this package's nodes that are in the graph and were not heard. A
    namespace limits the answer to one robot.
    """
    items = sorted(heard, key=lambda item: item.item)
    nodes = []
    for who in items:
        claim = read_claim(who) if who.item == ITEM else None
        if claim is None:
            continue
        # News come without the mark that tells two nodes of one name apart.
        marks = ('', who.since_ns)
        own = [one for one in items if one.node == who.node and one.since_ns in marks]
        newest = {one.item: one for one in sorted(own, key=lambda one: one.heard_s)}
        nodes.append(NodeReport(who.node, claim, sorted(newest.values(), key=_importance)))
    known = {node.name for node in nodes}
    nodes += [NodeReport(name, None) for name in sorted(silent) if name not in known]
    robots: dict[str, list[NodeReport]] = {}
    for node in nodes:
        robots.setdefault(node.name.rpartition('/')[0], []).append(node)
    return [
        RobotReport(name, sorted(of, key=lambda node: not node.is_executor))
        for name, of in sorted(robots.items())
        if namespace in (None, name)
    ]


def exit_code(robots: Sequence[RobotReport]) -> int:
    if not robots:
        return NOTHING
    return WRONG if any(robot.why() for robot in robots) else RIGHT


def _importance(item: HeardItem) -> tuple[int, str]:
    rank = _ORDER.index(item.item) if item.item in _ORDER else len(_ORDER)
    return rank, item.item


def _line_of(item: HeardItem, now_s: float) -> str:
    level = '' if not item.level else f'{_LEVELS[item.level].upper()}: '
    old = f' ({now_s - item.heard_s:.1f} s ago)' if now_s - item.heard_s > _OLD_S else ''
    return f'{level}{item.text}{old}'


def _age(ms: float) -> str:
    return f'{ms:.0f} ms' if abs(ms) < _SECOND_MS else f'{ms / _SECOND_MS:.1f} s'


def _is_said(item: HeardItem, why: str) -> bool:
    return item.text == why or (item.item == 'control' and why.startswith(item.text))


def _silent(name: str) -> str:
    return (
        f'{name}: in the graph and says nothing: it loads a policy, hangs, or was killed in the '
        'last 20 s'
    )
