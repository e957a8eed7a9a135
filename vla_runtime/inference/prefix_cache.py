"""The prefix cache: reuse of image tokens and prefixes of earlier inferences.

Two levels, both in the engine's own buffers, so a hit costs a comparison and no copy: the image
tokens of each camera, and the keys and values of each slot of each number of prompt rows. Attention
within the prefix is bidirectional, so any change of pixels, masks or tokens makes all keys and
values stale; only the image tokens of unchanged cameras stay valid.

Invariants:
- `exact` (the default) reuses only what is equal bit for bit: a hit changes nothing;
- `bounded` is opt-in, has a limit on age, on reuses in a row, on image and on state change, and
  names every reuse in the report;
- an entry is invalid while it is being rewritten, so an engine that fails half-way leaves none;
- nothing survives `clear`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from vla_runtime.engines.protocol import SLOTS, PolicyEngine, PrefixSlot, count_rows
from vla_runtime.files.setting_fields import check_settings, setting
from vla_runtime.types import CacheOutcome, MissReason, Reuse

CacheMode = Literal['exact', 'bounded', 'off']
# Clock of an observation's time; times of different clocks cannot be compared.
Clock = Literal['stamps', 'steady']


@dataclass(frozen=True)
class CachePolicy:
    """Cache settings; by default only equal inputs are reused."""

    mode: CacheMode = setting(
        'exact',
        'reuse of image tokens and prefixes from before: exact only what is equal, bounded also '
        'what has changed little, off none',
        name='cache_mode',
    )
    max_age_s: float = setting(
        0.0,
        'cache_mode bounded: oldest entry reused, seconds; bounded needs more than 0',
        0.0,
        10.0,
        name='cache_max_age_s',
    )
    max_reuses: int = setting(
        0,
        'cache_mode bounded: reuses of an entry in a row; bounded needs at least 1',
        0,
        1000,
        name='cache_max_reuses',
    )
    max_image_change: float = setting(
        0.0,
        "cache_mode bounded: largest mean change of all of a camera's pixels, grey levels; 0.0: "
        'equal pixels',
        0.0,
        255.0,
        name='cache_max_image_change',
    )
    max_state_bins: int = setting(
        0,
        "cache_mode bounded: largest change of any state's bin in the prompt; 0: equal bins",
        0,
        256,
        name='cache_max_state_bins',
    )

    def __post_init__(self) -> None:
        check_settings(self)
        if self.mode == 'bounded' and (self.max_age_s <= 0 or self.max_reuses < 1):
            raise ValueError(
                'cache_mode bounded reuses image tokens of images that have changed, so it needs '
                f'its limits: cache_max_age_s is {self.max_age_s} and must be above 0, '
                f'cache_max_reuses is {self.max_reuses} and must be at least 1'
            )


@dataclass(frozen=True)
class PrefixInputs:
    """Everything that a prefix is computed from.

    Attributes:
        pixels: of every camera, (3, height, width) float32 each; hidden cameras' are ignored.
        image_mask: (V,) bool, False for a hidden camera.
        rows: the family's prefix inputs by name, (R, …) each.
        words: instruction and advantage tags of the prompt rows.
        state_bins: (S,) int64 bins of the state in the prompt, empty where it is not in it.
        clock: of the observation's `time_s`: the stamps', or the steady clock without stamps.
        levels_per_unit: (V, 3) grey levels that one unit of a channel's pixels spans; None: 127.5,
            for pixels in [-1, 1].
    """

    pixels: np.ndarray | Sequence[np.ndarray]
    image_mask: np.ndarray
    rows: Mapping[str, np.ndarray]
    words: Hashable
    state_bins: np.ndarray
    time_s: float
    clock: Clock = 'stamps'
    levels_per_unit: np.ndarray | None = None

    @property
    def count(self) -> int:
        """R, prompt rows."""
        return count_rows(self.rows)


@dataclass(frozen=True)
class _Image:
    """Pixels that a camera's image tokens were computed from."""

    pixels: np.ndarray
    version: int
    time_s: float
    clock: Clock
    reuses: int = 0


@dataclass(frozen=True)
class _Prefix:
    """Inputs that a prefix was computed from."""

    images: tuple[int | None, ...]
    rows: Mapping[str, np.ndarray]
    words: Hashable
    state_bins: np.ndarray
    time_s: float
    clock: Clock
    reuses: int = 0
    # Of the latest request with this row count; in `latency` mode no other entry would exist.
    latest: bool = True


