"""`recorder_node`: records the topics of the policy, the executor and the robot of its namespace.

It is a process of its own, so recording costs those that move the robot nothing. Topics in: all
that `TopicRecorder` names. Topics out: `/diagnostics`.

Invariants:
- recording begins when the node starts and ends, with closed files, when it is shut down;
- a process that the middleware cut off closes its files and goes on beside them, in FOLDER_2;
- a disk that fills up ends the recording and not the node: its status says so.
"""

from __future__ import annotations

import sys

if __name__ == '__main__':
    # Before what takes seconds to import: a Ctrl-C meanwhile ends the process quietly.
    from vla_runtime.nodes.node_main import run_module

    sys.exit(run_module('recorder_node'))

from collections.abc import Iterator
from datetime import datetime
from itertools import chain, count
from pathlib import Path

from rclpy.callback_groups import MutuallyExclusiveCallbackGroup
from rclpy.node import Node

from vla_runtime.files.package_files import share_folder
from vla_runtime.messages.diagnostics import Level, StatusItem
from vla_runtime.nodes.node_parameters import refuse_unknown
from vla_runtime.nodes.node_runner import run_node
from vla_runtime.nodes.parameter_table import ParameterError
from vla_runtime.nodes.parameters import declare, values
from vla_runtime.nodes.recorder.parameters import RECORDER_PARAMETERS
from vla_runtime.nodes.recorder.topic_recorder import TopicRecorder
from vla_runtime.nodes.restart import state_before
from vla_runtime.nodes.status_board import StatusBoard
from vla_runtime.recording.recording import Recording, RecordingLimits
from vla_runtime.robot.file import find_robot, load_robot

_NAME = 'vla_recorder'
_MIB = 1 << 20


class RecorderNode(Node):
    """The recorder's node; see the module's invariants."""

    # A disk may take seconds to write, and the bag is closed after that.
    callback_s = 12.0

    def __init__(self) -> None:
        super().__init__(_NAME)
        declare(self, RECORDER_PARAMETERS)
        refuse_unknown(self, RECORDER_PARAMETERS)
        given = values(self, RECORDER_PARAMETERS)
        if not given['robot']:
            raise ParameterError("parameter 'robot' is not set; give it as -p robot:=PATH")
        robot = load_robot(find_robot(given['robot'], share_folder() / 'config' / 'robots'))
        self._problem = ''
        self._status = StatusBoard(self, self._gather, MutuallyExclusiveCallbackGroup())
        self._status.hardware = robot.name
        limits = RecordingLimits(given['keep_minutes'] * 60.0, given['max_mb'] * _MIB)
        folder = _free(_folder(given['folder'], self.get_namespace()))
        self._recording = Recording(folder, limits, self._on_failure)
        self._topics = TopicRecorder(
            self,
            robot,
            self._recording,
            images=given['record_images'],
            frame_bytes=given['frame_memory_mb'] * _MIB,
            on_error=self._on_error,
        )
        self.get_logger().info(f'recording to {self._recording.folder}')

    def destroy_node(self) -> None:
        self._topics.finish()
        self._recording.close()
        super().destroy_node()

    def _gather(self) -> Iterator[StatusItem]:
        recording, frames = self._recording, self._topics.frames
        facts = {
            'folder': str(recording.folder),
            'megabytes': recording.size / _MIB,
            'messages': recording.messages,
            'policy_found': self._topics.found,
            'chunks': self._topics.chunks,
            'frames_used': frames.given,
            'frames_missing': frames.missing,
            'frames_crowded_out': frames.crowded_out,
            'joint_states_missing': self._topics.states.missing,
            'frame_megabytes': frames.held_bytes / _MIB,
        }
        if self._problem:
            yield StatusItem('recording', Level.ERROR, self._problem, facts)
        elif frames.missing:
            text = (
                f'{frames.missing} frames that an inference used did not come, or gave way in '
                'memory (frame_memory_mb): their chunks cannot be replayed'
            )
            yield StatusItem('recording', Level.WARN, text, facts)
        elif self._topics.states.missing:
            text = (
                f'{self._topics.states.missing} joint states that an inference used did not come: '
                'replay --live cannot repeat their chunks'
            )
            yield StatusItem('recording', Level.WARN, text, facts)
        else:
            text = f'{recording.messages} messages, {recording.size / _MIB:.1f} MB'
            yield StatusItem('recording', Level.OK, text, facts)

    def _on_failure(self, text: str) -> None:
        self._problem = text
        self.get_logger().error(text)

    def _on_error(self, where: str, error: Exception) -> None:
        text = f'{where}: {type(error).__name__}: {error}'
        self._status.set(StatusItem('messages', Level.WARN, text))


def _folder(named: str, namespace: str) -> Path:
    if named:
        return Path(named).expanduser().absolute()
    # Recorders of several robots may start within one second.
    words = [datetime.now().strftime('%Y-%m-%d_%H%M%S'), *namespace.split('/')]
    return Path('recordings').absolute() / '_'.join(filter(None, words))


def _free(folder: Path) -> Path:
    """Return the folder, or FOLDER_2 and so on where the process before this one recorded to it."""
    if state_before() is None:
        return folder
    numbered = (folder.with_name(f'{folder.name}_{number}') for number in count(2))
    return next(path for path in chain([folder], numbered) if not path.exists())


def main(args: list[str] | None = None) -> int:
    """`ros2 run vla_runtime recorder_node --ros-args -p robot:=...`."""
    return run_node(RecorderNode, _NAME, args)
