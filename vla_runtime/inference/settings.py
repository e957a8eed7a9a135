"""Settings that may change between two inferences, without reloading anything."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from vla_runtime.family.declaration import MOST_DENOISE_STEPS, MOST_FLOW_STEPS
from vla_runtime.family.step_schedule import SchedulerChoice
from vla_runtime.files.setting_fields import check_settings, setting
from vla_runtime.inference.prefix_cache import CachePolicy
from vla_runtime.inference.real_time_chunking import PlanSchedule, RtcMode
from vla_runtime.types import Advantage

# Advantage-conditioned classifier-free guidance (RECAP, arXiv 2511.14759):
# `v = v_uncond + beta * (v_cond - v_uncond)` at every denoise step. Fused: both rows in one prefix
# run and one expert step. Serial, for engines of one row: the same within rounding, twice the cost.

# Largest scale that a person may set; usual values lie between 1.5 and 2.5.
MOST_BETA = 5.0
CfgMode = Literal['auto', 'fused', 'serial']


def row_weights(beta: float | None) -> np.ndarray:
    """Weights of the rows' velocities, float32: [1] without beta, else [beta, 1 - beta]."""
    if beta is None:
        return np.ones(1, dtype=np.float32)
    return np.array([beta, 1.0 - beta], dtype=np.float32)


def resolve_cfg_mode(wanted: CfgMode, max_rows: int) -> Literal['fused', 'serial']:
    """Choose by the engine's rows; fused on an engine with one row is a ValueError."""
    if wanted == 'auto':
        return 'fused' if max_rows >= 2 else 'serial'
    if wanted == 'fused' and max_rows < 2:
        raise ValueError(
            f"cfg_mode is 'fused', but this engine was built for {max_rows} prompt row; use "
            "'auto' or 'serial', or build an engine for two rows"
        )
    return wanted


# `latency`: one inference after the other; `throughput`: two at a time;
# `packed`: a prompt and the tokens of older requests in one pass.
PipelineMode = Literal['latency', 'throughput', 'packed']


@dataclass(frozen=True)
class PolicySettings:
    """Live settings of a policy; each inference uses one snapshot of them.

    Attributes:
        denoise_steps: None: as many as the bundle recommends.
        cfg_mode: both modes give the same numbers within rounding.
        rtc_mode: `off` ignores every plan (see `inference.real_time_chunking`).
        max_guidance_weight: LeRobot's default is 10 (with 10 denoise steps), the paper's is 5
            (with 5).
        rtc_horizon: the actions of the delay are conditioned even if it is smaller.
    """

    seed: int = setting(0, 'seed of the noise that chunks are denoised from', 0, 2**63 - 1)
    denoise_steps: int | None = setting(
        None,
        f'denoise steps of an inference, at most {MOST_FLOW_STEPS} of a flow and those of the '
        'training of a diffusion policy; 0: as the bundle recommends',
        0,
        MOST_DENOISE_STEPS,
    )
    noise_scheduler: SchedulerChoice = setting(
        'bundle',
        'scheduler of a diffusion policy: bundle the one of its training, ddpm with fresh noise '
        'every step, ddim without',
    )
    cfg_enabled: bool = setting(
        True, 'false switches classifier-free guidance off, whatever cfg_beta is'
    )
    cfg_beta: float = setting(
        1.0,
        'scale of classifier-free guidance, for policies trained with advantage tags; 1.0 is none',
        1.0,
        MOST_BETA,
    )
    cfg_mode: CfgMode = setting(
        'auto',
        'how classifier-free guidance (cfg_beta) runs its two prompt rows: fused together, '
        'serial one after the other, auto together where the engine can',
    )
    advantage: Advantage = setting(
        'positive',
        'tag in the prompt, for policies trained with advantage tags; under guidance (cfg_beta) '
        'of the conditioned row',
    )
    rtc_mode: RtcMode = setting(
        'off',
        'how real_time_chunking conditions a chunk on the committed plan: guided draws it there, '
        "jacobian through the network's Jacobian (backend torch), hard_prefix fixes its first "
        'actions, frozen holds those of the delay (families whose training code does so)',
    )
    plan_schedule: PlanSchedule = setting(
        'exp',
        'how the weight of the committed plan falls off after the delay, for real_time_chunking',
    )
    max_guidance_weight: float = setting(
        10.0,
        'largest weight with which real_time_chunking draws a chunk to the committed plan '
        '(rtc_mode guided and jacobian); 0.0: none; cfg_beta is another scale',
        0.0,
        100.0,
    )
    rtc_horizon: int = setting(
        0,
        'steps over which the weight of the committed plan falls off, the delay included, for '
        'real_time_chunking; 0: 10 under guided, as in LeRobot, else the whole plan',
        0,
        1024,
    )
    pipeline: PipelineMode = setting(
        'latency',
        'latency: one inference after the other; throughput: a request is encoded while the one '
        'before is denoised, more chunks a second, each from an older observation; packed: one '
        "pass over a request's prompt and a token of each older one, for policies that answer in "
        'tokens (backend torch)',
    )
    cache: CachePolicy = field(default_factory=CachePolicy)

    def __post_init__(self) -> None:
        check_settings(self)
        if not isinstance(self.cache, CachePolicy):
            raise ValueError(f'cache is {self.cache!r}: it must be a CachePolicy')

    @property
    def guided(self) -> bool:
        """True where the unconditioned prompt row runs too: 1.0 would give it no weight."""
        return self.cfg_enabled and self.cfg_beta != 1.0

    @property
    def networks_at_once(self) -> int:
        return 2 if self.pipeline == 'throughput' else 1
