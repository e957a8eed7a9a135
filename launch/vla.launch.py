"""A policy drives a robot: the policy node and the executor node, configured and activated.

ros2 launch vla_runtime vla.launch.py bundle:=/path/to/bundle robot:=so101
"""

import os
from pathlib import Path

from ament_index_python.packages import get_package_share_directory
from launch import LaunchContext, LaunchDescription
from launch.action import Action
from launch.actions import (
    DeclareLaunchArgument,
    EmitEvent,
    LogInfo,
    OpaqueFunction,
    RegisterEventHandler,
    SetEnvironmentVariable,
    Shutdown,
)
from launch.events import matches_action
from launch.substitutions import LaunchConfiguration
from launch_ros.actions import LifecycleNode
from launch_ros.event_handlers import OnStateTransition
from launch_ros.events.lifecycle import ChangeState
from lifecycle_msgs.msg import Transition

from vla_runtime.ros.robot import find_robot

SHARE = Path(get_package_share_directory('vla_runtime'))
PROFILE_VARIABLES = ('FASTRTPS_DEFAULT_PROFILES_FILE', 'FASTDDS_DEFAULT_PROFILES_FILE')

ARGUMENTS = (
    DeclareLaunchArgument('bundle', description='Folder of the policy bundle.'),
    DeclareLaunchArgument(
        'robot', description='Robot file, or the name of one of config/robots without .yaml.'
    ),
    DeclareLaunchArgument('backend', default_value='torch', description='What runs the networks.'),
    DeclareLaunchArgument(
        'params_file',
        default_value='',
        description='Your own parameters, on top of config/policy.yaml and config/executor.yaml. '
        "Key it '/**/vla_policy' and '/**/vla_executor'; '/**' sets both nodes at once.",
    ),
    DeclareLaunchArgument('namespace', default_value='', description='Namespace of both nodes.'),
    DeclareLaunchArgument(
        'use_sim_time', default_value='false', description='Follow /clock: true or false.'
    ),
    DeclareLaunchArgument(
        'replan_interval',
        default_value='',
        description='Steps executed from a chunk before the next takes over; empty: as configured.',
    ),
    DeclareLaunchArgument(
        'cfg_beta',
        default_value='',
        description='Guidance scale, which also turns guidance on; empty: as configured.',
    ),
    DeclareLaunchArgument(
        'autostart',
        default_value='true',
        description='Configure and activate both nodes: true or false.',
    ),
)


def generate_launch_description() -> LaunchDescription:
    return LaunchDescription([*ARGUMENTS, OpaqueFunction(function=start)])


def start(context: LaunchContext) -> list[Action]:
    """Both nodes with what the arguments say, known only when they are read."""
    said = {
        argument.name: LaunchConfiguration(argument.name).perform(context) for argument in ARGUMENTS
    }
    common = {
        'bundle': str(Path(said['bundle']).expanduser().resolve()),
        'robot': str(find_robot(said['robot'], SHARE / 'config' / 'robots').resolve()),
        'use_sim_time': _truth(said, 'use_sim_time'),
    }
    policy_only: dict[str, object] = {'backend': said['backend']}
    if said['cfg_beta']:
        policy_only |= {'cfg_enabled': True, 'cfg_beta': _number(said, 'cfg_beta', float)}
    executor_only = {}
    if said['replan_interval']:
        executor_only = {'replan_interval': _number(said, 'replan_interval', int)}
    own = [said['params_file']] if said['params_file'] else []
    actions = lossless_images(context)
    nodes = [
        _node(said, 'policy', [SHARE / 'config/policy.yaml', *own, common | policy_only]),
        _node(said, 'executor', [SHARE / 'config/executor.yaml', *own, common | executor_only]),
    ]
    if not _truth(said, 'autostart'):
        return [*actions, *nodes]
    # The handlers first: no transition may go unseen.
    for node, name in zip(nodes, ('vla_policy', 'vla_executor'), strict=True):
        actions += configure_and_activate(node, name)
    configure = [_change_state(node, Transition.TRANSITION_CONFIGURE) for node in nodes]
    return [*actions, *nodes, *configure]


def lossless_images(context: LaunchContext) -> list[Action]:
    """The shared-memory profile, unless the user has one or runs another middleware."""
    middleware = context.environment.get('RMW_IMPLEMENTATION', 'rmw_fastrtps_cpp')
    has_own = any(context.environment.get(name) for name in PROFILE_VARIABLES)
    if has_own or not middleware.startswith('rmw_fastrtps'):
        return []
    profile = os.fspath(SHARE / 'config' / 'fastdds.xml')
    return [SetEnvironmentVariable(name, profile) for name in PROFILE_VARIABLES]


def configure_and_activate(node: LifecycleNode, name: str) -> list[Action]:
    """Handlers: activate a node once it is configured; end the launch where either fails."""
    configured = OnStateTransition(
        target_lifecycle_node=node,
        start_state='configuring',
        goal_state='inactive',
        entities=[_change_state(node, Transition.TRANSITION_ACTIVATE)],
    )
    failed = [
        OnStateTransition(
            target_lifecycle_node=node,
            start_state=start_state,
            goal_state=goal_state,
            entities=[
                LogInfo(msg=f'{name} could not be {what}; its own error is above'),
                Shutdown(reason=f'{name} could not be {what}'),
            ],
        )
        for start_state, goal_state, what in (
            ('configuring', 'unconfigured', 'configured'),
            ('activating', 'inactive', 'activated'),
            # The state between an error and its handling.
            ('configuring', 'errorprocessing', 'configured'),
            ('activating', 'errorprocessing', 'activated'),
        )
    ]
    return [RegisterEventHandler(handler) for handler in (configured, *failed)]


def _change_state(node: LifecycleNode, transition: int) -> Action:
    return EmitEvent(
        event=ChangeState(lifecycle_node_matcher=matches_action(node), transition_id=transition)
    )


def _node(said: dict[str, str], role: str, parameters: list[object]) -> LifecycleNode:
    return LifecycleNode(
        package='vla_runtime',
        executable=f'{role}_node',
        name=f'vla_{role}',
        namespace=said['namespace'],
        parameters=parameters,
        output='screen',
        # Teardown ends an inference and sends the hold; launch's own 5 s can be too short for it.
        sigterm_timeout='20',
    )


def _truth(said: dict[str, str], name: str) -> bool:
    words = {'true': True, '1': True, 'false': False, '0': False}
    try:
        return words[said[name].lower()]
    except KeyError:
        raise ValueError(f'launch argument {name}:={said[name]}: expected true or false') from None


def _number(said: dict[str, str], name: str, kind: type) -> float:
    try:
        return kind(said[name])
    except ValueError:
        what = 'a whole number' if kind is int else 'a number'
        raise ValueError(f'launch argument {name}:={said[name]}: expected {what}') from None
