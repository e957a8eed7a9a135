"""Recipes of the families that `train-demo` can train, a module each.

A new one is a module with a `RECIPE` and its name below.
"""

from __future__ import annotations

from vla_runtime.tabletop.training.recipes.act import RECIPE as _ACT
from vla_runtime.tabletop.training.recipes.pi05 import RECIPE as _PI05
from vla_runtime.tabletop.training.recipes.recipe import Recipe
from vla_runtime.tabletop.training.recipes.smolvla import RECIPE as _SMOLVLA

RECIPES: dict[str, Recipe] = {recipe.name: recipe for recipe in (_PI05, _SMOLVLA, _ACT)}


def find_recipe(family: str) -> Recipe:
    """Return the recipe of a family.

    Raises:
        ValueError: a family without one; names those that have one.
    """
    if family not in RECIPES:
        raise ValueError(
            f"family '{family}' cannot be trained here; train-demo has recipes for "
            f'{", ".join(RECIPES)}'
        )
    return RECIPES[family]
