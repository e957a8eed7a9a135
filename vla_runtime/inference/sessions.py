"""Several robots on one policy: what each one owns, and requests that run together."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vla_runtime.inference.prefix_cache import PrefixCache
from vla_runtime.inference.settings import PolicySettings
from vla_runtime.types import CommittedPlan, Observation


class Session:
    """One robot's own: its prefix cache in the engine, and the number of its next inference.

    Made by `Policy.open_session`. No session sees what another one left.
    """

    def __init__(self, cache: PrefixCache) -> None:
        self.cache = cache
        self.number = 0

    def reset(self) -> None:
        """Begin a new episode: inference numbers start at 0 again, nothing cached survives."""
        self.number = 0
        self.cache.clear()


@dataclass(frozen=True)
class Request:
    """One inference of a batch; `session` None: the policy's own, the rest as of `Policy.infer`."""

    observation: Observation
    session: Session | None = None
    settings: PolicySettings | None = None
    plan: CommittedPlan | None = None
    noise: np.ndarray | None = None
    number: int | None = None
