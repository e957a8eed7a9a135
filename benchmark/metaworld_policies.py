"""Success of policies on each task of Meta-World, at the package's defaults, on the same scenes.

./run metaworld python benchmark/metaworld_policies.py engines/metaworld_act
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from parts.measurement import write_result

from vla_runtime.bundle.folder import read_bundle
from vla_tabletop.metaworld.check import check_policy
from vla_tabletop.sim.success_rate import SuccessRate
from vla_tabletop.study.runner import bundle_identity
from vla_tabletop.training.recipes import find_recipe


def measure(bundle: Path, episodes: int) -> dict[str, Any]:
    """Successes of each task and of all, with 95% intervals."""
    spec = read_bundle(bundle).spec
    found = check_policy(bundle, find_recipe(spec.family), episodes)
    counts = {one['family']: int(one['success'].split('/')[0]) for one in found}
    rates = {task: _rate(count, episodes) for task, count in counts.items()}
    return {
        'bundle': spec.name,
        'sha256': bundle_identity(bundle),
        'seeds': found[0]['seeds'],
        'all': _rate(sum(counts.values()), episodes * len(counts)),
        'tasks': rates,
    }


def _rate(count: int, episodes: int) -> dict[str, float]:
    low, high = SuccessRate(count, episodes).interval()
    return {'count': count, 'episodes': episodes, 'low': round(low, 3), 'high': round(high, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or '').splitlines()[0])
    parser.add_argument('bundles', type=Path, nargs='+')
    parser.add_argument('--episodes', type=int, default=8, help='a task (default: %(default)s)')
    parser.add_argument('--json', type=Path, help='write here instead of to benchmark/results/')
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    result = {one.name: measure(one, arguments.episodes) for one in arguments.bundles}
    packages = ('metaworld', 'mujoco', 'torch', 'numpy')
    print(write_result('metaworld_policies', result, packages, arguments.json).name)


if __name__ == '__main__':
    main()
