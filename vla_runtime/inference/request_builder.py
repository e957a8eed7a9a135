"""Build a `ChunkRequest` from an observation and the settings; runs no network.

All input checks are made here, so a request that was built can be run.
"""

from __future__ import annotations

from dataclasses import replace
from time import monotonic
from typing import Any

import numpy as np

from vla_runtime.bundle.schema import BundleSpec
from vla_runtime.engines.protocol import PolicyEngine, StepInputs
from vla_runtime.family.declaration import (
    real_action_dim,
)
from vla_runtime.family.listing import find_family
from vla_runtime.family.step_schedule import chosen_scheduler
from vla_runtime.inference.codec import PolicyCodec
from vla_runtime.inference.denoise import usual_schedule
from vla_runtime.inference.prefix_cache import Clock, PrefixInputs
from vla_runtime.inference.real_time_chunking import (
    USUAL_HORIZONS,
    clamp_weights,
    moving_shares,
    plan_weights,
    scheduler_plan_weights,
)
from vla_runtime.inference.request import ChunkRequest, PhaseClock
from vla_runtime.inference.runner import chunk_noise, step_noise
from vla_runtime.inference.setting_checks import EngineFacts, check_runnable
from vla_runtime.inference.settings import PolicySettings, resolve_cfg_mode, row_weights
from vla_runtime.types import Advantage, CommittedPlan, Observation


