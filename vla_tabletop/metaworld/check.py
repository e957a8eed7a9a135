"""Success of a new policy, for its receipt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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
    condition = Condition(world='metaworld', families=TASKS)
    world, source, results = MetaWorld(), PolicySource(bundle), []
    for index, task in enumerate(TASKS):
        outcomes = [
            run_episode(world, source, condition, _FIRST_SEED + number, index)
            for number in range(episodes)
        ]
        steps = [outcome.steps for outcome in outcomes if outcome.success]
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
    world.close()
    return results
