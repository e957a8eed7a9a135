"""Settings that a policy cannot run with, refused by name before an inference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Protocol

from vla_runtime.bundle.rules import check_guidable
from vla_runtime.bundle.schema import BundleSpec
from vla_runtime.engines.protocol import FEATURES, Feature
from vla_runtime.family.declaration import MOST_FLOW_STEPS, Family, token_dims
from vla_runtime.family.listing import family_names, find_family
from vla_runtime.family.step_schedule import chosen_scheduler
from vla_runtime.inference.settings import PolicySettings, resolve_cfg_mode

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


class EngineFacts(Protocol):
    """Facts about an engine that settings depend on; the engine may be on another machine."""

    @property
    def backend(self) -> str: ...

    @property
    def max_rows(self) -> int:
        """Most prompt rows of an inference."""

    @property
    def features(self) -> frozenset[Feature]: ...


def check_runnable(settings: PolicySettings, spec: BundleSpec, engine: EngineFacts) -> None:
    """Refuse settings that a policy or its engine cannot run (ValueError)."""
    family = find_family(spec.family)
    if not family.takes_steps:
        reason = 'draws no noise and takes no steps, and has no use for it'
        _check_unset(settings, _OF_STEPS, family, reason)
    elif family.head == 'flow':
        reason = 'denoises along a flow, which has no scheduler'
        _check_unset(settings, ('noise_scheduler',), family, reason)
        if settings.denoise_steps and settings.denoise_steps > MOST_FLOW_STEPS:
            raise ValueError(
                f'denoise_steps is {settings.denoise_steps}: for a flow it must be 1 to '
                f'{MOST_FLOW_STEPS}'
            )
    else:
        scheduler = chosen_scheduler(spec.dims, settings.noise_scheduler)
        scheduler.check_steps(settings.denoise_steps or spec.denoise_steps)
        if settings.rtc_mode == 'jacobian':
            raise ValueError(
                f"rtc_mode 'jacobian': the head of {family.name} (diffusion) has the "
                "plan's guidance without the network's Jacobian alone; use guided or "
                'hard_prefix'
            )
    known, steps = spec.student_steps, settings.denoise_steps
    if known and steps is not None and steps not in known:
        raise ValueError(
            f'denoise_steps is {steps}: this policy was distilled to '
            f'{" or ".join(map(str, known))} (policy.yaml: student_steps), and knows no other '
            'number of steps'
        )
    if settings.rtc_mode == 'frozen' and not family.freezes_actions:
        able = [name for name in family_names() if find_family(name).freezes_actions]
        raise ValueError(
            f"rtc_mode 'frozen' is the training code's own way of {' and '.join(able)}, and "
            f'this policy is of {family.name}; use guided, jacobian or hard_prefix'
        )
    needed: list[Feature] = []
    serial = False
    if settings.guided:
        check_guidable(spec, 'cfg_beta')
        serial = resolve_cfg_mode(settings.cfg_mode, engine.max_rows) == 'serial'
    if settings.rtc_mode == 'jacobian':
        if serial:
            raise ValueError(
                "rtc_mode 'jacobian' goes through the sum of both prompt rows, which serial "
                "guidance makes outside the engine; use cfg_mode 'fused', or another rtc_mode"
            )
        needed.append('jacobian')
    if settings.rtc_mode == 'hard_prefix' and spec.trained_delay_steps:
        needed.append('action_time')
    if settings.pipeline == 'throughput':
        needed.append('overlap')
    if settings.pipeline == 'packed':
        _check_packed(spec, family)
        needed.append('packed')
    for feature in needed:
        if feature not in engine.features:
            able = [name for name, features in FEATURES.items() if feature in features]
            raise ValueError(
                f"{_NEEDS[feature]}, which backend '{engine.backend}' cannot do; name one that "
                f'can: {", ".join(able)}'
            )


def _check_packed(spec: BundleSpec, family: Family) -> None:
    """Refuse packed requests of another head, or with answers of too many tokens."""
    if family.head != 'tokens':
        raise ValueError(
            f"pipeline 'packed' is for policies that answer in tokens, and the head of "
            f"{family.name} is {family.head}; use 'latency' or 'throughput'"
        )
    length = token_dims(spec.dims).answer_length
    if length > MOST_STAGES:
        raise ValueError(
            f"pipeline 'packed': an answer of this policy has up to {length} tokens, and a "
            f"chunk would be as many passes old (at most {MOST_STAGES}); use 'latency'"
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
