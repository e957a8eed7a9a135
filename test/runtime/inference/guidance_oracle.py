"""Judge a guided denoise loop from its trace, by the plain network, one prompt at a time.

The network's own numbers are the reference cases' (test/contract). Here it has no engine, no cache,
no rows and no mask: what is not valid is not there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vla_runtime.models.base.flow_network import FlowNetwork

# Of the largest velocity: sums in another order differ by a few millionths.
VELOCITY_TOLERANCE = 5e-5
# An error of a velocity goes into the next x, and is amplified there.
CHUNK_TOLERANCE = 1e-3
# Guidance that moves less than this (relative) could not be told from none.
LEAST_DIFFERENCE = 1e-2


@dataclass(frozen=True)
class Step:
    """One denoise step as it was recorded: x after it (H, A), velocity of each row (R, H, A)."""

    x: np.ndarray
    velocity: np.ndarray


@dataclass(frozen=True, eq=False)
class Prompt:
    """One row as a network sees it: visible images, valid tokens, pi0's state.

    Attributes:
        pixels: per visible camera (3, S, S).
        tokens: ids of the valid tokens.
        state: (S,) padded, or None where the state is in the tokens.
    """

    pixels: Sequence[np.ndarray]
    tokens: Sequence[int]
    state: np.ndarray | None = None


class PlainVelocity:
    """Velocities of a network of one prompt alone.

    Args:
        network: with weights, in float32.
    """

    def __init__(self, network: FlowNetwork) -> None:
        self._network = network
        self._prefixes: dict[Prompt, Mapping[str, Tensor]] = {}

    @torch.inference_mode()
    def velocity(self, prompt: Prompt, x: np.ndarray, t: float) -> np.ndarray:
        """(H, A) velocity at noisy actions x (H, A) and flow time t."""
        if prompt not in self._prefixes:
            self._prefixes[prompt] = self._prefix(prompt)
        found = self._network.velocity(
            torch.from_numpy(x)[None].float(),
            self._prefixes[prompt],
            self._network.time_conditioning(torch.tensor([t])),
            **({} if prompt.state is None else {'state': torch.from_numpy(prompt.state)[None]}),
        )
        return found[0].double().numpy()

    def _prefix(self, prompt: Prompt) -> Mapping[str, Tensor]:
        images = self._network.vision(torch.from_numpy(np.stack(prompt.pixels)))
        tokens = torch.tensor([prompt.tokens])
        seen = torch.ones(len(images), dtype=torch.bool)
        return self._network.prefix(
            images, seen, tokens=tokens, token_mask=torch.ones_like(tokens, dtype=torch.bool)
        )


class GuidanceOracle:
    """Judges traces of one observation, at one guidance scale.

    Args:
        plain: the policy's network.
        conditioned, unconditioned: the rows, in this order in a trace.
        beta: guidance scale.
    """

    def __init__(
        self, plain: PlainVelocity, conditioned: Prompt, unconditioned: Prompt, beta: float
    ) -> None:
        self._plain = plain
        self._rows = (conditioned, unconditioned)
        self._beta = beta

    def chunk(self, noise: np.ndarray, steps: int) -> np.ndarray:
        """(H, A) chunk of N guided Euler steps from noise, without any trace."""
        x = noise.astype(np.float64)
        for k in range(steps):
            conditioned, unconditioned = self._velocities(x, 1 - k / steps)
            x = x - (unconditioned + self._beta * (conditioned - unconditioned)) / steps
        return x

    def faults(self, noise: np.ndarray, trace: Sequence[Step]) -> set[str]:
        """List the faults of a trace: of `rows`, `conditioned velocity`, `unconditioned
        velocity`, `direction`, `size`, `identity`, `chunk`, `nothing to judge`; empty if nothing.
        """
        found: set[str] = set()
        x, steps = noise.astype(np.float64), len(trace)
        for k, step in enumerate(trace):
            if len(step.velocity) != 2:
                return {'rows'}
            found |= self._step_faults(x, 1 - k / steps, step, steps)
            x = step.x.astype(np.float64)
        expected = self.chunk(noise, steps)
        if np.abs(x - expected).max() > CHUNK_TOLERANCE * np.abs(expected).max():
            found.add('chunk')
        return found

    def _step_faults(self, x: np.ndarray, t: float, step: Step, steps: int) -> set[str]:
        found = set()
        expected = self._velocities(x, t)
        recorded = step.velocity.astype(np.float64)
        scale = np.abs(expected).max()
        for name, ours, theirs in zip(
            ('conditioned velocity', 'unconditioned velocity'), recorded, expected, strict=True
        ):
            if np.abs(ours - theirs).max() > VELOCITY_TOLERANCE * scale:
                found.add(name)
        direction, true_direction = recorded[0] - recorded[1], expected[0] - expected[1]
        size, true_size = np.linalg.norm(direction), np.linalg.norm(true_direction)
        if true_size < LEAST_DIFFERENCE * np.linalg.norm(expected[0]):
            found.add('nothing to judge')
        if (direction * true_direction).sum() < 0.999 * size * true_size:
            found.add('direction')
        if abs(size - true_size) > 0.01 * true_size:
            found.add('size')
        mixed = recorded[1] + self._beta * (recorded[0] - recorded[1])
        if np.abs(step.x - (x - mixed / steps)).max() > VELOCITY_TOLERANCE * scale:
            found.add('identity')
        return found

    def _velocities(self, x: np.ndarray, t: float) -> np.ndarray:
        return np.stack([self._plain.velocity(row, x, t) for row in self._rows])
