"""Parameter table of the policy node: `live_settings`, and what the node alone needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vla_runtime.engines.devices import MOST_THREADS
from vla_runtime.engines.preflight import AUTO, BACKENDS, PRECISIONS
from vla_runtime.engines.triton_option import OFF, WORDS
from vla_runtime.nodes.parameter_table import AUTOSTART, ParameterSpec, parameter_rows
from vla_runtime.nodes.policy.settings import live_settings
from vla_runtime.nodes.server_parameters import SERVER_PARAMETERS
from vla_runtime.sensors.synchronizer import SyncLimits

# Word of `backend` beside those that run here.
REMOTE = 'remote'
# Set by parameter and by topic alike, so the node needs its name.
INSTRUCTION = 'instruction'

POLICY_PARAMETERS: tuple[ParameterSpec, ...] = (
    ParameterSpec('bundle', '', 'folder of the policy bundle', read_only=True),
    *SERVER_PARAMETERS,
    ParameterSpec('robot', '', 'robot file (config/robots/*.yaml)', read_only=True),
    ParameterSpec(
        'backend',
        AUTO,
        'what runs the networks; auto: the first in order that can run this bundle here; remote: '
        'the server on another machine',
        words=(AUTO, *BACKENDS, REMOTE),
        read_only=True,
    ),
    AUTOSTART,
    ParameterSpec('device', 'cpu', 'cpu, cuda or cuda:N', read_only=True),
    ParameterSpec(
        'precision',
        AUTO,
        "number format of the networks' large matrices; auto: the fewest bits that passed, by the "
        "bundle's receipt",
        words=(AUTO, *PRECISIONS),
        read_only=True,
    ),
    ParameterSpec(
        'use_cuda_graphs', True, 'replay captured CUDA graphs: same results, faster', read_only=True
    ),
    ParameterSpec(
        'triton',
        OFF,
        "on: the action expert's layers in Triton kernels, on CUDA, where the family has them; "
        'needs backend torch',
        words=WORDS,
        read_only=True,
    ),
    ParameterSpec(
        'verify_bundle', True, 'compare every file with its SHA-256 at configure', read_only=True
    ),
    ParameterSpec(
        'torch_threads',
        0,
        'CPU threads of each network that runs, whatever the backend; 0: all cores but one, which '
        'the messages need, shared by two networks where pipeline is throughput at configure',
        minimum=0,
        maximum=MOST_THREADS,
        read_only=True,
    ),
    ParameterSpec(
        'jpeg_quality',
        0,
        'backend remote: quality of the JPEG that images go to the server as; 0: raw pixels, which '
        'are the only ones that the policy sees as they are',
        minimum=0,
        maximum=100,
        read_only=True,
    ),
    ParameterSpec(
        INSTRUCTION,
        '',
        'task of the robot in plain words; a message on ~/instruction sets it too, and the newest '
        'counts; empty: no inference, unless the policy has no language',
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
    *parameter_rows(live_settings().values()),
)


def limits_from(values: Mapping[str, Any]) -> SyncLimits:
    return SyncLimits(
        tolerance_ns=round(values['sync_tolerance_s'] * 1e9),
        max_age_ns=round(values['max_observation_age_s'] * 1e9),
    )
