"""The executor's `ensemble` weighs chunks as LeRobot's ACTTemporalEnsembler does.

LeRobot makes a chunk every step. Of a step it averages what at most `chunk_size` chunks say about
it, with weights exp(-m * i), i = 0 the oldest (ACT, arXiv 2304.13705, section IV-B).
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from reference_cases import find

from vla_runtime.execution.handover import HandoverParameters, LiveChunk, hand_over


def lerobots(chunks: np.ndarray, coefficient: float) -> np.ndarray:
    """Actions of T steps, (T, A), from a chunk a step, (T, H, A): the sum written out."""
    actions = []
    for now in range(len(chunks)):
        oldest = max(0, now - chunks.shape[1] + 1)
        weights = [np.exp(-coefficient * i) for i in range(now - oldest + 1)]
        said = [chunks[made, now - made] for made in range(oldest, now + 1)]
        total = sum(weight * action for weight, action in zip(weights, said, strict=True))
        actions.append(total / sum(weights))
    return np.array(actions)


def executors(chunks: np.ndarray, coefficient: float) -> np.ndarray:
    """Actions of the executor that replans every step, from chunks that came without delay.

    LeRobot's negative coefficients, with which the newest chunk weighs most, are the other order.
    """
    parameters = HandoverParameters(
        mode='ensemble',
        ensemble_decay=abs(coefficient),
        ensemble_order='newest_first' if coefficient < 0 else 'oldest_first',
    )
    live: list[LiveChunk] = []
    plan, actions = np.zeros((0, chunks.shape[2])), []
    for step, rows in enumerate(chunks):
        live = [chunk for chunk in live if chunk.end_step > step]
        live.append(LiveChunk(step, step, rows))
        plan = hand_over(parameters, plan[1:], live, step)
        actions.append(plan[0])
    return np.array(actions)


@pytest.mark.parametrize('coefficient', [0.0, 0.01, 0.5, -0.2])
@pytest.mark.parametrize('steps', [3, 8, 21])
def test_every_step_equals_lerobots_formula(coefficient: float, steps: int) -> None:
    chunks = np.random.default_rng(steps).normal(size=(steps, 8, 3))
    expected = lerobots(chunks, coefficient)
    np.testing.assert_allclose(executors(chunks, coefficient), expected, rtol=0, atol=1e-12)
    if coefficient:
        plain = lerobots(chunks, 0.0)
        assert np.abs(plain - expected).max() > 1e-4, 'the weights matter'


@pytest.mark.cases
@pytest.mark.parametrize('path', find('act_*.case.safetensors'), ids=lambda path: path.stem)
def test_recorded_chunks_give_the_actions_of_lerobots_ensembler(path: Path) -> None:
    from safetensors.numpy import load_file

    description = json.loads(
        path.with_name(path.name.replace('.case.safetensors', '.json')).read_text()
    )
    tensors, coefficient = load_file(path), description['ensemble_coefficient']
    for b in range(description['batch']):
        chunks = tensors['ensemble_chunks'][:, b].astype(np.float64)
        expected = tensors['ensemble_actions'][:, b]
        assert np.abs(lerobots(chunks, coefficient) - expected).max() <= 5e-6
        assert np.abs(executors(chunks, coefficient) - expected).max() <= 5e-6
