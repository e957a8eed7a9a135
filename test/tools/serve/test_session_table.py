"""Who has which session, and how long one that was left is kept."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from vla_tools.serve.sessions import RobotSession, SessionError, SessionTable


class Table(SessionTable):
    """A table with a clock of its own, and the names of the sessions that have ended."""

    def __init__(self, most: int = 3, keep_s: float = 60.0) -> None:
        self.now_s, self.ended = 0.0, []
        super().__init__(most, keep_s, self._note, lambda: self.now_s)

    def _note(self, session: RobotSession) -> None:
        assert session.ended
        self.ended.append(session.name)

    def used(self, name: str) -> RobotSession:
        return self.asked(self.open(name))

    def asked(self, session: RobotSession) -> RobotSession:
        """The session after a request of it."""
        self.admit(session)
        session.requests += 1
        return session


def test_a_session_that_was_left_goes_on_under_its_name() -> None:
    table = Table()
    session = table.used('a')
    table.leave(session)
    table.now_s = 60.0
    table.end_kept()
    assert table.open('a') is session and session.connected and not table.ended


def test_a_session_ends_after_its_time() -> None:
    table = Table()
    session = table.used('a')
    table.leave(session)
    table.now_s = 60.1
    table.end_kept()
    assert table.ended == ['a'] and table.open('a') is not session


def test_a_connected_session_is_kept_however_long() -> None:
    table = Table()
    table.used('a')
    table.now_s = 1e6
    table.end_kept()
    assert len(table.connected) == 1


def test_a_session_that_was_never_used_ends_at_once() -> None:
    table = Table()
    session = table.open()
    table.leave(session)
    assert table.ended == [session.name] and len(table) == 0


def test_a_second_connection_of_one_name_is_refused() -> None:
    table = Table()
    table.used('a')
    with pytest.raises(SessionError):
        table.open('a')
    with pytest.raises(SessionError):
        table.move(table.open(), 'a')


def test_the_longest_left_makes_room_and_connected_ones_never() -> None:
    table = Table(most=2)
    first, second = table.used('a'), table.used('b')
    with pytest.raises(SessionError):
        table.open()
    for session in (second, first):
        table.leave(session)
        table.now_s += 1.0
    third = table.open('c')
    assert not table.ended
    table.asked(third)
    assert table.ended == ['b']
    table.asked(third)
    assert table.ended == ['b']


def test_who_comes_back_needs_no_room() -> None:
    table = Table(most=1)
    session = table.used('a')
    table.leave(session)
    fresh = table.open()
    assert table.move(fresh, 'a') is session and table.ended == [fresh.name]


def test_a_robot_with_many_names_takes_no_other_robots_place() -> None:
    table = Table(most=3)
    session = table.used('a')
    table.leave(session)
    one = table.open()
    for number in range(10):
        table.now_s += 1.0
        one = table.asked(table.move(one, f'name {number}'))
    assert 'a' not in table.ended and len(table) == 3
    assert table.open('a') is session


def test_a_new_connection_takes_its_name_and_another_session_moves_it() -> None:
    table = Table()
    fresh = table.open()
    assert table.move(fresh, 'arm') is fresh and fresh.name == 'arm'
    assert table.move(fresh, None) is fresh is table.move(fresh, 'arm')
    table.asked(fresh)
    other = table.move(fresh, 'leg')
    assert other.name == 'leg' and not fresh.connected and not table.ended
    assert table.move(other, 'arm') is fresh
    assert table.ended == ['leg']


def test_names_are_not_to_be_guessed() -> None:
    table = Table(most=100)
    names = {table.open().name for _ in range(100)}
    assert len(names) == 100 and {len(name) for name in names} == {32}


def test_a_later_request_is_admitted_by_any_thread_while_robots_come_and_go() -> None:
    """The other threads decode requests; the table belongs to the event loop's."""
    table = Table(most=64, keep_s=0.0)
    session = table.used('first')
    crowd = [table.open() for _ in range(48)]
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(1) as decoder:
            admitted = decoder.submit(lambda: [table.admit(session) for _ in range(2000)])
            while not admitted.done():
                table.leave(crowd.pop())
                crowd.append(table.open())
            admitted.result()
    finally:
        sys.setswitchinterval(interval_s)