class PrefixCache:
    """Run the vision and prefix networks where the engine's buffers lack the result.

    `cameras` are names in the engine's order, for the report; `session` is whose image tokens and
    slots it fills. `runs` counts runs of the networks `vision` and `prefix`.
    """

    def __init__(self, engine: PolicyEngine, cameras: tuple[str, ...], session: int = 0) -> None:
        self._engine = engine
        self._cameras = cameras
        self._first_image = session * len(cameras)
        self._slots = range(session * SLOTS, (session + 1) * SLOTS)
        self._version = 0
        self._images: dict[int, _Image] = {}
        self._prefixes: dict[PrefixSlot, _Prefix] = {}
        self._latest: dict[int, int] = {}
        self.runs = {'vision': 0, 'prefix': 0}

    def clear(self) -> None:
        self._images.clear()
        self._prefixes.clear()
        self._latest.clear()

    def encode_images(self, inputs: PrefixInputs, policy: CachePolicy) -> dict[str, CacheOutcome]:
        """Bring every visible camera's image tokens into the engine; return outcomes by camera.

        Ages count from the last observation that the entry was computed from or equal to.
        """
        if policy.mode == 'off':
            self.clear()
        return {
            self._cameras[camera]: self._encode_image(int(camera), inputs, policy)
            for camera in np.flatnonzero(inputs.image_mask)
        }

    def _encode_image(self, camera: int, inputs: PrefixInputs, policy: CachePolicy) -> CacheOutcome:
        pixels = inputs.pixels[camera]
        entry = self._images.get(camera)
        outcome = _judge_image(entry, camera, inputs, policy)
        if outcome.found and entry is not None:
            fresh = replace(entry, time_s=inputs.time_s, clock=inputs.clock, reuses=0)
            older = replace(entry, reuses=outcome.reuses)
            self._images[camera] = fresh if outcome.reuse is Reuse.HIT else older
            return outcome
        self._images.pop(camera, None)
        self._engine.encode_image(self._first_image + camera, pixels)
        self.runs['vision'] += 1
        if policy.mode == 'off':
            return outcome
        self._version += 1
        kept = entry.pixels if entry is not None else np.empty_like(pixels)
        np.copyto(kept, pixels)
        self._images[camera] = _Image(kept, self._version, inputs.time_s, inputs.clock)
        return outcome

    def place(
        self,
        prefixes: Sequence[PrefixInputs],
        policy: CachePolicy,
        held: Collection[PrefixSlot] = (),
    ) -> tuple[int, ...]:
        """Choose the slots for one request's prefixes: those that hold them, or else free ones.

        Call after `encode_images`. Each prefix needs a slot: one, or one per row of serial
        guidance. Those in `held` are being read: they may be reused, and are not written.
        """
        rows = prefixes[0].count
        latest = self._latest.get(rows, self._slots[0])
        slots = [latest, *(slot for slot in self._slots if slot != latest)]
        # Bounded mode reuses only the latest entry, as it would in `latency` mode.
        standing = slots if policy.mode == 'exact' else slots[:1]
        free = (slot for slot in slots if (rows, slot) not in held)
        first = next(
            (s for s in standing if self._judge((rows, s), prefixes[0], policy).found), None
        )
        if first is None:
            first = next(free)
        self._latest[rows] = first
        chosen = (first, *(slot for slot in slots if slot != first))[: len(prefixes)]
        for slot in slots:
            if slot not in chosen and (entry := self._prefixes.get((rows, slot))) is not None:
                self._prefixes[rows, slot] = replace(entry, latest=False)
        return chosen

    def encode_prefix(self, inputs: PrefixInputs, policy: CachePolicy, slot: int) -> CacheOutcome:
        """Bring the prefix of these prompt rows into a slot of the engine.

        Call after `encode_images`. Does not change the prefix that the engine denoises over.
        """
        place = inputs.count, slot
        outcome = self._judge(place, inputs, policy)
        entry = self._prefixes.get(place)
        if outcome.found and entry is not None:
            fresh = replace(entry, time_s=inputs.time_s, clock=inputs.clock, reuses=0, latest=True)
            older = replace(entry, reuses=outcome.reuses)
            self._prefixes[place] = fresh if outcome.reuse is Reuse.HIT else older
            return outcome
        images = self._versions(inputs)
        self._prefixes.pop(place, None)
        self._engine.encode_prefix(inputs.image_mask, inputs.rows, slot)
        self.runs['prefix'] += 1
        if policy.mode == 'off':
            return outcome
        self._prefixes[place] = _Prefix(
            images,
            {name: array.copy() for name, array in inputs.rows.items()},
            inputs.words,
            inputs.state_bins.copy(),
            inputs.time_s,
            inputs.clock,
        )
        return outcome

    def _versions(self, inputs: PrefixInputs) -> tuple[int | None, ...]:
        """Versions of the image tokens in the engine, per camera; None for a hidden one."""
        return tuple(
            self._images[camera].version if visible and camera in self._images else None
            for camera, visible in enumerate(inputs.image_mask)
        )

    def _judge(self, place: PrefixSlot, inputs: PrefixInputs, policy: CachePolicy) -> CacheOutcome:
        entry = self._prefixes.get(place)
        if policy.mode == 'off':
            return CacheOutcome(Reuse.OFF)
        if entry is None:
            return _miss(MissReason.FIRST)
        if policy.mode == 'bounded' and not entry.latest:
            return _miss(MissReason.NOT_LATEST)
        images = self._versions(inputs)
        age_s = _age_s(entry, inputs)
        changed = _changed(entry, images, inputs)
        if not changed:
            reused_images = self._on_reused_images(inputs)
            return CacheOutcome(Reuse.HIT, age_s=age_s, on_reused_images=reused_images)
        missed = _miss(MissReason.INPUTS, age_s=age_s, changed=changed)
        if policy.mode != 'bounded' or images != entry.images or inputs.words != entry.words:
            return missed
        if inputs.state_bins.shape != entry.state_bins.shape or not inputs.state_bins.size:
            return missed
        # Only the state has changed.
        moved = int(np.abs(inputs.state_bins - entry.state_bins).max())
        if moved > policy.max_state_bins:
            return _miss(
                MissReason.STATE_CHANGE, age_s=age_s, bins=moved, limit=policy.max_state_bins
            )
        beyond = _beyond(age_s, entry.reuses, policy)
        return beyond or CacheOutcome(
            Reuse.REUSED, age_s=age_s, reuses=entry.reuses + 1, bins=moved
        )

    def _on_reused_images(self, inputs: PrefixInputs) -> bool:
        visible = (self._images.get(int(camera)) for camera in np.flatnonzero(inputs.image_mask))
        return any(image is not None and image.reuses for image in visible)


