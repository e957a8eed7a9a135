"""Callbacks that are told what the middleware knows of a message: when it was sent, its number.

rclpy passes that (`rmw_message_info_t` as a dict) to a callback whose signature has room for two
arguments, but not everywhere alike: the wait-set executors of Jazzy give two arguments, its events
executor gives one tuple of both, and Humble knows of none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import Parameter, Signature
from typing import Any

from rclpy.subscription import Subscription

# Humble's does not.
TELLS_INFO = hasattr(Subscription, 'CallbackType')
_TWO = Signature([Parameter(name, Parameter.POSITIONAL_ONLY) for name in ('message', 'info')])


def with_info(call: Callable[[Any, Mapping[str, Any]], Any]) -> Callable[..., Any]:
    """Return a callback for a subscription that calls `call(message, info)`.

    Args:
        call: takes a message, and what the middleware knows of it: `source_timestamp`,
            `received_timestamp` (ns) and `publication_sequence_number`; empty on Humble.
    """

    def take(*arguments: Any) -> None:
        found = arguments[0] if isinstance(arguments[0], tuple) else arguments
        message, info = (*found, {})[:2]
        call(message, info)

    take.__signature__ = _TWO  # type: ignore[attr-defined]
    return take
