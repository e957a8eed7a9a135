"""Success of a new policy, for its receipt."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

from tqdm import tqdm

from vla_tabletop.metaworld.tasks import TASKS
from vla_tabletop.metaworld.world import MetaWorld
from vla_tabletop.sim.success_rate import SuccessRate
from vla_tabletop.study.chunk_sources import PolicySource
from vla_tabletop.study.condition import Condition
from vla_tabletop.study.episode import run_episode
from vla_tabletop.training.recipes.recipe import Recipe

# Seeds of the studies begin far above.
_FIRST_SEED = 2**31


def check_policy(bundle: Path, recipe: Recipe, episodes: int) -> list[dict[str, Any]]:
    """Run each task so often, at the defaults of a study and in the plain wording."""
    if not episodes:
        return []
    condition, results = Condition(world='metaworld', families=TASKS), []
    with (
        closing(MetaWorld()) as world,
        closing(PolicySource(bundle)) as source,
        tqdm(total=len(TASKS) * episodes, desc='check', unit='episode') as bar,
    ):
        for index, task in enumerate(TASKS):
            steps = []
            for seed in range(_FIRST_SEED, _FIRST_SEED + episodes):
                outcome = run_episode(world, source, condition, seed, index)
                steps += [outcome.steps] if outcome.success else []
                bar.update()
            results.append(
                {
                    'family': task,
                    'variant': 'still',
                    'wording': 'plain',
                    'seeds': [_FIRST_SEED, _FIRST_SEED + episodes],
                    'replan_interval': condition.replan_interval,
                    'denoise_steps': recipe.denoise_steps,
                    'success': str(SuccessRate(len(steps), episodes)),
                    'mean_steps_to_success': round(sum(steps) / len(steps), 1) if steps else None,
                }
            )
    return results
