"""What training and the bundle must know of the world that a policy is taught in."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from vla_runtime.bundle.schema import ActionSpec, StateSpec
from vla_runtime.processing.normalization import Normalizer

IMAGE_SIZE = 64


@dataclass(frozen=True)
class TrainingWorld:
    """A world's sizes and names.

    Attributes:
        title: in a bundle's name.
        cameras: in the policy's order.
        points: things that the first stage finds in images.
        place: numbers that the second stage reads off the prefix, dm.
        half_height_px: pixels of a 64 pixel square that a projected 1 is.
        effort: factor on a recipe's steps.
    """

    name: str
    title: str
    cameras: tuple[str, ...]
    state: tuple[StateSpec, ...]
    actions: tuple[ActionSpec, ...]
    step_time_s: float
    points: int
    place: int
    half_height_px: float
    effort: int = 1

    def fit(self, dims: Any) -> Any:
        """Return a recipe's dimensions with this world's cameras, state and actions."""
        own = {'cameras': len(self.cameras), 'action_dim': len(self.actions)}
        # pi0.5 has 0: its state is in the prompt.
        if getattr(dims, 'state_dim', 0):
            own['state_dim'] = len(self.state)
        return replace(dims, **own)


@dataclass(frozen=True)
class Batch:
    """Batch of one training step: B frames, V cameras, H steps, A actions, S state numbers.

    Attributes:
        pixels: (B, V, 3, 64, 64) float32 in [-1, 1].
        tokens: (B, L) int64, cut to the batch's longest prompt, and token_mask (B, L) bool; L
            is 0 without language.
        actions: (B, H, A) float32 normalised.
        state: (B, S) float32 normalised.
        pixel: (B, V, 2) float32, the named thing's centre in each image, as `project` gives
            it.
        place: (B, P) float32, its position in decimetres.
        goal: (B,) index of the goal.
        frame: (B,) index into the data set.
    """

    pixels: np.ndarray
    tokens: np.ndarray
    token_mask: np.ndarray
    actions: np.ndarray
    state: np.ndarray
    pixel: np.ndarray
    place: np.ndarray
    goal: np.ndarray
    frame: np.ndarray


class TrainingSamples(Protocol):
    """Batches of a world's demonstrations, and the statistics that the policy ships with.

    `episode`: (F,) number of each frame's episode.
    """

    world: TrainingWorld
    statistics: dict[str, np.ndarray]
    action_normalizer: Normalizer
    episode: np.ndarray

    def pixels(self, frames: np.ndarray) -> np.ndarray:
        """Return (B, V, 3, 64, 64) float32 of these frames."""

    def points(self, frames: np.ndarray) -> np.ndarray:
        """Return (B, V, points, 2) float32 centres as `project` gives them."""

    def batch(self, frames: np.ndarray, rng: np.random.Generator) -> Batch:
        """Return a batch of these frames."""

    def held_out(self) -> np.ndarray:
        """Return which frames no training sees, (F,) bool; whole episodes."""

    def teaches(self) -> np.ndarray:
        """Return which frames to train on, (F,) bool."""

    def step_weight(self) -> np.ndarray:
        """Return the weight of each step of a chunk in the loss, (H,) float32 of mean 1."""

    def errors(self, actions: np.ndarray, batch: Batch) -> dict[str, float]:
        """Judge sampled chunks, (B, H, A) denormalised, of a batch's frames."""
