"""What the policy node offers by `vla_interfaces`: `~/state` and two services.

Nothing is offered where `vla_interfaces` is not built. A chunk that `~/get_action_chunk` asks for
is inferred like one for the executor, under a request without a number, and is its answer alone: it
is not published, and an executor that is being answered, or that executes a chunk, keeps others
out.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rclpy.clock import Clock, ClockType
from rclpy.node import Node

from vla_runtime.messages.trajectories import chunk_to_message, typed_messages
from vla_runtime.nodes.later_service import Complete, LaterService
from vla_runtime.nodes.node_runner import OnError, guarded
from vla_runtime.nodes.policy.instruction import Instruction
from vla_runtime.nodes.policy.robot_policy import Answer
from vla_runtime.nodes.qos import RELIABLE
from vla_runtime.types import PlanRequest

# So long after its last request, or after the end of its last chunk, an executor is answered: one
# that moves asks again before its chunk ends, and repeats a request that waits every 0.1 s.
_EXECUTOR_ASKS_S = 2.0
_USUAL_TIMEOUT_S = 10.0
_LOOK_S = 0.02
# A request that was given up may be answered late; more of them are not under way at once.
_MOST_GIVEN_UP = 8


@dataclass
class _Wanted:
    """One call that waits: its request, and the chunk's message once it is there."""

    request: PlanRequest
    end_s: float
    chunk: Any = None
    error: str = ''


@dataclass(frozen=True)
class PolicyFacts:
    """What `PolicyState` tells and the node knows; see there."""

    lifecycle: str
    text: str
    policy: str
    run: Mapping[str, str]
    episode: int
    requests_replaced: int
    ages_s: Mapping[str, float | None]


