"""Warm-ups: inferences on black images that capture the CUDA graphs of settings, piece by piece.

Invariants:
- the engine says which graphs are missing, so a change of settings waits for those alone;
- a piece captures one graph of the denoise loop at most, so what waits for a piece waits for one
  (a slot that was never used has those of its prefix captured in the same piece);
- other inferences, with other settings, may come between two pieces;
- nothing of a black image stays in the prefix cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from vla_runtime.bundle.schema import BundleSpec
from vla_runtime.engines.protocol import SLOTS, DenoiseLoop, PolicyEngine, PrefixSlot
from vla_runtime.family.declaration import image_sizes, observation_steps
from vla_runtime.inference.request import ChunkRequest
from vla_runtime.inference.request_builder import RequestBuilder
from vla_runtime.inference.settings import PolicySettings
from vla_runtime.types import Observation

# Runs a request that writes no held slot.
Run = Callable[[ChunkRequest, tuple[PrefixSlot, ...]], object]


@dataclass(frozen=True)
class _Piece:
    """One inference, over the slots of its loops and no held one."""

    request: ChunkRequest
    loops: tuple[DenoiseLoop, ...]
    held: tuple[PrefixSlot, ...]


class Preparation:
    """Prepares a policy's engine for settings.

    One thread uses it. `run` leaves no cached prefix.
    """

    def __init__(
        self, spec: BundleSpec, engine: PolicyEngine, builder: RequestBuilder, run: Run
    ) -> None:
        self._spec, self._engine, self._builder, self._run = spec, engine, builder, run
        # Those asked for last, because they are asked for at every inference.
        self._known: tuple[PolicySettings | None, list[_Piece]] = (None, [])

    def is_done(self, settings: PolicySettings) -> bool:
        """Return whether the graphs of these settings are there, or the engine captures none."""
        if set(self._engine.cuda_graph.values()) == {'eager'}:
            return True
        return not self._missing(settings)

    def run_all(self, settings: PolicySettings) -> None:
        """Run every piece, also those that capture nothing."""
        for piece in self._pieces(settings):
            self._run(piece.request, piece.held)

    def run_with(self, run: Callable[[ChunkRequest], object], settings: PolicySettings) -> None:
        run(self._request(settings))

    def capture_next_graph(self, settings: PolicySettings) -> bool:
        """Run the first piece that captures something; return True where none is left then."""
        for piece in self._missing(settings)[:1]:
            self._run(piece.request, piece.held)
        return not self._missing(settings)

    def _missing(self, settings: PolicySettings) -> list[_Piece]:
        return [
            piece
            for piece in self._pieces(settings)
            if any(map(self._engine.captures, piece.loops))
        ]

    def _pieces(self, wanted: PolicySettings) -> list[_Piece]:
        """Return a piece for each graph: with and without guidance and plan, in each slot used."""
        if self._known[0] != wanted:
            self._known = wanted, self._make_pieces(wanted)
        return self._known[1]

    def _make_pieces(self, wanted: PolicySettings) -> list[_Piece]:
        pieces = []
        for guided in (False, True):
            settings = replace(wanted, cfg_enabled=True, cfg_beta=2.0 if guided else 1.0)
            if guided and not self._can_be_guided(settings):
                continue
            request = self._request(settings)
            conditioned = self._builder.as_if_conditioned(request)
            for one in (request,) if conditioned is request else (request, conditioned):
                loops = _loops(one)
                if one.guidance == 'serial':
                    pieces.append(_Piece(one, loops, ()))
                    continue
                # Both slots where the pipeline will alternate.
                for loop in loops[: wanted.networks_at_once]:
                    held = tuple((loop.rows, slot) for slot in range(loop.slot))
                    pieces.append(_Piece(one, (loop,), held))
        return pieces

    def _request(self, settings: PolicySettings) -> ChunkRequest:
        return self._builder.build(self._black(), settings, 0)

    def _can_be_guided(self, guided: PolicySettings) -> bool:
        try:
            self._builder.check(guided)
        except ValueError:
            return False
        return True

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
            earlier_states=[np.zeros(len(self._spec.state), dtype=np.float32)]
            * ((observation_steps(self._spec.dims) or 1) - 1),
        )


def _loops(request: ChunkRequest) -> tuple[DenoiseLoop, ...]:
    inputs = request.inputs
    return tuple(
        DenoiseLoop(
            steps=len(request.times),
            rows=request.prefixes[0].count,
            slot=slot,
            jacobian=inputs.jacobian,
            action_time=inputs.clean_actions > 0,
            alone=bool(request.by_step),
        )
        for slot in range(SLOTS)
    )
