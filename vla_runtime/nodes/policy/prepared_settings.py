"""Live settings that take effect once their CUDA graphs are there, so that no chunk waits for them.

A change, as of the number of denoise steps, may need graphs that the engine lacks, which takes
seconds on a Jetson. Until they are there all the old settings stay in force. Graphs are captured
between two answers, one at a time (`prepare`). Everything else, and every change on a backend
without graphs, takes effect at the next chunk.
"""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter
from typing import Any

from vla_runtime.inference.chunk_policy import ChunkPolicy
from vla_runtime.inference.settings import PolicySettings
from vla_runtime.nodes.policy.settings import live_settings, settings_from


class PreparedSettings:
    """Settings of a policy's inferences; one thread uses it.

    Args:
        values: of all parameters of the node, now. All graphs that they lack are captured here,
            because nobody waits for a chunk yet.

    Raises:
        ValueError: settings that the policy cannot run with, or that the device has no memory for.
    """

    def __init__(self, policy: ChunkPolicy, values: Mapping[str, Any]) -> None:
        self._policy = policy
        first = settings_from(values)
        try:
            while not policy.prepare(first):
                pass
        except ValueError:
            raise
        except Exception as error:
            # Of any kind: drivers, PyTorch and Triton raise what they like.
            raise ValueError(
                f'the CUDA graphs of these settings cannot be captured: {error}. Set back what was '
                'changed last, such as denoise_steps or pipeline'
            ) from error
        self.settings = first
        self._in_force = _live(values)
        self._wanted = self._in_force
        self._waiting: PolicySettings | None = None
        self._refused: PolicySettings | None = None
        self._milliseconds = 0.0

    @property
    def refused(self) -> list[str]:
        """Settings that differ from those in force while the ones wanted cannot be prepared."""
        if self._refused is None:
            return []
        return [name for name, value in self._wanted.items() if value != self._in_force[name]]

    def of(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the node's values, or those in force where not prepared.

        ValueError for a misfit.
        """
        wanted = settings_from(values)
        self._waiting, self._wanted = None, _live(values)
        if not self._policy.is_prepared(wanted):
            if wanted != self._refused:
                self._waiting, self._refused = wanted, None
            return {**values, **self._in_force}
        self._milliseconds, self._refused = 0.0, None
        self.settings, self._in_force = wanted, self._wanted
        return dict(values)

    def prepare(self) -> float:
        """Capture one graph of settings that wait for theirs.

        After an error the settings in force are kept, and these are tried again once they change.

        Returns:
            Milliseconds that all of them took, after the last; 0 before, and where nothing waits.

        Raises:
            ValueError: settings that the policy cannot run with.
            RuntimeError: an error of the device, as of too little memory.
        """
        waiting, self._waiting = self._waiting, None
        if waiting is None:
            return 0.0
        start = perf_counter()
        try:
            done = self._policy.prepare(waiting)
        except Exception:
            self._refused, self._milliseconds = waiting, 0.0
            raise
        self._milliseconds += (perf_counter() - start) * 1e3
        if not done:
            return 0.0
        milliseconds, self._milliseconds = self._milliseconds, 0.0
        return milliseconds


def _live(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: values[name] for name in live_settings()}
