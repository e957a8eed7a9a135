"""The same as vla.launch.py with the simulated tabletop robot and the demo policy.

ros2 launch vla_runtime demo.launch.py instruction:='touch the red block'
"""

import os
import sys
from pathlib import Path
from runpy import run_path

from ament_index_python.packages import get_package_share_directory
from launch import LaunchContext, LaunchDescription
from launch.action import Action
from launch.actions import (
    DeclareLaunchArgument,
    IncludeLaunchDescription,
    OpaqueFunction,
    RegisterEventHandler,
)
from launch.event_handlers import OnProcessExit
from launch.events.process import ProcessExited
from launch.launch_description_sources import PythonLaunchDescriptionSource
from launch.substitutions import LaunchConfiguration
from launch_ros.actions import Node

from vla_runtime.nodes.launch_arguments import starts_here
from vla_runtime.processes.parent_death import LAUNCH_VARIABLE

SHARE = Path(get_package_share_directory('vla_runtime'))
RUNTIME = str(SHARE / 'launch' / 'vla.launch.py')
DEMO = str(SHARE / 'engines' / 'demo')
PASSED_ON = {
    'bundle': '',
    'server': '',
    'server_key_file': '',
    'server_ca_file': '',
    'backend': '',
    'device': '',
    'instruction': '',
    'params_file': '',
    'namespace': '',
    'use_sim_time': '',
    'replan_interval': '',
    'cfg_beta': '',
    'dry_run': '',
    'autostart': '',
    'respawn': 'false',
    'record': 'false',
    'record_images': '',
    'tasks': 'false',
    'view': 'false',
}


def generate_launch_description() -> LaunchDescription:
    described = {one.name: one.description for one in run_path(RUNTIME)['ARGUMENTS']}
    described['bundle'] = 'Folder of the policy bundle; empty: the demo policy, or that of server.'
    arguments = [
        DeclareLaunchArgument(name, default_value=value, description=described[name])
        for name, value in PASSED_ON.items()
    ]
    # The runtime before the robot, because it checks the parameter file, and sets the middleware's
    # profile for everything that is started after it.
    steps = [OpaqueFunction(function=step) for step in (refuse_robot, runtime, tabletop)]
    return LaunchDescription([*arguments, *steps])


def runtime(context: LaunchContext) -> list[Action]:
    """Policy and executor, with the demo policy where no other is given."""
    given = {name: LaunchConfiguration(name).perform(context) for name in PASSED_ON}
    if not given['server']:
        given['bundle'] = given['bundle'] or DEMO
    source = PythonLaunchDescriptionSource(RUNTIME)
    arguments = [('robot', 'tabletop'), *given.items()]
    return [IncludeLaunchDescription(source, launch_arguments=arguments)]


def refuse_robot(context: LaunchContext) -> list[Action]:
    """Refuse `robot`, which the demo sets itself: it would be dropped without a word."""
    if starts_here(sys.argv) and 'robot' in context.launch_configurations:
        raise ValueError('launch argument robot: the demo drives tabletop; use vla.launch.py')
    return []


def tabletop(context: LaunchContext) -> list[Action]:
    """The simulated robot, with the same parameter file as the other nodes."""
    own = LaunchConfiguration('params_file').perform(context)
    use_sim_time = LaunchConfiguration('use_sim_time').perform(context)
    # `runtime` has refused what is no truth value.
    given = {'use_sim_time': use_sim_time.lower() in ('true', '1')}
    node = Node(
        package='vla_runtime',
        executable='tabletop_node',
        name='tabletop',
        namespace=LaunchConfiguration('namespace'),
        parameters=[
            *([str(Path(own).expanduser().resolve())] if own else []),
            *([given] if use_sim_time else []),
        ],
        output='screen',
        sigterm_timeout='20',
        additional_env={LAUNCH_VARIABLE: str(os.getpid())},
    )
    # First: one that cannot even be imported may end at once.
    return [RegisterEventHandler(OnProcessExit(target_action=node, on_exit=end)), node]


def end(event: ProcessExited, context: LaunchContext) -> None:
    """End the launch with the simulator: without it the others would wait for a robot for ever."""
    if event.returncode != 0 and not context.is_shutdown:
        raise RuntimeError(
            f'tabletop, the simulated robot, ended with exit code {event.returncode}; its own '
            'error is above'
        )
