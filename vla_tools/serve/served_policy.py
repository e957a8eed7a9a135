"""A policy as every wire sees it: sessions, requests in, answers out.

A wire opens a session for a connection, submits a `RobotRequest` and waits for its `Answer`. All
but `submit` runs on the event loop's thread; the engine's work is that of the `Batcher`.
"""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import numpy as np

from vla_runtime.bundle.folder import Bundle
from vla_runtime.bundle.schema import BundleSpec
from vla_runtime.inference.runner import MOST_TOGETHER
from vla_runtime.inference.sessions import Request
from vla_runtime.inference.settings import PolicySettings
from vla_runtime.policy import Policy
from vla_runtime.remote.contract import contract_of
from vla_runtime.remote.message_pack import MessageError
from vla_runtime.types import ActionChunk, CommittedPlan, InferenceReport
from vla_tools.serve.batch_check import check_batches
from vla_tools.serve.batcher import Batched, Batcher
from vla_tools.serve.request_keys import KeysFile, RequestKeys
from vla_tools.serve.robot_request import RequestReader, RobotRequest
from vla_tools.serve.sessions import RobotSession, SessionError, SessionTable
from vla_tools.serve.statistics import Metrics, PolicyStatistics

logger = logging.getLogger(__name__)
T = TypeVar('T')
BatchMode = Literal['auto', 'exact', 'off']


@dataclass(frozen=True)
class ServeOptions:
    """How policies are served.

    Attributes:
        max_wait_s: time for which a request waits for others.
        max_batch: requests of a batch, up to `MOST_TOGETHER`.
        batch: `exact` runs requests one after the other where a chunk of a batch may differ from
            the one alone; `off` always.
        keep_s: time for which a session without a connection is kept.
        max_sessions: sessions of each policy.

    Raises:
        ValueError: a batch larger than what runs together.
    """

    max_wait_s: float = 0.002
    max_batch: int = 8
    batch: BatchMode = 'auto'
    keep_s: float = 60.0
    max_sessions: int = 64

    def __post_init__(self) -> None:
        if not 1 <= self.max_batch <= MOST_TOGETHER:
            raise ValueError(
                f'--max-batch {self.max_batch}: expected 1 to {MOST_TOGETHER}, the most that run '
                'together'
            )


@dataclass(frozen=True)
class Answer:
    """A chunk for a robot, and the batch that it was in."""

    chunk: ActionChunk
    report: InferenceReport
    batched: Batched


class ServerFaultError(RuntimeError):
    """A fault of the server's own; `ends` where no later request can be answered either."""

    def __init__(self, message: str, ends: bool) -> None:
        super().__init__(message)
        self.ends = ends


