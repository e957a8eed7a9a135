"""Evo-1 through `Policy`: exact cache, masked uniform noise, what is tied and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from guided_policies import NOISE, load_policy, write_guided
from tiny_policy import observation

from vla_runtime.inference.runner import chunk_noise
from vla_runtime.policy import Policy

REAL = 3


@pytest.fixture(scope='module')
def bundle(tmp_path_factory) -> Path:
    return write_guided(tmp_path_factory.mktemp('bundles'), 'evo1')


def test_noise_is_uniform_and_zero_where_actions_are_padded(bundle):
    chunk, report = load_policy(bundle).infer(observation())
    assert np.abs(report.noise[:, :REAL]).max() <= 1.0
    assert not report.noise[:, REAL:].any() and not chunk.normalised[:, REAL:].any()
    # A caller's noise is masked as well, and the caller's array stays as it is.
    given = NOISE.copy()
    again, report = load_policy(bundle).infer(observation(), noise=given)
    np.testing.assert_array_equal(given, NOISE)
    np.testing.assert_array_equal(report.noise[:, :REAL], NOISE[:, :REAL])
    assert not again.normalised[:, REAL:].any()
    many = chunk_noise(3, 4, (1000, 24), kind='uniform')
    assert many.dtype == np.float32
    assert (many.min() < -0.99, many.max() > 0.99, abs(many.mean()) < 0.02) == (True, True, True)
    assert many.std() == pytest.approx(3**-0.5, rel=0.02)


def test_images_of_any_shape_go_in(bundle):
    policy: Policy = load_policy(bundle)
    seen = observation()
    tall = {name: np.ascontiguousarray(i.transpose(1, 0, 2)) for name, i in seen.images.items()}
    chunk, _ = policy.infer(replace(seen, images=tall), noise=NOISE)
    assert np.isfinite(chunk.actions).all()
