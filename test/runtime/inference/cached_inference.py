"""Inferences of a tiny policy with a prefix cache and without, and observations to try it on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
from guided_policies import NOISE, without_ages
from tiny_policy import observation

from vla_runtime.inference.prefix_cache import CachePolicy
from vla_runtime.inference.request import cache_words
from vla_runtime.inference.settings import PolicySettings
from vla_runtime.policy import Policy
from vla_runtime.types import Observation


def infer(policy: Policy, seen: Observation) -> tuple[np.ndarray, Mapping[str, str]]:
    """The actions, from the same noise every time, and what the report says of the cache."""
    chunk, report = policy.infer(seen, noise=NOISE)
    return chunk.actions, without_ages(cache_words(report.cache))


def without_cache(
    bundle: Path, seen: Observation, settings: PolicySettings | None = None
) -> np.ndarray:
    """The actions that a policy without a cache gives."""
    settings = replace(settings or PolicySettings(), cache=CachePolicy(mode='off'))
    actions, cache = infer(Policy.load(bundle, settings=settings), seen)
    assert cache['prefix'] == 'off'
    return actions


def with_image(name: str, image: np.ndarray | None) -> Observation:
    """One camera's image another one; None: the camera is not there."""
    return observation(images={**observation().images, name: image})


def one_pixel(name: str) -> Observation:
    """One camera's image different in one of the network's pixels."""
    # 28 pixels a side from 48 x 64: this pixel is one that the resize reads.
    image = np.array(observation().images[name])
    image[24, 32] ^= 0x80
    image[23, 32] ^= 0x80
    return with_image(name, image)
