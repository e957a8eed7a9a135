"""Recipe of a family: what its small tabletop policy is, and how the one trainer feeds it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vla_runtime.family.declaration import Family, PolicyDims
from vla_runtime.family.listing import find_family
from vla_runtime.processing.prompts import PromptFormat
from vla_tabletop.training.samples import TaskMix

STAGES = ('see', 'ground', 'act')
# Numbers of an image token, and of each token that the grounding heads read, in every recipe.
WIDTH = 96


class Prefix(NamedTuple):
    """Outputs of a prefix forward for the objectives.

    Attributes:
        past: for B rows, as `FlowNetwork.velocity` takes them.
        images: (B, V, N, image_width) image tokens.
        last: (B, last_width) the token that has seen all others.
    """

    past: Mapping[str, Tensor]
    images: Tensor
    last: Tensor


# Network, pixels (B, V, 3, S, S), and the family's `prefix_inputs` by name, (B, …) each.
PrefixForward = Callable[[Any, Tensor, Mapping[str, Tensor]], Prefix]


@dataclass(frozen=True)
class Recipe:
    """Construction, initial weights and training samples of a family's tabletop policy.

    The kind of head decides the loss: flow matching for `flow`, L1 for `single`, the scheduler's
    for `diffusion`, cross entropy for `tokens`.

    Attributes:
        dims: from the vocabulary size.
        steps: of each stage, from scratch.
        draws: (noise, time) pairs a prefix, for `flow` and `diffusion`.
        prompt: None: no language and one task.
        initialise: sets weights in place: network, ids of the state's numbers, generator.
        prefix: differentiable forward of vision and prefix.
        denoise_steps: recommended.
        see: image tokens of images (n, 3, S, S), one a square of `PATCH_SIZE` pixels, if not
            the vision network's.
        image_width: of an image token.
        last_width: width of `Prefix.last`, from the network's dimensions.
        half: the bundle's weights are float16.
    """

    name: str
    title: str
    dims: Callable[[int], PolicyDims]
    steps: Mapping[str, int]
    draws: int
    tasks: TaskMix
    prompt: PromptFormat | None
    initialise: Callable[[Any, np.ndarray, torch.Generator], None]
    prefix: PrefixForward
    denoise_steps: int
    half: bool = False
    see: Callable[[Any, Tensor], Tensor] | None = None
    image_width: int = WIDTH
    last_width: Callable[[Any], int] = lambda dims: WIDTH

    @property
    def family(self) -> Family:
        """The family's declaration."""
        return find_family(self.name)


def values_of_last_layer(past: Mapping[str, Tensor]) -> Tensor:
    """Values (B, P, WIDTH) of a prefix's tokens that the head's last cross-attention reads.

    Objectives on these train the numbers that the policy acts on.
    """
    return past['cross_value'][-1].transpose(1, 2).flatten(2)
