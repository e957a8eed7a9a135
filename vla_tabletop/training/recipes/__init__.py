"""Recipes of the families that `train-demo` can train, a module each.

A new one is a module with a `RECIPE` and a line below. A recipe imports PyTorch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from vla_runtime.files.typed_yaml import did_you_mean

if TYPE_CHECKING:
    from vla_tabletop.training.recipes.recipe import Recipe

# Family of a recipe to the bundle that was trained with it and ships, a folder of engines/.
SHIPPED = {
    'pi05': 'demo',
    'smolvla': 'demo_smolvla',
    'act': 'demo_act',
    'diffusion': 'demo_diffusion',
    'pi0_fast': 'demo_pi0_fast',
}
RECIPE_NAMES = tuple(SHIPPED)
DEMO_FAMILY = 'pi05'


def require_recipe(family: str) -> None:
    """Refuse a family without a recipe (ValueError names those with one)."""
    if family not in RECIPE_NAMES:
        raise ValueError(
            f"family '{family}' cannot be trained here: train-demo has no recipe for it"
            f'{did_you_mean(family, RECIPE_NAMES)}'
        )


def find_recipe(family: str) -> Recipe:
    """Return the recipe of a family (ValueError names those with one)."""
    require_recipe(family)
    recipe: Recipe = importlib.import_module(f'{__name__}.{family}').RECIPE
    return recipe
