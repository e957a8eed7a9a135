"""The same as vla.launch.py with the simulated tabletop robot and the demo policy.

ros2 launch vla_runtime demo.launch.py
"""

from pathlib import Path

from ament_index_python.packages import get_package_share_directory
from launch import LaunchDescription
from launch.actions import DeclareLaunchArgument, IncludeLaunchDescription
from launch.launch_description_sources import PythonLaunchDescriptionSource
from launch.substitutions import LaunchConfiguration
from launch_ros.actions import Node
from launch_ros.parameter_descriptions import ParameterValue

SHARE = Path(get_package_share_directory('vla_runtime'))
PASSED_ON = {
    'bundle': str(SHARE / 'engines' / 'demo'),
    'backend': 'torch',
    'params_file': '',
    'namespace': '',
    'use_sim_time': 'false',
    'replan_interval': '',
    'cfg_beta': '',
    'autostart': 'true',
}


def generate_launch_description() -> LaunchDescription:
    arguments = [
        DeclareLaunchArgument(name, default_value=value, description='As in vla.launch.py.')
        for name, value in PASSED_ON.items()
    ]
    # First, because it sets the middleware's profile for everything that is started after it.
    runtime = IncludeLaunchDescription(
        PythonLaunchDescriptionSource(str(SHARE / 'launch' / 'vla.launch.py')),
        launch_arguments=[
            ('robot', 'tabletop'),
            *((name, LaunchConfiguration(name)) for name in PASSED_ON),
        ],
    )
    tabletop = Node(
        package='vla_runtime',
        executable='tabletop_node',
        name='tabletop',
        namespace=LaunchConfiguration('namespace'),
        parameters=[
            {'use_sim_time': ParameterValue(LaunchConfiguration('use_sim_time'), value_type=bool)}
        ],
        output='screen',
        sigterm_timeout='20',
    )
    return LaunchDescription([*arguments, runtime, tabletop])
