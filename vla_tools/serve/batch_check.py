"""Whether a chunk of a batch is the one that its request has alone, tried before robots come."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from vla_runtime.bundle.folder import Bundle
from vla_runtime.bundle.schema import BundleSpec
from vla_runtime.family.declaration import image_sizes
from vla_runtime.inference.sessions import Request, Session
from vla_runtime.policy import Policy
from vla_runtime.types import Observation

# Requests of a batch that have buffers, and on CUDA graphs, of their own.
SIZES = (2, 4, 8)


class Exactness(NamedTuple):
    """Result of `check_batches`.

    Attributes:
        exact: every chunk of a batch is bit for bit the one alone, whatever is asked.
        bound: largest difference found, in normalised actions; None where nothing was compared.
        why: for a person.
    """

    exact: bool
    bound: float | None
    why: str


def check_batches(policy: Policy, bundle: Bundle, device: str, most: int) -> Exactness:
    """Run seeded requests alone and in batches; on CUDA this captures the graphs of sessions.

    An engine on a CPU promises equal bits for float32, and runs requests one after the other where
    this processor does not keep them.

    Raises:
        ValueError: the device has no memory for a session.
    """
    together = 'together' in policy.features
    promised = not together or (device == 'cpu' and policy.precision == 'float32')
    sizes = [size for size in SIZES if size <= most] if together else []
    sessions = [policy.open_session() for _ in range(max(sizes, default=1))]
    try:
        found = _largest_difference(policy, bundle, sessions, sizes)
    except ValueError as error:
        return Exactness(promised, 0.0 if promised else None, f'not compared: {error}')
    finally:
        for session in sessions:
            policy.close_session(session)
    if not together:
        return Exactness(True, 0.0, f'{policy.backend} runs requests one after the other')
    if promised and not found:
        return Exactness(True, 0.0, 'float32 on a CPU: bit for bit')
    return Exactness(False, found, f'{policy.precision} on {device}: within {found:.3g}')


def _largest_difference(
    policy: Policy, bundle: Bundle, sessions: list[Session], sizes: list[int]
) -> float:
    requests = [
        Request(seeded_observation(bundle, seed), session, number=seed)
        for seed, session in enumerate(sessions)
    ]
    largest = 0.0
    alone = [policy.infer_batch([request])[0][0].normalised for request in requests]
    for size in sizes:
        together = policy.infer_batch([replace(one) for one in requests[:size]])
        for (chunk, _), expected in zip(together, alone, strict=False):
            largest = max(largest, float(np.abs(chunk.normalised - expected).max()))
    return largest


def seeded_observation(bundle: Bundle, seed: int) -> Observation:
    """Return an observation that a policy accepts: noise for images, a state of its statistics."""
    spec, random = bundle.spec, np.random.default_rng(seed)
    sizes = image_sizes(spec.dims)
    images: dict[str, np.ndarray | None] = {
        camera.name: random.integers(0, 256, (*size, 3), dtype=np.uint8)
        for camera, size in zip(spec.cameras, sizes, strict=True)
        if camera.present
    }
    state = usual_state(spec, bundle.statistics)
    earlier = getattr(spec.dims, 'observation_steps', 1) - 1
    return Observation(images, state, f'task {seed}', earlier_states=(state,) * earlier)


def usual_state(spec: BundleSpec, statistics: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return the middle of the states that the policy was trained with, zeros where not known."""
    for low, high in (('q01', 'q99'), ('min', 'max'), ('low', 'high'), ('mean', 'mean')):
        if f'state.{low}' in statistics and f'state.{high}' in statistics:
            middle = (statistics[f'state.{low}'] + statistics[f'state.{high}']) / 2
            return np.asarray(middle, dtype=np.float64)
    return np.zeros(len(spec.state))
