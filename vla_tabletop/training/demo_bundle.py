"""Write a trained tabletop policy as a bundle, with its training and its success rates."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save

from vla_runtime.bundle.schema import (
    VERIFICATION_FILE,
    WEIGHTS_FILE,
    BundleSpec,
    CameraSpec,
    ImageSpec,
    NormalisationSpec,
)
from vla_runtime.bundle.writer import new_bundle, seal, write_statistics
from vla_runtime.family.declaration import PolicyDims
from vla_runtime.models.base.flow_network import FlowNetwork
from vla_runtime.policy import Policy
from vla_tabletop.sim.closed_loop import run_seeds
from vla_tabletop.sim.gl import mujoco
from vla_tabletop.sim.scene import FIRST_UNSEEN_SEED, Variant
from vla_tabletop.sim.success_rate import SuccessRate
from vla_tabletop.sim.tasks import Family, Wording
from vla_tabletop.sim.world import Tabletop
from vla_tabletop.training.recipes import find_recipe
from vla_tabletop.training.recipes.recipe import Recipe
from vla_tabletop.training.samples import TABLETOP
from vla_tabletop.training.world import TrainingWorld

TOKENIZER_FILE = 'tokenizer.model'
# Bundle, recipe, episodes to what the receipt says of success.
Evaluate = Callable[[Path, Recipe, int], list[dict[str, Any]]]
EVALUATION_REPLAN_STEPS = 8
_EVALUATIONS: tuple[tuple[Family, Variant, Wording], ...] = (
    ('colour', 'still', 'plain'),
    ('position', 'still', 'plain'),
    ('push', 'still', 'plain'),
    ('colour', 'still', 'held_out'),
    ('position', 'still', 'held_out'),
    ('colour', 'moving', 'plain'),
)


def demo_spec(
    recipe: Recipe, dims: PolicyDims, source: Mapping[str, str], world: TrainingWorld = TABLETOP
) -> BundleSpec:
    """policy.yaml of a policy of a world."""
    return BundleSpec(
        name=_title(recipe, world),
        family=recipe.name,
        dims=dims,
        cameras=tuple(CameraSpec(camera) for camera in world.cameras),
        images=ImageSpec(padding='centre', resample='bilinear'),
        state=world.state,
        actions=world.actions,
        step_time_s=world.step_time_s,
        denoise_steps=recipe.denoise_steps,
        prompt=recipe.prompt,
        normalisation=NormalisationSpec(state='quantiles_openpi', actions='quantiles_openpi'),
        tokenizer=None if recipe.prompt is None else TOKENIZER_FILE,
        source=dict(source),
    )


def _title(recipe: Recipe, world: TrainingWorld) -> str:
    return recipe.title if world == TABLETOP else f'{world.title}, {recipe.name}'


def write_demo_bundle(
    target: Path,
    network: FlowNetwork,
    statistics: Mapping[str, np.ndarray],
    tokenizer: Path | None,
    made: Mapping[str, Any],
    episodes: int,
    force: bool = False,
    world: TrainingWorld = TABLETOP,
    check: Evaluate | None = None,
    files: Iterable[Path] = (),
) -> dict[str, str]:
    """Write the bundle, run it in the simulator, and write the results beside it.

    Args:
        network: trained, of a family with a recipe.
        statistics: `state.q01` and so on; `tokenizer` is None without language.
        made: facts of the training, for verification.json.
        episodes: a kind of task, on unseen scenes; 0: none.
        check: simulates the bundle; None: the tabletop's.
        files: of its family, copied.

    Returns success rates by what was evaluated, in words.
    """
    versions = {
        'python': platform.python_version(),
        'torch': str(torch.__version__),  # a subclass of str, which yaml refuses
        'mujoco': mujoco.__version__,
        'numpy': np.__version__,
    }
    recipe = find_recipe(network.family.name)
    spec = demo_spec(recipe, network.dims, {'made by': 'vla_runtime train-demo', **versions}, world)
    with new_bundle(target, force=force) as folder:
        stored = torch.float16 if recipe.half else torch.float32
        weights = {
            name: value.to('cpu', stored).contiguous()
            for name, value in network.state_dict().items()
        }
        (folder / WEIGHTS_FILE).write_bytes(save(weights))
        write_statistics(folder, statistics)
        if tokenizer is not None:
            (folder / TOKENIZER_FILE).write_bytes(tokenizer.read_bytes())
        for file in files:
            (folder / file.name).write_bytes(file.read_bytes())
        sealed = seal(folder, spec)
        closed_loop = (check or evaluate)(folder, recipe, episodes)
        origin = 'on from an earlier one' if 'start' in made else 'from scratch'
        verification = {
            'what': f'{_title(recipe, world)}, trained {origin} in simulation',
            'made': dict(made),
            'versions': versions,
            'machine': f'{platform.machine()}, {torch.get_num_threads()} thread(s)',
            'closed_loop': closed_loop,
        }
        text = json.dumps(verification, indent=2) + '\n'
        (folder / VERIFICATION_FILE).write_text(text, encoding='utf-8')
        seal(folder, sealed)
    return {
        f'{r["family"]} ({r["variant"]}, {r["wording"]} wording)': r['success'] for r in closed_loop
    }


def _evaluations(recipe: Recipe) -> list[tuple[Family, Variant, Wording]]:
    """Criteria for a policy of this recipe: the tasks that it was taught, and its instructions."""
    return [
        (family, variant, wording)
        for family, variant, wording in _EVALUATIONS
        if family in recipe.tasks.share and (recipe.prompt is not None or wording == 'plain')
    ]


def evaluate(bundle: Path, recipe: Recipe, episodes: int) -> list[dict[str, Any]]:
    """Run a policy on the tabletop, for the receipt."""
    if not episodes:
        return []
    world, policy, results = Tabletop(), Policy.load(bundle), []
    seeds = range(FIRST_UNSEEN_SEED, FIRST_UNSEEN_SEED + episodes)
    for family, variant, wording in _evaluations(recipe):
        outcomes = run_seeds(
            world,
            policy,
            seeds,
            family,
            EVALUATION_REPLAN_STEPS,
            variant,
            wording,
            recipe.tasks.colours,
        )
        rate = SuccessRate(sum(outcome.success for outcome in outcomes), episodes)
        times = [outcome.time_s for outcome in outcomes if outcome.success]
        results.append(
            {
                'family': family,
                'variant': variant,
                'wording': wording,
                'seeds': [seeds.start, seeds.stop],
                'replan_interval': EVALUATION_REPLAN_STEPS,
                'denoise_steps': recipe.denoise_steps,
                'success': str(rate),
                'wrong_block': sum(outcome.name == 'wrong_block' for outcome in outcomes),
                'mean_seconds_to_success': round(float(np.mean(times)), 2) if times else None,
            }
        )
    world.close()
    policy.close()
    return results
