"""The report of an inference: what was asked of it, what was reused, and what ran."""

from __future__ import annotations

from collections.abc import Mapping

from vla_runtime.inference.request import ChunkRequest
from vla_runtime.inference.runner import DenoisedChunk, EncodedPrefix
from vla_runtime.inference.settings import PolicySettings
from vla_runtime.types import InferenceReport


def make_report(
    request: ChunkRequest,
    encoded: EncodedPrefix,
    denoised: DenoisedChunk,
    settings: PolicySettings,
    *,
    number: int,
    milliseconds: Mapping[str, float],
    overlap_ms: float,
    cuda_graph: Mapping[str, str],
    stamps_ns: Mapping[str, int],
) -> InferenceReport:
    """Return the report of a request that was run with these settings; see `InferenceReport`."""
    return InferenceReport(
        number=number,
        seed=settings.seed,
        milliseconds=milliseconds,
        pipeline=settings.pipeline,
        overlap_ms=overlap_ms,
        cache=encoded.cache,
        runs={**encoded.runs, **denoised.runs},
        beta=settings.cfg_beta if settings.cfg_enabled else 1.0,
        guidance=request.guidance,
        rtc_mode=request.rtc_mode,
        clean_steps=request.inputs.clean_actions,
        denoise_steps=len(request.times),
        tokens=request.tokens,
        samples=settings.samples,
        sample=denoised.sample,
        sample_distances=denoised.distances,
        cuda_graph=dict(cuda_graph),
        noise=request.noise,
        stamps_ns=dict(stamps_ns),
    )
