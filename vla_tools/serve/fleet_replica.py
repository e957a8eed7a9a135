"""A replica of a fleet: one policy, and the sessions of the robots that stay with it.

Invariants:
- a session answers to the ingress that opened it; where an ingress was lost, its sessions are kept
  for robots that come back through the next one;
- a robot's request is answered from its own session or not at all.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from ray import serve

from vla_runtime.engines.preflight import AUTO
from vla_tools.serve.loading import Loading, load_served
from vla_tools.serve.request_keys import read_key_mapping
from vla_tools.serve.robot_request import RobotRequest
from vla_tools.serve.served_policy import ServeOptions
from vla_tools.serve.sessions import SessionError
from vla_tools.serve.socket_connection import EndedError, WireLimits
from vla_tools.serve.statistics import Metrics
from vla_tools.serve.status import metrics_text, status_of
from vla_tools.serve.wire_openpi import Conversation


class Opened(NamedTuple):
    """A session that was opened, and what its client is told first."""

    replica: str
    name: str
    contract: bytes


class Reply(NamedTuple):
    """Result of a request.

    Attributes:
        kind: `reply`: to be sent; `end`: the session cannot go on; `moved`: the request names
            another session; `unknown`: this replica has no such session.
        data: the reply, the reason, or the name of the other session.
        code: of the close; 0 but for `end`.
    """

    kind: str
    data: bytes | str = b''
    code: int = 0


class PolicyReplica:
    """Owns a policy, and its GPU where there is one. All runs on the replica's event loop.

    Args:
        arguments: those of `fleet_policies.policies`.
    """

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self._arguments = dict(arguments)
        self._id: str = serve.get_replica_context().replica_id.unique_id
        folder = Path(arguments['bundle'])
        keys = arguments.get('keys')
        self._metrics = Metrics()
        self._served, _ = load_served(
            f'{folder.name}/{self._id}',
            folder,
            Loading(
                ServeOptions(**arguments.get('serve', {})),
                arguments.get('backend', AUTO),
                arguments.get('device'),
                arguments.get('precision', AUTO),
                arguments.get('threads'),
                None if keys is None else read_key_mapping(Path(keys)),
            ),
            self._metrics,
            (folder.name,),
        )
        self._limits = WireLimits(float(arguments.get('max_rate', 200.0)))
        self._decoders = ThreadPoolExecutor(os.cpu_count(), thread_name_prefix='decode')
        # By session: the ingress, and the conversation.
        self._open: dict[str, tuple[str, _Conversation]] = {}

    async def open(self, ingress: str, name: str, replica: str | None = None) -> Opened | str:
        """Open a session, or go on with one that was left; a text says why there is none.

        Args:
            name: of the session; '': a new one.
            replica: read by the router.
        """
        name = name or f'{self._id}.{os.urandom(16).hex()}'
        before = self._open.get(name)
        if before is not None and before[0] != ingress:
            # Whoever held it was lost: an ingress has no session twice.
            self._leave(name)
        talk = _Conversation(self._served, self._limits, self._decoders)
        try:
            contract = await talk.open(name)
        except SessionError as error:
            return str(error)
        self._open[name] = (ingress, talk)
        return Opened(self._id, name, contract)

    async def ask(
        self, ingress: str, name: str, data: bytes | None, replica: str | None = None
    ) -> Reply:
        """Answer a request of a session."""
        owner, talk = self._open.get(name, ('', None))
        if talk is None or owner != ingress:
            return Reply('unknown')
        try:
            return Reply('reply', await talk.answer(data))
        except _MovedError as moved:
            return Reply('moved', moved.name)
        except EndedError as end:
            self._leave(name)
            return Reply('end', str(end), end.code)

    async def leave(self, ingress: str, name: str, replica: str | None = None) -> None:
        """Note that a session's robot has gone."""
        if self._open.get(name, ('',))[0] == ingress:
            self._leave(name)

    def _leave(self, name: str) -> None:
        self._open.pop(name)[1].leave()

    async def state(self, replica: str | None = None) -> tuple[dict[str, Any], str]:
        """Return the policy's state for the status page, and its metrics as Prometheus reads them.

        Both are of plain types.
        """
        status = status_of([self._served], 0.0, False)['policies'][self._served.name]
        return status, metrics_text(self._metrics, [self._served]).decode()

    async def arguments(self, replica: str | None = None) -> dict[str, Any]:
        """Return the arguments that this replica was made with."""
        return self._arguments

    async def check_health(self) -> None:
        """Raise where no request can be answered, so that Ray starts another; end old sessions.

        Ray calls it every few seconds.
        """
        self._served.sessions.end_kept()
        if not self._served.is_ready:
            raise RuntimeError('the policy has ended; the reason is in the log above')

    def __del__(self) -> None:
        # Called by Ray after the last request. A replica that failed to load has none of it.
        if hasattr(self, '_served'):
            self._served.close()
        if hasattr(self, '_decoders'):
            self._decoders.shutdown()


class _MovedError(EndedError):
    """Goes through a conversation as the end of one; carries the session's name."""

    def __init__(self, name: str) -> None:
        super().__init__(name, 0)
        self.name = name


class _Conversation(Conversation):
    """Leaves it to the ingress to find the session that a request names."""

    async def move(self, request: RobotRequest) -> None:
        assert request.session_id is not None
        raise _MovedError(request.session_id)
