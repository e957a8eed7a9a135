"""What a policy node keeps for the one that is respawned after it."""

from __future__ import annotations

from pathlib import Path

import pytest

from vla_runtime.ros.policy.kept_instruction import (
    KeptInstruction,
    read_instruction,
    write_instruction,
)


@pytest.mark.parametrize('heard', [None, '', 'hebe den Würfel'])
def test_what_is_kept_is_read_back(tmp_path: Path, heard: str | None) -> None:
    path, kept = tmp_path / 'instruction.json', KeptInstruction('', heard)
    assert read_instruction(path) is None
    write_instruction(path, kept)
    assert read_instruction(path) == kept


@pytest.mark.parametrize(
    'content',
    [
        b'',
        b'\xff',
        b'[1]',
        b'{"instruction": "push"}',
        b'{"instruction": 1, "heard": null}',
        b'{"instruction": "push", "heard": 2}',
    ],
)
def test_a_file_that_says_no_instruction_is_an_error_that_names_it(
    tmp_path: Path, content: bytes
) -> None:
    path = tmp_path / 'instruction.json'
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r'instruction\.json: cannot be read: '):
        read_instruction(path)
