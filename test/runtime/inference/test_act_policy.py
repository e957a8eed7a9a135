"""ACT through `Policy`: no instruction, the exact cache, images at their own sizes, refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tiny_policy import observation, tiny_spec, write_tiny_policy

from vla_convert.export.onnx.export import write_onnx
from vla_convert.export.onnx.verification import verify_onnx
from vla_runtime.bundle.folder import read_bundle
from vla_runtime.bundle.writer import seal
from vla_runtime.inference.prefix_cache import CachePolicy
from vla_runtime.inference.settings import PolicySettings
from vla_runtime.policy import Policy

# A wrist camera of another size than the one above.
SIZES = ((48, 64), (33, 100))


@pytest.fixture(scope='module')
def bundle(tmp_path_factory) -> Path:
    return write_tiny_policy(tmp_path_factory.mktemp('bundles') / 'act', tiny_spec('act'))


@pytest.fixture(scope='module')
def two_sizes(tmp_path_factory) -> Path:
    """A policy whose cameras' images differ in size, with ONNX files."""
    spec = tiny_spec('act')
    spec = replace(spec, dims=replace(spec.dims, images=SIZES))
    folder = write_tiny_policy(tmp_path_factory.mktemp('bundles') / 'two_sizes', spec)
    write_onnx(folder, spec, 'float32')
    seal(folder, spec)
    return folder


def of_two_sizes():
    seen = observation()
    wrist = np.random.default_rng(5).integers(0, 256, (*SIZES[1], 3), dtype=np.uint8)
    return replace(seen, images={'top': seen.images['top'], 'wrist': wrist})


def test_a_change_of_normalised_images_is_measured_in_grey_levels(bundle):
    bounds = CachePolicy(mode='bounded', max_age_s=9.0, max_reuses=9, max_image_change=2.5)
    policy = Policy.load(bundle, settings=PolicySettings(cache=bounds))
    grey = {name: np.full((48, 64, 3), 100, np.uint8) for name in ('top', 'wrist')}
    # With stamps, for without one the ages of cache entries would be wall time.
    policy.infer(observation(images=grey, stamps_ns={'state': 100_000_000}))
    for levels, reuse in ((2, 'reused'), (3, 'miss')):
        brighter = {**grey, 'top': grey['top'] + np.uint8(levels)}
        stamps_ns = {'state': levels * 100_000_000}
        _, report = policy.infer(observation(images=brighter, stamps_ns=stamps_ns))
        outcome = report.cache.images['top']
        assert outcome.reuse.value == reuse
        assert outcome.grey_levels == pytest.approx(levels, rel=1e-4)


def test_an_image_of_another_size_is_refused_with_both_sizes(bundle):
    policy, seen = Policy.load(bundle), observation()
    wrong = {**seen.images, 'wrist': np.zeros((24, 32, 3), np.uint8)}
    with pytest.raises(ValueError, match=r'images\[wrist\]'):
        policy.infer(replace(seen, images=wrong))


def test_images_of_two_sizes_run_on_both_backends(two_sizes):
    chunks = []
    for backend in ('torch', 'onnxruntime'):
        policy = Policy.load(two_sizes, backend)
        policy.warm_up()
        chunk, report = policy.infer(of_two_sizes())
        assert report.runs['vision'] == 2
        again, _ = policy.infer(of_two_sizes())
        np.testing.assert_array_equal(again.normalised, chunk.normalised)
        chunks.append(chunk.normalised)
        policy.close()
    np.testing.assert_allclose(*chunks, rtol=0, atol=1e-5)


def test_images_of_two_sizes_are_verified_in_a_file_each(two_sizes):
    receipt = verify_onnx(two_sizes, read_bundle(two_sizes).spec)
    assert receipt.failures == []
    files = {item.file for item in receipt.tensors}
    assert {'vision.onnx', 'vision_s2.onnx'} <= files


def test_images_of_two_sizes_are_refused_by_tensorrt(two_sizes):
    from vla_runtime.engines.tensorrt.loading import check_one_image_size

    with pytest.raises(ValueError, match="'tensorrt'"):
        check_one_image_size(read_bundle(two_sizes).spec.dims)
