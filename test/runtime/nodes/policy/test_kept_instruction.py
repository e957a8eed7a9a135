"""Instruction that a policy node keeps for the one that is respawned after it."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vla_runtime.nodes.policy import instruction
from vla_runtime.nodes.policy.instruction import (
    FILE_VARIABLE,
    Instruction,
    KeptInstruction,
    read_instruction,
    write_instruction,
)


@pytest.mark.parametrize('heard', [None, '', 'hebe den Würfel'])
def test_what_is_kept_is_read_back(tmp_path: Path, heard: str | None) -> None:
    path, kept = tmp_path / 'instruction.json', KeptInstruction('/policy', '', heard)
    assert read_instruction(path, '/policy') is None
    write_instruction(path, kept)
    assert read_instruction(path, '/policy') == kept


@pytest.mark.parametrize(
    'content',
    [
        b'',
        b'\xff',
        b'[1]',
        b'{"node": "/policy", "instruction": "push"}',
        b'{"node": "/policy", "instruction": 1, "heard": null}',
        b'{"node": "/policy", "instruction": "push", "heard": 2}',
        b'{"node": "/policy", "instruction": "\\ud800", "heard": null}',
        b'[' * 100_000,
        b' ' * (5 << 20) + b'{"node": "/policy", "instruction": "push", "heard": null}',
    ],
)
def test_a_file_that_says_no_instruction_is_an_error_that_names_it(
    tmp_path: Path, content: bytes
) -> None:
    path = tmp_path / 'instruction.json'
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r'instruction\.json'):
        read_instruction(path, '/policy')


def test_the_instruction_of_another_node_is_an_error_that_names_both(tmp_path: Path) -> None:
    path = tmp_path / 'instruction.json'
    write_instruction(path, KeptInstruction('/left/vla_policy', 'push', None))
    with pytest.raises(ValueError, match='policy'):
        read_instruction(path, '/right/vla_policy')


def test_a_fifo_is_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / 'instruction.json'
    os.mkfifo(path)
    with pytest.raises(ValueError, match='FIFO'):
        read_instruction(path, '/policy')


class Disk:
    """Disk that instructions are written to; full while told so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.full = False
        self._write = instruction.write_text
        monkeypatch.setattr(instruction, 'write_text', self._write_text)

    def _write_text(self, path: Path, text: str) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, 'No space left on device', str(path))
        self._write(path, text)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def test_an_instruction_that_cannot_be_kept_leaves_no_older_one(tmp_path: Path, disk: Disk) -> None:
    path = tmp_path / 'instruction.json'
    write_instruction(path, KeptInstruction('/policy', 'push', None))
    disk.full = True
    with pytest.raises(OSError, match='No space'):
        write_instruction(path, KeptInstruction('/policy', 'lift', None))
    # The next node has none, and the robot holds: it must not turn to a superseded one.
    with pytest.raises(ValueError, match='read'):
        read_instruction(path, '/policy')


class Node:
    """A node with one parameter, as rclpy's before it had hooks for changes."""

    def __init__(self) -> None:
        self.value = ''
        self.errors: list[str] = []

    def get_fully_qualified_name(self) -> str:
        return '/policy'

    def get_parameter(self, name: str) -> Any:
        return SimpleNamespace(value=self.value)

    def create_publisher(self, *_: Any) -> Any:
        return SimpleNamespace(publish=lambda message: None)

    def create_subscription(self, *_: Any) -> None:
        pass

    def get_logger(self) -> Any:
        return SimpleNamespace(error=self.errors.append, info=lambda text: None)


@pytest.mark.parametrize('gone', ['file', 'folder'])
def test_an_instruction_whose_file_is_removed_is_kept_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gone: str
) -> None:
    path = tmp_path / 'logs' / 'instruction.json'
    monkeypatch.setenv(FILE_VARIABLE, str(path))
    node: Any = Node()
    instruction = Instruction(node, lambda: None, lambda where, error: None)
    node.value = 'push'
    instruction.follow()
    path.unlink()
    if gone == 'folder':
        path.parent.rmdir()
    instruction.follow()
    assert read_instruction(path, '/policy') == KeptInstruction('/policy', 'push', None)
    assert not node.errors


def test_an_instruction_that_could_not_be_kept_is_once_there_is_room(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / 'instruction.json'
    monkeypatch.setenv(FILE_VARIABLE, str(path))
    node: Any = Node()
    instruction = Instruction(node, lambda: None, lambda where, error: None)
    node.value, disk.full = 'push', True
    for _ in range(3):
        instruction.follow()
    assert len(node.errors) == 1
    disk.full = False
    instruction.follow()
    assert read_instruction(path, '/policy') == KeptInstruction('/policy', 'push', None)
