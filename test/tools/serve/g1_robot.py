"""A robot with the client of `inspect-robots-unitree-g1`: PYTHON_WITH_IT g1_robot.py PORT."""

from __future__ import annotations

import json
import sys

import numpy as np
from inspect_robots.scene import Scene
from inspect_robots.types import Observation
from inspect_robots_unitree_g1 import packing
from inspect_robots_unitree_g1.policy import Gr00tPolicy

LEGS = {'left_leg': 6, 'right_leg': 6, 'waist': 3}


def main() -> None:
    random = np.random.default_rng(0)
    policy = Gr00tPolicy(host='127.0.0.1', port=int(sys.argv[1]), action_horizon=8)
    policy.reset(Scene(id='a', instruction='wave'))
    for _ in range(3):
        image = random.integers(0, 256, (48, 64, 3), dtype=np.uint8)
        state = {packing.STATE_KEY: random.uniform(0, 1, packing.TOTAL_DIM)}
        state |= {name: random.uniform(-1, 1, size) for name, size in LEGS.items()}
        chunk = policy.act(Observation(images={'head_cam': image}, state=state))
    finite = all(bool(np.isfinite(action.data).all()) for action in chunk.actions)
    print(json.dumps({'rows': len(chunk.actions), 'finite': finite}))


if __name__ == '__main__':
    main()
