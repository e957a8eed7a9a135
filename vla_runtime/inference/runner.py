"""The two halves of an inference: encode into a slot, denoise from it.

Invariants:
- `encode` writes image tokens and one slot (two with serial guidance) and selects no prefix;
- `denoise` reads the slots that `encode` names and writes no prefix;
- they share only the slot and what `encode` returns.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from vla_runtime.engines.protocol import BatchEngine, PolicyEngine, PrefixSlot, TokenEngine
from vla_runtime.engines.schedules import schedule_key
from vla_runtime.family.declaration import AnswerDecoder, Noise, token_dims
from vla_runtime.inference.denoise import StepObserver, denoise, denoise_by_step
from vla_runtime.inference.packed import write_answer
from vla_runtime.inference.prefix_cache import PrefixCache
from vla_runtime.inference.request import ChunkRequest
from vla_runtime.types import CacheReport, InferenceReport

# Most requests whose steps run together: each power of two has buffers and a graph of its own.
MOST_TOGETHER = 8

# --- Repeatable noise of a chunk: counter-based, keyed by (seed, inference number)


def chunk_noise(
    seed: int,
    number: int,
    shape: tuple[int, int],
    draw: int = 0,
    kind: Noise = 'normal',
) -> np.ndarray:
    """Noise of one inference: standard normal, or uniform in [-1, 1).

    A Philox generator (Salmon et al., SC 2011) keyed by the seed and the inference number, so the
    noise of inference n does not depend on the inferences before it.

    Args:
        seed: 0 to 2**64 - 1.
        number: inference number, from 0.
        shape: (H, A) of the float32 result.
        draw: index within the inference, for whoever needs several, as the training of a student.
    """
    # The counter has 256 bits, lowest word first: no draw reaches the next one's range.
    bits = np.random.Philox(key=[seed, number], counter=[0, 0, 0, draw])
    generator = np.random.Generator(bits)
    if kind == 'uniform':
        return np.float32(2.0) * generator.random(shape, dtype=np.float32) - np.float32(1.0)
    return generator.standard_normal(shape, dtype=np.float32)


def step_noise(seed: int, number: int, steps: int, shape: tuple[int, int]) -> np.ndarray:
    """Standard normal noise that the steps of one inference add, (steps, H, A) float32.

    A range of the counter of its own, beside that of `chunk_noise`, whose arguments these are; the
    noise of a step does not depend on how many follow. `steps` are those that add noise.
    """
    bits = np.random.Philox(key=[seed, number], counter=[0, 0, 1, 0])
    return np.random.Generator(bits).standard_normal((steps, *shape), dtype=np.float32)


# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EncodedPrefix:
    """A request whose prefix lies in slots of the engine, and the work of filling them.

    Attributes:
        slots: one, or one for each row of serial guidance.
        runs: number of runs of the networks `vision` and `prefix`.
    """

    request: ChunkRequest
    slots: tuple[int, ...]
    cache: CacheReport
    runs: Mapping[str, int]

    @property
    def places(self) -> tuple[PrefixSlot, ...]:
        """Slots that the denoise loop reads."""
        rows = self.request.prefixes[0].count
        return tuple((rows, slot) for slot in self.slots)


@dataclass(frozen=True)
class DenoisedChunk:
    """Result of the denoise loop, and runs of the network `expert`.

    `chunk` is (H, A) float32 in normalised action space, or (n,) int64 tokens of a `tokens` head;
    `together` the number of requests whose steps ran as rows of the same passes.
    """

    chunk: np.ndarray
    runs: Mapping[str, int]
    together: int = 1


class ChunkRunner:
    """Run requests on one engine through one prefix cache.

    `cameras` are names in the engine's order; `decoder` is None for all but `tokens` heads.
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
        self,
        request: ChunkRequest,
        held: Collection[PrefixSlot] = (),
        cache: PrefixCache | None = None,
    ) -> EncodedPrefix:
        """Run the vision and prefix networks for what the cache does not hold.

        The slots in `held` are being read by another inference and are not written. `cache` is
        that of the request's session; None: the runner's own.
        """
        cache, policy = self.cache if cache is None else cache, request.settings.cache
        before = dict(cache.runs)
        images = cache.encode_images(request.prefixes[0], policy)
        self._engine.synchronize()
        request.clock.mark('vision')
        slots = cache.place(request.prefixes, policy, held)
        prefixes = tuple(
            cache.encode_prefix(prefix, policy, slot)
            for slot, prefix in zip(slots, request.prefixes, strict=True)
        )
        self._engine.synchronize()
        request.clock.mark('prefix')
        return EncodedPrefix(
            request,
            slots,
            CacheReport(images, prefixes),
            runs={network: count - before[network] for network, count in cache.runs.items()},
        )

    def denoise(self, encoded: EncodedPrefix, on_step: StepObserver | None = None) -> DenoisedChunk:
        """Run the expert.

        With a `tokens` head `on_step` is called after each token with (index, tokens so far,
        logits), else as by `inference.denoise.denoise`.
        """
        if self._decoder is not None:
            return self._read_answer(self._decoder, encoded, on_step)
        engine, request = self._engine, encoded.request
        steps = len(request.times)
        engine.set_schedule(*request.schedule)
        if request.by_step:
            chunk = denoise_by_step(
                engine, request.inputs, request.schedule, encoded.places, on_step, request.share
            )
        else:
            engine.use_prefix(*encoded.places[0])
            chunk = denoise(engine, request.inputs, on_step)
        chunk[request.clamped] = request.inputs.plan[request.clamped]
        request.clock.mark('denoise')
        return DenoisedChunk(chunk, runs={'expert': steps * len(encoded.slots)})

    def group(self, encoded: Sequence[EncodedPrefix]) -> list[list[int]]:
        """Return which requests (places in `encoded`) can be denoised together, in any order."""
        groups: dict[Hashable, list[int]] = {}
        for index, one in enumerate(encoded):
            groups.setdefault(self._kind(index, one), []).append(index)
        return [
            group[first : first + MOST_TOGETHER]
            for group in groups.values()
            for first in range(0, len(group), MOST_TOGETHER)
        ]

    def _kind(self, index: int, encoded: EncodedPrefix) -> Hashable:
        """Return what requests that run together have in common; that of one alone is its own."""
        request = encoded.request
        alone = request.by_step or request.inputs.jacobian or request.inputs.clean_actions
        if alone or 'together' not in self._engine.features:
            return index
        return request.prefixes[0].count, schedule_key(*request.schedule)

    def denoise_together(self, encoded: Sequence[EncodedPrefix]) -> list[DenoisedChunk]:
        """Run the expert for requests of one group; each result is that of `denoise`."""
        if len(encoded) == 1:
            return [self.denoise(encoded[0])]
        engine = cast(BatchEngine, self._engine)
        requests = [one.request for one in encoded]
        engine.set_schedule(*requests[0].schedule)
        chunks, together = engine.denoise_together(
            [one.places[0] for one in encoded], [request.inputs for request in requests]
        )
        for request, chunk in zip(requests, chunks, strict=True):
            chunk[request.clamped] = request.inputs.plan[request.clamped]
            request.clock.mark('denoise')
        runs = {'expert': len(requests[0].times)}
        return [DenoisedChunk(chunk, runs, together) for chunk in chunks]

    def _read_answer(
        self,
        decoder: AnswerDecoder,
        encoded: EncodedPrefix,
        on_step: StepObserver | None,
    ) -> DenoisedChunk:
        engine = cast(TokenEngine, self._engine)
        engine.use_prefix(*encoded.places[0])
        length = token_dims(engine.dims).answer_length
        answer = write_answer(engine, length, decoder.end, on_step)
        encoded.request.clock.mark('denoise')
        return DenoisedChunk(answer, runs={'expert': len(answer) - 1})

    def report(
        self,
        encoded: EncodedPrefix,
        denoised: DenoisedChunk,
        stamps_ns: Mapping[str, int],
        overlap_ms: float = 0.0,
        ticks: int = 0,
        answers_per_s: float | None = None,
    ) -> InferenceReport:
        request, settings = encoded.request, encoded.request.settings
        return InferenceReport(
            number=request.number,
            seed=settings.seed,
            milliseconds=request.clock.milliseconds(),
            pipeline=settings.pipeline,
            overlap_ms=overlap_ms,
            cache=encoded.cache,
            runs={**encoded.runs, **denoised.runs},
            beta=settings.cfg_beta if settings.guided else 1.0,
            guidance=request.guidance,
            rtc_mode=request.rtc_mode,
            clean_steps=request.inputs.clean_actions,
            denoise_steps=len(request.times),
            tokens=request.tokens,
            cuda_graph=_graphs_used(self._engine.cuda_graph, request, denoised.together),
            noise=request.noise,
            stamps_ns=dict(stamps_ns),
            ticks=ticks,
            answers_per_s=answers_per_s,
            together=denoised.together,
        )


def _graphs_used(
    captured: Mapping[str, str], request: ChunkRequest, together: int
) -> dict[str, str]:
    """Graphs as the engine has them; steps that run one by one go without theirs."""
    captured = dict(captured)
    of_batches = captured.pop('together', 'eager')
    if together > 1:
        captured['denoise'] = of_batches
    # A loop that gave up its graph, and an engine that captures none, keep their own words.
    graphs = 'captured' in captured.values() and captured['denoise'] in ('captured', 'eager')
    by_step = f'eager: {request.by_step}' if request.by_step and graphs else ''
    return {**captured, **({'denoise': by_step} if by_step else {})}
