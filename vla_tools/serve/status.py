"""State of a server: as JSON, as a page for people, for Prometheus."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from vla_runtime.files.quotes import counted
from vla_runtime.pages.page import render
from vla_tools.serve.served_policy import ServedPolicy
from vla_tools.serve.statistics import Metrics

_TEMPLATE = Path(__file__).with_name('status.html.j2')
METRICS_TYPE = CONTENT_TYPE_LATEST
# A server is asked for its sessions by people; a page of thousands helps none.
_SHOWN_SESSIONS = 100
_ID_SHOWN = 8


def status_of(policies: Sequence[ServedPolicy], started_s: float, draining: bool) -> dict[str, Any]:
    """Return the state of a server, of plain types. `started_s` is steady time.

    Policies that others have replaced come last; one of a name that is served again is numbered.

    Sessions are shown by the first letters of their names: a whole name is what a robot comes back
    with.
    """
    states: dict[str, Any] = {}
    for served in policies:
        same = sum(name.split(' (')[0] == served.name for name in states)
        states[f'{served.name} ({same + 1})' if same else served.name] = _policy(served)
    return {
        'ready': not draining and all(served.is_ready for served in policies),
        'draining': draining,
        'up_s': round(time.monotonic() - started_s, 1),
        'policies': states,
    }


def _policy(served: ServedPolicy) -> dict[str, Any]:
    sessions, now_s = served.sessions.all, time.monotonic()
    keys = ('policy', 'family', 'bundle_sha256', 'backend', 'device', 'precision')
    return {
        **{key: served.metadata[key] for key in (*keys, 'batch_exact', 'batch_bound', 'max_batch')},
        'batches_are': served.why_batches,
        'session_bytes': served.session_bytes,
        'ready': served.is_ready,
        'queued': served.queued,
        'connected': len(served.sessions.connected),
        'kept': len(sessions) - len(served.sessions.connected),
        'sessions': [
            {
                'session': session.name[:_ID_SHOWN],
                'connected': session.connected,
                'requests': session.requests,
                'faults': session.faults,
                'age_s': round(now_s - session.opened_s, 1),
            }
            for session in sessions[:_SHOWN_SESSIONS]
        ],
        **served.statistics.report(),
    }


def status_page(status: Mapping[str, Any]) -> str:
    """Return the page of a state."""
    policies = {
        name: {**one, 'sentence': _sentence(one)} for name, one in status['policies'].items()
    }
    return render(_TEMPLATE, title='Policy server', status=status, policies=policies)


def _sentence(policy: Mapping[str, Any]) -> str:
    sessions = counted(policy['connected'], 'robot')
    return (
        f'{sessions} connected, {policy["kept"]} kept, {policy["queued"]} waiting; '
        f'{counted(policy["answers"], "answer")}, {counted(policy["faults"], "fault")}'
    )


def metrics_text(metrics: Metrics, policies: Sequence[ServedPolicy]) -> bytes:
    """Return all metrics in Prometheus's text format; policies of one name are one there."""
    sessions: Counter[tuple[str, str]] = Counter()
    queued: Counter[str] = Counter()
    for served in policies:
        connected = len(served.sessions.connected)
        sessions[served.name, 'connected'] += connected
        sessions[served.name, 'kept'] += len(served.sessions) - connected
        queued[served.name] += served.queued
    # A policy that has gone leaves no last number behind.
    metrics.sessions.clear()
    metrics.queued.clear()
    for labels, count in sessions.items():
        metrics.sessions.labels(*labels).set(count)
    for name, count in queued.items():
        metrics.queued.labels(name).set(count)
    return generate_latest(metrics.registry)
