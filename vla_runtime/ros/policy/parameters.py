"""The policy node's parameters, and the settings of an inference made from them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from vla_runtime.engines.preflight import BACKENDS, MOST_THREADS
from vla_runtime.engines.protocol import MAX_SAMPLES
from vla_runtime.inference.guidance import MOST_BETA, CfgMode
from vla_runtime.inference.pipeline import PipelineMode
from vla_runtime.inference.prefix_cache import CacheMode, CachePolicy
from vla_runtime.inference.real_time_chunking import PlanSchedule, RtcMode
from vla_runtime.inference.settings import PolicySettings
from vla_runtime.ros.autostart import AUTOSTART
from vla_runtime.ros.parameters import ParameterSpec
from vla_runtime.ros.policy.synchronizer import SyncLimits
from vla_runtime.types import Advantage

# Set by parameter and by topic alike, so the node needs its name.
INSTRUCTION = 'instruction'

POLICY_PARAMETERS: tuple[ParameterSpec, ...] = (
    ParameterSpec('bundle', '', 'folder of the policy bundle', read_only=True),
    ParameterSpec('robot', '', 'robot file (config/robots/*.yaml)', read_only=True),
    ParameterSpec('backend', 'torch', 'what runs the networks', words=BACKENDS, read_only=True),
    AUTOSTART,
    ParameterSpec('device', 'cpu', 'cpu, cuda or cuda:N', read_only=True),
    ParameterSpec(
        'precision',
        'float32',
        "number format of the networks' large matrices",
        words=('float32', 'bfloat16', 'float16'),
        read_only=True,
    ),
    ParameterSpec(
        'use_cuda_graphs', True, 'replay captured CUDA graphs: same results, faster', read_only=True
    ),
    ParameterSpec(
        'verify_bundle', True, 'compare every file with its SHA-256 at configure', read_only=True
    ),
    ParameterSpec(
        'torch_threads',
        0,
        'CPU threads of each network that runs; 0: all cores but one, which the messages need, '
        'shared by two networks where pipeline is throughput at configure',
        minimum=0,
        maximum=MOST_THREADS,
        read_only=True,
    ),
    ParameterSpec(
        INSTRUCTION,
        '',
        'what the robot is to do, in plain words; a message on ~/instruction sets it too, and the '
        'newest of both counts; empty: nothing, no inference',
    ),
    ParameterSpec(
        'max_observation_age_s',
        0.5,
        'frames and states older than this, on the ROS clock, stop inference',
        minimum=0.01,
        maximum=10.0,
    ),
    ParameterSpec(
        'sync_tolerance_s',
        0.05,
        'stamps of the frames of one observation lie within this',
        minimum=0.0,
        maximum=1.0,
    ),
    ParameterSpec(
        'seed', 0, 'seed of the noise that chunks are denoised from', minimum=0, maximum=2**63 - 1
    ),
    ParameterSpec(
        'denoise_steps',
        0,
        'Euler steps of an inference; 0: as the bundle recommends',
        minimum=0,
        maximum=100,
    ),
    ParameterSpec(
        'cfg_enabled', False, 'classifier-free guidance, for policies trained with advantage tags'
    ),
    ParameterSpec(
        'cfg_beta',
        1.5,
        'scale of classifier-free guidance (cfg_enabled); 1.0 is none',
        minimum=1.0,
        maximum=MOST_BETA,
    ),
    ParameterSpec(
        'cfg_mode',
        'auto',
        'how classifier-free guidance (cfg_enabled) runs its two prompt rows: fused together, '
        'serial one after the other, auto together where the engine can',
        words=get_args(CfgMode),
    ),
    ParameterSpec(
        'advantage',
        'positive',
        'tag in the prompt, for policies trained with advantage tags; under cfg_enabled of the '
        'conditioned row',
        words=get_args(Advantage),
    ),
    ParameterSpec(
        'real_time_chunking',
        False,
        "tie each chunk to the executor's committed plan, in the way of rtc_mode",
    ),
    ParameterSpec(
        'rtc_mode',
        'guided',
        'how real_time_chunking ties a chunk to the committed plan: guided draws it there, '
        "jacobian draws it through the network's Jacobian (backend torch), hard_prefix fixes its "
        'first actions',
        words=tuple(word for word in get_args(RtcMode) if word != 'off'),
    ),
    ParameterSpec(
        'plan_schedule',
        'exp',
        'how the weight of the committed plan falls off after the delay, for real_time_chunking '
        'and for the choice among samples',
        words=get_args(PlanSchedule),
    ),
    ParameterSpec(
        'max_guidance_weight',
        10.0,
        'largest weight with which real_time_chunking draws a chunk to the committed plan '
        '(rtc_mode guided and jacobian); 0.0: none, no chunk is tied; cfg_beta is another scale',
        minimum=0.0,
        maximum=100.0,
    ),
    ParameterSpec(
        'rtc_horizon',
        0,
        'steps over which the weight of the committed plan falls off, the delay included, for '
        'real_time_chunking and for the choice among samples; 0: the whole plan',
        minimum=0,
        maximum=1024,
    ),
    ParameterSpec(
        'samples',
        1,
        'chunks denoised together over one prefix (backend torch); the one that continues the '
        'committed plan best is used',
        minimum=1,
        maximum=MAX_SAMPLES,
    ),
    ParameterSpec(
        'pipeline',
        'latency',
        'latency: one inference after the other; throughput: a request is encoded while the one '
        'before is denoised, the same chunks, none sooner; needs requests that overlap, and '
        'vla_executor sends one at a time; on a CPU two networks run at once (torch_threads)',
        words=get_args(PipelineMode),
    ),
    ParameterSpec(
        'cache_mode',
        'exact',
        'reuse of image tokens and prefixes from before: exact only what is equal, bounded also '
        'what has changed little, off none',
        words=get_args(CacheMode),
    ),
    ParameterSpec(
        'cache_max_age_s',
        0.0,
        'cache_mode bounded: oldest entry reused, seconds; must be above 0 for it',
        minimum=0.0,
        maximum=10.0,
    ),
    ParameterSpec(
        'cache_max_reuses',
        0,
        'cache_mode bounded: reuses of an entry in a row; must be at least 1 for it',
        minimum=0,
        maximum=1000,
    ),
    ParameterSpec(
        'cache_max_image_change',
        0.0,
        "cache_mode bounded: largest mean change of all of a camera's pixels, grey levels; 0.0: "
        'equal pixels',
        minimum=0.0,
        maximum=255.0,
    ),
    ParameterSpec(
        'cache_max_state_bins',
        0,
        "cache_mode bounded: largest change of any state's bin in the prompt; 0: equal bins",
        minimum=0,
        maximum=256,
    ),
)


def settings_from(values: Mapping[str, Any]) -> PolicySettings:
    """The settings of one inference from the parameters' values."""
    return PolicySettings(
        seed=values['seed'],
        denoise_steps=values['denoise_steps'] or None,
        cfg_enabled=values['cfg_enabled'],
        cfg_beta=values['cfg_beta'],
        cfg_mode=values['cfg_mode'],
        advantage=values['advantage'],
        rtc_mode=values['rtc_mode'] if values['real_time_chunking'] else 'off',
        plan_schedule=values['plan_schedule'],
        max_guidance_weight=values['max_guidance_weight'],
        rtc_horizon=values['rtc_horizon'],
        samples=values['samples'],
        pipeline=values['pipeline'],
        cache=CachePolicy(
            mode=values['cache_mode'],
            max_age_s=values['cache_max_age_s'],
            max_reuses=values['cache_max_reuses'],
            max_image_change=values['cache_max_image_change'],
            max_state_bins=values['cache_max_state_bins'],
        ),
    )


def limits_from(values: Mapping[str, Any]) -> SyncLimits:
    """What belongs together in one observation from the parameters' values."""
    return SyncLimits(
        tolerance_ns=round(values['sync_tolerance_s'] * 1e9),
        max_age_ns=round(values['max_observation_age_s'] * 1e9),
    )
