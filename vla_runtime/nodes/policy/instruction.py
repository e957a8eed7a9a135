"""The policy's instruction: a parameter, which a message on `~/instruction` sets as well.

The newest one counts, however it was given and whatever state the node is in.
`~/current_instruction` (transient local) tells it to whoever judges by it. A policy without
language does not read it, and the log says so once. A respawned node goes on with the one in force.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rclpy.node import Node
from rclpy.parameter import Parameter
from std_msgs.msg import String

from vla_runtime.files.atomic_write import write_text
from vla_runtime.files.input_files import read_text
from vla_runtime.files.json_file import LARGEST_JSON
from vla_runtime.files.quotes import one_line, quoted
from vla_runtime.inference.chunk_policy import ChunkPolicy
from vla_runtime.nodes.node_runner import OnError, guarded
from vla_runtime.nodes.policy.parameters import INSTRUCTION
from vla_runtime.nodes.qos import LATCHED
from vla_runtime.nodes.restart import note, state_before

# The newest instruction in a file: a respawned node's arguments name the one at launch, which
# another may have superseded since.

# The launch file sets it for a node that it respawns; one file a launch, so that another launch
# begins with its own arguments.
FILE_VARIABLE = 'VLA_RUNTIME_INSTRUCTION_FILE'

_LONGEST_REASON = 200


@dataclass(frozen=True)
class KeptInstruction:
    """Instruction handed to the next policy node.

    Attributes:
        node: full name.
        heard: newest message on `~/instruction`; None before the first. A latched one is delivered
            to the next node once more.
    """

    node: str
    instruction: str
    heard: str | None


def instruction_file() -> Path | None:
    """Return the file of this node and of those respawned after it; None where none is."""
    name = os.environ.get(FILE_VARIABLE)
    return Path(name) if name else None


def read_instruction(path: Path, node: str) -> KeptInstruction | None:
    """Read what the node before this one kept; None where it kept nothing.

    `node` is this node's full name.

    Raises:
        ValueError: cannot be read, is no such file, or is another node's.
    """
    try:
        kept = KeptInstruction(**json.loads(read_text(path, LARGEST_JSON)))
        if not isinstance(kept.instruction, str) or not isinstance(kept.heard, str | None):
            raise TypeError('no instruction is in it')
        # Half a character can be written in JSON, and in no message.
        f'{kept.instruction}{kept.heard}'.encode()
    except FileNotFoundError:
        return None
    except (OSError, TypeError, ValueError, RecursionError) as error:
        reason = one_line(str(error), _LONGEST_REASON)
        raise ValueError(f'{path}: cannot be read: {reason}') from None
    if kept.node != node:
        owner = one_line(str(kept.node), _LONGEST_REASON)
        raise ValueError(
            f'{path}: is of {owner}, and this is {node}: set {FILE_VARIABLE} to a file of each '
            "policy node's own"
        )
    return kept


def write_instruction(path: Path, kept: KeptInstruction) -> None:
    """Keep the instruction for the next node.

    Raises:
        OSError: cannot be written. An older one is not left, where that can be helped: the next
            node finds a file that it cannot read.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(asdict(kept)))
    except OSError:
        with suppress(OSError):
            os.truncate(path, 0)
        raise


_LOGGED = 300
_HEARD = 'instruction_heard'


