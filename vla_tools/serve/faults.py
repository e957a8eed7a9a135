"""Faults of a request, as every wire over a websocket tells them."""

from __future__ import annotations

import logging

from vla_tools.serve.served_policy import ServedPolicy, ServerFaultError
from vla_tools.serve.sessions import RobotSession, SessionError
from vla_tools.serve.socket_connection import INTERNAL_ERROR, POLICY_VIOLATION, EndedError

logger = logging.getLogger(__name__)


def told(error: Exception, served: ServedPolicy, session: RobotSession) -> str:
    """Return what a client is told of the fault that is being handled, after which it goes on.

    Raises:
        EndedError: the session cannot go on.
    """
    if isinstance(error, EndedError):
        raise error
    if isinstance(error, SessionError):
        raise EndedError(str(error), POLICY_VIOLATION) from None
    if isinstance(error, (ServerFaultError, ValueError)):
        served.count_fault(session)
        if isinstance(error, ServerFaultError) and error.ends:
            raise EndedError(str(error), INTERNAL_ERROR) from None
        return str(error)
    logger.exception('%s: a request failed', served.name)
    raise EndedError('the server failed; the reason is in its log', INTERNAL_ERROR) from None
