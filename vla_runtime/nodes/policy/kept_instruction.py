"""The newest instruction in a file, for the policy node that is respawned after this one.

A respawned node gets the arguments of the first one. Those name the instruction at launch, which
another may have superseded since: the robot would turn to a task that nobody wants any more.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from vla_runtime.files.atomic_write import write_text
from vla_runtime.files.input_files import read_text
from vla_runtime.files.json_file import LARGEST_JSON
from vla_runtime.files.quotes import one_line

# The launch file sets it for a node that it respawns; one file a launch, so that another launch
# begins with its own arguments.
FILE_VARIABLE = 'VLA_RUNTIME_INSTRUCTION_FILE'

_LONGEST_REASON = 200


@dataclass(frozen=True)
class KeptInstruction:
    """Instruction handed to the next policy node.

    Attributes:
        node: full name of the node.
        instruction: instruction in force.
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

    Args:
        path: path of the file.
        node: full name of this node.

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
