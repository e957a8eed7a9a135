"""A tool that is commanded by twists, its robot file to be filled in, and a policy for it."""

from __future__ import annotations

from dataclasses import replace

from tiny_policy import tiny_spec

from vla_runtime.bundle.schema import ActionSpec, PoseSpec, StateSpec

TWIST = PoseSpec(
    name='tool',
    position=('vx', 'vy', 'vz'),
    rotation=('wx', 'wy', 'wz'),
    form='axis_angle',
    kind='velocity',
    frame='base',
)
SPEC = replace(
    tiny_spec(),
    cameras=(),
    state=tuple(StateSpec(name, 'm') for name in ('px', 'py', 'pz')),
    actions=tuple(
        ActionSpec(name, 'm/s' if name[0] == 'v' else 'rad/s', 'velocity') for name in TWIST.actions
    ),
    poses=(TWIST,),
)
ROBOT = """
format: 1
name: cart
joints:
  - {name: px, message_name: tool_x, unit: m, lower: -9, upper: 9, velocity: 9}
  - {name: py, message_name: tool_y, unit: m, lower: -9, upper: 9, velocity: 9}
  - {name: pz, message_name: tool_z, unit: UNIT, lower: -9, upper: 9, velocity: 9}
joint_states: [{topic: tool_states}]
poses:
  - {name: tool, frame_id: base, BOX velocity: 0.25, angular_velocity: 1.0, acceleration: 2.0}
outputs:
  - {kind: KIND, topic: servo/twist, pose: tool}
"""
BOX = 'lower: [0.2, -0.4, 0.05], upper: [0.7, 0.4, 0.6],'
