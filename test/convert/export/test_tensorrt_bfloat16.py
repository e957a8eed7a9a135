"""A bfloat16 bundle from ONNX files to chunks: engines, buffers and receipt."""

from __future__ import annotations

import json

import numpy as np
import pytest
from tensorrt_machine import Machine, write_exported_policy
from tiny_policy import observation

from vla_runtime.cli.main import main
from vla_runtime.engines.tolerances import BOUNDS
from vla_runtime.inference.settings import PolicySettings
from vla_runtime.policy import Policy


@pytest.fixture(scope='module')
def exported(tmp_path_factory):
    return write_exported_policy(tmp_path_factory.mktemp('bfloat16') / 'policy', 'pi0', 'bfloat16')


def test_bfloat16_engines_pass_their_receipt_and_give_chunks_within_its_bounds(
    monkeypatch, exported
):
    Machine(monkeypatch, exported)
    assert main(['build', str(exported)]) == 0
    (path,) = exported.glob('engines/*/verification.json')
    receipt = json.loads(path.read_text())
    assert receipt['precision'] == 'bfloat16'
    errors = [item['max_error'] for item in receipt['chunks']]
    # Rounded, and no more than that: engines in float32 err by 5e-5 at most.
    assert 5e-5 < max(errors) <= min(item['bound'] for item in receipt['chunks'])
    for settings in (PolicySettings(), PolicySettings(cfg_enabled=True, cfg_beta=2.0)):
        found, expected = (
            _normalised(exported, *place, settings)
            for place in (('tensorrt', 'cuda', 'bfloat16'), ('torch', 'cpu', 'float32'))
        )
        error = np.abs(found - expected).max() / max(1.0, np.abs(expected).max())
        assert 0.0 < error <= BOUNDS['bfloat16'].chunk


def _normalised(bundle, backend, device, precision, settings) -> np.ndarray:
    """The chunk before it is turned into units, which the bounds are for."""
    policy = Policy.load(bundle, backend, device, precision=precision, settings=settings)
    trace = []
    policy.infer(observation(), on_step=lambda index, x, velocity: trace.append(x))
    policy.close()
    return trace[-1]
