"""A connection that is made again when it is lost, to the same policy alone.

Invariants:
- a server with another bundle than the first one is refused for as long as it has it;
- the robot's session goes on where the server lets it: while it still waits for a connection that
  is dead, a new session begins;
- a thread of its own connects again, first at once and then ever less often; `ask` never waits for
  it;
- after `close` nothing is connected any more.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from vla_runtime.remote.connection import (
    ServerAddress,
    ServerConnection,
    ServerLostError,
    ServerRefusalError,
)
from vla_runtime.remote.contract import Contract, ContractError, read_contract

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0


def fetch_contract(address: ServerAddress) -> Contract:
    """Ask a server for its contract and leave; raises as `ServerLink`."""
    connection = ServerConnection(address)
    try:
        return read_contract(connection.metadata)
    finally:
        connection.drop()


class ServerLink:
    """A link to a served policy.

    Args:
        note: called with a sentence when the server is lost, refused or back; by any thread.

    Attributes:
        contract: as the newest connection had it; of the same policy, run the same way.
        session_id: name of the robot's session, which later connections go on with.
        reconnects: connections after the first.

    Raises:
        ServerLostError, ValueError: as of `ServerConnection`; ContractError: no such policy.
    """

    def __init__(self, address: ServerAddress, note: Callable[[str], None]) -> None:
        self.address, self._note = address, note
        connection = ServerConnection(address)
        try:
            self.contract: Contract = read_contract(connection.metadata)
            self.session_id = _session_of(connection)
        except BaseException:
            connection.drop()
            raise
        self.reconnects = 0
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._connection: ServerConnection | None = connection
        self._thread: threading.Thread | None = None
        self._why = ''

    @property
    def why_away(self) -> str:
        """Reason why there is no connection; empty where there is one. Finds out about one."""
        connection = self._connection
        if connection is not None and not connection.is_open:
            self.lose(connection, f'{self.address.url}: the server closed the connection')
        with self._lock:
            return self._why

    def ask(self, message: bytes) -> Any:
        """Return the answer to a request; raises as `ServerConnection.ask`."""
        connection = self._connection
        if connection is None:
            raise ServerLostError(self.why_away or f'{self.address.url}: no connection')
        try:
            return connection.ask(message)
        except ServerLostError as error:
            self.lose(connection, str(error))
            raise
        except ServerRefusalError as error:
            if error.reason.startswith('session_id'):
                self.session_id = ''
                self.lose(connection, str(error))
            raise

    def ping(self) -> float:
        """Return the milliseconds of a message there and back; raises as `ask`."""
        connection = self._connection
        if connection is None:
            raise ServerLostError(self.why_away)
        return connection.ping()

    def lose(self, connection: ServerConnection | None, why: str) -> None:
        """Give up a connection and begin to connect again; None: the present one."""
        with self._lock:
            if self._connection is None or connection not in (None, self._connection):
                return
            lost, self._connection = self._connection, None
            self._why = why
            if not self._closed.is_set():
                self._thread = threading.Thread(
                    target=self._connect_again, name='reconnect', daemon=True
                )
                self._thread.start()
        lost.drop()
        self._note(f'{why}; connecting again')

    def close(self) -> None:
        self._closed.set()
        with self._lock:
            connection, thread = self._connection, self._thread
            self._connection, self._why = None, f'{self.address.url}: closed'
        if connection is not None:
            connection.close()
        if thread is not None:
            thread.join()

    def _connect_again(self) -> None:
        pause_s, said = _FIRST_PAUSE_S, ''
        while not self._closed.wait(pause_s):
            pause_s = min(2.0 * pause_s, _LONGEST_PAUSE_S)
            try:
                connection, contract = self._same_policy()
            # A server may say anything, and this thread alone can find a better one.
            except Exception as error:
                why = str(error) or type(error).__name__
                with self._lock:
                    self._why = why
                if why != said:
                    said = why
                    self._note(said)
                continue
            with self._lock:
                if self._closed.is_set():
                    connection.drop()
                    return
                self._connection, self._why = connection, ''
                # Versions and threads may be others.
                self.contract = contract
                self.session_id = self.session_id or _session_of(connection)
                self.reconnects += 1
            self._note(f'{self.address.url}: connected again')
            return

    def _same_policy(self) -> tuple[ServerConnection, Contract]:
        connection = ServerConnection(self.address)
        try:
            found = read_contract(connection.metadata)
            mine = self.contract
            if found.bundle_sha256 != mine.bundle_sha256:
                raise ContractError(
                    f'{self.address.url}: the server has another bundle now: '
                    f"'{found.spec.name}' {found.bundle_sha256[:12]}…, and this robot was matched "
                    f"with '{mine.spec.name}' {mine.bundle_sha256[:12]}…; serve that one, or "
                    'configure the nodes again'
                )
            how = ('backend', 'device', 'precision', 'triton', 'max_rows', 'features')
            if changed := [name for name in how if getattr(found, name) != getattr(mine, name)]:
                raise ContractError(
                    f'{self.address.url}: the server runs the policy in another way now '
                    f'({", ".join(changed)}); start it as before, or configure the nodes again'
                )
        except BaseException:
            connection.drop()
            raise
        return connection, found


def _session_of(connection: ServerConnection) -> str:
    return str(connection.metadata.get('session_id', ''))[:128]
