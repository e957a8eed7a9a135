"""Statistics of a condition's episodes, with confidence intervals."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from vla_runtime.bundle.success import difference_interval
from vla_tabletop.sim.success_rate import SuccessRate
from vla_tabletop.study.episode import EpisodeResult
from vla_tabletop.study.smoothness import CacheUse


@dataclass(frozen=True)
class Mean:
    """A mean with its 95% interval, ± 1.96 standard errors; NaN where values are too few."""

    value: float
    low: float
    high: float
    count: int


def mean_of(values: Iterable[float]) -> Mean:
    """Mean of those values that are numbers."""
    known = np.array([value for value in values if math.isfinite(value)])
    if not len(known):
        return Mean(math.nan, math.nan, math.nan, 0)
    mean = float(known.mean())
    if len(known) == 1:
        return Mean(mean, math.nan, math.nan, 1)
    half = 1.959964 * float(known.std(ddof=1)) / math.sqrt(len(known))
    return Mean(mean, mean - half, mean + half, len(known))


@dataclass(frozen=True)
class Summary:
    """One row of a study's table; counts are of all episodes.

    Attributes:
        obeyed: touched the block that the words meant.
        steps: to success, over successes only (failing the long ones looks quick).
        delay_steps: as counted by the executor.
        starved_ticks: ticks an episode.
        position_jump: rad, see `EpisodeResult`.
        velocity_jump: rad/s.
        jerk_seams, jerk_elsewhere, jerk_overall: rad/s³.
        steps_per_chunk: steps over inferences.
        images_saved: fraction of image tokens found in the cache, 0 to 1.
        prefixes_saved: likewise of the prefixes.
    """

    success: SuccessRate
    obeyed: SuccessRate
    wrong_block: int
    timeout: int
    steps: Mean
    delay_steps: Mean
    starved_ticks: Mean
    position_jump: Mean
    velocity_jump: Mean
    jerk_seams: Mean
    jerk_elsewhere: Mean
    jerk_overall: Mean
    inferences: Mean
    steps_per_chunk: Mean
    images_saved: Mean
    prefixes_saved: Mean
    refused: int
    halted: int
    cache_use: CacheUse


MEANS = (
    'steps',
    'delay_steps',
    'starved_ticks',
    'position_jump',
    'velocity_jump',
    'jerk_seams',
    'jerk_elsewhere',
    'jerk_overall',
    'inferences',
    'steps_per_chunk',
    'images_saved',
    'prefixes_saved',
)


def summarise(episodes: Sequence[EpisodeResult]) -> Summary:
    """Everything about some episodes of one condition; at least one."""
    count = len(episodes)
    return Summary(
        success=SuccessRate(sum(e.success for e in episodes), count),
        obeyed=SuccessRate(sum(e.obeyed for e in episodes), count),
        wrong_block=sum(e.outcome == 'wrong_block' for e in episodes),
        timeout=sum(e.outcome == 'timeout' for e in episodes),
        steps=mean_of(e.steps for e in episodes if e.success),
        delay_steps=mean_of(e.delay_steps for e in episodes),
        starved_ticks=mean_of(e.starved_ticks for e in episodes),
        position_jump=mean_of(e.position_jump for e in episodes),
        velocity_jump=mean_of(e.velocity_jump for e in episodes),
        jerk_seams=mean_of(e.jerk.seams for e in episodes),
        jerk_elsewhere=mean_of(e.jerk.elsewhere for e in episodes),
        jerk_overall=mean_of(e.jerk.overall for e in episodes),
        inferences=mean_of(e.inferences for e in episodes),
        steps_per_chunk=mean_of(e.steps / e.inferences for e in episodes if e.inferences),
        images_saved=mean_of(e.cache_use.images_saved for e in episodes),
        prefixes_saved=mean_of(e.cache_use.prefixes_saved for e in episodes),
        refused=sum(e.refused for e in episodes),
        halted=sum(bool(e.halted) for e in episodes),
        cache_use=sum((e.cache_use for e in episodes), CacheUse()),
    )


def by_family(episodes: Sequence[EpisodeResult]) -> dict[str, list[EpisodeResult]]:
    """`all`, then each family by itself where there are several."""
    groups = {'all': list(episodes)}
    families = list(dict.fromkeys(episode.family for episode in episodes))
    if len(families) == 1:
        return {families[0]: groups['all']}
    for family in families:
        groups[family] = [episode for episode in episodes if episode.family == family]
    return groups


@dataclass(frozen=True)
class PairedComparison:
    """A condition against the reference, seed by seed.

    Attributes:
        won: successes here that fail there.
        lost: the reverse.
        p: McNemar's exact test (two-sided), not corrected for multiple comparisons.
        low, high: 95% interval of the difference of success, as a fraction.
    """

    won: int
    lost: int
    p: float
    low: float
    high: float


def compare(
    episodes: Sequence[EpisodeResult], reference: Sequence[EpisodeResult]
) -> PairedComparison:
    """Pair two conditions by seed; ValueError: not run on the same seeds."""
    if [e.seed for e in episodes] != [e.seed for e in reference]:
        raise ValueError('conditions run on other seeds cannot be compared pair by pair')
    pairs = [(a.success, b.success) for a, b in zip(episodes, reference, strict=True)]
    won, lost = pairs.count((True, False)), pairs.count((False, True))
    interval = difference_interval(len(pairs), won, lost)
    return PairedComparison(won, lost, _sign_test(won, lost), *interval)


def _sign_test(won: int, lost: int) -> float:
    """Two-sided p of a fair coin falling at least as unevenly."""
    total = won + lost
    tail = sum(math.comb(total, k) for k in range(min(won, lost) + 1)) / 2**total
    return min(1.0, 2.0 * tail)