def _age_s(entry: _Image | _Prefix, inputs: PrefixInputs) -> float:
    return inputs.time_s - entry.time_s if inputs.clock == entry.clock else math.nan


def _miss(reason: MissReason, **facts: Any) -> CacheOutcome:
    return CacheOutcome(Reuse.MISS, reason, **facts)


def _judge_image(
    entry: _Image | None, camera: int, inputs: PrefixInputs, policy: CachePolicy
) -> CacheOutcome:
    pixels = inputs.pixels[camera]
    if policy.mode == 'off':
        return CacheOutcome(Reuse.OFF)
    if entry is None:
        return _miss(MissReason.FIRST)
    age_s = _age_s(entry, inputs)
    if np.array_equal(entry.pixels, pixels):
        return CacheOutcome(Reuse.HIT, age_s=age_s)
    if policy.mode != 'bounded':
        return _miss(MissReason.PIXELS, age_s=age_s)
    change = _grey_levels(np.abs(entry.pixels - pixels), camera, inputs)
    if not change <= policy.max_image_change:
        return _miss(
            MissReason.IMAGE_CHANGE,
            age_s=age_s,
            grey_levels=change,
            limit=policy.max_image_change,
        )
    return _beyond(age_s, entry.reuses, policy) or CacheOutcome(
        Reuse.REUSED, age_s=age_s, reuses=entry.reuses + 1, grey_levels=change
    )


def _grey_levels(change: np.ndarray, camera: int, inputs: PrefixInputs) -> float:
    if inputs.levels_per_unit is None:
        # [-1, 1] spans 255 grey levels.
        return float(change.mean()) * 127.5
    return float((change.mean(axis=(1, 2)) * inputs.levels_per_unit[camera]).mean())


def _beyond(age_s: float, reuses: int, policy: CachePolicy) -> CacheOutcome | None:
    """Return a miss for an entry over the limit of age or reuses; None within both."""
    if math.isnan(age_s):
        return _miss(MissReason.OTHER_CLOCK)
    if age_s < 0:
        # The entry's real age is unknown.
        return _miss(MissReason.CLOCK_BACK, age_s=age_s)
    if age_s > policy.max_age_s:
        return _miss(MissReason.AGE, age_s=age_s, limit=policy.max_age_s)
    if reuses >= policy.max_reuses:
        return _miss(MissReason.REUSES, age_s=age_s, reuses=reuses, limit=policy.max_reuses)
    return None


def _changed(
    entry: _Prefix, images: tuple[int | None, ...], inputs: PrefixInputs
) -> tuple[str, ...]:
    parts: Mapping[str, bool] = {
        'images': images != entry.images,
        **{
            name.replace('_', ' '): not np.array_equal(array, entry.rows[name])
            for name, array in inputs.rows.items()
        },
    }
    return tuple(part for part, differs in parts.items() if differs)