class TypedInterface:
    """See the module.

    Args:
        request_chunk: asks for a chunk for no executor; returns None while the node is not active.
        missing: says what keeps a request from being answered now, a sentence each.
        active: whether the node is.
    """

    def __init__(
        self,
        node: Node,
        instruction: Instruction,
        on_error: OnError,
        request_chunk: Callable[[], PlanRequest | None],
        missing: Callable[[], list[str]],
        active: Callable[[], bool],
    ) -> None:
        self._node, self._instruction = node, instruction
        self._request_chunk, self._missing = request_chunk, missing
        self._active = active
        self._typed: Any = typed_messages()
        self._lock = threading.Lock()
        # A second call is refused.
        self._wanted: _Wanted | None = None
        # Moments (ns) of requests whose callers were told that it takes too long.
        self._given_up: deque[int] = deque(maxlen=_MOST_GIVEN_UP)
        # Until then (steady) an executor counts as one that drives.
        self._drives_until_s = -math.inf
        self._newest = -1, math.nan, math.nan
        if self._typed is None:
            return
        from vla_interfaces.srv import GetActionChunk, SetInstruction

        self._states = node.create_publisher(self._typed.PolicyState, '~/state', RELIABLE)
        node.create_service(
            SetInstruction,
            '~/set_instruction',
            guarded(on_error, '~/set_instruction', self._on_set_instruction),
        )
        service = LaterService(
            node, GetActionChunk, '~/get_action_chunk', self._on_get_chunk, on_error
        )
        node.create_timer(
            _LOOK_S,
            guarded(on_error, '~/get_action_chunk', service.look),
            clock=Clock(clock_type=ClockType.STEADY_TIME),
        )

    def note_request(self) -> None:
        """An executor has asked for a chunk."""
        self._drive_for(0.0)

    def takes(self, answer: Answer) -> bool:
        """Return whether an answer is of a service's call, and no executor's; in any thread.

        One that comes after its call was told that it takes too long is nobody's.
        """
        with self._lock:
            wanted = self._of(answer.request)
            if wanted is not None:
                wanted.chunk = chunk_to_message(answer.chunk, answer.header)
            late = answer.request.request is None and answer.request.stamp_ns in self._given_up
        if wanted is not None or late:
            return True
        self._drive_for(len(answer.chunk.actions) * answer.chunk.step_time_s)
        return False

    def _drive_for(self, seconds: float) -> None:
        until_s = time.monotonic() + seconds + _EXECUTOR_ASKS_S
        self._drives_until_s = max(self._drives_until_s, until_s)

    def note_answer(self, answer: Answer, overhead_ms: float) -> None:
        """Remember an answer for the state; in any thread. See `Answer.overhead_ms`."""
        seconds = answer.report.milliseconds['total'] * 1e-3
        self._newest = answer.header.number, seconds, seconds + overhead_ms * 1e-3

    def take_error(self, request: PlanRequest, error: Exception) -> None:
        """An inference has failed, maybe for a service's call; in any thread."""
        with self._lock:
            if (wanted := self._of(request)) is not None:
                wanted.error = str(error) or type(error).__name__

    def publish(self, facts: PolicyFacts) -> None:
        if self._typed is None:
            return
        chunk, inference_s, answer_s = self._newest
        message = self._typed.PolicyState(
            lifecycle=facts.lifecycle,
            text=facts.text,
            missing=self._missing(),
            policy=facts.policy,
            instruction=self._instruction.text,
            episode=facts.episode,
            chunk=chunk,
            inference_s=inference_s,
            answer_s=answer_s,
            requests_replaced=facts.requests_replaced,
            inputs=[
                self._typed.InputAge(name=name, age_s=math.inf if age_s is None else age_s)
                for name, age_s in facts.ages_s.items()
            ],
            **facts.run,
        )
        message.header.stamp = self._node.get_clock().now().to_msg()
        self._states.publish(message)

    def _of(self, request: PlanRequest) -> _Wanted | None:
        # The moment at which it came is the node's addition.
        wanted = self._wanted
        if wanted is None or request.request is not None:
            return None
        return wanted if wanted.request.stamp_ns == request.stamp_ns else None

    def _on_set_instruction(self, request: Any, response: Any) -> Any:
        response.previous = self._instruction.text
        response.message = self._instruction.set(request.instruction)
        response.success = not response.message
        return response

    def _on_get_chunk(self, request: Any, response: Any) -> Complete:
        refused = self._why_refused(request.instruction)
        given_s = request.timeout.sec + request.timeout.nanosec * 1e-9
        end_s = time.monotonic() + (given_s if given_s > 0 else _USUAL_TIMEOUT_S)
        wanted = None
        if not refused:
            # A quick answer waits for the lock: it is this call's.
            with self._lock:
                asked = self._request_chunk()
                wanted = self._wanted = None if asked is None else _Wanted(asked, end_s)
        if wanted is None:
            response.message = refused or 'the policy node is not active: activate it first'
            return lambda: True

        def complete() -> bool:
            with self._lock:
                late = time.monotonic() > wanted.end_s
                if wanted.chunk is None and not wanted.error and not late:
                    return False
                self._wanted = None
                if wanted.chunk is None and not wanted.error:
                    self._given_up.append(wanted.request.stamp_ns)
            if wanted.chunk is not None:
                response.success, response.chunk = True, wanted.chunk
            else:
                said = wanted.error or '; '.join(self._missing())
                response.message = said or 'the inference takes longer'
            return True

        return complete

    def _why_refused(self, instruction: str) -> str:
        if (left_s := self._drives_until_s - time.monotonic()) > 0.0:
            return (
                'an executor is being answered: call its ~/stop, and ask again when its last '
                f'chunk is over, in {math.ceil(left_s)} s; or give this policy node a namespace '
                'without an executor'
            )
        with self._lock:
            if self._wanted is not None:
                return 'another call of ~/get_action_chunk waits for its chunk'
        if not self._active():
            return 'the policy node is not active: activate it first'
        # What a robot is driven by, so only where nothing else refuses the call.
        return self._instruction.set(instruction) if instruction else ''


def empty_plan(
    names: Sequence[str], kinds: Sequence[str], *, episode: int, now_ns: int
) -> PlanRequest:
    """Return the request of whoever executes no plan; it has no number."""
    return PlanRequest(
        rows=np.zeros((0, len(names))),
        names=tuple(names),
        kinds=tuple(kinds),
        step_time_s=None,
        stamp_ns=now_ns,
        episode=episode,
        certain=0,
    )
