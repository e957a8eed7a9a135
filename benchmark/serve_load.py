"""What the policy server costs over `Policy.infer`, and its chunks a second with many robots.

Overhead: one robot sends three 224x224 images over loopback, by turns with the same request to
`Policy.infer` in this process; the demo policy with a third camera, prefix found in the cache and
with new images. The difference of the medians is the overhead; `reply - engine` is the same of one
request, from the server's own time of the engine in its reply. `bare socket` is the same frame to a
server of the same libraries that answers at once with as many bytes: what no server is faster than.

Load: 1 to 32 robots, each of which asks again as soon as it has its chunk, with batches and one
after the other by turns. One process has all robots. New images every time (miss), or the same
(hit).

`--realtime` (SCHED_FIFO) keeps other programs of the machine out of the figures; they get on in the
pauses, each as long as a load.

Run: python benchmark/serve_load.py [--realtime] [--seconds 4] [--rounds 2] [--requests 400]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, AsyncExitStack, contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import yaml
from parts.measurement import Target, in_turn, percentiles, write_result
from tqdm import tqdm
from websockets.asyncio.client import connect

from vla_runtime.policy import Policy
from vla_runtime.remote.message_pack import pack, unpack
from vla_runtime.types import Observation

ROOT = Path(__file__).resolve().parents[1]
ROBOTS = (1, 2, 4, 8, 16, 32)
SIDE = 224
# As a chunk of the demo policy comes back.
_REPLY_BYTES = 3000
PACKAGES = ('msgpack', 'numpy', 'starlette', 'torch', 'uvicorn', 'uvloop', 'websockets')


def with_three_cameras(folder: Path) -> Path:
    """The demo policy, whose networks take any number of cameras, with one camera more."""
    shutil.copytree(ROOT / 'engines' / 'demo', folder)
    spec = yaml.safe_load((folder / 'policy.yaml').read_text(encoding='utf-8'))
    spec['dimensions']['cameras'] = 3
    spec['cameras'].append({'name': 'side', 'present': True})
    (folder / 'policy.yaml').write_text(yaml.safe_dump(spec, sort_keys=False), encoding='utf-8')
    return folder


BARE = """
import socket, sys
import uvicorn
from starlette.applications import Starlette
from starlette.routing import WebSocketRoute

async def answer(socket):
    await socket.accept()
    while True:
        await socket.receive_bytes()
        await socket.send_bytes(bytes(int(sys.argv[1])))

