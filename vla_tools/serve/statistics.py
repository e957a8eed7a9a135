"""Counts and times of one served policy: for the status page and for Prometheus."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from vla_runtime.types import CacheReport, Reuse
from vla_tools.serve.batcher import Batched

# Answers whose times are kept for percentiles.
_KEPT = 2000
_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_BATCHES = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32)


class Metrics:
    """What Prometheus reads, of all policies of a server."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        name = ['policy']
        self.answers = Counter(
            'vla_answers', 'chunks that were returned', name, registry=self.registry
        )
        self.faults = Counter(
            'vla_faults', 'requests that were refused or failed', name, registry=self.registry
        )
        self.cached = Counter(
            'vla_prefixes',
            'prefixes by what the cache did: hit, reused, miss, off',
            ['policy', 'outcome'],
            registry=self.registry,
        )
        self.seconds = Histogram(
            'vla_answer_seconds',
            'time from a request to its answer',
            name,
            registry=self.registry,
            buckets=_SECONDS,
        )
        self.batch = Histogram(
            'vla_batch_requests',
            'requests of the batch that an answer was in',
            name,
            registry=self.registry,
            buckets=_BATCHES,
        )
        self.sessions = Gauge(
            'vla_sessions', 'sessions by state', ['policy', 'state'], registry=self.registry
        )
        self.queued = Gauge(
            'vla_queued', 'requests that wait for a batch', name, registry=self.registry
        )


class PolicyStatistics:
    """What happened to the requests of one policy since the server started."""

    def __init__(self, policy: str, metrics: Metrics) -> None:
        self._answers, self._faults = metrics.answers.labels(policy), metrics.faults.labels(policy)
        self._seconds, self._batch = metrics.seconds.labels(policy), metrics.batch.labels(policy)
        self._cached = {one.value: metrics.cached.labels(policy, one.value) for one in Reuse}
        self.answers = self.faults = 0
        self.cache: dict[str, int] = {}
        self.batches: dict[int, int] = {}
        self._total_ms: deque[float] = deque(maxlen=_KEPT)
        self._wait_ms: deque[float] = deque(maxlen=_KEPT)
        self._run_ms: deque[float] = deque(maxlen=_KEPT)

    def count(self, found: Batched, total_ms: float) -> None:
        """Count an answer, `total_ms` after its request."""
        self.answers += 1
        together = found.inference[1].together
        self.batches[together] = self.batches.get(together, 0) + 1
        outcome = _outcome(found.inference[1].cache)
        self.cache[outcome] = self.cache.get(outcome, 0) + 1
        self._total_ms.append(total_ms)
        self._wait_ms.append(found.wait_ms)
        self._run_ms.append(found.run_ms)
        self._answers.inc()
        self._cached[outcome].inc()
        self._seconds.observe(total_ms * 1e-3)
        self._batch.observe(together)

    def count_fault(self) -> None:
        """Count a request that was refused or failed."""
        self.faults += 1
        self._faults.inc()

    def report(self) -> dict[str, Any]:
        """Return counts, and percentiles of the last answers in milliseconds, of plain types."""
        return {
            'answers': self.answers,
            'faults': self.faults,
            'batches': {str(size): count for size, count in sorted(self.batches.items())},
            'cache': dict(sorted(self.cache.items())),
            'total_ms': _percentiles(self._total_ms),
            'wait_ms': _percentiles(self._wait_ms),
            'run_ms': _percentiles(self._run_ms),
        }


def _outcome(report: CacheReport) -> str:
    """Return one word for all prefixes of an inference: a hit where all are."""
    words = {outcome.reuse.value for outcome in report.prefixes}
    return words.pop() if len(words) == 1 else 'miss'


def _percentiles(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    p50, p99 = np.percentile(np.array(values), [50, 99])
    return {'p50': float(p50), 'p99': float(p99)}
