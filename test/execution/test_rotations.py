"""Chunks of poses: what is no rotation is refused before any of it is used."""

from __future__ import annotations

import numpy as np
import pytest
from execution_rig import chunk_of

from vla_runtime.execution.chunk_check import CheckedChunk, check_chunk
from vla_runtime.execution.columns import Column, CommandColumns
from vla_runtime.execution.command import ChunkRefusal
from vla_runtime.execution.limits import make_limits

QUATERNION = tuple(Column(name, quaternion='hand') for name in 'wxyz')
# Not in the order of the robot's columns.
ORDER = (3, 4, 5, 0, 1, 2)
SIX = tuple(Column(f'r{at}', rotation_6d='hand', component=at) for at in ORDER)


def checked(of: tuple[Column, ...], row: list[float], bad: list[float]) -> CheckedChunk:
    """A chunk of good rows with a bad one among them."""
    columns = CommandColumns(of)
    rows = np.array([row, row, bad, row])
    return check_chunk(chunk_of(rows, columns.names), columns, make_limits(columns.names))


@pytest.mark.parametrize('length', [0.0, 1e-9, 5e-4])
def test_when_a_quaternion_has_no_length_expect_refusal_with_its_row(length: float) -> None:
    result = checked(QUATERNION, [1.0, 0.0, 0.0, 0.0], [0.0, length, 0.0, 0.0])
    assert result.refusal is ChunkRefusal.NO_ROTATION
    assert 'row 2' in result.text and "'w', 'x', 'y', 'z'" in result.text


def test_when_a_quaternion_has_a_length_expect_it_taken_whatever_it_is() -> None:
    assert checked(QUATERNION, [1.0, 0.0, 0.0, 0.0], [0.0, -0.3, 0.0, 0.0]).refusal is None


@pytest.mark.parametrize(
    'bad',
    [
        [0.0] * 6,
        [0.0, 1.0, 0.0, 0.0, 0.0, 0.0],
        [0.0, 0.0, 0.0, 1.0, 0.0, 0.0],
        [-2.0, 0.0, 0.0, 1.0, 0.0, 0.0],
        [1.0, 1e-5, 0.0, 1.0, 0.0, 0.0],
    ],
    ids=['zero', 'no first', 'no second', 'opposite', 'parallel'],
)
def test_when_a_6d_rotation_is_degenerate_expect_refusal_with_its_row(bad: list[float]) -> None:
    good = [0.0, 1.0, 0.0, 1.0, 0.0, 0.0]
    result = checked(SIX, good, bad)
    assert result.refusal is ChunkRefusal.NO_ROTATION
    assert 'row 2' in result.text and "'r0', 'r1'" in result.text
    assert checked(SIX, good, [0.5, 1.0, 0.0, 2.0, 0.0, 0.0]).refusal is None


def test_when_a_component_of_a_6d_rotation_is_missing_expect_an_error_naming_those_there() -> None:
    with pytest.raises(ValueError, match=r"'hand' has components \[0, 1, 2, 4, 5\]"):
        CommandColumns([column for column in SIX if column.component != 3])
