"""The policy server beside LeRobot's, and beside a process of its own for each robot, by turns.

LeRobot writes a folder of pi0.5 of 127 million random numbers, and our server runs the bundle of
it. Robots ask again as soon as they have their chunk. LeRobot 0.6.1's policy server has one
observation and one policy for all clients, so that one may get the chunk of another, or none: its
chunks that came to who had asked are counted, and the others beside them. With processes each robot
has the policy, and its cache, in a process of its own, with one thread; the servers have a thread
for each core. Twice: new images every time (miss), and the same (hit; LeRobot has no cache).

    python benchmark/serve_beside.py --lerobot-python LEROBOT_ENV/bin/python

LEROBOT_ENV: pip install 'lerobot[async,transformers-dep]==0.6.1'
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import socket
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from lerobot_turns import TOKENIZERS, export, lerobot_environment, make_folder, observation
from lerobot_turns import look as pi05_look
from parts.lerobot_worker import TASK, Options
from parts.measurement import in_turn, write_result
from serve_load import ask, served
from tqdm import tqdm
from websockets.asyncio.client import connect

from vla_runtime.bundle.folder import read_bundle
from vla_runtime.policy import Policy
from vla_runtime.remote.message_pack import pack
from vla_runtime.types import Observation

ROOT = Path(__file__).resolve().parents[1]
# With more a chunk takes the processor minutes; `serve_load.py` has them with the demo's policy.
ROBOTS = (1, 2, 4, 8)
PACKAGES = ('msgpack', 'numpy', 'starlette', 'torch', 'uvicorn', 'uvloop', 'websockets')


def looks_of(bundle: Path, robot: int, miss: bool) -> list[Observation]:
    spec = read_bundle(bundle, verify=False).spec
    seeds = [1000 * robot + turn for turn in range(3 if miss else 1)]
    return [observation(pi05_look('pi05', seed, spec), spec) for seed in seeds]


def packed(look: Observation) -> bytes:
    images = {f'observation/image/{name}': image for name, image in look.images.items()}
    return pack({**images, 'observation/state': look.state, 'prompt': TASK})


@dataclass
class Load:
    """Milliseconds of each chunk, and chunks a second of all robots together."""

    ms: list[float] = field(default_factory=list)
    chunks_per_s: float = 0.0

    def add(self, ms: list[float], seconds: float) -> None:
        """Add a robot's chunks; its last one began within the load and ended after it."""
        self.ms += ms
        self.chunks_per_s += len(ms) / seconds


async def run_robots(url: str, looks: list[list[Observation]], seconds: float) -> Load:
    load = Load()
    requests = [[packed(look) for look in one] for one in looks]
    async with AsyncExitStack() as stack:
        servers = []
        for _ in requests:
            opened = connect(url, compression=None, max_size=None, proxy=None, ping_timeout=None)
            servers.append(await stack.enter_async_context(opened))
            await servers[-1].recv()
        # A first chunk each, so that a hit is one.
        await asyncio.gather(
            *(ask(one, mine[0]) for one, mine in zip(servers, requests, strict=True))
        )

        async def run(server: Any, mine: list[bytes]) -> None:
            found: list[float] = []
            begin_s = perf_counter()
            while perf_counter() - begin_s < seconds:
                found.append((await ask(server, mine[(len(found) + 1) % len(mine)]))[0])
            load.add(found, perf_counter() - begin_s)

        await asyncio.gather(*(run(one, mine) for one, mine in zip(servers, requests, strict=True)))
    return load


def run_process(
    bundle: Path, robot: int, miss: bool, seconds: float, begin: Any, sent: Any
) -> None:
    """One robot's own process: load, wait for the others, infer."""
    policy = Policy.load(bundle, 'torch', threads=1, verify=False)
    policy.warm_up()
    looks = looks_of(bundle, robot, miss)
    policy.infer(looks[0])
    begin.wait()
    found: list[float] = []
    begin_s = perf_counter()
    while perf_counter() - begin_s < seconds:
        start_s = perf_counter()
        policy.infer(looks[(len(found) + 1) % len(looks)])
        found.append((perf_counter() - start_s) * 1e3)
    sent.put((found, perf_counter() - begin_s))
    policy.close()


def run_processes(bundle: Path, count: int, miss: bool, seconds: float) -> Load:
    made = multiprocessing.get_context('spawn')
    begin, sent = made.Barrier(count), made.Queue()
    processes = [
        made.Process(target=run_process, args=(bundle, robot, miss, seconds, begin, sent))
        for robot in range(count)
    ]
    for process in processes:
        process.start()
    load = Load()
    for _ in processes:
        load.add(*sent.get())
    for process in processes:
        process.join()
    return load


