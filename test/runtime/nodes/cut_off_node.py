"""A lifecycle node whose ports are lost while it configures for the first time."""

from __future__ import annotations

import os
import re
import sys
import threading
from pathlib import Path

from rclpy.lifecycle import LifecycleNode, LifecycleState, TransitionCallbackReturn
from rclpy.parameter import Parameter

from vla_runtime.nodes.node_runner import run_node
from vla_runtime.nodes.parameter_table import AUTOSTART
from vla_runtime.nodes.parameters import declare
from vla_runtime.nodes.restart import state_before


class CutOff(LifecycleNode):
    """Takes its own ports away, and never ends configuring; the process after it does at once."""

    def __init__(self) -> None:
        overrides = [Parameter(AUTOSTART.name, value=True)]
        super().__init__('cut_off', parameter_overrides=overrides)
        declare(self, (AUTOSTART,))
        self._first = state_before() is None

    def on_configure(self, state: LifecycleState) -> TransitionCallbackReturn:
        if self._first:
            for link in Path('/proc/self/fd').iterdir():
                if match := re.search(r'(.*/fast(?:rtps|dds)_port\d+)_el$', _target(link)):
                    Path(match[1]).unlink()
            threading.Event().wait()
        return super().on_configure(state)


def _target(link: Path) -> str:
    try:
        return os.readlink(link)
    except OSError:
        return ''


if __name__ == '__main__':
    sys.exit(run_node(CutOff, 'cut_off'))
