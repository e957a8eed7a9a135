"""The newest instruction in a file, for the policy node that is respawned after this one.

A respawned node gets the arguments of the first one. Those name the instruction at launch, which
another may have superseded since: the robot would turn to a task that nobody wants any more.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from vla_runtime.files.whole_files import write_text

# The launch file sets it for a node that it respawns; one file a launch, so that another launch
# begins with its own arguments.
FILE_VARIABLE = 'VLA_RUNTIME_INSTRUCTION_FILE'


@dataclass(frozen=True)
class KeptInstruction:
    """Instruction handed to the next policy node.

    Attributes:
        instruction: in force.
        heard: newest message on `~/instruction`; None before the first. A latched one is delivered
            to the next node once more.
    """

    instruction: str
    heard: str | None


def instruction_file() -> Path | None:
    """Return the file of this node and of those respawned after it; None where none is."""
    name = os.environ.get(FILE_VARIABLE)
    return Path(name) if name else None


def read_instruction(path: Path) -> KeptInstruction | None:
    """Read what the node before this one kept; None where it kept nothing.

    Raises:
        ValueError: cannot be read, or is no such file.
    """
    try:
        kept = KeptInstruction(**json.loads(path.read_text(encoding='utf-8')))
    except FileNotFoundError:
        return None
    except (OSError, TypeError, ValueError) as error:
        raise ValueError(f'{path}: cannot be read: {error}') from None
    if not isinstance(kept.instruction, str) or not isinstance(kept.heard, str | None):
        raise ValueError(f'{path}: cannot be read: no instruction is in it')
    return kept


def write_instruction(path: Path, kept: KeptInstruction) -> None:
    """Keep the instruction for the next node.

    Raises:
        OSError: cannot be written.
    """
    write_text(path, json.dumps(asdict(kept)))
