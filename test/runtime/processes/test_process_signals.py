"""Signals between programs, and children that end with the process that started them."""

import ast
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from paths import ROOT

from vla_runtime.processes import domains
from vla_runtime.processes.parent_death import LAUNCH_VARIABLE

# The program before: a signal comes when it no longer looks, then the next program begins.
BEFORE = """
import os, select, signal, sys, threading
from vla_runtime.processes.interrupt import interruptible, keep_signals
who, number, after = sys.argv[1], int(sys.argv[2]), sys.argv[3]
with interruptible() as interrupt:
    if who == 'another thread':
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    keep_signals()
    assert not interrupt.wanted
    if number:
        os.kill(os.getpid(), number)
    if who == 'another thread':
        # Taken: exec would end a thread that is still about to.
        select.select([int(os.environ['VLA_RUNTIME_SIGNALS'])], [], [])
    else:
        assert signal.sigpending() == {number} - {0}
    os.execv(sys.executable, [sys.executable, '-c', after])
"""
AFTER = """
import os, signal, subprocess, sys
from vla_runtime.processes.interrupt import interruptible
mask = 'import signal; print(signal.pthread_sigmask(signal.SIG_BLOCK, ()))'
with interruptible() as interrupt:
    print(interrupt.how or 'nothing', flush=True)
    for run in (subprocess.check_call, lambda words: os.execv(words[0], words)):
        run([sys.executable, '-c', mask])
"""


def said_after(who: str, number: int) -> list[str]:
    words = [sys.executable, '-c', BEFORE, who, f'{number:d}', AFTER]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60.0)
    assert (done.returncode, done.stderr) == (0, '')
    return done.stdout.splitlines()


@pytest.mark.parametrize('who', ['no other thread', 'another thread'])
@pytest.mark.parametrize(
    ('name', 'how'),
    [
        ('SIGINT', 'ended with Ctrl-C'),
        ('SIGTERM', 'ended by SIGTERM'),
        ('SIGHUP', 'ended by SIGHUP: its terminal was closed'),
    ],
)
def test_a_signal_between_two_programs_is_the_next_ones(who, name, how):
    # Neither its children nor itself keep a mask.
    assert said_after(who, getattr(signal, name)) == [how, 'set()', 'set()']


def test_without_a_signal_the_next_program_starts_as_any():
    assert said_after('no other thread', 0) == ['nothing', 'set()', 'set()']


# --- Children end with the process that started them, nodes with their launch

PARENT = """
import subprocess, sys, time
from vla_runtime.processes.parent_death import dies_with_this_process
child = subprocess.Popen(
    [sys.executable, '-c', 'import time; time.sleep(1000)'],
    preexec_fn=dies_with_this_process(),
)
print(child.pid, flush=True)
time.sleep(1000)
"""
NODE = """
import os, signal, time
from vla_runtime.processes.parent_death import end_with_launch
def end(*_):
    os.write(1, b'SIGTERM')
    os._exit(0)
signal.signal(signal.SIGTERM, end)
end_with_launch()
print(os.getpid(), flush=True)
while True:
    time.sleep(0.1)
"""
# Starts what follows as the launch files start their nodes.
LAUNCH = f"""
import os, subprocess, sys, time
os.environ['{LAUNCH_VARIABLE}'] = str(os.getpid())
subprocess.Popen(sys.argv[1:])
time.sleep(1000)
"""
# Far longer than anything here takes on any machine.
PATIENCE_S = 120.0


def test_a_child_ends_when_its_parent_is_killed():
    parent = subprocess.Popen([sys.executable, '-c', PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = os.pidfd_open(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    # Becomes readable when the process ends.
    readable, _, _ = select.select([child], [], [], PATIENCE_S)
    os.close(child)
    assert readable


def start_launch(*between: str) -> tuple[subprocess.Popen[str], int]:
    """Start a launch with one node; returns it and the node's process id."""
    launch = subprocess.Popen(
        [sys.executable, '-c', LAUNCH, *between, sys.executable, '-c', NODE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert launch.stdout is not None
    return launch, int(launch.stdout.readline())


@pytest.mark.parametrize('number', [signal.SIGKILL, signal.SIGTERM])
def test_a_node_gets_sigterm_when_its_launch_ends(number):
    launch, _ = start_launch()
    launch.send_signal(number)
    # Read to its end, which comes when the node, too, has closed it.
    assert launch.communicate(timeout=PATIENCE_S)[0] == 'SIGTERM'


def test_what_a_shell_in_a_launch_starts_goes_on():
    launch, node = start_launch('sh', '-c', '"$@"; true', 'sh')
    launch.kill()
    launch.wait()
    assert launch.stdout is not None
    readable, _, _ = select.select([launch.stdout], [], [], 0.5)
    os.kill(node, signal.SIGTERM)
    assert launch.stdout.read() == 'SIGTERM'
    assert not readable


@pytest.mark.parametrize('reaped', [True, False])
def test_a_node_gets_sigterm_when_its_launch_ended_before_it_could_be_tied(reaped):
    # To the end of its input, which `communicate` closes.
    wait = ('sh', '-c', 'echo 0; read line; exec "$@"', 'sh')
    launch, _ = start_launch(*wait)
    launch.kill()
    # Ended, and not reaped yet.
    os.waitid(os.P_PID, launch.pid, os.WEXITED | os.WNOWAIT)
    if reaped:
        launch.wait()
    assert launch.communicate(timeout=PATIENCE_S)[0] == 'SIGTERM'


def test_every_node_of_the_launch_files_is_told_its_launch():
    for file in (ROOT / 'launch').glob('*.launch.py'):
        calls = [
            node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)
        ]
        nodes = [call for call in calls if ast.unparse(call.func) == 'Node']
        assert nodes, file
        for call in nodes:
            given = {word.arg: ast.unparse(word.value) for word in call.keywords}
            assert 'LAUNCH_VARIABLE: str(os.getpid())' in given['additional_env'], file


# --- Test processes that run at the same time have domains of their own

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
def claims(tmp_path):
    made = Claims(tmp_path, domains=6)
    yield made
    made.close()


def test_processes_at_the_same_time_never_share_one(claims):
    assert sorted(claims.start(6)) == ['1', '2', '3', '4', '5', '6']
    (refused,) = claims.start()
    assert refused.startswith('all 6 domains are in use')


def test_a_process_that_was_killed_gives_its_domain_back(claims):
    claimed = claims.start(6)
    claims.processes[2].send_signal(signal.SIGKILL)
    claims.processes[2].wait()
    assert claims.start() == [claimed[2]]


def test_a_process_claims_one_more_with_every_call():
    # Tests of nodes have claimed one for their process.
    own = os.environ.get('ROS_DOMAIN_ID', 'none')
    claimed = [domains.claim_domain() for _ in range(2)]
    assert len({own, *map(str, claimed)}) == 3
    assert set(claimed) <= set(domains.DOMAINS)
