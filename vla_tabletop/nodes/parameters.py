"""The tabletop node's parameters."""

from __future__ import annotations

from vla_runtime.nodes.parameter_table import ParameterSpec
from vla_tabletop.sim.scene import VARIANTS

TABLETOP_PARAMETERS: tuple[ParameterSpec, ...] = (
    ParameterSpec(
        'robot',
        'tabletop',
        'robot file whose joints, cameras and outputs are served',
        read_only=True,
    ),
    ParameterSpec(
        'camera_rate_hz', 20.0, 'frames a second', minimum=1.0, maximum=100.0, read_only=True
    ),
    ParameterSpec(
        'instruction_topic',
        'vla_policy/current_instruction',
        'topic of the instruction that success is judged by',
        read_only=True,
    ),
    ParameterSpec('seed', 0, 'seed of the scene that ~/reset begins', minimum=0, maximum=2**63 - 1),
    ParameterSpec('variant', 'still', 'variant of the scene that ~/reset begins', words=VARIANTS),
)
