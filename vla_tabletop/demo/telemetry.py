"""Measurements of a session for its report, kept while it runs."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from vla_runtime.messages.trajectories import HandoverReport


@dataclass
class Series:
    """Growing samples: ROS times and rows of numbers."""

    times_ns: list[int] = field(default_factory=list)
    rows: list[list[float]] = field(default_factory=list)

    def add(self, time_ns: int, row: list[float]) -> None:
        self.times_ns.append(time_ns)
        self.rows.append(row)

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """(n,) times in ns and (n, columns) rows, as many as there are of both."""
        count = min(len(self.times_ns), len(self.rows))
        return np.array(self.times_ns[:count], dtype=np.int64), np.array(self.rows[:count])


@dataclass(frozen=True)
class Inference:
    """One line of the policy's report."""

    time_ns: int
    number: int
    milliseconds: dict[str, float]
    ages_ms: dict[str, float]
    overhead_ms: float
    cache: str
    beta: float
    denoise_steps: int


@dataclass(frozen=True)
class Thumbnail:
    """A JPEG of what a camera saw."""

    time_ns: int
    camera: str
    jpeg: bytes


# Outcome of an instruction that used up its time without the simulator judging it.
NO_VERDICT = 'no verdict in time'


@dataclass
class Attempt:
    """One instruction, from start to end; `outcome` stays empty if the demo ends first."""

    instruction: str
    seed: int
    start_ns: int
    end_ns: int = 0
    outcome: str = ''


@dataclass
class Telemetry:
    """Everything kept of one session.

    Attributes:
        measured: joint to positions.
        commanded: joint to positions.
        executor: values by condition of the executor.
        counters: executor counter to its value in each activation.
        resets: ROS times between which the simulator moved robot and blocks.
        refusals: the executor's reasons for refused chunks, each once.
    """

    measured: dict[str, Series] = field(default_factory=dict)
    commanded: dict[str, Series] = field(default_factory=dict)
    inferences: list[Inference] = field(default_factory=list)
    handovers: list[HandoverReport] = field(default_factory=list)
    thumbnails: list[Thumbnail] = field(default_factory=list)
    attempts: list[Attempt] = field(default_factory=list)
    executor: dict[str, dict[str, str]] = field(default_factory=dict)
    executor_reports: int = 0
    counters: dict[str, dict[str, int]] = field(default_factory=dict)
    tick_p99_ms: Series = field(default_factory=Series)
    resets: list[tuple[int, int]] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def total(self, counter: str) -> int:
        """A counter of the executor over the whole session; each activation restarts it."""
        return sum(self.counters.get(counter, {}).values())

    @property
    def refused(self) -> dict[str, int]:
        """Chunks that the executor refused, by its name of the reason, the most frequent first."""
        return self._totals('refused.')

    @property
    def limited(self) -> dict[str, int]:
        """Ticks in which a limit changed a command, by `JOINT.LIMIT`, the most frequent first."""
        return self._totals('limited.')

    def _totals(self, prefix: str) -> dict[str, int]:
        names = [name for name in self.counters if name.startswith(prefix)]
        totals = {name.removeprefix(prefix): self.total(name) for name in names}
        return dict(sorted(totals.items(), key=lambda item: -item[1]))

    @property
    def chunks(self) -> str:
        """Describe what became of the policy's answers."""
        return (
            f'{len(self.inferences)} sent by the policy, {self.total("received")} received by the '
            f'executor, {self.total("accepted")} accepted, {self.total("taken_over")} executed, '
            f'{self.total("late")} late'
        )

    @property
    def completed(self) -> int:
        """Instructions that were carried out."""
        return sum(attempt.outcome == 'success' for attempt in self.attempts)

    @property
    def judged(self) -> int:
        """Instructions that came to an end."""
        return sum(bool(attempt.outcome) for attempt in self.attempts)

    @property
    def score(self) -> str:
        """Describe how many instructions were completed."""
        text = f'{self.completed} of {self.judged} instructions completed'
        cut_off = len(self.attempts) - self.judged
        return f'{text}; {cut_off} cut off by the end' if cut_off else text
