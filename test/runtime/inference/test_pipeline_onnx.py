"""Two inferences at a time in ONNX Runtime: at once, and the chunks of one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
from onnx_bundles import tiny_onnx_bundle
from test_pipeline import PATIENCE_S, THROUGHPUT, Gate, chunk_of
from tiny_policy import observation

from vla_runtime.inference.settings import PolicySettings
from vla_runtime.policy import Policy
from vla_runtime.types import Observation

FUSED = PolicySettings(cfg_enabled=True, cfg_beta=2.0, cfg_mode='fused')
SERIAL = replace(FUSED, cfg_mode='serial')


@pytest.fixture(scope='module', params=('pi05', 'pi0'))
def policy(request: pytest.FixtureRequest) -> Iterator[Policy]:
    loaded = Policy.load(
        tiny_onnx_bundle(request.param), backend='onnxruntime', settings=THROUGHPUT
    )
    yield loaded
    loaded.close()


def chunks(
    policy: Policy, seen: Sequence[tuple[PolicySettings, Observation]], pipeline: str
) -> list[np.ndarray]:
    policy.reset()
    futures = []
    for settings, look in seen:
        policy.settings = replace(settings, pipeline=pipeline)
        futures.append(policy.submit(look))
    return [chunk_of(future) for future in futures]


def test_the_next_request_is_encoded_while_the_expert_denoises(policy: Policy) -> None:
    policy.reset()
    policy.settings = THROUGHPUT
    gate = Gate()
    first = policy.submit(observation(0), on_step=gate)
    gate.wait()
    # The first denoise loop stands still at its first step: this returns all the same.
    second = policy.submit(observation(1))
    assert not first.done()
    gate.open()
    assert first.result(PATIENCE_S)[1].pipeline == 'throughput'
    assert second.result(PATIENCE_S)[1].overlap_ms > 0


def test_chunks_are_bit_identical_to_those_of_one_after_the_other(policy: Policy) -> None:
    random = np.random.default_rng(0)
    kinds = (PolicySettings(), FUSED, SERIAL, PolicySettings(denoise_steps=3))
    seen = [
        (kinds[random.integers(len(kinds))], observation(int(random.integers(4))))
        for _ in range(24)
    ]
    alone, together = (chunks(policy, seen, each) for each in ('latency', 'throughput'))
    for one, other in zip(alone, together, strict=True):
        np.testing.assert_array_equal(one, other)
    assert len({chunk.tobytes() for chunk in alone}) > 4