class ServedPolicy:
    """One policy, its sessions and its queue.

    Attributes:
        name: under which clients ask for it.
        metadata: what a client is told first, but for its session.
        reader: reads requests from a message's fields.

    Raises:
        ValueError: keys that do not fit the bundle; the policy stays open then.
    """

    def __init__(
        self,
        name: str,
        policy: Policy,
        bundle: Bundle,
        device: str,
        options: ServeOptions,
        metrics: Metrics,
        *,
        keys: KeysFile | None = None,
        policies: tuple[str, ...] = (),
    ) -> None:
        self.name, self.options, self._policy = name, options, policy
        self.reader = RequestReader(policy.spec, RequestKeys(policy.spec, keys), policy.settings)
        most = 1 if options.batch == 'off' else options.max_batch
        exactness = check_batches(policy, bundle, device, most)
        if options.batch == 'exact' and not exactness.exact:
            most = 1
        self.why_batches = exactness.why if most > 1 else 'one after the other'
        self.metadata: dict[str, Any] = {
            **contract_of(policy, bundle.statistics, device, policies or (name,)),
            'batch_exact': exactness.exact or most == 1,
            'batch_bound': 0.0 if most == 1 else exactness.bound,
            'max_batch': most,
        }
        self.statistics = PolicyStatistics(name, metrics)
        self.sessions = SessionTable(options.max_sessions, options.keep_s, self._forget)
        self._batcher = Batcher(policy, most, options.max_wait_s, lambda: self._connected)
        self._connected = 0

    @property
    def spec(self) -> BundleSpec:
        return self._policy.spec

    @property
    def session_bytes(self) -> int:
        """Memory on the device that a session takes."""
        return self._policy.session_bytes

    @property
    def is_ready(self) -> bool:
        return self._batcher.is_running

    @property
    def queued(self) -> int:
        return self._batcher.queued

    async def open(self, name: str | None = None) -> RobotSession:
        """Return the session of a new connection (SessionError: there is none)."""
        await self.sessions.find_room()
        session = self.sessions.open(name)
        self._count()
        return session

    def leave(self, session: RobotSession) -> None:
        """Note that a connection has gone."""
        self.sessions.leave(session)
        self._count()

    def move(self, session: RobotSession, request: RobotRequest) -> RobotSession:
        """Return the session that a request names (SessionError: it cannot be had)."""
        moved = self.sessions.move(session, request.session_id)
        self._count()
        return moved

    def _count(self) -> None:
        # Read by the engine's thread.
        self._connected = len(self.sessions.connected)

    async def reset(self, session: RobotSession, request: RobotRequest) -> None:
        """Begin a new episode of this session alone.

        Raises:
            ValueError: a seed for a policy without noise; the session is as before.
        """
        if request.seed is not None:
            self._policy.check(replace(self._policy.settings, seed=request.seed))
        session.last_chunk, session.seed = None, request.seed

        def work() -> None:
            if session.engine is not None:
                session.engine.reset()

        await self._settled(self._batcher.call(work))

    def submit(self, session: RobotSession, request: RobotRequest) -> Future[Batched]:
        """Queue a request of a session that has no other one open.

        Any thread may call it, but for a session's first request.

        Raises:
            MessageError: a plan that is none; the session is as before.
        """
        plan = _plan(session, request)
        settings = self._settings(session, request, plan)
        self.sessions.admit(session)
        session.requests += 1

        def make() -> Request:
            if session.ended:
                raise SessionError('this session has ended')
            if session.engine is None:
                session.engine = self._policy.open_session()
            assert request.observation is not None
            return Request(
                request.observation, session.engine, settings, plan, request.noise, request.number
            )

        return self._batcher.submit(make)

    async def answer(self, session: RobotSession, submitted: Future[Batched]) -> Answer:
        """Wait for the chunk of a request that was submitted.

        Raises:
            ValueError: the request does not fit; the session is as before.
            ServerFaultError: the server cannot answer.
        """
        found = await self._settled(submitted)
        chunk, report = found.inference
        session.last_chunk = chunk.actions
        return Answer(chunk, report, found)

    def count_fault(self, session: RobotSession | None) -> None:
        """Count a request that was refused or failed; None: of nobody who has a session."""
        self.statistics.count_fault()
        if session is not None:
            session.faults += 1

    def _settings(
        self, session: RobotSession, request: RobotRequest, plan: CommittedPlan | None
    ) -> PolicySettings:
        settings = request.settings or self._policy.settings
        seed = session.seed if request.seed is None else request.seed
        if seed is not None and seed != settings.seed:
            settings = replace(settings, seed=seed)
        if plan is not None and settings.rtc_mode == 'off' and not request.gives_rtc_mode:
            settings = replace(settings, rtc_mode='guided')
        return settings

    async def _settled(self, future: Future[T]) -> T:
        """Wait for the engine's thread; a fault of its own is told without its inner parts."""
        try:
            return await asyncio.wrap_future(future)
        except ValueError:
            raise
        except Exception as error:
            logger.exception('%s: a request failed', self.name)
            raise ServerFaultError(
                f'the policy failed on this request ({type(error).__name__}; the reason is in the '
                "server's log)",
                ends=not self.is_ready,
            ) from None

    def _forget(self, session: RobotSession) -> None:
        def work() -> None:
            if session.engine is not None:
                self._policy.close_session(session.engine)
                session.engine = None

        if self._batcher.is_running:
            self._batcher.call(work)

    def close(self) -> None:
        """Answer what is queued, then free the policy."""
        self._batcher.close()


def _plan(session: RobotSession, request: RobotRequest) -> CommittedPlan | None:
    """Return the plan that a request continues; None where nothing of one is left."""
    rows: np.ndarray | None = request.plan
    if request.executed_steps is not None:
        if session.last_chunk is None:
            raise MessageError(
                'executed_steps: this connection has had no chunk yet; send what is left of one '
                'that came through another as plan'
            )
        rows = session.last_chunk[request.executed_steps :]
    if rows is None or not len(rows):
        if request.delay_steps:
            raise MessageError('delay_steps: there is no plan that goes on meanwhile')
        return None
    if request.delay_steps > len(rows):
        raise MessageError(f'delay_steps: {request.delay_steps}, and the plan has {len(rows)} rows')
    return CommittedPlan(rows, request.delay_steps, len(rows))
