"""A live robot as a page's source: the graph, what may be asked of it, and the scene."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from vla_runtime.nodes.graph_status import GraphStatus, quiet_node
from vla_tools.view.controls import ACTIONS, ControlError, Controls
from vla_tools.view.graph import LiveGraph
from vla_tools.view.markers import MarkerPublisher
from vla_tools.view.moment import constants, moment
from vla_tools.view.scene_keeper import SceneKeeper
from vla_tools.view.source import Publish, ViewOptions
from vla_tools.view.state import ViewState

# Services come and go with their nodes.
_OFFER_EVERY = 5


class LiveSource:
    """See `app.Source`; `close` leaves the graph.

    Args:
        status: of the graph that this process is in.
        namespace: full name of the robot's.

    Raises:
        ValueError: the URDF that a person named cannot be read.
    """

    def __init__(self, status: GraphStatus, namespace: str, options: ViewOptions) -> None:
        # First: it may end in an error, and nothing runs yet.
        self._scenes = SceneKeeper(options.urdf, options.tip)
        self._node = quiet_node('vla_view', namespace)
        self._asking = quiet_node('_vla_view_asks', namespace)
        self._state = ViewState(namespace, options.robot)
        self._controls = None if options.read_only else Controls(self._asking)
        self._publish: Publish | None = None
        self._lock = threading.Lock()
        self._offered: list[str] = []
        self._looks, self._version = 0, (-1, -1)
        self._markers = MarkerPublisher(self._node)
        self.graph = LiveGraph(self._node, status, self._state, self._lock, self._on_moment)

    def begin(self, publish: Publish) -> None:
        self._publish = publish
        self.graph.start()

    def close(self) -> None:
        self.graph.stop()
        self._scenes.close()
        if self._controls is not None:
            self._controls.stop()
        for node in (self._node, self._asking):
            node.destroy_node()

    @property
    def pictures(self) -> Mapping[str, tuple[int, bytes]]:
        return self.graph.pictures

    @property
    def pages(self) -> int:
        return self.graph.pages

    @pages.setter
    def pages(self, count: int) -> None:
        self.graph.pages = count

    @property
    def scene_port(self) -> int | None:
        return self._scenes.port

    def hello(self) -> dict[str, Any]:
        with self._lock:
            return self._hello()

    def _hello(self) -> dict[str, Any]:
        fixed = constants(self._state)
        return {
            **fixed,
            'title': fixed['robot'] or 'vla_runtime',
            'live': True,
            'read_only': self._controls is None,
            'actions': list(ACTIONS),
            'offered': self._offered,
            'no_scene': self._scenes.why_none,
            'scene_note': self._scenes.note,
            'history': {name: list(points) for name, points in self._state.points.items()},
        }

    async def command(self, command: Mapping[str, Any]) -> str:
        if self._controls is None:
            raise ControlError('this page was started with --read-only')
        what, name = command.get('do'), str(command.get('name', ''))
        if what == 'set':
            return await self._controls.set(name, command.get('value'))
        if what in ACTIONS:
            return await self._controls.act(str(what))
        raise ControlError(f'expected one of {", ".join([*ACTIONS, "set"])}, got {what!r:.40}')

    def _on_moment(self, now_ns: int) -> None:
        if self._looks % _OFFER_EVERY == 0:
            self._offered = [] if self._controls is None else self._controls.offered()
        self._looks += 1
        state = self._state
        self._scenes.show(
            state,
            state.positions(),
            state.plan_at(now_ns),
            tuple(state.chunks),
            watched=self.graph.pages > 0,
        )
        self._markers.show(state, self._scenes, now_ns)
        fresh = self._state.fresh_points()
        if not self.graph.pages or self._publish is None:
            return
        news = {
            'now': moment(self._state, now_ns),
            'fresh': fresh,
            'offered': self._offered,
        }
        # Another robot, its cameras, or its shape.
        before, self._version = self._version, (self._state.version, self._scenes.version)
        self._publish(news, anew=before != self._version)