listener = socket.create_server(('127.0.0.1', 0))
print(f'ready: ws://127.0.0.1:{listener.getsockname()[1]}', flush=True)
app = Starlette(routes=[WebSocketRoute('/', answer)])
given = {'ws': 'websockets-sansio', 'ws_per_message_deflate': False, 'log_level': 'error'}
uvicorn.Server(uvicorn.Config(app, **given)).run(sockets=[listener])
"""


@contextmanager
def started(*command: str) -> Iterator[str]:
    """A server in a process of its own; its address."""
    server = subprocess.Popen(
        [sys.executable, *command], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        line = next(line for line in server.stdout if line.startswith('ready: '))
        yield line.split()[1]
    finally:
        server.terminate()
        server.wait()


def served(bundle: Path, *options: str) -> AbstractContextManager[str]:
    """The policy server; its address."""
    words = ('-m', 'vla_runtime', 'serve', str(bundle), '--port', '0', '--max-rate', '100000')
    return started(*words, *options)


@contextmanager
def realtime(wanted: bool) -> Iterator[None]:
    """Let this process, and those that it starts, go before all others of the machine."""
    if not wanted:
        yield
        return
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(10))
    try:
        yield
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def look_of(cameras: tuple[str, ...], seed: int) -> Observation:
    random = np.random.default_rng(seed)
    images = {name: random.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8) for name in cameras}
    return Observation(images, random.uniform(-1, 1, 6), 'touch the red block')


def packed(look: Observation) -> bytes:
    images = {f'observation/image/{name}': image for name, image in look.images.items()}
    return pack({**images, 'observation/state': look.state, 'prompt': look.instruction})


def changed(look: Observation, turn: int) -> Observation:
    """The same with other pixels."""
    for image in look.images.values():
        assert image is not None
        image[:] += np.uint8(1 + turn % 7)
    return look


async def ask(socket: Any, request: bytes) -> tuple[float, dict[str, Any]]:
    """Milliseconds to the reply, and the reply."""
    start = perf_counter()
    await socket.send(request)
    reply = unpack(await socket.recv())
    return (perf_counter() - start) * 1e3, reply


async def ask_bare(socket: Any, looks: Observation) -> float:
    """Milliseconds that a request's bytes and a reply's take by themselves."""
    start = perf_counter()
    await socket.send(packed(looks))
    await socket.recv()
    return (perf_counter() - start) * 1e3


async def measure_overhead(
    url: str, bare_url: str, policy: Policy, requests: int
) -> dict[str, Any]:
    looks = look_of(policy.spec.camera_names, 0)
    times: dict[str, list[float]] = defaultdict(list)
    async with (
        connect(url, compression=None, max_size=None, proxy=None) as socket,
        connect(bare_url, compression=None, max_size=None, proxy=None) as bare,
    ):
        await socket.recv()
        for turn in tqdm(range(requests), desc='overhead'):
            for kind in ('miss', 'hit'):
                if kind == 'miss':
                    changed(looks, turn)
                for way in in_turn(['server', 'alone'], turn):
                    if way == 'server':
                        start = perf_counter()
                        request = packed(looks)
                        packing_ms = (perf_counter() - start) * 1e3
                        milliseconds, reply = await ask(socket, request)
                        engine_ms = reply['policy_timing']['infer_ms']
                        times[f'{kind} server'].append(packing_ms + milliseconds)
                        times[f'{kind} reply - engine'].append(
                            packing_ms + milliseconds - engine_ms
                        )
                    else:
                        start = perf_counter()
                        chunk, _ = policy.infer(looks)
                        times[f'{kind} alone'].append((perf_counter() - start) * 1e3)
                times[f'{kind} bare socket'].append(await ask_bare(bare, looks))
                assert np.array_equal(reply['actions'], chunk.actions)
    figures: dict[str, Any] = {name: percentiles(found) for name, found in times.items()}
    for kind in ('miss', 'hit'):
        over = figures[f'{kind} server']['median'] - figures[f'{kind} alone']['median']
        figures[f'{kind} overhead_ms'] = over
    return figures


async def run_robot(
    socket: Any, requests: list[bytes], seconds: float, found: list[tuple[float, int]]
) -> None:
    """Ask until the time is over; what comes after it does not count."""
    until_s = perf_counter() + seconds
    turn = 1
    while True:
        milliseconds, reply = await ask(socket, requests[turn % len(requests)])
        if perf_counter() > until_s:
            return
        found.append((milliseconds, reply['vla_runtime']['together']))
        turn += 1


async def run_robots(url: str, count: int, miss: bool, seconds: float) -> list[tuple[float, int]]:
    """Milliseconds and size of the batch of each chunk, once every robot has had its first."""
    found: list[tuple[float, int]] = []
    async with AsyncExitStack() as stack:
        sockets, requests = [], []
        for seed in range(count):
            look = look_of(('front', 'wrist'), seed)
            requests.append([packed(changed(look, turn)) for turn in range(3 if miss else 1)])
            opening = connect(url, compression=None, max_size=None, proxy=None)
            sockets.append(await stack.enter_async_context(opening))
            await sockets[-1].recv()
        # This fills the caches.
        await asyncio.gather(
            *(ask(socket, given[0]) for socket, given in zip(sockets, requests, strict=True))
        )
        robots = (
            run_robot(socket, given, seconds, found)
            for socket, given in zip(sockets, requests, strict=True)
        )
        await asyncio.gather(*robots)
    return found


def measure_load(
    urls: dict[str, str], rounds: int, seconds: float, pause_s: float
) -> dict[str, Any]:
    found: dict[tuple[str, int, bool], list[tuple[float, int]]] = defaultdict(list)
    kinds = [(count, miss) for count in ROBOTS for miss in (False, True)]
    for round_ in range(rounds):
        for count, miss in tqdm(kinds, desc=f'load, round {round_ + 1}'):
            for way in in_turn([*urls], round_):
                found[way, count, miss] += asyncio.run(run_robots(urls[way], count, miss, seconds))
                time.sleep(pause_s)
    figures: dict[str, Any] = {}
    for (way, count, miss), answers in found.items():
        milliseconds, together = np.array(answers).T
        figures[f'{way}, {count} robots, {"miss" if miss else "hit"}'] = {
            'chunks_per_s': len(answers) / (rounds * seconds),
            'p50_ms': float(np.percentile(milliseconds, 50)),
            'p99_ms': float(np.percentile(milliseconds, 99)),
            'together_mean': float(together.mean()),
        }
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or '').split('\n')[0])
    parser.add_argument('--seconds', type=float, default=4.0, help='of a load (default: 4)')
    parser.add_argument('--rounds', type=int, default=2, help='rounds of loads (default: 2)')
    parser.add_argument('--requests', type=int, default=400, help='for overhead (default: 400)')
    parser.add_argument('--threads', default='1', help='CPU threads of a network (default: 1)')
    parser.add_argument('--realtime', action='store_true', help='first of all programs')
    parser.add_argument('--out', type=Path, help='another file for the results')
    arguments = parser.parse_args()
    options = ('--backend', 'torch', '--threads', arguments.threads)
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        bundle = with_three_cameras(Path(folder) / 'three_cameras')
        policy = Policy.load(bundle, 'torch', threads=int(arguments.threads))
        policy.warm_up()
        with (
            realtime(arguments.realtime),
            served(bundle, *options) as url,
            started('-c', BARE, str(_REPLY_BYTES)) as bare_url,
        ):
            overhead = measure_overhead(url, bare_url, policy, arguments.requests)
            figures['overhead'] = asyncio.run(overhead)
        policy.close()
    demo = ROOT / 'engines' / 'demo'
    with (
        realtime(arguments.realtime),
        served(demo, *options) as batches,
        served(demo, *options, '--batch', 'off') as alone,
    ):
        urls = {'batches': batches, 'one after the other': alone}
        pause_s = arguments.seconds if arguments.realtime else 0.0
        figures['load'] = measure_load(urls, arguments.rounds, arguments.seconds, pause_s)
    for name, one in figures['load'].items():
        print(
            f'{name:38} {one["chunks_per_s"]:7.1f} chunks/s, {one["p50_ms"]:7.1f} ms, p99 '
            f'{one["p99_ms"]:7.1f}, {one["together_mean"]:.1f} together'
        )
    for kind in ('hit', 'miss'):
        over = figures['overhead'][f'{kind} overhead_ms']
        print(Target(f'overhead, {kind}, ms', 1.5, over, arguments.requests).line)
        for part in ('reply - engine', 'bare socket'):
            print(f'  {part}: {figures["overhead"][f"{kind} {part}"]}')
    print(f'wrote {write_result("serve_load", figures, PACKAGES, arguments.out)}')


if __name__ == '__main__':
    main()
