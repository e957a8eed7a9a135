"""A policy drives a robot: the policy node and the executor node, configured and activated.

ros2 launch vla_runtime vla.launch.py bundle:=/path/to/bundle robot:=so101
ros2 launch vla_runtime vla.launch.py backend:=remote server:=ws://box:8000 robot:=so101
"""

import os
import sys
from pathlib import Path
from uuid import uuid4

from ament_index_python.packages import get_package_share_directory
from launch import LaunchContext, LaunchDescription
from launch.action import Action
from launch.actions import (
    DeclareLaunchArgument,
    ExecuteProcess,
    OpaqueFunction,
    RegisterEventHandler,
    SetEnvironmentVariable,
)
from launch.event_handlers import OnProcessExit
from launch.events.process import ProcessExited
from launch.logging import get_logger, launch_config
from launch.substitutions import LaunchConfiguration
from launch_ros.actions import Node
from launch_ros.parameter_descriptions import ParameterValue
from launch_ros.utilities import make_namespace_absolute, prefix_namespace

from vla_runtime.nodes.launch_arguments import check_arguments, starts_here
from vla_runtime.nodes.middleware import lossless_images
from vla_runtime.nodes.parameter_file import check_parameter_file
from vla_runtime.nodes.parameter_table import COULD_NOT_START
from vla_runtime.nodes.policy.instruction import FILE_VARIABLE
from vla_runtime.processes.parent_death import LAUNCH_VARIABLE
from vla_runtime.robot.file import find_robot

SHARE = Path(get_package_share_directory('vla_runtime'))
RESPAWN_DELAY_S = 1.0
# What launch_ros keeps beside the arguments.
NOT_ARGUMENTS = {'ros_namespace', 'ros_params', 'ros_remaps', 'global_params', 'global_remaps'}

ARGUMENTS = (
    DeclareLaunchArgument(
        'bundle', default_value='', description='Folder of the policy bundle; or give server.'
    ),
    DeclareLaunchArgument(
        'server',
        default_value='',
        description='Policy server, ws://HOST:PORT or wss://HOST:PORT, with backend:=remote.',
    ),
    DeclareLaunchArgument(
        'server_key_file', default_value='', description="File with the server's key."
    ),
    DeclareLaunchArgument(
        'server_ca_file',
        default_value='',
        description='Certificates that a wss:// server is checked with; empty: as configured.',
    ),
    DeclareLaunchArgument(
        'robot', description='Robot file, or the name of one of config/robots without .yaml.'
    ),
    DeclareLaunchArgument(
        'backend',
        default_value='',
        description='What runs the networks; empty: as configured, or auto, the first that runs.',
    ),
    DeclareLaunchArgument(
        'device',
        default_value='',
        description='Where the networks run: cpu, cuda or cuda:N; empty: as configured, or cpu.',
    ),
    DeclareLaunchArgument(
        'instruction',
        default_value='',
        description='What the robot is to do, until another instruction is given; empty: as '
        'configured.',
    ),
    DeclareLaunchArgument(
        'params_file',
        default_value='',
        description='Your own parameters, on top of config/policy.yaml and config/executor.yaml. '
        "Key it '/**/vla_policy' and '/**/vla_executor'; '/**' sets all nodes at once.",
    ),
    DeclareLaunchArgument('namespace', default_value='', description='Namespace of the nodes.'),
    DeclareLaunchArgument(
        'use_sim_time',
        default_value='',
        description='Follow /clock: true or false; empty: as configured, or false.',
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
        'dry_run',
        default_value='',
        description='Compute and report all, command nothing: true or false; empty: as '
        'configured, or false.',
    ),
    DeclareLaunchArgument(
        'autostart',
        default_value='',
        description='Configure and activate both nodes: true or false; empty: as configured, or '
        'true.',
    ),
    DeclareLaunchArgument(
        'respawn',
        default_value='false',
        description='Start the policy node again when it dies: true or false.',
    ),
    DeclareLaunchArgument(
        'record',
        default_value='false',
        description='Record all topics and every frame that an inference used: true, false, or '
        "the new folder to record to. Section '/**/vla_recorder' of params_file has the rest.",
    ),
    DeclareLaunchArgument(
        'record_images',
        default_value='',
        description='Frames that are recorded: used, all or reduced; empty: as configured, or '
        'used. Needs record.',
    ),
    DeclareLaunchArgument(
        'tasks',
        default_value='false',
        description='Also take tasks, by the action RunPolicy of vla_interfaces: true or false.',
    ),
    DeclareLaunchArgument(
        'view',
        default_value='false',
        description='Show the robot on a page, http://127.0.0.1:8085: true, false, or a port.',
    ),
)


def generate_launch_description() -> LaunchDescription:
    return LaunchDescription([*ARGUMENTS, OpaqueFunction(function=start)])


