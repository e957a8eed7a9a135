"""A lifecycle node whose transitions are four steps: load, open, shut, free.

Invariants:
- a step that raises fails its transition and reports the cause, which rclpy would swallow;
- what a failed `_load` or `_open` began is torn down before the transition returns;
- a transition that the state does not allow is refused and changes nothing;
- why a node is not further than it is stays known, for its status.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable

from rclpy.lifecycle import LifecycleNode, LifecycleState, TransitionCallbackReturn

from vla_runtime.nodes.node_runner import guarded

_SUCCESS, _FAILURE = TransitionCallbackReturn.SUCCESS, TransitionCallbackReturn.FAILURE


class ManagedNode(LifecycleNode):
    """See the module's invariants."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        # Why the last transition failed, or the node left its state by itself; '' after one that
        # succeeded.
        self._problem = ''
        for service in self.services:
            if service.srv_name.endswith('/change_state'):
                # rclpy raises out of this callback where the state does not allow the transition.
                service.callback = guarded(self._refuse, 'change_state', service.callback)

    def _load(self) -> None:
        """Configure: read the files, get the memory."""
        raise NotImplementedError

    def _open(self) -> None:
        """Activate: take up the work. Publishers are enabled by then."""
        raise NotImplementedError

    def _shut(self) -> None:
        """Deactivate: end the work that `_open` began, all or part of it."""
        raise NotImplementedError

    def _free(self) -> None:
        """Clean up: give back what `_load` took, all or part of it."""
        raise NotImplementedError

    def _on_exception(self, where: str, error: Exception) -> None:
        raise NotImplementedError

    def _on_state(self, label: str) -> None:
        """Report that the node is `inactive` or `unconfigured` now; nothing by default."""

    @property
    def lifecycle(self) -> str:
        return str(self._state_machine.current_state[1])

    def _withdraw(self, why: str) -> None:
        """Give up the work, and what it took, because another node does it."""
        self.get_logger().error(f'{why}; this node gives up what it has configured')
        if self.lifecycle == 'active':
            self.trigger_deactivate()
        if self.lifecycle == 'inactive':
            self.trigger_cleanup()
        self._problem = why

    def on_configure(self, state: LifecycleState) -> TransitionCallbackReturn:
        if not self._managed('configure', self._load):
            self._managed('configure', self._free)
            return _FAILURE
        self._problem = ''
        self._on_state('inactive')
        return super().on_configure(state)

    def on_activate(self, state: LifecycleState) -> TransitionCallbackReturn:
        # Publishers first: the first message may be there before this returns.
        super().on_activate(state)
        if self._managed('activate', self._open):
            self._problem = ''
            return _SUCCESS
        self._managed('activate', self._shut)
        super().on_deactivate(state)
        return _FAILURE

    def on_deactivate(self, state: LifecycleState) -> TransitionCallbackReturn:
        if not self._managed('deactivate', self._shut):
            return TransitionCallbackReturn.ERROR
        self._on_state('inactive')
        return super().on_deactivate(state)

    def on_cleanup(self, state: LifecycleState) -> TransitionCallbackReturn:
        if not self._managed('cleanup', self._free):
            return TransitionCallbackReturn.ERROR
        self._on_state('unconfigured')
        return super().on_cleanup(state)

    def on_shutdown(self, state: LifecycleState) -> TransitionCallbackReturn:
        self._managed('shutdown', self._shut)
        self._managed('shutdown', self._free)
        return super().on_shutdown(state)

    def on_error(self, state: LifecycleState) -> TransitionCallbackReturn:
        stopped, freed = self._managed('error', self._shut), self._managed('error', self._free)
        return _SUCCESS if stopped and freed else _FAILURE

    def _managed(self, transition: str, step: Callable[[], None]) -> bool:
        try:
            step()
        except Exception as error:
            self._problem = f'{transition} failed: {error}'
            self._on_exception(f'{transition} failed', error)
            return False
        return True

    def _refuse(self, _: str, error: Exception) -> None:
        self.get_logger().warning(f'transition refused: {error}')


def place_of_bug(error: Exception) -> str:
    """Return the traceback of a bug; '' for what a person can mend, whose text says all."""
    if isinstance(error, (ValueError, OSError)):
        return ''
    return ''.join(traceback.format_exception(type(error), error, error.__traceback__))