class RequestBuilder:
    """Build requests for one policy; of the engine only static properties are read."""

    def __init__(self, codec: PolicyCodec, engine: PolicyEngine) -> None:
        self._codec = codec
        self._spec = codec.spec
        self._family = find_family(codec.spec.family)
        self._engine: EngineFacts = engine

    def check(self, settings: PolicySettings) -> None:
        """Refuse settings that this policy or its engine cannot run (ValueError)."""
        check_runnable(settings, self._spec, self._engine)

    def build(
        self,
        observation: Observation,
        settings: PolicySettings,
        number: int,
        *,
        plan: CommittedPlan | None = None,
        noise: np.ndarray | None = None,
    ) -> ChunkRequest:
        """Check and convert everything that goes into one inference.

        `settings` are accepted by `check`; `noise` is used instead of that of seed and number.
        Anything that does not fit the bundle is a ValueError.
        """
        clock = PhaseClock()
        state = self._codec.check(observation)
        earlier = self._codec.earlier_states(observation)
        spec, dims = self._spec, self._spec.dims
        steps = settings.denoise_steps or spec.denoise_steps
        noise = self._noise(noise, settings, number)
        first, step_noise = self._split(noise, settings, steps)
        advantages = self._advantages(settings)
        guidance = (
            'none'
            if len(advantages) == 1
            else resolve_cfg_mode(settings.cfg_mode, self._engine.max_rows)
        )
        normalised = None
        if plan is not None and settings.rtc_mode != 'off':
            normalised = self._codec.plan(plan, observation)
        prefixes, head_rows = self._prefixes(
            observation, state, earlier, advantages, clock, alone=guidance == 'serial'
        )
        free = ChunkRequest(
            settings=settings,
            number=number,
            prefixes=prefixes,
            schedule=usual_schedule(
                self._family, dims, steps, spec.flow_times, settings.noise_scheduler
            ),
            inputs=StepInputs(
                x=first,
                row_weight=row_weights(None if guidance == 'none' else settings.cfg_beta),
                plan=np.zeros((dims.horizon, dims.action_dim), dtype=np.float32),
                plan_weight=np.zeros((steps, dims.horizon), dtype=np.float32),
                rows=head_rows,
                step_noise=step_noise,
            ),
            guidance=guidance,
            noise=noise,
            clock=clock,
        )
        return (
            free
            if plan is None or normalised is None
            else self._conditioned(free, plan, normalised)
        )

    def as_if_conditioned(self, request: ChunkRequest) -> ChunkRequest:
        """Return a request with the head's inputs of a plan; itself where they are the same."""
        settings = request.settings
        jacobian = settings.rtc_mode == 'jacobian' and request.guidance != 'serial'
        clean = self._spec.trained_delay_steps if settings.rtc_mode == 'hard_prefix' else 0
        if settings.rtc_mode == 'frozen':
            return replace(request, share=moving_shares(0, 0, self._spec.dims.horizon))
        if not (jacobian or clean):
            return request
        inputs = replace(request.inputs, jacobian=jacobian, clean_actions=clean)
        return replace(request, inputs=inputs)

    def _prefixes(
        self,
        observation: Observation,
        state: np.ndarray,
        earlier: np.ndarray,
        advantages: tuple[Advantage | None, ...],
        clock: PhaseClock,
        *,
        alone: bool,
    ) -> tuple[tuple[PrefixInputs, ...], dict[str, np.ndarray]]:
        """Return the prefixes, each row its own if `alone`, and the head's inputs by name."""
        # Without language an instruction is not part of what the prefix sees.
        instruction = observation.instruction if self._codec.prompts else ''
        rows = self._codec.rows(instruction, state, advantages, earlier)
        clock.mark('tokens')
        pixels, image_mask = self._codec.camera_images.encode(observation.images)
        clock.mark('images')
        time_s, clock_read = _time(observation)
        family, dims = self._family, self._spec.dims
        prefix = PrefixInputs(
            pixels=pixels,
            image_mask=image_mask,
            rows={name: rows[name] for name in family.prefix_inputs(dims)},
            words=(instruction, advantages),
            state_bins=self._codec.state_bins(state),
            time_s=time_s,
            clock=clock_read,
            levels_per_unit=self._codec.camera_images.levels_per_unit,
        )
        head_rows = {name: rows[name] for name in family.head_inputs(dims)}
        if not alone:
            return (prefix,), head_rows
        return _rows_alone(prefix, instruction, advantages), head_rows

    def _advantages(self, settings: PolicySettings) -> tuple[Advantage | None, ...]:
        if self._spec.advantage is None:
            return (None,)
        # At beta = 1 the unconditioned row has weight zero: the conditioned row alone
        # gives exactly the same chunk at half the cost.
        return (settings.advantage, None) if settings.guided else (settings.advantage,)

    def _split(
        self, noise: np.ndarray, settings: PolicySettings, steps: int
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the noise that x begins with, and that of the steps; None: they take none."""
        if not self._family.has_scheduler:
            return noise, None
        by_draw = noise[None] if noise.ndim == 2 else noise
        scheduler = chosen_scheduler(self._spec.dims, settings.noise_scheduler)
        added = scheduler.step_noise(by_draw, steps)
        return np.ascontiguousarray(by_draw[0]), added

    def _rows_of(self, count: int) -> slice:
        first = self._spec.action_rows.start
        return slice(first, first + count)

    def _noise(self, noise: np.ndarray | None, settings: PolicySettings, number: int) -> np.ndarray:
        chunk = (self._spec.dims.horizon, self._spec.dims.action_dim)
        if not self._family.takes_steps:
            if noise is not None:
                raise ValueError(
                    f'noise: the head of {self._spec.family} ({self._family.head}) draws none'
                )
            return np.zeros(chunk, dtype=np.float32)
        shape = noise_shape(self._spec, settings)
        if noise is None:
            drawn = chunk_noise(settings.seed, number, chunk, kind=self._family.noise)
            if shape != chunk:
                added = step_noise(settings.seed, number, shape[0] - 1, chunk)
                drawn = np.concatenate([drawn[None], added])
            return self._masked(drawn)
        given = np.asarray(noise)
        if given.shape != shape or given.dtype.kind not in 'fiu' or not np.isfinite(given).all():
            axes = '' if shape == chunk else 'the first and one for each step but the last, '
            raise ValueError(
                f'noise: expected finite real numbers of shape {shape} ({axes}horizon, padded '
                f'action dimension), got {given.dtype} of shape {given.shape}'
            )
        # A copy, because the report keeps it and the caller may reuse the array.
        return self._masked(np.array(given, dtype=np.float32, order='C'))

    def _masked(self, noise: np.ndarray) -> np.ndarray:
        noise[..., real_action_dim(self._spec.dims) :] = 0.0
        return noise

    def _conditioned(
        self, free: ChunkRequest, plan: CommittedPlan, normalised: np.ndarray
    ) -> ChunkRequest:
        """Condition a request on the plan, (H, A) float32 in normalised action space."""
        settings, times = free.settings, free.times
        rows = self._spec.action_rows
        tie: dict[str, Any] = {
            'schedule': settings.plan_schedule,
            'delay': plan.delay_steps,
            'horizon': self._spec.real_horizon,
        }
        # Beyond the end of the plan or of the chunk there is nothing to continue.
        end = min(plan.execution_horizon, len(plan.actions), self._spec.real_horizon)
        horizon = settings.rtc_horizon or USUAL_HORIZONS.get(settings.rtc_mode, end)
        end = min(end, max(horizon, plan.delay_steps))
        tie['execution_horizon'] = end
        clamped = clean = 0
        if not end:
            return free
        if settings.rtc_mode == 'frozen':
            return self._frozen(free, normalised, min(plan.delay_steps, end), end)
        weight = np.zeros_like(free.inputs.plan_weight)
        if settings.rtc_mode == 'hard_prefix':
            clamped = min(plan.delay_steps, end)
            # A policy accepts at most as many actions at flow time 0 as it was trained with; any
            # further ones are held by their weight alone.
            clean = min(clamped, self._spec.trained_delay_steps)
            held = self._rows_of(clamped)
            has_scheduler = self._family.has_scheduler
            weight[:, held] = 1.0 if has_scheduler else clamp_weights(times, clamped, clamped)
        elif self._family.has_scheduler:
            weight[:, rows] = scheduler_plan_weights(
                len(times), maximum=settings.max_guidance_weight, **tie
            )
        else:
            weight[:, rows] = plan_weights(times, maximum=settings.max_guidance_weight, **tie)
        if not weight.any():
            # Such a chunk is not conditioned on the plan, so its report must say `off`.
            return free
        x = free.inputs.x
        if clean:
            x = x.copy()
            x[..., :clean, :] = normalised[:clean]
        inputs = replace(
            free.inputs,
            x=x,
            plan=normalised,
            plan_weight=weight,
            jacobian=settings.rtc_mode == 'jacobian',
            clean_actions=clean,
        )
        return replace(
            free, inputs=inputs, rtc_mode=settings.rtc_mode, clamped=self._rows_of(clamped)
        )

    def _frozen(
        self, free: ChunkRequest, normalised: np.ndarray, frozen: int, overlap: int
    ) -> ChunkRequest:
        """Return a request whose first actions begin at the plan; the first `frozen` stay there."""
        x, begun = free.inputs.x.copy(), self._rows_of(overlap)
        x[..., begun, :] = normalised[begun]
        share = np.ones((self._spec.dims.horizon, 1), dtype=np.float32)
        rows = self._spec.action_rows
        share[rows] = moving_shares(frozen, overlap, self._spec.real_horizon)
        return replace(
            free,
            inputs=replace(free.inputs, x=x, plan=normalised),
            share=share,
            rtc_mode='frozen',
            clamped=self._rows_of(frozen),
        )


def noise_shape(spec: BundleSpec, settings: PolicySettings) -> tuple[int, ...]:
    """Return the shape of an inference's noise: (H, A).

    (draws, H, A) with a scheduler that adds noise in its steps: one to begin with, and one for each
    step but the last.
    """
    draws = 1
    if find_family(spec.family).has_scheduler:
        steps = settings.denoise_steps or spec.denoise_steps
        draws = chosen_scheduler(spec.dims, settings.noise_scheduler).draws(steps)
    chunk = (spec.dims.horizon, spec.dims.action_dim)
    return chunk if draws == 1 else (draws, *chunk)


def _rows_alone(
    prefix: PrefixInputs, instruction: str, advantages: tuple[Advantage | None, ...]
) -> tuple[PrefixInputs, ...]:
    return tuple(
        replace(
            prefix,
            rows={name: array[row : row + 1] for name, array in prefix.rows.items()},
            words=(instruction, (advantage,)),
        )
        for row, advantage in enumerate(advantages)
    )


def _time(observation: Observation) -> tuple[float, Clock]:
    """Return the observation's newest stamp (s) and its clock; steady time without one."""
    stamps = observation.stamps_ns.values()
    return (max(stamps) * 1e-9, 'stamps') if stamps else (monotonic(), 'steady')
