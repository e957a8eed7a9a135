"""What may be changed between two inferences, without reloading anything."""

from __future__ import annotations

from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import get_args

from vla_runtime.engines.protocol import MAX_SAMPLES
from vla_runtime.inference.guidance import CfgMode, check_beta
from vla_runtime.inference.pipeline import PipelineMode
from vla_runtime.inference.prefix_cache import CachePolicy
from vla_runtime.inference.real_time_chunking import PlanSchedule, RtcMode
from vla_runtime.inference.setting_checks import check_type, is_finite
from vla_runtime.types import Advantage


@dataclass(frozen=True)
class PolicySettings:
    """Live settings of a policy; each inference uses one snapshot of them.

    Attributes:
        seed: of the noise generator, 0 to 2**63 - 1.
        denoise_steps: Euler steps, 1 to 100; None is what the bundle recommends.
        cfg_enabled: guide with a second prompt row; needs a policy trained with advantage tags.
        cfg_beta: guidance scale, at least 1; used when `cfg_enabled`.
        cfg_mode: `fused` runs both prompt rows together, `serial` one after the other, the same
            numbers within rounding; `auto` is fused where the engine was built for two rows.
        advantage: tag of the conditioned row, for policies trained with advantage tags.
        rtc_mode: how a chunk is tied to the committed plan, where one is given: `guided`,
            `jacobian`, `hard_prefix`, or `off` (see `inference.real_time_chunking`).
        plan_schedule: decay of the tie to the plan, and of what actions count when a sample is
            chosen.
        max_guidance_weight: upper bound of the tie to the plan (`guided` and `jacobian`); LeRobot's
            default is 10, with 10 denoise steps, and the paper's 5, with 5. At 0 there is no tie.
        rtc_horizon: actions over which the tie to the plan falls off, the delay included; 0 is the
            whole plan. Those that are executed for certain are tied however small it is.
        samples: chunks denoised together over one prefix, 1 to 16; the one that continues the
            committed plan best is returned, without a plan the first.
        cache: what of the last inference may be reused; by default only what is equal.
        pipeline: `latency` runs one inference after the other; `throughput` encodes the next
            while the last is denoised: the same chunks. It gains where requests overlap, and needs
            what two networks at a time need: on a CPU twice the threads.
    """

    seed: int = 0
    denoise_steps: int | None = None
    cfg_enabled: bool = False
    cfg_beta: float = 1.5
    cfg_mode: CfgMode = 'auto'
    advantage: Advantage = 'positive'
    rtc_mode: RtcMode = 'guided'
    plan_schedule: PlanSchedule = 'exp'
    max_guidance_weight: float = 10.0
    rtc_horizon: int = 0
    samples: int = 1
    cache: CachePolicy = field(default_factory=CachePolicy)
    pipeline: PipelineMode = 'latency'

    def __post_init__(self) -> None:
        self._check_types()
        if not 0 <= self.seed < 2**63:
            raise ValueError(f'seed is {self.seed}: it must be 0 to 2**63 - 1')
        if self.denoise_steps is not None and not 1 <= self.denoise_steps <= 100:
            raise ValueError(f'denoise_steps is {self.denoise_steps}: it must be 1 to 100')
        check_beta(self.cfg_beta)
        if self.rtc_horizon < 0:
            raise ValueError(f'rtc_horizon is {self.rtc_horizon}: it must not be negative')
        if not 1 <= self.samples <= MAX_SAMPLES:
            raise ValueError(f'samples is {self.samples}: it must be 1 to {MAX_SAMPLES}')
        for name, words in (
            ('advantage', Advantage),
            ('cfg_mode', CfgMode),
            ('rtc_mode', RtcMode),
            ('plan_schedule', PlanSchedule),
            ('pipeline', PipelineMode),
        ):
            if getattr(self, name) not in get_args(words):
                raise ValueError(
                    f"{name} is '{getattr(self, name)}': it must be one of "
                    f'{", ".join(get_args(words))}'
                )
        if not is_finite(self.max_guidance_weight) or self.max_guidance_weight < 0:
            raise ValueError(
                f'max_guidance_weight is {self.max_guidance_weight}: it must be a finite number '
                'of at least 0'
            )

    @property
    def networks_at_once(self) -> int:
        """How many networks may run at the same time."""
        return 2 if self.pipeline == 'throughput' else 1

    def _check_types(self) -> None:
        kinds: dict[str, type] = {
            'seed': Integral,
            'denoise_steps': Integral,
            'cfg_enabled': bool,
            'cfg_beta': Real,
            'max_guidance_weight': Real,
            'rtc_horizon': Integral,
            'samples': Integral,
            'cache': CachePolicy,
        }
        for name, kind in kinds.items():
            value = getattr(self, name)
            if name != 'denoise_steps' or value is not None:
                check_type(name, value, kind)
