"""Run episodes one after the other: home, set the scene, drive, judge.

A person types a letter and Enter: s success, f failure, p pause, r resume, q end. The verdicts are
the executor's own (~/success, ~/failure, the time limit), so a recording and a data set have them.
The robot rests between two episodes, and when this command ends.

examples:
  vla_runtime episodes --count 20 --seconds 30
  vla_runtime episodes --count 20 --seconds 30 --home
  vla_runtime episodes --namespace /left

exit code: 0; 2 where no executor is in the graph, or it refuses to start.
"""

from __future__ import annotations

import argparse
import queue
import sys
import threading
from typing import TYPE_CHECKING

from vla_runtime.files.quotes import counted

if TYPE_CHECKING:
    from vla_runtime.nodes.episode_client import EpisodeClient

_KEYS = 's success, f failure, p pause, r resume, q end'
_CALLS = {'s': 'success', 'f': 'failure', 'p': 'pause', 'r': ''}
_END = 'q'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        '--count', type=int, default=0, metavar='N', help='end after so many (default: q ends)'
    )
    parser.add_argument(
        '--seconds', type=float, metavar='S', help='time limit of each (default: the executor has)'
    )
    parser.add_argument(
        '--home', action='store_true', help="send the robot to the robot file's home before each"
    )
    parser.add_argument('--namespace', metavar='NS', help="the robot's (default: none)")


def main(arguments: argparse.Namespace) -> int:
    """Return the exit code that the module says."""
    from vla_runtime.nodes.episode_client import EpisodeClient
    from vla_runtime.nodes.graph_status import full_namespace, graph_node

    try:
        name = f'{full_namespace(arguments.namespace) or ""}/vla_executor'
        with graph_node('_vla_episodes') as node:
            client = EpisodeClient(node, name)
            try:
                return _run(client, arguments)
            finally:
                client.close()
    except ValueError as error:
        print(f'error: {error}', file=sys.stderr)
        return 2


class _Ended(Exception):  # noqa: N818 - it is an answer, not an error
    """A person wants no more episodes."""


def _run(client: EpisodeClient, arguments: argparse.Namespace) -> int:
    if arguments.seconds is not None and (refused := client.limit_time(arguments.seconds)):
        raise ValueError(f'--seconds {arguments.seconds:g}: {refused}')
    lines = _Lines()
    outcomes: list[str] = []
    _say(f'{client.name}: {_KEYS}; then Enter')
    try:
        while not arguments.count or len(outcomes) < arguments.count:
            _rest(client, lines, go_home=arguments.home)
            of = f' of {arguments.count}' if arguments.count else ''
            _say(f'episode {len(outcomes) + 1}{of}: set the scene, then press Enter')
            lines.wait_for(client, '')
            begun = client.begin()
            if not begun.success:
                raise ValueError(begun.message)
            outcomes.append(_drive(client, lines))
    except (_Ended, EOFError):
        pass
    finally:
        if client.is_started():
            client.call('pause')
        _say(_summary(outcomes))
    return 0


def _rest(client: EpisodeClient, lines: _Lines, *, go_home: bool) -> None:
    """Let a started robot rest, or send it home and wait until it is there."""
    if go_home:
        answer = client.go_home(far=False)
        if not answer.success:
            _say(f'  {answer.message}')
            _say('  h sends it home all the same')
            lines.wait_for(client, 'h')
            answer = client.go_home(far=True)
        if not answer.success:
            raise ValueError(answer.message)
        client.wait_until_home()
    elif client.is_started() and not client.is_paused():
        client.call('pause')


def _drive(client: EpisodeClient, lines: _Lines) -> str:
    """Return how the episode ended."""
    was_started = True
    while not client.outcome:
        client.spin()
        line = lines.take()
        if line == _END:
            raise _Ended
        if line in _CALLS:
            answer = client.go_on() if line == 'r' else client.call(_CALLS[line])
            if not client.outcome:
                _say(f'  {answer.message}')
        if was_started and not client.is_started() and (control := client.control()):
            _say(f'  {control.text}')
            _say('  r starts it again')
        was_started = client.is_started()
    _say(f'  {client.text}')
    return client.outcome


def _summary(outcomes: list[str]) -> str:
    successes = outcomes.count('success')
    limits = outcomes.count('time_limit')
    return (
        f'{counted(len(outcomes), "episode")}, {successes} successful'
        f'{f", {limits} ended by the time limit" if limits else ""}'
    )


def _say(text: str) -> None:
    print(text, flush=True)


class _Lines:
    """Lines that a person types, without waiting for them."""

    def __init__(self) -> None:
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in sys.stdin:
            self._lines.put(line.strip().lower())
        self._lines.put(None)

    def take(self) -> str | None:
        """Return the next line; None where there is none; EOFError at the end of the input."""
        try:
            line = self._lines.get_nowait()
        except queue.Empty:
            return None
        if line is None:
            raise EOFError
        return line

    def wait_for(self, client: EpisodeClient, letter: str) -> None:
        """Wait for a line of this letter; `_Ended` where a person wants no more."""
        while (line := self.take()) != letter:
            if line == _END:
                raise _Ended
            client.spin()
