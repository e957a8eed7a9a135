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
        beta=settings.cfg_beta if settings.guided else 1.0,
        guidance=request.guidance,
        rtc_mode=request.rtc_mode,
        clean_steps=request.inputs.clean_actions,
        denoise_steps=len(request.times),
        tokens=request.tokens,
        samples=settings.samples,
        sample=denoised.sample,
        sample_distances=denoised.distances,
        cuda_graph=_graphs_used(cuda_graph, request),
        noise=request.noise,
        stamps_ns=dict(stamps_ns),
    )


def _graphs_used(captured: Mapping[str, str], request: ChunkRequest) -> dict[str, str]:
    """Graphs as the engine has them; serial guidance runs the steps one by one, without theirs."""
    # A loop that gave up its graph, and an engine that captures none, keep their own words.
    graphs = 'captured' in captured.values() and captured['denoise'] in ('captured', 'eager')
    by_step = request.guidance == 'serial' and graphs
    return {**captured, **({'denoise': 'eager: serial guidance'} if by_step else {})}
