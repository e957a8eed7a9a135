"""Build a `ChunkRequest` from an observation and the settings; runs no network.

All input checks are made here, so a request that was built can be run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from time import monotonic
from typing import Any

import numpy as np

from vla_runtime.bundle.rules import check_guidable
from vla_runtime.engines.protocol import FEATURES, Feature, PolicyEngine, StepInputs
from vla_runtime.family.declaration import (
    MOST_FLOW_STEPS,
    Family,
    real_action_dim,
    token_dims,
)
from vla_runtime.family.listing import family_names, find_family
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
from vla_runtime.inference.settings import PolicySettings, resolve_cfg_mode, row_weights
from vla_runtime.types import Advantage, CommittedPlan, Observation

# Engine feature to the words of the refusal: the setting and what it needs.
_NEEDS: Mapping[Feature, str] = {
    'jacobian': "rtc_mode 'jacobian' needs a backward pass through the network",
    'action_time': (
        "rtc_mode 'hard_prefix' with a policy trained for it (policy.yaml: trained_delay_steps) "
        'needs a flow time for every action'
    ),
    'overlap': "pipeline 'throughput' needs one prefix encoded while another is denoised over",
    'packed': "pipeline 'packed' needs a prompt and tokens of other requests in one pass",
}


# Most tokens of an answer whose requests are packed: a chunk is as many passes old.
MOST_STAGES = 64
# Settings that heads of one pass have no use for: they draw no noise and take no steps.
_OF_STEPS = (
    'seed',
    'denoise_steps',
    'noise_scheduler',
    'rtc_mode',
    'plan_schedule',
    'max_guidance_weight',
    'rtc_horizon',
)


# Where the default of a setting has another name at the node.
_REMEDIES = {
    'denoise_steps': 'leave it at 0, its default',
    'noise_scheduler': "leave it at 'bundle', its default",
    'rtc_mode': 'set real_time_chunking to false',
}


class RequestBuilder:
    """Build requests for one policy; of the engine only static properties are read."""

    def __init__(self, codec: PolicyCodec, engine: PolicyEngine) -> None:
        self._codec = codec
        self._spec = codec.spec
        self._family = find_family(codec.spec.family)
        self._max_rows = engine.max_rows
        self._backend, self._features = engine.backend, engine.features

    def check(self, settings: PolicySettings) -> None:
        """Refuse settings that this policy or its engine cannot run (ValueError)."""
        if not self._family.takes_steps:
            reason = 'draws no noise and takes no steps, and has no use for it'
            _check_unset(settings, _OF_STEPS, self._family, reason)
        elif self._family.head == 'flow':
            reason = 'denoises along a flow, which has no scheduler'
            _check_unset(settings, ('noise_scheduler',), self._family, reason)
            if settings.denoise_steps and settings.denoise_steps > MOST_FLOW_STEPS:
                raise ValueError(
                    f'denoise_steps is {settings.denoise_steps}: for a flow it must be 1 to '
                    f'{MOST_FLOW_STEPS}'
                )
        else:
            scheduler = chosen_scheduler(self._spec.dims, settings.noise_scheduler)
            scheduler.check_steps(settings.denoise_steps or self._spec.denoise_steps)
            if settings.rtc_mode == 'jacobian':
                raise ValueError(
                    f"rtc_mode 'jacobian': the head of {self._family.name} (diffusion) has the "
                    "plan's guidance without the network's Jacobian alone; use guided or "
                    'hard_prefix'
                )
        known, steps = self._spec.student_steps, settings.denoise_steps
        if known and steps is not None and steps not in known:
            raise ValueError(
                f'denoise_steps is {steps}: this policy was distilled to '
                f'{" or ".join(map(str, known))} (policy.yaml: student_steps), and knows no other '
                'number of steps'
            )
        if settings.rtc_mode == 'frozen' and not self._family.freezes_actions:
            able = [name for name in family_names() if find_family(name).freezes_actions]
            raise ValueError(
                f"rtc_mode 'frozen' is the training code's own way of {' and '.join(able)}, and "
                f'this policy is of {self._family.name}; use guided, jacobian or hard_prefix'
            )
        needed: list[Feature] = []
        serial = False
        if settings.guided:
            check_guidable(self._spec, 'cfg_beta')
            serial = resolve_cfg_mode(settings.cfg_mode, self._max_rows) == 'serial'
        if settings.rtc_mode == 'jacobian':
            if serial:
                raise ValueError(
                    "rtc_mode 'jacobian' goes through the sum of both prompt rows, which serial "
                    "guidance makes outside the engine; use cfg_mode 'fused', or another rtc_mode"
                )
            needed.append('jacobian')
        if settings.rtc_mode == 'hard_prefix' and self._spec.trained_delay_steps:
            needed.append('action_time')
        if settings.pipeline == 'throughput':
            needed.append('overlap')
        if settings.pipeline == 'packed':
            self._check_packed()
            needed.append('packed')
        for feature in needed:
            if feature not in self._features:
                able = [name for name, features in FEATURES.items() if feature in features]
                raise ValueError(
                    f"{_NEEDS[feature]}, which backend '{self._backend}' cannot do; name one that "
                    f'can: {", ".join(able)}'
                )

    def _check_packed(self) -> None:
        """Refuse packed requests of another head, or with answers of too many tokens."""
        if self._family.head != 'tokens':
            raise ValueError(
                f"pipeline 'packed' is for policies that answer in tokens, and the head of "
                f"{self._family.name} is {self._family.head}; use 'latency' or 'throughput'"
            )
        length = token_dims(self._spec.dims).answer_length
        if length > MOST_STAGES:
            raise ValueError(
                f"pipeline 'packed': an answer of this policy has up to {length} tokens, and a "
                f"chunk would be as many passes old (at most {MOST_STAGES}); use 'latency'"
            )

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
        noise = self._noise(noise, settings, number, steps)
        first, step_noise = self._split(noise, settings, steps)
        advantages = self._advantages(settings)
        guidance = (
            'none' if len(advantages) == 1 else resolve_cfg_mode(settings.cfg_mode, self._max_rows)
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

    def _draws(self, settings: PolicySettings, steps: int) -> int:
        """Noises of a sample: one, or one a step for a scheduler that adds some."""
        if not self._family.has_scheduler:
            return 1
        return chosen_scheduler(self._spec.dims, settings.noise_scheduler).draws(steps)

    def _split(
        self, noise: np.ndarray, settings: PolicySettings, steps: int
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the noise that x begins with, and that of the steps; None: they take none."""
        if not self._family.has_scheduler:
            return noise, None
        draws = self._draws(settings, steps)
        by_draw = noise[..., None, :, :] if draws == 1 else noise
        added = np.zeros((steps, *by_draw[..., 0, :, :].shape), dtype=np.float32)
        added[: draws - 1] = np.moveaxis(by_draw[..., 1:, :, :], -3, 0)
        return np.ascontiguousarray(by_draw[..., 0, :, :]), added

    def _rows_of(self, count: int) -> slice:
        first = self._spec.action_rows.start
        return slice(first, first + count)

    def _noise(
        self, noise: np.ndarray | None, settings: PolicySettings, number: int, steps: int
    ) -> np.ndarray:
        chunk = (self._spec.dims.horizon, self._spec.dims.action_dim)
        if not self._family.takes_steps:
            if noise is not None:
                raise ValueError(
                    f'noise: the head of {self._spec.family} ({self._family.head}) draws none'
                )
            return np.zeros(chunk, dtype=np.float32)
        draws = self._draws(settings, steps)
        if noise is None:
            drawn = chunk_noise(settings.seed, number, chunk, kind=self._family.noise)
            if draws > 1:
                added = step_noise(settings.seed, number, draws - 1, chunk)
                drawn = np.concatenate([drawn[None], added])
            return self._masked(drawn)
        shape: tuple[int, ...] = chunk if draws == 1 else (draws, *chunk)
        given = np.asarray(noise)
        if given.shape != shape or given.dtype.kind not in 'fiu' or not np.isfinite(given).all():
            axes = '' if draws == 1 else 'the first and one for each step but the last, '
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
            'horizon': self._spec.horizon,
        }
        # Beyond the end of the plan or of the chunk there is nothing to continue.
        end = min(plan.execution_horizon, len(plan.actions), self._spec.horizon)
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
        share[rows] = moving_shares(frozen, overlap, self._spec.horizon)
        return replace(
            free,
            inputs=replace(free.inputs, x=x, plan=normalised),
            share=share,
            rtc_mode='frozen',
            clamped=self._rows_of(frozen),
        )


def _check_unset(
    settings: PolicySettings, names: Sequence[str], family: Family, reason: str
) -> None:
    for item in fields(settings):
        value = getattr(settings, item.name)
        if item.name in names and value != item.default:
            # A node has a switch for it, and that is what was set.
            said = f'{item.name} is {value!r}'
            if item.name == 'rtc_mode':
                said = f'real_time_chunking is on (rtc_mode {value!r})'
            raise ValueError(
                f'{said}: the head of {family.name} ({family.head}) {reason}; '
                f'{_REMEDIES.get(item.name, "leave it at its default")}'
            )


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
