"""Test processes that run at the same time have domains of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from vla_runtime.processes import domains

CLAIM = """
import sys, tempfile
tempfile.tempdir = sys.argv[1]
from vla_runtime.processes import domains
domains.DOMAINS = range(1, 1 + int(sys.argv[2]))
try:
    print(domains.claim_domain(), flush=True)
except RuntimeError as error:
    print(error, flush=True)
sys.stdin.read()
"""


class Claims:
    """Processes that claim a domain in the folder of one test and keep it until they are ended."""

    def __init__(self, folder: Path, domains: int) -> None:
        self._arguments = (str(folder), str(domains))
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, count: int = 1) -> list[str]:
        """Start so many at once; what each of them says."""
        pipes = {'stdin': subprocess.PIPE, 'stdout': subprocess.PIPE}
        command = [sys.executable, '-c', CLAIM, *self._arguments]
        # The domain of these tests may be one of the few; nobody claims that of its environment.
        environment = {k: v for k, v in os.environ.items() if k != 'ROS_DOMAIN_ID'}
        started = [
            subprocess.Popen(command, text=True, env=environment, **pipes) for _ in range(count)
        ]
        self.processes += started
        return [process.stdout.readline().strip() for process in started if process.stdout]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()


@pytest.fixture
def claims(tmp_path: Path):
    made = Claims(tmp_path, domains=6)
    yield made
    made.close()


def test_processes_at_the_same_time_never_share_one(claims: Claims) -> None:
    assert sorted(claims.start(6)) == ['1', '2', '3', '4', '5', '6']
    (refused,) = claims.start()
    assert refused.startswith('all 6 domains are in use')


def test_a_process_that_was_killed_gives_its_domain_back(claims: Claims) -> None:
    claimed = claims.start(6)
    claims.processes[2].send_signal(signal.SIGKILL)
    claims.processes[2].wait()
    assert claims.start() == [claimed[2]]


def test_a_process_claims_one_more_with_every_call() -> None:
    # Tests of nodes have claimed one for their process.
    own = os.environ.get('ROS_DOMAIN_ID', 'none')
    claimed = [domains.claim_domain() for _ in range(2)]
    assert len({own, *map(str, claimed)}) == 3
    assert set(claimed) <= set(domains.DOMAINS)
