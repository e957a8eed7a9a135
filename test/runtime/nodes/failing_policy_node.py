"""The policy node, whose first inferences fail in the middle of the work or at its very end, or
all of them until other settings were prepared, or which cannot prepare what was not configured.
"""

from __future__ import annotations

import itertools
import os
import sys
from concurrent.futures import Future

from vla_runtime.nodes.policy.node import main
from vla_runtime.nodes.policy.responder import Responder
from vla_runtime.policy import Policy

FAILURES = 3
_answer = Responder.answer
_calls = itertools.count()
_prepared: set[int | None] = set()


def answer(self: Responder, request, instruction, settings, *, now_ns):
    answered = _answer(self, request, instruction, settings, now_ns=now_ns)
    if not isinstance(answered, Future) or next(_calls) >= FAILURES:
        return answered
    if os.environ['FAILS'] == 'at once':
        raise RuntimeError('the GPU fell off the bus')
    failed: Future = Future()
    failed.set_exception(RuntimeError('the GPU fell off the bus'))
    return failed


def answer_prepared(self: Responder, request, instruction, settings, *, now_ns):
    if settings.denoise_steps is None:
        raise RuntimeError('the GPU fell off the bus')
    return _answer(self, request, instruction, settings, now_ns=now_ns)


def is_prepared(self: Policy, settings) -> bool:
    return settings.denoise_steps in _prepared


def prepare(self: Policy, settings) -> bool:
    if settings.denoise_steps is not None and os.environ['FAILS'] == 'preparing':
        raise RuntimeError('the graphs do not fit into memory')
    _prepared.add(settings.denoise_steps)
    return True


if __name__ == '__main__':
    if os.environ['FAILS'] in ('preparing', 'until prepared'):
        Policy.is_prepared, Policy.prepare = is_prepared, prepare
    if os.environ['FAILS'] == 'until prepared':
        Responder.answer = answer_prepared
    elif os.environ['FAILS'] != 'preparing':
        Responder.answer = answer
    sys.exit(main())
