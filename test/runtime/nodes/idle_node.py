"""A node that does nothing, and is destroyed no sooner than a file exists.

Command line: `plain` or `lifecycle`, and the file.
"""

import sys
import time
from pathlib import Path

from rclpy.lifecycle import LifecycleNode
from rclpy.node import Node

from vla_runtime.nodes.node_runner import run_node

_KIND, _GATE = sys.argv[1], Path(sys.argv[2])


class Idle(LifecycleNode if _KIND == 'lifecycle' else Node):
    def __init__(self) -> None:
        super().__init__('idle')
        print('runs', flush=True)

    def destroy_node(self) -> None:
        while not _GATE.exists():
            time.sleep(0.01)
        super().destroy_node()


if __name__ == '__main__':
    sys.exit(run_node(Idle, 'idle'))
