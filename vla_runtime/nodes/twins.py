"""Two nodes where one belongs: of one name, or on the topics that only one may send on.

ROS 2 allows both; a robot gets two commands, two answers or two measured states. Every node of this
package says who it is in the item `node` of its status, and looks for such a twin before it takes
up its work: the one that came first stays. Invariants:
- a twin has said so within the last seconds: a killed one stays in the graph for up to 20 s and
  keeps nobody out;
- a twin is in the graph: a recording that is played says what nodes said that are gone;
- of two that meet, both agree on which came first.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from rclpy.node import Node

from vla_runtime.messages.diagnostics import Level, StatusItem
from vla_runtime.nodes.graph_faults import full_names
from vla_runtime.nodes.polled_topics import HeardItem, HeardStatus
from vla_runtime.nodes.restart import state_before

ITEM = 'node'
# Nodes that announce themselves every 0.5 s, as the shipped profiles say, meet within this time.
_MEET_S = 1.0
# One of the same name is there: what lives says so within this time.
_SPEAKS_S = 1.5
_LOOKS_S = 0.02
# Of two the one that is further came first.
_RANKS = {'active': 1, 'inactive': 2}
_MOVES, _OTHERS = 0, 3


@dataclass(frozen=True)
class Claim:
    """What a node says of itself.

    Attributes:
        node: full name.
        process: what runs it, for the person at the robot.
        since_ns: system clock when it was made; with `process` it is unique.
        lifecycle: label of its state; `active` for a node without a lifecycle.
        topics: full names of topics that only one node may send on, while it is active.
    """

    node: str
    process: str
    since_ns: int
    lifecycle: str
    moves: bool = False
    topics: frozenset[str] = field(default_factory=frozenset)

    @property
    def order(self) -> tuple[int, int]:
        """Of two twins the one with the smaller order came first."""
        rank = _RANKS.get(self.lifecycle, _OTHERS)
        return (_MOVES if self.moves else rank), self.since_ns

    def values(self) -> dict[str, object]:
        return {
            'process': self.process,
            'since_ns': self.since_ns,
            'lifecycle': self.lifecycle,
            'started': self.moves,
            'topics': ' '.join(sorted(self.topics)),
        }

    def describe(self) -> str:
        state = 'active and started' if self.moves else self.lifecycle
        return f'{self.node} ({self.process}, {state})'


def read_claim(heard: HeardItem) -> Claim | None:
    """Return what a node said of itself; None where it is no such item."""
    values = heard.values
    try:
        return Claim(
            heard.node,
            values['process'],
            int(values['since_ns']),
            values['lifecycle'],
            values['started'] == 'true',
            frozenset(values['topics'].split()),
        )
    except (KeyError, ValueError):
        return None


def find_first(mine: Claim, others: Iterable[Claim]) -> Claim | None:
    """Return the twin that came before; None where there is none."""
    found = [one for one in find_twins(mine, others) if one.order < mine.order]
    return min(found, key=lambda one: one.order, default=None)


def find_twins(mine: Claim, others: Iterable[Claim]) -> list[Claim]:
    """Return those of the same name, and those that claim one of the topics."""
    return [one for one in others if one.node == mine.node or one.topics & mine.topics]


class Twins:
    """A node's own claim, and others' from `heard`, which is to keep the item `node`."""

    def __init__(self, node: Node, heard: HeardStatus) -> None:
        self._node, self._heard = node, heard
        self._process = f'process {os.getpid()} on {socket.gethostname()}'
        self._since_ns = time.time_ns()
        # A restarted process was first, and the graph still has its predecessor.
        self._waits = state_before() is None
        self._meets_s = time.monotonic() + _MEET_S
        self._speaks_s: float | None = None

    def claim(self, lifecycle: str, *, moves: bool = False, topics: Collection[str] = ()) -> Claim:
        name = self._node.get_fully_qualified_name()
        return Claim(name, self._process, self._since_ns, lifecycle, moves, frozenset(topics))

    def others(self) -> list[Claim]:
        own = self._process, self._since_ns
        read = (read_claim(found) for found in self._heard.items(ITEM))
        found = [one for one in read if one and (one.process, one.since_ns) != own]
        if not found:
            return []
        names = full_names(self._node)
        mine = self._node.get_fully_qualified_name()
        return [one for one in found if names.count(one.node) > (one.node == mine)]

    def first(
        self, mine: Claim, shared_with: Mapping[str, Collection[str]] | None = None
    ) -> Claim | None:
        """Return the earlier twin that was heard.

        `shared_with` has nodes that may send there too.
        """
        return find_first(mine, _without_shared(self.others(), shared_with or {}))

    def wait_for_first(
        self, mine: Claim, shared_with: Mapping[str, Collection[str]] | None = None
    ) -> Claim | None:
        """Wait to hear an earlier twin: once, a second, longer where the graph has this name."""
        while True:
            self._heard.take()
            if found := self.first(mine, shared_with):
                return found
            now_s, until_s = time.monotonic(), self._meets_s
            if self.is_named_twice():
                self._speaks_s = self._speaks_s or now_s + _SPEAKS_S
                until_s = max(until_s, self._speaks_s)
            if now_s > until_s or not self._waits:
                return None
            time.sleep(_LOOKS_S)

    def is_named_twice(self) -> bool:
        """Return whether the graph has another node of this name, alive or not."""
        return full_names(self._node).count(self._node.get_fully_qualified_name()) > 1

    def require_first(
        self,
        mine: Claim,
        mend: str,
        shared_with: Mapping[str, Collection[str]] | None = None,
    ) -> None:
        """Wait as `wait_for_first` does; TwinError names the first and what mends it."""
        if found := self.wait_for_first(mine, shared_with):
            raise TwinError(why_second(mine, found, mend))
        if self.is_named_twice() and all(one.node != mine.node for one in self.others()):
            self._node.get_logger().warning(
                f'the graph has another node of the name {mine.node}, which says nothing: one '
                'that was killed leaves the graph within some 20 s; one that hangs is to be ended'
            )


class TwinError(ValueError):
    """Another node has the name or the topics of this one."""


def why_second(mine: Claim, first: Claim, mend: str) -> str:
    shared = sorted(first.topics & mine.topics)
    on = f' on {", ".join(shared)}' if shared else ''
    same = 'another node of the same name' if first.node == mine.node else 'another node'
    domain = os.environ.get('ROS_DOMAIN_ID') or '0'
    return (
        f'{same} was here first{on}: {first.describe()}, which is left alone. End that one first, '
        f'or {mend}, or another ROS_DOMAIN_ID (now {domain})'
    )


def node_item(claim: Claim, problem: str = '') -> StatusItem:
    """Return the status item that says who a node is; `problem`: why it is not further."""
    level = Level.ERROR if problem else Level.OK
    text = f'{claim.lifecycle}: {problem}' if problem else claim.lifecycle
    return StatusItem(ITEM, level, text, claim.values())


def _without_shared(
    others: Iterable[Claim], shared_with: Mapping[str, Collection[str]]
) -> list[Claim]:
    return [
        replace(
            one, topics=frozenset(t for t in one.topics if one.node not in shared_with.get(t, ()))
        )
        for one in others
    ]
