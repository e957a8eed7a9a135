"""Who takes the robot's commands: controllers that are active, fit, and have one sender."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from rclpy.node import Node

from vla_runtime.nodes.doctor.findings import Finding, note, ok, problem
from vla_runtime.nodes.executor.controller_watch import ControllerWatch, Verdict, state_type
from vla_runtime.nodes.graph_faults import (
    describe_publishers,
    listener_names,
    publisher_names,
    type_name,
    why_without_subscribers,
)
from vla_runtime.nodes.output_types import MissingTypeError, message_type
from vla_runtime.nodes.polled_topics import PolledTopic, PolledTopics
from vla_runtime.nodes.qos import NEWEST
from vla_runtime.robot.match import MatchedOutput

AREA = 'controllers'
_THEN = ', then ~/start'


class Controllers:
    """Watches the controllers behind the outputs while the node is spun."""

    def __init__(self, node: Node, outputs: Sequence[MatchedOutput], *, use_sim_time: bool) -> None:
        self._node = node
        self._outputs = [(one, node.resolve_topic_name(one.output.topic)) for one in outputs]
        self._watch = ControllerWatch(
            node,
            self._outputs,
            None,
            use_sim_time=use_sim_time,
            now_ns=lambda: int(node.get_clock().now().nanoseconds),
        )
        self._topics = PolledTopics(node, 'controllers')
        self._states: list[PolledTopic] = []
        message = state_type()
        for one, topic in self._outputs:
            if one.output.kind == 'joint_trajectory' and message is not None:
                name = f'{topic.rpartition("/")[0]}/controller_state'
                self._states.append(self._topics.subscribe(message, name))
        # Positions by joint, as controllers measure them.
        self.feedback: dict[str, float] = {}

    def look(self) -> None:
        """Take what came; call many times a second."""
        self._watch.look(time.monotonic())
        for state in self._states:
            if (taken := state.take()) is not None:
                message = taken.message
                self.feedback.update(
                    zip(message.joint_names, message.feedback.positions, strict=False)
                )

    def findings(self) -> list[Finding]:
        verdicts = {one.topic: one for one in self._watch.verdicts}
        found: list[Finding] = []
        for one, topic in self._outputs:
            found += self._of_output(one, topic, verdicts.get(one.output.topic))
        if missing := self._watch.unwatched():
            text, _, mend = missing.partition(': sudo')
            found.append(note(AREA, 'packages', text, f'sudo{mend}'))
        return found

    def close(self) -> None:
        self._watch.close()
        self._topics.close()

    def _of_output(
        self, one: MatchedOutput, topic: str, verdict: Verdict | None
    ) -> Iterator[Finding]:
        output = one.output
        what = output.kind
        senders = list(self._senders(output.command_topic, what))
        if verdict is not None and verdict.refusal:
            text, _, mend = verdict.refusal.removesuffix(_THEN).partition(': ')
            yield problem(AREA, what, f'{topic}: {text}', mend or 'mend what is named')
        elif why := self._why_untaken(one, topic):
            yield problem(
                AREA,
                what,
                f'{topic}: {why}',
                'start the controller, or mend the topic of the output in the robot file (ros2 '
                f'topic info --verbose {topic}, ros2 control list_controllers)',
            )
        else:
            names = describe_publishers(self._node, listener_names(self._node, topic))
            who = f'taken by {names}' if names else 'served'
            if verdict is not None and verdict.active:
                who = f"'{verdict.name}' is active"
            yield ok(AREA, what, f'{topic}: {who}')
            if verdict is not None and verdict.warning:
                yield note(AREA, what, f'{topic}: {verdict.warning}')
        yield from senders

    def _why_untaken(self, one: MatchedOutput, topic: str) -> str:
        if one.output.is_action:
            served = self._node.count_publishers(f'{topic}/_action/status')
            return '' if served else 'no node serves this action'
        try:
            kind = type_name(message_type(one.output.kind))
        except MissingTypeError as error:
            return str(error)
        return why_without_subscribers(self._node, topic, kind, NEWEST, 0)

    def _senders(self, topic: str, what: str) -> Iterator[Finding]:
        names = [
            name
            for name in publisher_names(self._node, self._node.resolve_topic_name(topic), 0)
            if not name.endswith('/vla_executor')
        ]
        if names:
            yield note(
                AREA,
                what,
                f'{topic} has commands from {describe_publishers(self._node, names)}',
                'any other sender stops the executor: end it before ~/start, or name it in '
                'shared_with',
            )
