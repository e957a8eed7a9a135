"""Scene of a seed: positions and motion of the blocks, light, camera poses.

A scene is drawn once, before the simulation starts: the same seed and variant give the same
episode.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

Variant = Literal['still', 'moving', 'pushed', 'lighting', 'camera_jitter']
VARIANTS: tuple[Variant, ...] = get_args(Variant)

Colour = Literal['red', 'green', 'blue']
COLOURS: tuple[Colour, ...] = get_args(Colour)
CAMERAS = ('front', 'wrist')

# Scenes of training come from generators seeded below this; evaluation and demo never meet them.
FIRST_UNSEEN_SEED = 2**31

BLOCK_HALF_SIZE_M = 0.0175
# Centres of blocks at reset, inside what the arm reaches with its tool upright.
WORKSPACE_LOW_M = np.array([0.20, -0.14])
WORKSPACE_HIGH_M = np.array([0.34, 0.14])
# The belt of the moving variant turns back here.
BELT_LOW_M = np.array([0.18, -0.17])
BELT_HIGH_M = np.array([0.36, 0.17])
EDGE_M = 0.20  # |y| of the two stripes
SEPARATION_M = 0.08  # between any two centres: a touch of one is never a touch of another
SIDE_GAP_M = 0.03  # between any two y: left-most and right-most are never in doubt

# Tip 24 cm above the table, tool upright.
HOME_RAD = np.array([0.0, -0.35, 1.75, 1.74, 0.0, 0.0])
START_SPREAD_RAD = np.array([0.25, 0.12, 0.12, 0.12, 0.12, 0.0])


@dataclass(frozen=True)
class Shove:
    """A push that moves every block aside at once, as a hand would.

    It begins at `start_s` of simulated time; `displacement_m` is (3, 2) in x and y, less about 1
    cm of friction.
    """

    start_s: float
    duration_s: float
    displacement_m: np.ndarray


@dataclass(frozen=True)
class Lighting:
    """Light of one episode: lamp direction and brightness, ambient light, tint of the table."""

    lamp_direction: np.ndarray
    lamp_diffuse: np.ndarray
    ambient: np.ndarray
    table_rgb: np.ndarray


@dataclass(frozen=True)
class CameraOffset:
    """A camera that is not where it was calibrated: shift in metres and rotation vector in rad."""

    shift_m: np.ndarray
    rotation_rad: np.ndarray


@dataclass(frozen=True)
class Scene:
    """All that is random about one episode.

    Shove, lighting and camera offsets are None or empty but in their variants.

    Attributes:
        block_xy_m: (3, 2) centres in the order of `COLOURS`.
        block_yaw_rad: (3,).
        start_rad: (6,) joint positions at reset.
        belt_m_s: (2,) velocity of all blocks; zero but for the moving variant.
    """

    block_xy_m: np.ndarray
    block_yaw_rad: np.ndarray
    start_rad: np.ndarray
    belt_m_s: np.ndarray
    shove: Shove | None
    lighting: Lighting | None
    camera_offsets: dict[str, CameraOffset]


def sample_scene(seed: int, variant: Variant = 'still') -> Scene:
    """Draw the scene of a seed; ValueError: unknown variant.

    Blocks, yaw and start do not depend on the variant.
    """
    if variant not in VARIANTS:
        raise ValueError(f'variant {variant!r} is unknown; choose one of {", ".join(VARIANTS)}')
    rng = np.random.default_rng([seed, 0])
    blocks = _sample_blocks(rng)
    yaw = rng.uniform(-np.pi / 4, np.pi / 4, size=len(COLOURS))
    start = HOME_RAD + START_SPREAD_RAD * rng.uniform(-1, 1, size=HOME_RAD.size)
    rng = np.random.default_rng([seed, 1 + VARIANTS.index(variant)])
    return Scene(
        block_xy_m=blocks,
        block_yaw_rad=yaw,
        start_rad=start,
        belt_m_s=_sample_belt(rng) if variant == 'moving' else np.zeros(2),
        shove=_sample_shove(rng, blocks) if variant == 'pushed' else None,
        lighting=_sample_lighting(rng) if variant == 'lighting' else None,
        camera_offsets=_sample_offsets(rng) if variant == 'camera_jitter' else {},
    )


def layout_is_clear(blocks: np.ndarray) -> bool:
    """Return whether (3, 2) centres keep their distance and are plainly ordered left to right."""
    for i in range(len(blocks)):
        for j in range(i):
            gap = blocks[i] - blocks[j]
            if np.hypot(*gap) < SEPARATION_M or abs(gap[1]) < SIDE_GAP_M:
                return False
    return True


def _sample_blocks(rng: np.random.Generator) -> np.ndarray:
    while True:
        blocks = rng.uniform(WORKSPACE_LOW_M, WORKSPACE_HIGH_M, size=(len(COLOURS), 2))
        if layout_is_clear(blocks):
            return blocks


def _sample_belt(rng: np.random.Generator) -> np.ndarray:
    angle, speed = rng.uniform(0, 2 * np.pi), rng.uniform(0.03, 0.05)
    return speed * np.array([np.cos(angle), np.sin(angle)])


def _sample_shove(rng: np.random.Generator, blocks: np.ndarray) -> Shove:
    start_s = rng.uniform(0.8, 2.0)
    while True:
        angle = rng.uniform(0, 2 * np.pi, size=len(blocks))
        way = rng.uniform(0.03, 0.07, size=(len(blocks), 1))
        way = way * np.stack([np.cos(angle), np.sin(angle)], axis=1)
        inside = np.all((blocks + way > BELT_LOW_M) & (blocks + way < BELT_HIGH_M))
        if inside and layout_is_clear(blocks + way) and layout_is_clear(blocks + 0.5 * way):
            return Shove(start_s, 0.3, way)


def _sample_lighting(rng: np.random.Generator) -> Lighting:
    return Lighting(
        lamp_direction=np.append(rng.uniform(-0.8, 0.8, size=2), -1.0),
        lamp_diffuse=rng.uniform(0.25, 0.65) * rng.uniform(0.85, 1.0, size=3),
        ambient=np.full(3, rng.uniform(0.25, 0.45)),
        table_rgb=rng.uniform(0.55, 0.85) * rng.uniform(0.92, 1.0, size=3),
    )


def _sample_offsets(rng: np.random.Generator) -> dict[str, CameraOffset]:
    reach_m = {'front': 0.010, 'wrist': 0.003}
    return {
        camera: CameraOffset(
            shift_m=reach_m[camera] * rng.uniform(-1, 1, size=3),
            rotation_rad=0.025 * rng.uniform(-1, 1, size=3),
        )
        for camera in CAMERAS
    }
