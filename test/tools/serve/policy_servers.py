"""Servers of tiny policies on ports of their own, and a client of openpi's wire."""

from __future__ import annotations

import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from family_contracts.robot import CAMERAS, IMAGE_SIZE, JOINTS
from tiny_policy import tiny_spec, write_tiny_policy
from websockets.sync.client import ClientConnection, connect

from vla_runtime.bundle.folder import read_bundle
from vla_runtime.bundle.schema import BundleSpec
from vla_runtime.engines.devices import default_device
from vla_runtime.policy import Policy
from vla_runtime.remote.message_pack import pack, unpack
from vla_tools.serve.app import PolicyServer
from vla_tools.serve.listener import address_of, listen
from vla_tools.serve.loading import Loading, load_served
from vla_tools.serve.request_keys import KeysFile
from vla_tools.serve.served_policy import ServedPolicy, ServeOptions
from vla_tools.serve.socket_connection import WireLimits
from vla_tools.serve.statistics import Metrics
from vla_tools.serve.uvicorn_server import HttpOptions, UvicornServer
from vla_tools.serve.wire_zmq import ZmqWire

# Tests ask as fast as they can.
FAST = WireLimits(requests_per_s=1e6)
# For a condition that comes true at once on an idle machine.
PATIENCE_S = 30.0


def request(look: int = 0, **changes: Any) -> dict[str, Any]:
    """A seeded request of the tiny policies' robot."""
    random = np.random.default_rng(look)
    images = {
        f'observation/image/{name}': random.integers(0, 256, (*IMAGE_SIZE, 3), dtype=np.uint8)
        for name in CAMERAS
    }
    state = random.uniform(-1, 1, len(JOINTS))
    return {**images, 'observation/state': state, 'prompt': 'pick up the red cup', **changes}


def wait_for(condition: Callable[[], Any]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end_s, 'waited in vain'
        time.sleep(0.005)


def tiny_bundle(folder: Path, spec: BundleSpec | None = None) -> Path:
    return write_tiny_policy(folder, spec or tiny_spec())


@dataclass
class Running:
    """A server that runs, its parts, and where it listens."""

    port: int
    server: PolicyServer
    served: ServedPolicy
    policy: Policy
    runner: UvicornServer
    zmq_port: int

    @property
    def url(self) -> str:
        return f'ws://127.0.0.1:{self.port}'


@contextmanager
def running(
    bundle: Path,
    *,
    options: ServeOptions | None = None,
    http: HttpOptions | None = None,
    keys: tuple[str, ...] = (),
    limits: WireLimits | None = None,
    mapped: KeysFile | None = None,
    backend: str = 'torch',
    zmq: bool = False,
    beside: bool = False,
) -> Iterator[Running]:
    """Serve a bundle on a port of its own, in a thread of this process.

    Args:
        beside: `POST /bundles` may put one of the same folder in its place.
    """
    read = read_bundle(bundle)
    device = default_device(backend)
    policy = Policy.load(read, backend, device, threads=1, verify=False)
    metrics = Metrics()
    served = ServedPolicy(
        'tiny', policy, read, device, options or ServeOptions(), metrics, keys=mapped
    )
    wire = ZmqWire(served, 'tcp://127.0.0.1:0', keys=keys, file=mapped) if zmq else None
    load = None
    if beside:
        loading = Loading(options or ServeOptions(), backend, threads=1)
        load = lambda name: load_served(name, bundle.parent / name, loading, metrics)[0]  # noqa: E731
    server = PolicyServer(
        {'tiny': served}, metrics, keys=keys, limits=limits or FAST, zmq=wire, load=load
    )
    listener = listen('127.0.0.1', 0)
    http = http or HttpOptions()
    runner = UvicornServer(server, listener, replace(http, drain_s=PATIENCE_S))
    thread = threading.Thread(target=runner.run_until_signal)
    thread.start()
    try:
        wait_for(lambda: runner.started)
        port = address_of(listener)[1]
        yield Running(port, server, served, policy, runner, wire.port if wire else 0)
    finally:
        runner.stop()
        thread.join()


def status_of(server: Running, path: str, authorization: str = '') -> int:
    asked = urllib.request.Request(f'http://127.0.0.1:{server.port}{path}')
    if authorization:
        asked.add_header('Authorization', authorization)
    try:
        with urllib.request.urlopen(asked, timeout=PATIENCE_S) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


class Client:
    """A robot's connection, as openpi's client makes it; `metadata` came first."""

    def __init__(self, url: str, **options: Any) -> None:
        self._connecting = connect(url, compression=None, max_size=None, **options)
        self.socket: ClientConnection = self._connecting.__enter__()
        self.metadata = unpack(self.socket.recv(timeout=PATIENCE_S))

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self._connecting.__exit__(None, None, None)

    def ask(self, message: Any) -> Any:
        """Send a request; the reply as a map, or a fault as text."""
        self.socket.send(pack(message))
        return self.reply()

    def reply(self) -> Any:
        reply = self.socket.recv(timeout=PATIENCE_S)
        return reply if isinstance(reply, str) else unpack(reply)

    def actions(self, message: Any) -> np.ndarray:
        reply = self.ask(message)
        assert isinstance(reply, dict), reply
        return reply['actions']
