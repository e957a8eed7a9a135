"""Takes from a session's messages what its report shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus
from sensor_msgs.msg import JointState

from vla_runtime.messages.diagnostics import values_of
from vla_runtime.messages.trajectories import read_handover, stamp_to_ns
from vla_runtime.nodes.recorder.topic_recorder import Listener
from vla_runtime.robot.schema import Robot, RobotOutput
from vla_tabletop.demo.telemetry import Inference, Series, Telemetry, Thumbnail

_COUNTERS = frozenset(
    {
        'requests', 'received', 'accepted', 'taken_over', 'late', 'clamped', 'steps',
        'starved_ticks', 'overrun_ticks', 'limited_ticks', 'late_ticks', 'ticks', 'sent',
    }
)  # fmt: skip


class TelemetryListener:
    """Gets messages from the recorder, so that bag and report agree."""

    def __init__(self, robot: Robot, telemetry: Telemetry, namespace: str) -> None:
        self._robot = robot
        self._executor = f'{namespace.rstrip("/")}/vla_executor: '
        self._telemetry = telemetry

    @property
    def listeners(self) -> dict[str, Listener]:
        """Topic to what takes its messages."""
        return {
            **{source.topic: self._on_joints for source in self._robot.joint_states},
            **{output.topic: self._commands(output) for output in self._robot.outputs},
            'vla_policy/report': self._on_inference,
            'vla_executor/report': self._on_handover,
            'tabletop/report': self._on_verdict,
            '/diagnostics': self._on_diagnostics,
        }

    def on_reduced(self, camera: str, stamp_ns: int, jpeg: bytes) -> None:
        """Take a reduced image."""
        self._telemetry.thumbnails.append(Thumbnail(stamp_ns, camera, jpeg))

    def _on_joints(self, message: JointState, _: int) -> None:
        stamp_ns = stamp_to_ns(message.header.stamp)
        for name, position in zip(message.name, message.position, strict=True):
            self._telemetry.measured.setdefault(name, Series()).add(stamp_ns, [position])

    def _commands(self, output: RobotOutput) -> Callable[[Any, int], None]:
        names = [self._robot.joint(name).in_messages for name in output.joints]

        def keep(message: Any, now_ns: int) -> None:
            for name, position in zip(names, _positions(output.kind, message), strict=True):
                self._telemetry.commanded.setdefault(name, Series()).add(now_ns, [position])

        return keep

    def _on_inference(self, message: DiagnosticArray, now_ns: int) -> None:
        for status in message.status:
            given = values_of(status)
            self._telemetry.inferences.append(
                Inference(
                    time_ns=now_ns,
                    number=int(given['number']),
                    milliseconds=_numbers(given, 'ms.'),
                    ages_ms=_numbers(given, 'age_ms.'),
                    overhead_ms=float(given['overhead_ms']),
                    cache=_cache(given),
                    beta=float(given['beta']),
                    denoise_steps=int(given['denoise_steps']),
                )
            )

    def _on_handover(self, message: DiagnosticArray, _: int) -> None:
        seams = (status for status in message.status if status.name.endswith(': seam'))
        self._telemetry.handovers += map(read_handover, seams)

    def _on_verdict(self, message: DiagnosticArray, now_ns: int) -> None:
        for status in message.status:
            given = values_of(status)
            for attempt in reversed(self._telemetry.attempts):
                if not attempt.outcome and attempt.instruction == given['instruction']:
                    attempt.end_ns = now_ns
                    attempt.outcome = given.get('outcome', 'unknown task')
                    break

    def _on_diagnostics(self, message: DiagnosticArray, now_ns: int) -> None:
        prefix = self._executor
        episode, is_executor = '', False
        for status in message.status:
            if not status.name.startswith(prefix):
                continue
            condition, is_executor = status.name.removeprefix(prefix), True
            given = values_of(status)
            self._telemetry.executor[condition] = {**given, 'text': status.message}
            episode = given.get('episode', episode)
            by_kind = {name for name in given if name.startswith(('refused.', 'limited.'))}
            for counter in (_COUNTERS & given.keys()) | by_kind:
                by_episode = self._telemetry.counters.setdefault(counter, {})
                by_episode[episode] = int(given[counter])
            why = given.get('newest_refusal', '')
            if why and why not in self._telemetry.refusals:
                self._telemetry.refusals.append(why)
            if condition == 'tick':
                self._telemetry.tick_p99_ms.add(now_ns, [float(given['late_p99_ms'])])
            if status.level == DiagnosticStatus.ERROR:
                self._note_problem(f'executor: {status.message}')
        # Last: whoever waits for it finds the counters.
        self._telemetry.executor_reports += is_executor

    def _note_problem(self, text: str) -> None:
        if text not in self._telemetry.problems:
            self._telemetry.problems.append(text)


def _positions(kind: str, message: Any) -> list[float]:
    if kind == 'joint_trajectory':
        return list(message.points[-1].positions)
    return list(message.data if kind == 'float64_multi_array' else message.position)


def _cache(given: dict[str, str]) -> str:
    """Describe what was reused: `vision 1 of 2, prefix miss`."""
    cameras = [word for key, word in given.items() if key.startswith('cache.camera.')]
    rows = given.get('cache.rows', 'off').split()
    if set(cameras) | set(rows) <= {'off'}:
        return 'off'
    return f'vision {cameras.count("hit")} of {len(cameras)}, prefix {" and ".join(rows)}'


def _numbers(given: dict[str, str], prefix: str) -> dict[str, float]:
    return {
        key.removeprefix(prefix): float(value)
        for key, value in given.items()
        if key.startswith(prefix)
    }