class LeRobotServer:
    """LeRobot's policy server, which has one policy for all clients."""

    def __init__(self, python: Path, options: Options) -> None:
        # A relative one would be sought where the server is started.
        self._python, self._options = python.absolute(), options
        with socket.create_server(('127.0.0.1', 0)) as free:
            self._port = free.getsockname()[1]

    def command(self, verb: str, *words: str) -> list[str]:
        script = ROOT / 'benchmark' / 'parts' / 'lerobot_server.py'
        given = json.dumps(asdict(self._options))
        return [str(self._python), str(script), verb, given, str(self._port), *words]

    @contextmanager
    def running(self) -> Iterator[None]:
        # It writes `logs/` where it is started.
        folder = tempfile.TemporaryDirectory()
        server = subprocess.Popen(
            self.command('serve'),
            env=lerobot_environment(),
            stderr=subprocess.DEVNULL,
            cwd=folder.name,
        )
        try:
            while True:
                if server.poll() is not None:
                    raise SystemExit('the policy server of LeRobot ended; run its command by hand')
                try:
                    socket.create_connection(('127.0.0.1', self._port)).close()
                    break
                except OSError:
                    time.sleep(0.2)
            yield
        finally:
            server.terminate()
            server.wait()
            folder.cleanup()

    def run_robots(self, count: int, seconds: float) -> dict[str, Any]:
        done = subprocess.run(
            self.command('robots', str(count), str(seconds)),
            env=lerobot_environment(),
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        return dict(json.loads(done.stdout.splitlines()[-1]))


def measure(
    url: str, bundle: Path, lerobot: LeRobotServer | None, rounds: int, seconds: float
) -> dict[str, Any]:
    found: dict[tuple[str, int, bool], list[Load]] = defaultdict(list)
    others: dict[tuple[str, int, bool], list[int]] = defaultdict(lambda: [0, 0])
    kinds = [(count, miss) for count in ROBOTS for miss in (True, False)]
    ways = ['server', 'processes', *(['lerobot'] if lerobot else [])]
    for round_ in range(rounds):
        for count, miss in tqdm(kinds, desc=f'round {round_ + 1}', mininterval=10):
            for way in in_turn(ways, round_):
                key = way, count, miss
                if way == 'server':
                    looks = [looks_of(bundle, robot, miss) for robot in range(count)]
                    found[key].append(asyncio.run(run_robots(url, looks, seconds)))
                elif way == 'processes':
                    found[key].append(run_processes(bundle, count, miss, seconds))
                elif miss:
                    assert lerobot is not None
                    with lerobot.running():
                        answer = lerobot.run_robots(count, seconds)
                    found[key].append(Load(answer['ms'], answer['chunks_per_s']))
                    others[key][0] += answer['foreign']
                    others[key][1] += answer['none']
    figures: dict[str, Any] = {}
    for (way, count, miss), loads in found.items():
        times = [one for load in loads for one in load.ms]
        one: dict[str, Any] = {
            'chunks_per_s': float(np.mean([load.chunks_per_s for load in loads]))
        }
        if times:
            one['p50_ms'], one['p99_ms'] = np.percentile(times, [50, 99]).tolist()
        if way == 'lerobot':
            one['of_another_client'], one['no_answer'] = others[way, count, miss]
        figures[f'{way}, {count} robots, {"miss" if miss else "hit"}'] = one
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or '').split('\n')[0])
    parser.add_argument('--lerobot-python', type=Path, help='Python that has LeRobot 0.6.1')
    parser.add_argument('--seconds', type=float, default=20.0, help='of a load (default: 20)')
    parser.add_argument('--rounds', type=int, default=1, help='rounds of loads (default: 1)')
    parser.add_argument(
        '--size', choices=['mid', 'tiny'], default='mid', help='of pi0.5 (default: mid, 127 M)'
    )
    parser.add_argument('--folder', type=Path, help='keeps the checkpoint and the bundle')
    parser.add_argument('--out', type=Path, help='another file for the results')
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.folder or Path(scratch)
        options = Options(
            family='pi05',
            size=arguments.size,
            folder=str((folder / f'pi05_{arguments.size}').resolve()),
            tokenizer=TOKENIZERS['pi05'],
            device='cpu',
            threads=os.cpu_count() or 1,
        )
        bundle = Path(f'{options.folder}_bundle')
        if not bundle.exists():
            if arguments.lerobot_python is None:
                parser.error('--lerobot-python writes the checkpoint')
            make_folder(arguments.lerobot_python, options)
            export(options, bundle, None)
        lerobot = None
        if arguments.lerobot_python is not None:
            lerobot = LeRobotServer(arguments.lerobot_python, options)
        with served(bundle, '--backend', 'torch', '--threads', str(os.cpu_count())) as url:
            figures = measure(url, bundle, lerobot, arguments.rounds, arguments.seconds)
    for name, one in figures.items():
        print(f'{name:30}', ', '.join(f'{key} {value:.4g}' for key, value in one.items()))
    print(f'wrote {write_result("serve_beside", figures, PACKAGES, arguments.out)}')


if __name__ == '__main__':
    main()
