"""Starts one of the package's launch files, as `ros2 launch vla_runtime FILE NAME:=VALUE` does.

python launch_file.py FILE [NAME:=VALUE ...]; exit code 0 when everything ended as asked.
"""

from __future__ import annotations

import sys
from pathlib import Path

from ament_index_python.packages import get_package_share_directory
from launch import LaunchDescription, LaunchService
from launch.actions import IncludeLaunchDescription
from launch.launch_description_sources import PythonLaunchDescriptionSource


def main(file: str, *arguments: str) -> int:
    path = Path(get_package_share_directory('vla_runtime')) / 'launch' / file
    included = IncludeLaunchDescription(
        PythonLaunchDescriptionSource(str(path)),
        launch_arguments=[tuple(argument.split(':=', 1)) for argument in arguments],
    )
    service = LaunchService()
    service.include_launch_description(LaunchDescription([included]))
    return service.run()


if __name__ == '__main__':
    sys.exit(main(*sys.argv[1:]))
