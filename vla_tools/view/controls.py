"""What a person may ask of the robot's nodes from the page: services and live parameters.

Invariants:
- only what stops a robot, or lets it rest, is sent again when no answer comes. Anything else would
  be carried out a second time, perhaps after a stop that came in between;
- a stop drops each start, resume and home that has no answer yet.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rcl_interfaces.srv import SetParameters
from rclpy.client import Client
from rclpy.node import Node
from rclpy.parameter import Parameter
from std_srvs.srv import SetBool, Trigger

from vla_runtime.nodes.node_runner import make_executor
from vla_runtime.nodes.service_call import ServiceCall

# Services of the executor, in the order of their buttons. The page shows those that are not in the
# graph and cannot be pressed. A way home that is far is refused: a person has to look at it first.
ACTIONS: Mapping[str, Any] = {
    'start': Trigger,
    'stop': Trigger,
    'pause': Trigger,
    'resume': Trigger,
    'home': SetBool,
    'success': Trigger,
    'failure': Trigger,
}
_POLL_S = 0.005
_ANSWER_S = 20.0
# Seconds after which a request is sent again. Whatever is not named here is sent once.
_AGAIN_S = {'stop': 0.5, 'pause': 5.0}
_MOVING = ('start', 'resume', 'home')


@dataclass(frozen=True)
class Setting:
    """A live parameter: the node that has it, and the type of its values."""

    node: str
    kind: type


SETTINGS: Mapping[str, Setting] = {
    'instruction': Setting('vla_policy', str),
    'replan_interval': Setting('vla_executor', int),
    'cfg_beta': Setting('vla_policy', float),
}


class ControlError(ValueError):
    """What was asked cannot be done, or was refused; the message says why."""


class Controls:
    """Asks by a node of its own, spun in a thread of its own.

    Args:
        node: in the robot's namespace; nothing else spins it.
    """

    def __init__(self, node: Node) -> None:
        self._triggers: dict[str, Client] = {
            name: node.create_client(kind, f'vla_executor/{name}') for name, kind in ACTIONS.items()
        }
        self._parameters: dict[str, Client] = {
            name: node.create_client(SetParameters, f'{name}/set_parameters')
            for name in {setting.node for setting in SETTINGS.values()}
        }
        self._stops = 0
        self._executor = make_executor()
        self._executor.add_node(node)
        self._ending = False
        self._thread = threading.Thread(target=self._spin, name='answers', daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._ending = True
        self._thread.join()
        self._executor.shutdown()

    def offered(self) -> list[str]:
        """Return what the graph has now, of `ACTIONS` and `SETTINGS`."""
        actions = [name for name, client in self._triggers.items() if client.service_is_ready()]
        settings = [
            name
            for name, setting in SETTINGS.items()
            if self._parameters[setting.node].service_is_ready()
        ]
        return actions + settings

    async def act(self, name: str) -> str:
        """Call a service and return what it says; ControlError: refused, dropped, or not there."""
        self._stops += name == 'stop'
        client = self._triggers.get(name)
        if client is None:
            raise ControlError(f'no such button: {name}')
        if not client.service_is_ready():
            raise ControlError(f'{client.srv_name} is not in the graph')
        response = await self._answer(client, ACTIONS[name].Request(), name)
        if not response.success:
            raise ControlError(response.message or f'{name} was refused')
        return str(response.message)

    async def set(self, name: str, value: Any) -> str:
        """Set a live parameter; ControlError: of another type, refused, or not there."""
        setting = SETTINGS.get(name)
        if setting is None:
            raise ControlError(f'no such setting: {name}')
        try:
            value = _as(setting.kind, value)
        except (TypeError, ValueError, OverflowError):
            raise ControlError(f'{name}: {value!r:.40} is no {setting.kind.__name__}') from None
        client = self._parameters[setting.node]
        if not client.service_is_ready():
            raise ControlError(f'{setting.node} is not in the graph')
        request = SetParameters.Request(
            parameters=[Parameter(name, value=value).to_parameter_msg()]
        )
        response = await self._answer(client, request, name)
        if not response.results[0].successful:
            raise ControlError(response.results[0].reason or f'{name} was refused')
        return f'{name} is set'

    async def _answer(self, client: Any, request: Any, name: str) -> Any:
        call = ServiceCall(client, request, _AGAIN_S.get(name, math.inf))
        stops, end_s = self._stops, time.monotonic() + _ANSWER_S
        while (answer := call.answer()) is None:
            if name in _MOVING and self._stops != stops:
                raise ControlError(f'{name} was dropped: a stop was asked for before its answer')
            if time.monotonic() > end_s:
                raise ControlError(
                    f'{client.srv_name}: no answer within {_ANSWER_S:g} s. Look whether it was '
                    'carried out before you ask again'
                )
            await asyncio.sleep(_POLL_S)
        return answer

    def _spin(self) -> None:
        while not self._ending:
            self._executor.spin_once(timeout_sec=0.1)


def _as(kind: type, value: Any) -> Any:
    made = kind(value)
    if kind is int:
        # What a parameter holds.
        made.to_bytes(8, 'little', signed=True)
    return made