def start(context: LaunchContext) -> list[Action]:
    """Both nodes with what the arguments say, known only when they are read."""
    said = {
        argument.name: LaunchConfiguration(argument.name).perform(context) for argument in ARGUMENTS
    }
    # Of a person's own launch file; the nodes' full names begin with it.
    pushed = context.launch_configurations.get('ros_namespace')
    namespace = make_namespace_absolute(prefix_namespace(pushed, said['namespace'])) or ''
    given = context.launch_configurations.keys() - NOT_ARGUMENTS
    for warning in check_arguments(
        given, said, namespace.rstrip('/'), all_are_meant=starts_here(sys.argv)
    ):
        get_logger('launch').warning(warning)
    own = []
    if said['params_file']:
        own = [str(Path(said['params_file']).expanduser().resolve())]
        for section in check_parameter_file(Path(own[0]), namespace):
            get_logger('launch').warning(
                f"{own[0]}: section '{section}' matches none of vla_runtime's nodes and is let be"
            )
    if bool(said['bundle']) == bool(said['server']):
        raise ValueError(
            'launch arguments bundle and server: give one of them, bundle:=FOLDER, or '
            'backend:=remote server:=ws://HOST:PORT'
        )
    common: dict[str, object] = {
        'robot': _text(find_robot(said['robot'], SHARE / 'config' / 'robots').resolve()),
    }
    if said['use_sim_time']:
        common['use_sim_time'] = _truth(said, 'use_sim_time')
    recorder, clock = dict(common), dict(common)
    del clock['robot']
    if said['bundle']:
        common['bundle'] = _text(Path(said['bundle']).expanduser().resolve())
    else:
        common['server'] = _text(said['server'])
    for name in ('server_key_file', 'server_ca_file'):
        if said[name]:
            common[name] = _text(Path(said[name]).expanduser().resolve())
    if said['autostart']:
        common['autostart'] = _truth(said, 'autostart')
    policy_only: dict[str, object] = {
        name: said[name] for name in ('backend', 'device') if said[name]
    }
    if said['instruction']:
        policy_only['instruction'] = _text(said['instruction'])
    if said['cfg_beta']:
        policy_only['cfg_beta'] = _number(said, 'cfg_beta', float)
    executor_only: dict[str, object] = {}
    if said['replan_interval']:
        executor_only['replan_interval'] = _number(said, 'replan_interval', int)
    if said['dry_run']:
        executor_only['dry_run'] = _truth(said, 'dry_run')
    # A person's file wins over the launch's defaults, and what is given here wins over the file.
    # The defaults are a file too: of a dictionary launch would make a section that wins over own.
    defaults = SHARE / 'config/launch.yaml'
    policy = [SHARE / 'config/policy.yaml', defaults, *own, common | policy_only]
    executor = [SHARE / 'config/executor.yaml', defaults, *own, common | executor_only]
    respawn = {'respawn': _truth(said, 'respawn'), 'respawn_delay': RESPAWN_DELAY_S}
    # Of this launch alone: the next one begins with its own arguments.
    kept = Path(launch_config.log_dir) / f'instruction-{uuid4().hex}.json'
    return [
        *set_profile(context),
        # First: what the policy says before it has found the recorder is not in the bag.
        *_recorder(said, own, recorder),
        *_node(said, 'policy', policy, {FILE_VARIABLE: str(kept)}, **respawn),
        *_node(said, 'executor', executor),
        *(_node(said, 'task', [*own, clock]) if _truth(said, 'tasks') else []),
        *_view(said, namespace),
    ]


def set_profile(context: LaunchContext) -> list[Action]:
    """The shared-memory profile, unless the user has one or runs another middleware."""
    chosen = lossless_images(context.environment, SHARE / 'config')
    return [SetEnvironmentVariable(name, profile) for name, profile in chosen.items()]


def _node(
    said: dict[str, str],
    role: str,
    parameters: list[object],
    environment: dict[str, str] | None = None,
    **options: object,
) -> list[Action]:
    name = f'vla_{role}'
    node = Node(
        package='vla_runtime',
        executable=f'{role}_node',
        name=name,
        namespace=said['namespace'],
        parameters=parameters,
        output='screen',
        # Teardown ends an inference and sends the hold; launch's own 5 s can be too short for it.
        sigterm_timeout='20',
        additional_env={LAUNCH_VARIABLE: str(os.getpid()), **(environment or {})},
        **options,
    )

    def on_exit(event: ProcessExited, context: LaunchContext) -> None:
        if event.returncode == COULD_NOT_START and not context.is_shutdown:
            raise RuntimeError(f'{name} could not start; its own error is above')

    # Only the first time: a node that has run may find a device busy when it is started again.
    handler = OnProcessExit(target_action=node, on_exit=on_exit, handle_once=True)
    return [RegisterEventHandler(handler), node]


def _recorder(said: dict[str, str], own: list[str], given: dict[str, object]) -> list[Action]:
    """The recorder node, when it is asked for; the others go on after it, once it has started."""
    words = {'true': '', '1': '', 'false': None, '0': None, '': None}
    folder = words.get(said['record'].lower(), said['record'])
    images = said['record_images']
    if folder is None:
        if images:
            raise ValueError(f'launch argument record_images:={images}: give record:=true too')
        return []
    given = dict(given)
    if folder:
        given['folder'] = _text(Path(folder).expanduser().resolve())
    if images:
        given['record_images'] = _text(images)
    return _node(said, 'recorder', [*own, given])


def _view(said: dict[str, str], namespace: str) -> list[Action]:
    """The page's process, when it is asked for. Whatever becomes of it, the others go on."""
    words = {'true': '', '1': '', 'false': None, '0': None, '': None}
    port = words.get(said['view'].lower(), said['view'])
    if port is None:
        return []
    if port and not port.isdecimal():
        raise ValueError(f'launch argument view:={port}: expected true, false or a port')
    robot = find_robot(said['robot'], SHARE / 'config' / 'robots').resolve()
    chosen = ['--namespace', namespace or '/', '--robot', str(robot)]
    if port:
        chosen += ['--port', port]
    return [
        ExecuteProcess(
            cmd=[sys.executable, '-m', 'vla_runtime', 'view', *chosen],
            name='vla_view',
            output='screen',
            additional_env={LAUNCH_VARIABLE: str(os.getpid())},
        )
    ]


def _text(value: object) -> ParameterValue:
    """Text whatever it looks like: launch would read 'no' as false, and '/data/run #2' to the #."""
    return ParameterValue(str(value), value_type=str)


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
