"""Robots with openpi's own client, run by a Python that has it: openpi_robots.py PORT ROBOTS TURNS.

Writes one JSON line: the robots whose chunks together were those of the same robot alone, and how
many chunks differed.
"""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from openpi_client.action_chunk_broker import ActionChunkBroker
from openpi_client.websocket_client_policy import WebsocketClientPolicy

CAMERAS, SIZE, STATES = ('top', 'wrist'), (48, 64), 3


def look(robot: int, turn: int) -> dict[str, Any]:
    """Every third look of a robot is the one before."""
    random = np.random.default_rng(1000 * robot + turn - (turn % 3 == 2))
    images = {
        f'observation/image/{name}': random.integers(0, 256, (*SIZE, 3), dtype=np.uint8)
        for name in CAMERAS
    }
    state = random.uniform(-1, 1, STATES)
    return {**images, 'observation/state': state, 'prompt': f'task {robot % 3}'}


def run(port: int, robot: int, turns: int) -> list[np.ndarray]:
    policy = WebsocketClientPolicy('127.0.0.1', port)
    return [policy.infer(look(robot, turn))['actions'] for turn in range(turns)]


def broker_returns_rows(port: int) -> bool:
    """Whether openpi's broker gives the rows of a chunk, then asks again."""
    horizon = 4
    broker = ActionChunkBroker(WebsocketClientPolicy('127.0.0.1', port), horizon)
    rows = [broker.infer(look(0, 0))['actions'] for _ in range(horizon)]
    chunk = WebsocketClientPolicy('127.0.0.1', port).infer(look(0, 0))['actions']
    broker.infer(look(0, 1))
    broker.reset()
    return bool(np.array_equal(rows, chunk[:horizon]))


def main() -> None:
    port, robots, turns = map(int, sys.argv[1:])
    with ThreadPoolExecutor(robots) as pool:
        found = [pool.submit(run, port, robot, turns) for robot in range(robots)]
        together = [future.result() for future in found]
    unlike = 0
    for robot in range(robots):
        alone = run(port, robot, turns)
        unlike += sum(
            not np.array_equal(one, other)
            for one, other in zip(together[robot], alone, strict=True)
        )
    chunks = sum(map(len, together))
    print(json.dumps({'chunks': chunks, 'unlike': unlike, 'broker': broker_returns_rows(port)}))


if __name__ == '__main__':
    main()
