"""Stages that pushes reach: over the block's rear, down, the block moved, the block at the edge.

The scripted expert and the policies do the same unseen scenes, blocks lying still, without delay.
A policy's receipt, if it has one, says how it was made and how often it touches.

    python benchmark/push_stages.py [--bundles engines/demo ...] [--episodes 50] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from measurement import write_result

from vla_runtime.bundle.schema import VERIFICATION_FILE
from vla_tabletop.sim.closed_loop import policy_chunk
from vla_tabletop.sim.expert import Expert, Style
from vla_tabletop.sim.rollout import run_episode
from vla_tabletop.sim.scene import FIRST_UNSEEN_SEED
from vla_tabletop.sim.success_rate import SuccessRate
from vla_tabletop.sim.tasks import SIDE_SIGN, Task, sample_task
from vla_tabletop.sim.world import Tabletop, TabletopState
from vla_tabletop.training.demo_bundle import EVALUATION_REPLAN_STEPS

STAGES = ('over', 'down', 'moved', 'edge')
# Where the expert goes down: this far behind the block's centre, and beside it.
CORRIDOR_M = (0.03, 0.13)
ASIDE_M = 0.02
LOW_M = 0.04  # a tip below this pushes
MOVED_M = 0.01
CONTACT_M = 0.035  # behind the block's centre: a low tip is at the block
OFF_MIDDLE_M = 0.008  # beside it: pushed here a block slips away, and the expert goes back

Chunk = Callable[[Tabletop, Task], np.ndarray]


def stage_reached(states: Sequence[TabletopState], block: int, sign: float) -> str | None:
    """The last of `over`, `down`, `moved` that an episode reached; None before the first.

    Args:
        states: one a chunk, in order.
        block: block that is to be pushed.
        sign: sign of y that the block is pushed to.
    """
    tip = np.array([state.tip_m for state in states])
    centre = np.array([state.block_m[block] for state in states])
    behind = sign * (centre[:, 1] - tip[:, 1])
    over = (behind > CORRIDOR_M[0]) & (behind < CORRIDOR_M[1])
    over &= np.abs(centre[:, 0] - tip[:, 0]) < ASIDE_M
    if sign * (centre[-1, 1] - centre[0, 1]) > MOVED_M:
        return 'moved'
    if np.any(over & (tip[:, 2] < LOW_M)):
        return 'down'
    return 'over' if np.any(over) else None


def off_middle(states: Sequence[TabletopState], block: int, sign: float) -> list[float]:
    """Sideways distances of the low tip from the block's middle, in every state beside it."""
    tip = np.array([state.tip_m for state in states])
    centre = np.array([state.block_m[block] for state in states])
    behind = sign * (centre[:, 1] - tip[:, 1])
    at_block = (behind > 0.0) & (behind < CONTACT_M) & (tip[:, 2] < LOW_M)
    return np.abs(centre[at_block, 0] - tip[at_block, 0]).tolist()


def push_all(world: Tabletop, chunk: Chunk, seeds: Sequence[int]) -> dict[str, Any]:
    """Push in every scene; how many episodes got as far as each stage, and how many succeeded."""
    reached = dict.fromkeys(STAGES, 0)
    wrong, aside_m = 0, []
    for seed in seeds:
        states: list[TabletopState] = []

        def watched(world: Tabletop, task: Task, states: list = states) -> np.ndarray:
            states.append(world.state())
            return chunk(world, task)

        start = world.reset(seed)
        task = sample_task(np.random.default_rng([seed, 100]), start.block_m, 'push')
        outcome = run_episode(world, task, watched, EVALUATION_REPLAN_STEPS)
        assert task.goal.side is not None
        sign = SIDE_SIGN[task.goal.side]
        stage = 'edge' if outcome.success else stage_reached(states, task.goal.block, sign)
        for passed in STAGES[: STAGES.index(stage) + 1] if stage else ():
            reached[passed] += 1
        wrong += outcome.name == 'wrong_block'
        aside_m += off_middle(states, task.goal.block, sign)
    return {
        'reached': reached,
        'success': str(SuccessRate(reached['edge'], len(seeds))),
        'wrong_block': wrong,
        'off_middle_m': float(np.median(aside_m)) if aside_m else None,
        'off_middle_share': float(np.mean(np.array(aside_m) > OFF_MIDDLE_M)) if aside_m else None,
    }


def receipt(bundle: Path) -> dict[str, Any]:
    """Return a bundle's training and its achievements, where the bundle has them."""
    path = bundle / VERIFICATION_FILE
    return json.loads(path.read_text(encoding='utf-8')) if path.exists() else {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--bundles', type=Path, nargs='+', default=[Path('engines/demo')])
    parser.add_argument('--episodes', type=int, default=50)
    parser.add_argument('--out', type=Path)
    arguments = parser.parse_args()

    import torch

    from vla_runtime.policy import Policy
    from vla_tabletop.study.runner import bundle_identity

    # Tiny networks gain nothing from threads.
    torch.set_num_threads(1)
    first = FIRST_UNSEEN_SEED + 20_000
    seeds = range(first, first + arguments.episodes)
    world, expert = Tabletop(), Expert()

    def plan(world: Tabletop, task: Task) -> np.ndarray:
        return expert.plan(world.joint_positions, world.state().block_m, task.goal, Style())

    figures: dict[str, Any] = {'episodes': len(seeds), 'expert': push_all(world, plan, seeds)}
    for bundle in arguments.bundles:
        policy = Policy.load(bundle, threads=1)
        figures[str(bundle)] = {
            'bundle_sha256': bundle_identity(bundle),
            **push_all(world, policy_chunk(policy), seeds),
            **{name: receipt(bundle).get(name) for name in ('made', 'closed_loop')},
        }
        policy.close()
    world.close()
    for who in ('expert', *map(str, arguments.bundles)):
        print(f'{who}: {figures[who]["reached"]}, {figures[who]["success"]}')
    packages = ('vla_runtime', 'numpy', 'mujoco', 'torch')
    print(f'wrote {write_result("push_stages", figures, packages, arguments.out)}')


if __name__ == '__main__':
    main()
