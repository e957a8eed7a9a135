"""A process in a network namespace of its own, on a cable that a test can pull."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from paths import ROOT

# What its two ends need to find each other: discovery by address, and no shared memory, which
# would lead around the cable.
_TRANSPORT = {'FASTDDS_BUILTIN_TRANSPORTS': 'UDPv4', 'ROS_AUTOMATIC_DISCOVERY_RANGE': 'LOCALHOST'}

# A hardware address that no device has.
_NOBODY = '02:00:00:00:00:01'


def _ip(*words: str) -> None:
    subprocess.run(['ip', *words], check=True, capture_output=True, text=True)


@dataclass(frozen=True)
class Cable:
    """Between this network namespace and another one.

    Attributes:
        namespace: the other one.
        inside: the device there.
        here: address of this end.
        mac: hardware address of this end.
    """

    namespace: str
    inside: str
    here: str
    mac: str

    def pull(self) -> None:
        """Nothing passes any more; both ends keep their addresses."""
        _ip('-n', self.namespace, 'link', 'set', self.inside, 'down')

    def plug(self) -> None:
        _ip('-n', self.namespace, 'link', 'set', self.inside, 'up')

    @contextmanager
    def lose_what_comes(self) -> Iterator[None]:
        """Nothing from the other end arrives, and all that is sent to it does."""
        self._send_to(_NOBODY)
        try:
            yield
        finally:
            self._send_to(self.mac)

    def _send_to(self, mac: str) -> None:
        words = ['neigh', 'replace', self.here, 'lladdr', mac, 'dev', self.inside]
        _ip('-n', self.namespace, *words, 'nud', 'permanent')

    @contextmanager
    def process(self, script: Path) -> Iterator[subprocess.Popen[bytes]]:
        """A Python script running at the other end."""
        words = ['ip', 'netns', 'exec', self.namespace, sys.executable, str(script)]
        # It finds what the tests find: their folders are on the path of this process only.
        path = os.pathsep.join([str(ROOT), *sys.path])
        # `ip netns exec` becomes the script, so the signal goes to it.
        process = subprocess.Popen(words, env={**os.environ, 'PYTHONPATH': path})
        try:
            yield process
        finally:
            process.kill()
            process.wait()


@contextmanager
def cable(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cable]:
    """A namespace with a cable to it; processes and graphs started meanwhile talk over both.

    Skips the test, saying why, where namespaces cannot be made.
    """
    if shutil.which('ip') is None:
        pytest.skip('a network namespace needs the program ip (iproute2)')
    pid = os.getpid()
    namespace, outside, inside = f'vla{pid}', f'vla{pid}o', f'vla{pid}i'
    # 198.18.0.0/15 is reserved for tests of networks: no robot has an address there.
    here, there = (f'198.18.{pid % 256}.{end}' for end in (1, 2))
    try:
        _ip('netns', 'add', namespace)
    except subprocess.CalledProcessError as error:
        pytest.skip(f'network namespaces are not permitted here: {error.stderr.strip()}')
    try:
        try:
            _ip('link', 'add', outside, 'type', 'veth', 'peer', 'name', inside, 'netns', namespace)
        except subprocess.CalledProcessError as error:
            pytest.skip(f'a veth pair is not permitted here: {error.stderr.strip()}')
        _ip('addr', 'add', f'{here}/30', 'dev', outside)
        _ip('link', 'set', outside, 'up')
        _ip('-n', namespace, 'addr', 'add', f'{there}/30', 'dev', inside)
        _ip('-n', namespace, 'link', 'set', 'lo', 'up')
        _ip('-n', namespace, 'link', 'set', inside, 'up')
        with monkeypatch.context() as changed:
            for name, value in {**_TRANSPORT, 'ROS_STATIC_PEERS': f'{here};{there}'}.items():
                changed.setenv(name, value)
            mac = Path(f'/sys/class/net/{outside}/address').read_text().strip()
            yield Cable(namespace, inside, here, mac)
    finally:
        # The pair goes with the namespace too, but some time after: the next cable has its name.
        subprocess.run(['ip', 'link', 'del', outside], capture_output=True)
        _ip('netns', 'del', namespace)
