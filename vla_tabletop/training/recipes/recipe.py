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
        past: tensors that the head reads, as `FlowNetwork.velocity` takes them, for B rows.
        images: (B, V, N, image_width) of the image tokens.
        last: (B, last_width) of the token that has seen all the others.
    """

    past: Mapping[str, Tensor]
    images: Tensor
    last: Tensor


# Network, pixels (B, V, 3, S, S), and the family's `prefix_inputs` by name, (B, …) each.
PrefixForward = Callable[[Any, Tensor, Mapping[str, Tensor]], Prefix]


@dataclass(frozen=True)
class Recipe:
    """Construction, initial weights and training samples of a family's tabletop policy.

    Which loss trains the head follows from its kind: flow matching for `flow`, L1 for `single`, the
    scheduler's for `diffusion`, cross entropy of what the expert would write for `tokens`.

    Attributes:
        dims: size of the vocabulary to the network's dimensions.
        steps: optimiser steps of each stage, from scratch.
        draws: (noise, time) pairs that share one prefix, for `flow` and `diffusion`.
        prompt: form of its prompts; None for a family without language, which learns one task.
        initialise: sets the starting weights in place: network, token ids of the numbers that a
            state bin can be, generator.
        prefix: forward of vision and prefix, differentiable.
        denoise_steps: recommended.
        see: image tokens of images (n, 3, S, S), where they are not those of the vision network: a
            token for every square of `PATCH_SIZE` pixels.
        image_width: numbers of an image token.
        last_width: the network's dimensions to the numbers of what `Prefix.last` is.
        half: the bundle's weights are stored in float16, which halves it.
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
    """Values of a prefix's tokens that the head's last cross-attention reads, (B, P, WIDTH).

    Heads that read these teach the very numbers that the policy acts on, through the very prefix
    that serves it.
    """
    return past['cross_value'][-1].transpose(1, 2).flatten(2)
