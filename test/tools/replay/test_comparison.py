"""Chunks that went through their message, compared with themselves, at every rate of a policy."""

from __future__ import annotations

import numpy as np
import pytest

from vla_runtime.messages.trajectories import chunk_to_message, message_to_chunk
from vla_runtime.types import ActionChunk, ChunkHeader
from vla_tools.replay.rerun import compare_chunks

RATES_HZ = range(1, 121)
HEADER = ChunkHeader(observation_ns=1, episode=1, number=0)


def _chunk(step_time_s: float) -> ActionChunk:
    rows = np.random.default_rng(0).normal(size=(50, 1))
    return ActionChunk(rows, ('a',), ('position',), step_time_s, rows.astype(np.float32))


def test_a_chunk_is_identical_to_itself_after_its_message_at_every_rate():
    for rate_hz in RATES_HZ:
        chunk = _chunk(1 / rate_hz)
        recorded, _ = message_to_chunk(chunk_to_message(chunk, HEADER))
        assert compare_chunks(recorded, chunk).identical, rate_hz


def test_another_rate_cannot_be_compared():
    for rate_hz in RATES_HZ:
        with pytest.raises(ValueError, match='cannot be compared'):
            compare_chunks(_chunk(1 / rate_hz), _chunk(1 / (rate_hz + 1)))
