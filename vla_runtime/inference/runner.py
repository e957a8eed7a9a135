"""The two halves of an inference: encode into a slot, denoise from it.

Invariants:
- `encode` writes image tokens and one slot (two with serial guidance) and selects no prefix;
- `denoise` reads the slots that `encode` names and writes no prefix;
- they share only the slot and what `encode` returns.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import cast

import numpy as np

from vla_runtime.engines.protocol import PolicyEngine, TokenEngine
from vla_runtime.family.declaration import AnswerDecoder, token_dims
from vla_runtime.inference.clock import PhaseClock
from vla_runtime.inference.denoise import StepObserver, denoise, denoise_serially
from vla_runtime.inference.greedy import write_answer
from vla_runtime.inference.prefix_cache import PrefixCache, PrefixSlot
from vla_runtime.inference.request import ChunkRequest
from vla_runtime.inference.sampling import plan_distances
from vla_runtime.types import CacheReport


@dataclass(frozen=True)
class EncodedPrefix:
    """Slots that hold a request's prefix, and the work of filling them.

    Attributes:
        rows: prompt rows in a slot.
        slots: one, or one for each row of serial guidance.
        cache: outcomes of the prefix cache.
        runs: number of runs of the networks `vision` and `prefix`.
    """

    rows: int
    slots: tuple[int, ...]
    cache: CacheReport
    runs: Mapping[str, int]

    @property
    def places(self) -> tuple[PrefixSlot, ...]:
        """Places that the denoise loop reads."""
        return tuple((self.rows, slot) for slot in self.slots)


@dataclass(frozen=True)
class DenoisedChunk:
    """Result of the denoise loop.

    Attributes:
        chunk: (H, A) float32 in normalised action space, of the chosen sample; (n,) int64, the
            tokens of an answer of a `tokens` head.
        sample: index of that sample.
        distances: distance of every sample from the committed plan; empty without a choice.
        runs: number of runs of the network `expert`.
    """

    chunk: np.ndarray
    sample: int
    distances: tuple[float, ...]
    runs: Mapping[str, int]


class ChunkRunner:
    """Run requests on one engine through one prefix cache.

    Args:
        engine: loaded.
        cameras: names, in the engine's order, for the report.
        decoder: decoder of the answers of a `tokens` head; None for the other heads.
    """

    def __init__(
        self,
        engine: PolicyEngine,
        cameras: tuple[str, ...],
        decoder: AnswerDecoder | None = None,
    ) -> None:
        self._engine = engine
        self._decoder = decoder
        self.cache = PrefixCache(engine, cameras)

    def encode(
        self, request: ChunkRequest, clock: PhaseClock, held: Collection[PrefixSlot] = ()
    ) -> EncodedPrefix:
        """Run the vision and prefix networks for what the cache does not hold.

        Args:
            request: the inference to run.
            clock: the request's; marks `vision` and `prefix`.
            held: places that another inference is denoising over; they are not written.
        """
        cache = self.cache
        before = dict(cache.runs)
        images = cache.encode_images(request.prefixes[0], request.cache)
        self._engine.synchronize()
        clock.mark('vision')
        slots = cache.place(request.prefixes, request.cache, held)
        prefixes = tuple(
            cache.encode_prefix(prefix, request.cache, slot)
            for slot, prefix in zip(slots, request.prefixes, strict=True)
        )
        self._engine.synchronize()
        clock.mark('prefix')
        return EncodedPrefix(
            rows=request.prefixes[0].count,
            slots=slots,
            cache=CacheReport(images, prefixes),
            runs={network: count - before[network] for network, count in cache.runs.items()},
        )

    def denoise(
        self,
        request: ChunkRequest,
        encoded: EncodedPrefix,
        clock: PhaseClock,
        on_step: StepObserver | None = None,
    ) -> DenoisedChunk:
        """Run the expert and choose among the samples.

        Args:
            request: the inference to run.
            encoded: result of `encode` for it.
            clock: the request's; marks `denoise`.
            on_step: see `inference.denoise.denoise`; with a `tokens` head called after each token
                with (index, tokens so far, logits).
        """
        if self._decoder is not None:
            return self._read_answer(self._decoder, encoded, clock, on_step)
        engine, steps = self._engine, len(request.times)
        engine.set_schedule(request.times, dt=-1.0 / steps)
        if request.guidance == 'serial':
            chunks = denoise_serially(engine, request.inputs, request.times, encoded.slots, on_step)
        else:
            engine.use_prefix(*encoded.places[0])
            chunks = denoise(engine, request.inputs, on_step)
        chunks = chunks.reshape(-1, *chunks.shape[-2:])
        if request.clamped:
            chunks[:, : request.clamped] = request.inputs.plan[: request.clamped]
        sample, distances = 0, np.zeros(0)
        if request.overlap is not None:
            distances = plan_distances(chunks, request.overlap)
            # A NaN or infinite distance never wins; if all are, the chunk is refused later.
            sample = int(np.where(np.isfinite(distances), distances, np.inf).argmin())
        clock.mark('denoise')
        return DenoisedChunk(
            chunks[sample],
            sample,
            tuple(map(float, distances)),
            runs={'expert': steps * len(encoded.slots)},
        )

    def _read_answer(
        self,
        decoder: AnswerDecoder,
        encoded: EncodedPrefix,
        clock: PhaseClock,
        on_step: StepObserver | None,
    ) -> DenoisedChunk:
        """Let a `tokens` head write its answer."""
        engine = cast(TokenEngine, self._engine)
        engine.use_prefix(*encoded.places[0])
        length = token_dims(engine.dims).answer_length
        answer = write_answer(engine, length, decoder.end, on_step)
        clock.mark('denoise')
        return DenoisedChunk(answer, 0, (), runs={'expert': len(answer) - 1})
