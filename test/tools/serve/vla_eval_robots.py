"""Benchmarks of Ai2's harness at once, run by a Python that has it: PORT ROBOTS STEPS INTERVAL.

Writes one JSON line: rows, rows that differ from the same benchmark's alone, and what the server
says to a camera that no policy has.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import numpy as np
from vla_eval.connection import Connection

CAMERAS, SIZE, STATES = ('top', 'wrist'), (48, 64), 3


def look(robot: int, step: int) -> dict[str, Any]:
    random = np.random.default_rng(1000 * robot + step)
    images = {name: random.integers(0, 256, (*SIZE, 3), dtype=np.uint8) for name in CAMERAS}
    state = random.uniform(-1, 1, STATES)
    return {'images': images, 'states': state, 'task_description': f'task {robot % 3}'}


async def run(url: str, robot: int, steps: int) -> list[np.ndarray]:
    async with Connection(url) as connection:
        rows = []
        for _ in range(2):
            await connection.start_episode({'task': {'name': f'task {robot % 3}'}})
            for step in range(steps):
                rows.append((await connection.act(look(robot, step)))['actions'])
            await connection.end_episode({'success': True})
        return rows


async def refusal(url: str) -> str:
    async with Connection(url) as connection:
        await connection.start_episode({})
        unfit = look(0, 0)
        unfit['images']['head'] = unfit['images']['top']
        try:
            await connection.act(unfit)
        except RuntimeError as error:
            await connection.act(look(0, 0))
            return str(error)
    return ''


async def main() -> None:
    port, robots, steps, interval = map(int, sys.argv[1:])
    url = f'ws://127.0.0.1:{port}/vla-eval?replan_interval={interval}'
    together = await asyncio.gather(*(run(url, robot, steps) for robot in range(robots)))
    unlike = 0
    for robot, rows in enumerate(together):
        alone = await run(url, robot, steps)
        unlike += sum(
            not np.array_equal(one, other) for one, other in zip(rows, alone, strict=True)
        )
        # An episode begins anew.
        unlike += not np.array_equal(rows[0], rows[steps])
    said = await refusal(url)
    print(json.dumps({'rows': sum(map(len, together)), 'unlike': unlike, 'refusal': said}))


if __name__ == '__main__':
    asyncio.run(main())
