"""History of observations for loops that look once a step: evaluations, simulators, tests.

A node keeps messages by their stamps instead (`sensors.synchronizer`). Both fill the history at the
start of an episode as training does: the first observation stands for those before it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from vla_runtime.bundle.schema import BundleSpec
from vla_runtime.family.declaration import observation_steps
from vla_runtime.types import Observation


class ObservationHistory:
    """Gives each observation the earlier frames and states that a policy sees with it.

    Args:
        spec: contents of the bundle's policy.yaml.
    """

    def __init__(self, spec: BundleSpec) -> None:
        self._frames = [
            (camera.name, camera.frame_of, camera.steps_ago)
            for camera in spec.cameras
            if camera.present and camera.frame_of is not None and camera.steps_ago is not None
        ]
        self._states = (observation_steps(spec.dims) or 1) - 1
        oldest = max((ago for _, _, ago in self._frames), default=0)
        self._seen: deque[Observation] = deque(maxlen=1 + max(oldest, self._states))

    def clear(self) -> None:
        """Begin a new episode."""
        self._seen.clear()

    def add(self, observation: Observation) -> Observation:
        """Return the observation of the next step with its history.

        Args:
            observation: images of the cameras themselves, and the state.
        """
        self._seen.append(observation)
        images, stamps = dict(observation.images), dict(observation.stamps_ns)
        for name, camera, ago in self._frames:
            before = self._ago(ago)
            images[name] = before.images[camera]
            if camera in before.stamps_ns:
                stamps[name] = before.stamps_ns[camera]
        states = [self._ago(ago + 1).state for ago in range(self._states)]
        return replace(observation, images=images, stamps_ns=stamps, earlier_states=states)

    def _ago(self, steps: int) -> Observation:
        """Observation of so many steps ago, or the first of the episode."""
        return self._seen[max(0, len(self._seen) - 1 - steps)]
