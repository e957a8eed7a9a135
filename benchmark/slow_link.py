"""The demo behind a slow, lossy network: does the robot still do what it is told?

The server of the demo policy is in a network namespace of its own; policy node, executor and
simulated robot are in this one (`test/slow_link.py`). Each link carries the demo until it has
judged `--attempts` instructions: one without a limit, one of 50 ms and 2% loss in each direction,
one of 5 Mbit/s, and one of 50 ms that is cut for a second in every eight. Needs root.

Run: python benchmark/slow_link.py [--attempts 20] [--jpeg-quality 90]
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

from parts.measurement import Target, write_result
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / 'test'))

from slow_link import Quality, SlowLink  # noqa: E402

CUT_S, PERIOD_S = 1.0, 8.0
# Link, and the replan interval that suits it, steps.
LINKS = {
    'no limit': (Quality(), 8),
    '50 ms, 2% loss': (Quality(delay_s=0.05, loss=0.02), 8),
    '5 Mbit/s': (Quality(delay_s=0.005, rate_bit_s=5e6), 8),
    '50 ms, cut for 1 s in 8 s': (Quality(delay_s=0.05), 8),
}
PACKAGES = ('msgpack', 'numpy', 'rclpy', 'torch', 'uvicorn', 'uvloop', 'websockets')
# An attempt takes some 4 s on a good link.
_SECONDS = 60


@contextmanager
def server_at(link: SlowLink, keys: Path) -> Iterator[str]:
    """The demo's server at the other end; its address."""
    words = ['serve', str(ROOT / 'engines' / 'demo'), '--host', '0.0.0.0', '--threads', '1']
    server = subprocess.Popen(
        [*link.there, sys.executable, '-m', 'vla_runtime', *words, '--key-file', str(keys)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        ready = next(line for line in server.stdout if line.startswith('ready: '))
        yield f'ws://{link.address}:{int(ready.rpartition(":")[2])}'
    finally:
        server.terminate()
        server.wait()


@contextmanager
def cut_often(link: SlowLink, wanted: bool) -> Iterator[None]:
    """Cut the link again and again."""
    done = threading.Event()
    whole = link.quality

    def work() -> None:
        while not done.wait(PERIOD_S - CUT_S):
            link.quality = replace(whole, is_cut=True)
            done.wait(CUT_S)
            link.quality = whole

    thread = threading.Thread(target=work)
    if wanted:
        thread.start()
    try:
        yield
    finally:
        done.set()
        if wanted:
            thread.join()


def attempt(url: str, keys: Path, out: Path, seed: int, interval: int, quality: int) -> Any:
    """Run the demo once; instructions that were completed, and that were judged, and its lines."""
    words = ['demo', '--bundle', url, '--key-file', str(keys), '--out', str(out)]
    words += ['--seconds', str(_SECONDS), '--seed', str(seed), '--replan-interval', str(interval)]
    done = subprocess.run(
        [sys.executable, '-m', 'vla_runtime', *words, '--jpeg-quality', str(quality)],
        cwd=ROOT,
        env={**os.environ, 'ROS_DOMAIN_ID': str(100 + os.getpid() % 100)},
        capture_output=True,
        text=True,
    )
    found = re.search(r'(\d+) of (\d+) instructions completed', done.stdout)
    if found is None:
        sys.exit(f'the demo ended without a score:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}')
    chunks = re.search(r'chunks: (.*)', done.stdout)
    return int(found[1]), int(found[2]), chunks[1] if chunks else '', done.returncode


def measure(name: str, attempts: int, quality: int, folder: Path) -> dict[str, Any]:
    link_quality, interval = LINKS[name]
    keys = folder / 'keys'
    keys.write_text(f'{os.urandom(16).hex()}\n', encoding='utf-8')
    completed = judged = 0
    chunks = []
    with SlowLink(link_quality) as link, server_at(link, keys) as url:
        with cut_often(link, 'cut' in name), tqdm(total=attempts, desc=name) as bar:
            for seed in count():
                out = folder / f'{name.replace("/", " ")} {seed}'
                won, tried, said, rc = attempt(url, keys, out, seed, interval, quality)
                completed, judged = completed + won, judged + tried
                chunks.append(f'{said}; rc {rc}')
                bar.update(min(tried, attempts - bar.n))
                if judged >= attempts:
                    break
        packets, dropped = link.packets, link.dropped
    return {
        'completed': completed,
        'judged': judged,
        'replan_interval': interval,
        'packets': packets,
        'dropped': dropped,
        'chunks': chunks,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or '').split('\n')[0])
    parser.add_argument('--attempts', type=int, default=20, help='a link (default: 20)')
    parser.add_argument(
        '--jpeg-quality', type=int, default=90, help='of the images (default: 90; 0: raw)'
    )
    parser.add_argument('--links', nargs='+', choices=list(LINKS), default=list(LINKS))
    parser.add_argument('--out', type=Path, help='another file for the results')
    arguments = parser.parse_args()
    figures: dict[str, Any] = {'jpeg_quality': arguments.jpeg_quality}
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.links:
            figures[name] = measure(name, arguments.attempts, arguments.jpeg_quality, Path(folder))
            one = figures[name]
            failed = 1.0 - one['completed'] / one['judged']
            print(Target(f'{name}: failed', 0.05, failed, one['judged']).line)
    print(f'wrote {write_result("slow_link", figures, PACKAGES, arguments.out)}')


if __name__ == '__main__':
    main()
