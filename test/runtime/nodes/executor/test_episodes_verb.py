"""`vla_runtime episodes` on a real graph, as a person at the robot types it."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from executor_bench import Bench
from graph import graph
from paths import ROOT

pytestmark = pytest.mark.graph


@pytest.fixture(scope='module')
def bench(bundle: Path) -> Iterator[Bench]:
    with graph() as made:
        bench = Bench(made, bundle, '/table')
        bench.begin()
        yield bench
        bench.arm.close()


class Verb:
    """The command, its keys and what it prints."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, '-m', 'vla_runtime', 'episodes', *arguments],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines += iter(self.process.stdout.readline, '')

    @property
    def text(self) -> str:
        return ''.join(self.lines)

    def type(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f'{line}\n')
        self.process.stdin.flush()


def test_without_an_executor_it_says_so_and_gives_2() -> None:
    verb = Verb('--namespace', '/nobody')
    assert verb.process.wait(60) == 2
    assert '/nobody/vla_executor' in verb.text


def test_episodes_are_begun_judged_and_counted(bench: Bench) -> None:
    wait = bench.graph.wait_for
    verb = Verb('--namespace', '/table', '--count', '3', '--seconds', '0.5', '--home')
    wait(lambda: 'episode 1 of 3' in verb.text, 'the first question')
    paused = bench.status()
    assert paused is not None and (paused['mode'], paused['reason']) == ('running', 'paused')
    assert bench.graph.set_parameter(bench.node, 'episode_time_limit_s', 0.0).successful
    verb.type('')
    wait(lambda: bench.arm.plans, 'a request')
    verb.type('s')
    wait(lambda: 'episode 2 of 3' in verb.text, 'the second question')
    assert bench.graph.set_parameter(bench.node, 'episode_time_limit_s', 0.4).successful
    verb.type('')
    # Nobody types anything: the time is up.
    wait(lambda: 'episode 3 of 3' in verb.text, 'the third question')
    assert bench.graph.set_parameter(bench.node, 'episode_time_limit_s', 0.0).successful
    verb.type('')
    bench.wait_for_status('driving', lambda s: s['reason'] == 'waiting_for_chunk')
    verb.type('q')
    assert verb.process.wait(60) == 0
    assert '2 episodes, 1 successful, 1 ended by the time limit' in verb.text
    bench.wait_for_status('rest', lambda s: s['reason'] == 'paused')
