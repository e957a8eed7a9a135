"""Memory of the policy server over many requests of robots that come, look, reset and go.

    python benchmark/serve_memory.py
    python benchmark/serve_memory.py --requests 2000 --shares 4

Eight robots ask the demo policy of ACT at once. Each connects anew after 250 requests, which begins
a session, and shows other pixels at every one. The server is a process of its own, and only its
memory is weighed.
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

import psutil
from parts.measurement import write_result
from serve_load import PACKAGES, ROOT, ask, changed, look_of, packed, served
from tqdm import tqdm
from websockets.asyncio.client import connect

from vla_runtime.bundle.folder import read_bundle

ROBOTS = 8
# A robot connects again after so many requests.
_EACH = 250
# Before it is weighed: what is made once is there then.
_WARM_UP = 2000


async def run_robot(url: str, cameras: tuple[str, ...], seed: int, requests: int) -> None:
    for begin in range(0, requests, _EACH):
        look = look_of(cameras, seed)
        async with connect(url, compression=None, max_size=None, proxy=None) as socket:
            await socket.recv()
            for turn in range(min(_EACH, requests - begin)):
                _, reply = await ask(socket, packed(changed(look, turn)))
                if 'actions' not in reply:
                    raise SystemExit(f'the server answered {reply}')


async def run_robots(url: str, cameras: tuple[str, ...], requests: int) -> None:
    robots = (run_robot(url, cameras, seed, requests // ROBOTS) for seed in range(ROBOTS))
    await asyncio.gather(*robots)


def measure(requests: int, shares: int) -> list[dict[str, float]]:
    """Return how many megabytes the server has grown by after each share of the requests."""
    bundle = ROOT / 'engines' / 'demo_act'
    cameras = read_bundle(bundle).spec.camera_names
    with served(bundle, '--backend', 'torch', '--threads', '1') as url:
        (server,) = psutil.Process().children()
        asyncio.run(run_robots(url, cameras, _WARM_UP))
        before = server.memory_info().rss
        found = []
        for share in tqdm(range(1, shares + 1), unit='share'):
            asyncio.run(run_robots(url, cameras, requests // shares))
            grown = server.memory_info().rss - before
            found.append({'requests': share * (requests // shares), 'grown_mb': grown / 1e6})
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or '').split('\n')[0])
    parser.add_argument('--requests', type=int, default=100_000, help='in all (default: 100,000)')
    parser.add_argument('--shares', type=int, default=10, help='weighed after each (default: 10)')
    parser.add_argument('--out', type=Path, help='another file for the results')
    arguments = parser.parse_args()
    figures = measure(arguments.requests, arguments.shares)
    for row in figures:
        print(f'{row["requests"]:>8.0f} requests: {row["grown_mb"]:+.1f} MB')
    print(f'wrote {write_result("serve_memory", {"grown": figures}, PACKAGES, arguments.out)}')


if __name__ == '__main__':
    main()
