"""One line that says how the session is going; overwritten on a terminal, repeated elsewhere."""

from __future__ import annotations

import shutil
import sys
import time

from vla_tabletop.demo.console import say
from vla_tabletop.demo.telemetry import Telemetry

_TERMINAL_PERIOD_S = 0.2
_PLAIN_PERIOD_S = 2.0


class StatusLine:
    """Shows a session's progress on standard output.

    Args:
        telemetry: telemetry so far.
        seconds: duration that the session shall take.
        begun_s: steady time of its beginning.
    """

    def __init__(self, telemetry: Telemetry, seconds: float, begun_s: float) -> None:
        self._telemetry = telemetry
        self._seconds = seconds
        self._begun_s = begun_s
        self._terminal = sys.stdout.isatty()
        self._due_s = 0.0

    def show(self, instruction: str) -> None:
        """Print it, when it is time to."""
        now_s = time.monotonic()
        if now_s < self._due_s:
            return
        self._due_s = now_s + (_TERMINAL_PERIOD_S if self._terminal else _PLAIN_PERIOD_S)
        text = self.text(instruction, now_s - self._begun_s)
        if self._terminal:
            width = shutil.get_terminal_size().columns - 1
            say(f'\r\033[K{text[:width]}', end='')
        else:
            say(text)

    def end(self) -> None:
        """Leave the line standing."""
        if self._terminal:
            say('')

    def text(self, instruction: str, elapsed_s: float) -> str:
        """The line for now."""
        telemetry = self._telemetry
        control = telemetry.executor.get('control', {})
        p99_ms = telemetry.tick_p99_ms.rows
        newest = telemetry.inferences[-1] if telemetry.inferences else None
        parts = [
            f'{min(elapsed_s, self._seconds):5.1f} s of {self._seconds:g}',
            f'chunk {len(telemetry.inferences)}',
            f'replan {control.get("replan_interval", "-")}',
            f'cache {newest.cache if newest else "-"}',
            f'{newest.milliseconds["total"]:.0f} ms' if newest else '- ms',
            f'tick p99 {p99_ms[-1][0]:.2f} ms late' if p99_ms else 'tick p99 - ms late',
            f'starved {telemetry.total("starved_ticks")}',
            f'done {telemetry.completed} of {telemetry.judged}',
            f'{control.get("kind", "-")}: {instruction}',
        ]
        return ' | '.join(parts)
