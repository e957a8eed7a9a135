"""Checks of a chunk apart from the robot's motion: shape, joints, values, limits.

Any thread may make them while another one ticks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vla_runtime.execution.columns import (
    CommandColumns,
    OutOfReach,
    describe_no_rotation,
    write_alike,
)
from vla_runtime.execution.command import ChunkRefusal
from vla_runtime.execution.intake import Refused
from vla_runtime.execution.limits import Limits, check_rows
from vla_runtime.types import ActionChunk, same_step_time

# No robot is commanded a number like this in any unit; arithmetic on larger ones may overflow.
_LARGEST = 1e6


@dataclass(frozen=True)
class CheckedChunk:
    """A chunk in the executor's order, or why it can never be used.

    Attributes:
        rows: (horizon, columns) float64, finite, within the position limits; angles without end
            and quaternions are written alike from row to row.
        written: (horizon, chunk names) the same rows as the chunk writes them.
        clamped: values outside the limits, in words; empty when there were none.
        refusal: reason why it cannot be used, with empty rows; None when it can.
        text: the same reason in words for the person at the robot.
    """

    rows: np.ndarray
    written: np.ndarray
    step_time_s: float = 0.0
    clamped: str = ''
    refusal: ChunkRefusal | None = None
    text: str = ''


def check_chunk(
    chunk: ActionChunk,
    columns: CommandColumns,
    limits: Limits,
    near: np.ndarray,
    step_time_s: float | None = None,
) -> CheckedChunk:
    """Read and check a chunk; never raises, whatever it is.

    `near` (columns,) is where the robot is; see `ChunkForm.to_columns`.
    """
    try:
        return _check(chunk, columns, limits, near, step_time_s)
    except Refused as refused:
        refusal, text = refused.refusal, str(refused)
    except Exception as error:  # a chunk comes from outside: it must not end anything here
        refusal, text = ChunkRefusal.INTERNAL_ERROR, f'{type(error).__name__}: {error}'
    empty = np.zeros((0, columns.count))
    return CheckedChunk(empty, np.zeros((0, len(columns.chunk_names))), refusal=refusal, text=text)


def _check(
    chunk: ActionChunk,
    columns: CommandColumns,
    limits: Limits,
    near: np.ndarray,
    expected_s: float | None,
) -> CheckedChunk:
    written = ordered_rows(chunk, columns)
    step_time_s = float(chunk.step_time_s)
    if not 1e-3 <= step_time_s <= 10.0:
        raise Refused(
            ChunkRefusal.WRONG_STEP_TIME,
            f'step time is {step_time_s} s, expected 0.001 to 10 seconds',
        )
    if expected_s is not None and not same_step_time(step_time_s, expected_s):
        raise Refused(
            ChunkRefusal.WRONG_STEP_TIME,
            f'its rows are {step_time_s:.9g} s apart (time_from_start), but a step of the policy '
            f"is {expected_s:.9g} s (step_time_s in the bundle's policy.yaml): let the policy "
            'answer in steps of its bundle, or give the executor the bundle of the policy that '
            'answers',
        )
    rows = _as_commanded(written, columns, near)
    rows = write_alike(rows, columns, rows[0], 0)
    check = check_rows(rows, step_time_s, limits, columns)
    if check.rejected:
        raise Refused(ChunkRefusal.LIMIT, check.rejected)
    return CheckedChunk(check.rows, written, step_time_s, check.clamped)


def _as_commanded(written: np.ndarray, columns: CommandColumns, near: np.ndarray) -> np.ndarray:
    """Convert the rows of a chunk to (steps, columns); raise `Refused` where one cannot be."""
    if columns.form is None:
        if no_rotation := describe_no_rotation(written, columns):
            raise Refused(ChunkRefusal.NO_ROTATION, no_rotation)
        return written
    try:
        return columns.form.to_columns(written, near)
    except OutOfReach as error:
        raise Refused(ChunkRefusal.OUT_OF_REACH, str(error)) from error
    except ValueError as error:
        raise Refused(ChunkRefusal.NO_ROTATION, str(error)) from error


def ordered_rows(chunk: ActionChunk, columns: CommandColumns) -> np.ndarray:
    """The chunk's actions in the executor's order, as the chunk writes them.

    Returns (horizon, chunk names) float64, finite, a copy.

    Raises:
        Refused: wrong shape, wrong joints, wrong kinds, or a value that is not a number.
    """
    try:
        actions = np.array(chunk.actions, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise Refused(
            ChunkRefusal.MALFORMED, f'actions are no array of numbers: {error}'
        ) from error
    names, kinds = tuple(chunk.names), tuple(chunk.kinds)
    if actions.ndim != 2 or not len(actions) or actions.shape[1] != len(names):
        raise Refused(
            ChunkRefusal.MALFORMED,
            f'actions have shape {actions.shape}, expected (1 or more, {len(names)}) for the '
            f'names {list(names)}',
        )
    if len(kinds) != len(names):
        raise Refused(ChunkRefusal.MALFORMED, f'{len(kinds)} kinds for {len(names)} names')
    try:
        order = columns.order_of(names)
    except ValueError as error:
        raise Refused(ChunkRefusal.WRONG_JOINTS, str(error)) from error
    for name, expected, at in zip(columns.chunk_names, columns.chunk_kinds, order, strict=True):
        if kinds[at] != expected:
            raise Refused(
                ChunkRefusal.WRONG_JOINTS,
                f"the chunk gives '{name}' as {kinds[at]}, the executor commands its {expected}; "
                "make the bundle's action kinds and the robot file agree",
            )
    rows = actions[:, order]
    usable = np.abs(rows) <= _LARGEST
    if not usable.all():
        row, column = np.argwhere(~usable)[0]
        name = columns.chunk_names[column]
        raise Refused(
            ChunkRefusal.NOT_FINITE,
            f"'{name}' in row {row} is {rows[row, column]}, expected a finite number of at most "
            f'{_LARGEST:g}',
        )
    return rows
