"""Warm-ups: inferences on black images that capture the CUDA graphs of settings, piece by piece.

Invariants:
- a piece captures one graph of the denoise loop at most, so what waits for a piece waits for one
  capture (the first piece after a load captures those of the other networks, too);
- other inferences, with other settings, may come between two pieces;
- nothing of a black image stays in the prefix cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from vla_runtime.bundle.schema import BundleSpec
from vla_runtime.engines.protocol import PolicyEngine
from vla_runtime.families.family import image_sizes
from vla_runtime.inference.clock import PhaseClock
from vla_runtime.inference.guidance import resolve_cfg_mode
from vla_runtime.inference.prefix_cache import Place
from vla_runtime.inference.request import ChunkRequest
from vla_runtime.inference.request_builder import RequestBuilder
from vla_runtime.inference.settings import PolicySettings
from vla_runtime.types import Observation

# Runs a request that writes no held place; returns the places of its prefix.
Run = Callable[[ChunkRequest, tuple[Place, ...]], tuple[Place, ...]]
# Settings whose graphs are known to be there: with those under way, as many as any engine keeps.
_DONE_KEPT = 3


@dataclass(frozen=True)
class _Piece:
    """One inference; `elsewhere` keeps it off the places of the one before."""

    request: ChunkRequest
    elsewhere: bool


class Preparation:
    """Prepares a policy's engine for settings; one thread uses it.

    Args:
        spec: of the bundle.
        engine: only its row count and the state of its graphs are read.
        builder: of the policy.
        run: runs a request and leaves nothing of it in the prefix cache.
    """

    def __init__(
        self, spec: BundleSpec, engine: PolicyEngine, builder: RequestBuilder, run: Run
    ) -> None:
        self._spec, self._engine, self._builder, self._run = spec, engine, builder, run
        # By the settings that graphs depend on, latest last.
        self._done: list[tuple[object, ...]] = []
        self._graphs: tuple[object, ...] = ()
        self._left: list[_Piece] = []
        self._places: tuple[Place, ...] = ()

    def is_done(self, settings: PolicySettings) -> bool:
        """Return whether the graphs of these settings are there, or the engine captures none."""
        if set(self._engine.cuda_graph.values()) == {'eager'}:
            return True
        return self._graphs_of(settings) in self._done

    def run_all(self, settings: PolicySettings) -> None:
        """Run every piece, also those that were run before."""
        self._left = []
        while not self.run_piece(settings):
            pass

    def run_piece(self, settings: PolicySettings) -> bool:
        """Run the next piece; the first one where the last call was for other graphs.

        Returns:
            True when it was the last
        """
        graphs = self._graphs_of(settings)
        if not self._left or graphs != self._graphs:
            self._graphs, self._left = graphs, self._pieces(settings)
        # Taken out only when it has run: after an error it is tried again.
        piece = self._left[0]
        self._places = self._run(piece.request, self._places if piece.elsewhere else ())
        self._left.pop(0)
        if self._left:
            return False
        self._done = [*(one for one in self._done if one != graphs), graphs][-_DONE_KEPT:]
        return True

    def _graphs_of(self, settings: PolicySettings) -> tuple[object, ...]:
        """Return the settings that graphs depend on; with and without guidance are warmed up."""
        return (
            settings.denoise_steps or self._spec.denoise_steps,
            resolve_cfg_mode(settings.cfg_mode, self._engine.max_rows),
            settings.rtc_mode,
            settings.samples,
            settings.pipeline,
        )

    def _pieces(self, wanted: PolicySettings) -> list[_Piece]:
        """Return a piece for each graph: with and without guidance and plan, in each slot used."""
        observation, pieces = self._black(), []
        for guided in (False, True) if self._spec.advantage else (False,):
            settings = replace(wanted, cfg_enabled=guided, cfg_beta=2.0)
            request = self._builder.build(
                observation, settings, 0, plan=None, noise=None, clock=PhaseClock()
            )
            tied = self._builder.as_if_tied(request, settings)
            # Both slots where the pipeline will alternate; serial guidance uses both at once.
            both = settings.pipeline == 'throughput' and request.guidance != 'serial'
            for one in (request,) if tied is request else (request, tied):
                pieces += [_Piece(one, elsewhere) for elsewhere in (False, True)[: 1 + both]]
        return pieces

    def _black(self) -> Observation:
        sizes = image_sizes(self._spec.dims)
        return Observation(
            images={
                camera.name: np.zeros((*size, 3), dtype=np.uint8)
                for camera, size in zip(self._spec.cameras, sizes, strict=True)
                if camera.present
            },
            state=np.zeros(len(self._spec.state), dtype=np.float32),
            instruction='warm up',  # Not read without language.
        )
