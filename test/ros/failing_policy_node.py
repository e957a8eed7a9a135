"""The policy node, whose first inferences fail in the middle of the work or at its very end, or
which cannot prepare what was not configured.
"""

from __future__ import annotations

import itertools
import os
import sys
from concurrent.futures import Future

from vla_runtime.policy import Policy
from vla_runtime.ros.policy.node import main
from vla_runtime.ros.policy.responder import Responder

FAILURES = 3
_answer = Responder.answer
_calls = itertools.count()


def answer(self: Responder, request, read):
    answered = _answer(self, request, read)
    if not isinstance(answered, Future) or next(_calls) >= FAILURES:
        return answered
    if os.environ['FAILS'] == 'at once':
        raise RuntimeError('the GPU fell off the bus')
    failed: Future = Future()
    failed.set_exception(RuntimeError('the GPU fell off the bus'))
    return failed


def prepare(self: Policy, settings) -> bool:
    raise RuntimeError('the graphs do not fit into memory')


if __name__ == '__main__':
    if os.environ['FAILS'] == 'preparing':
        Policy.is_prepared = lambda self, settings: settings.denoise_steps is None
        Policy.prepare = prepare
    else:
        Responder.answer = answer
    sys.exit(main())