class Instruction:
    """Keeps parameter and topics together, for a node that has declared its parameters.

    Args:
        on_news: called when a message has come.
        on_error: called with the text of a message that cannot be taken.
    """

    def __init__(self, node: Node, on_news: Callable[[], None], on_error: OnError) -> None:
        self._node = node
        self._on_news = on_news
        self._published = ''
        self._reader: ChunkPolicy | None = None
        self._said_unused = False
        self._current = node.create_publisher(String, '~/current_instruction', LATCHED)
        self._file, self._name = instruction_file(), node.get_fully_qualified_name()
        kept = self._from_before()
        # As written to the file; None after a write that failed.
        self._kept: KeptInstruction | None = kept
        self._not_kept: KeptInstruction | None = None
        # Where this node was respawned, or its process started again, a latched message is
        # delivered once more, and may be older than what the parameter was set to since.
        before = state_before()
        heard = kept.heard if before is None else before.notes.get(_HEARD)
        self._heard = heard if isinstance(heard, str) else None
        self._delivered = self._heard
        note(_HEARD, lambda: self._heard)
        # Before ROS 2 Iron there is no such hook: the next status keeps it.
        if hasattr(node, 'add_post_set_parameters_callback'):
            node.add_post_set_parameters_callback(guarded(on_error, INSTRUCTION, self._keep))
        # For as long as the node lives: made anew it would get latched messages again.
        node.create_subscription(
            String,
            '~/instruction',
            guarded(on_error, '~/instruction', self._on_message),
            LATCHED,
        )

    @property
    def text(self) -> str:
        """Instruction of the next inference; empty for none."""
        return str(self._node.get_parameter(INSTRUCTION).value)

    def read_by(self, policy: ChunkPolicy | None) -> None:
        """Name the policy that runs from now on, if any."""
        self._reader, self._said_unused = policy, False

    def follow(self) -> None:
        """Tell the others when the parameter was set: before ROS 2 Iron nothing calls back."""
        self._keep()
        if self.text != self._published:
            self._tell()
        policy = self._reader
        if policy is None or policy.reads_instruction or self._said_unused or not self.text:
            return
        self._said_unused = True
        self._node.get_logger().warning(
            f"instruction: not used, because policy '{policy.spec.name}' has no language"
        )

    def _on_message(self, message: String) -> None:
        delivered, self._delivered = self._delivered, None
        if message.data == delivered != self.text:
            self._node.get_logger().warning(
                f'instruction: {quoted(message.data, _LOGGED)} is not taken: it came before this '
                'process started again, and the parameter was set since; publish it anew to set it'
            )
            return
        if refused := self.set(message.data, heard=True):
            raise ValueError(refused)

    def set(self, text: str, *, heard: bool = False) -> str:
        """Set the instruction and tell it; return why it is refused, empty where it is not.

        `heard`: it came on the topic, and may come once more to the next node.
        """
        result = self._node.set_parameters([Parameter(INSTRUCTION, value=text)])[0]
        if not result.successful:
            return str(result.reason) or 'refused'
        if heard:
            self._heard = text
        self._keep()
        # Also when it is the same again: whoever judges by it begins anew.
        self._tell()
        self._on_news()
        return ''

    def _from_before(self) -> KeptInstruction:
        """Restore the instruction that the previous node kept; return the one in force."""
        log = self._node.get_logger()
        own = KeptInstruction(self._name, self.text, None)
        try:
            kept = None if self._file is None else read_instruction(self._file, self._name)
        except ValueError as error:
            # Which one was in force is not known, and that of the arguments may be superseded.
            log.error(f'instruction: empty, so that the robot holds; give it anew: {error}')
            kept = KeptInstruction(self._name, '', None)
        else:
            if kept is None:
                return own
            if kept.instruction != own.instruction:
                log.warning(
                    f'instruction: {quoted(kept.instruction, _LOGGED)}, as before this node was '
                    f'respawned, not {quoted(own.instruction, _LOGGED)} of its arguments'
                )
        self._node.set_parameters([Parameter(INSTRUCTION, value=kept.instruction)])
        return kept

    def _keep(self, *_: Any) -> None:
        now = KeptInstruction(self._name, self.text, self._heard)
        # Written anew where somebody has removed it, with all of launch's logs for example.
        if self._file is None or (now == self._kept and self._file.exists()):
            return
        try:
            write_instruction(self._file, now)
        except OSError as error:
            # Tried again with every status, and said once.
            if now != self._not_kept:
                self._node.get_logger().error(
                    'instruction: a node that is respawned after this one will not know it, and '
                    f'have none or that of its arguments: {error}'
                )
            self._not_kept, self._kept = now, None
        else:
            self._kept = now

    def _tell(self) -> None:
        before, self._published = self._published, self.text
        self._current.publish(String(data=self._published))
        if self._published != before:
            self._node.get_logger().info(f'instruction: {quoted(self._published, _LOGGED)}')
