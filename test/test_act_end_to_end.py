"""From an ACT checkpoint folder through `vla_runtime export` to chunks in robot units.

Every `act_*.end_to_end` case in the cases folder: raw observations in, LeRobot's own chunks out.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from network_cases import relative_error
from reference_cases import find
from safetensors.torch import load_file

from vla_runtime.cli.main import main
from vla_runtime.policy import Policy
from vla_runtime.types import Observation

pytestmark = pytest.mark.cases


def arguments(case: Path) -> list[str]:
    """The options that complete a reference folder."""
    tensors = load_file(case.with_suffix('.safetensors'))
    state = ','.join(f'state_{i}' for i in range(len(tensors['state_0'])))
    actions = ','.join(f'action_{i}' for i in range(tensors['chunk_0'].shape[1]))
    return ['--state-names', state, '--action-names', actions, '--units', '1', '--rate-hz', '30']


@pytest.fixture(
    scope='module',
    params=find('act_*.end_to_end.json'),
    ids=lambda path: path.stem.removesuffix('.end_to_end'),
)
def case(request, tmp_path_factory):
    """Description, tensors and bundle of one case."""
    path: Path = request.param
    folder = path.with_name(path.name.removesuffix('.end_to_end.json'))
    bundle = tmp_path_factory.mktemp('act') / 'bundle'
    assert main(['export', str(folder), '--out', str(bundle), *arguments(path)]) == 0
    return json.loads(path.read_text()), load_file(path.with_suffix('.safetensors')), bundle


@pytest.fixture(scope='module', params=['torch', 'onnxruntime'])
def policy(request, case):
    return Policy.load(case[2], backend=request.param)


def observations(description, tensors):
    for i in range(description['observations']):
        images = {name: tensors[f'{name}_{i}'].numpy() for name in description['cameras']}
        yield i, Observation(images=images, state=tensors[f'state_{i}'].numpy(), instruction='')


def test_pixels_and_state_equal_lerobots(case, policy):
    description, tensors, _ = case
    for i, observation in observations(description, tensors):
        state = policy._codec.check(observation)
        if f'state_normalised_{i}' in tensors:
            assert relative_error(state, tensors[f'state_normalised_{i}']) <= 1e-6
        pixels, _ = policy._codec.camera_images.encode(observation.images)
        for index, name in enumerate(description['cameras']):
            if f'{name}_normalised_{i}' in tensors:
                expected = tensors[f'{name}_normalised_{i}']
                assert relative_error(pixels[index], expected) <= 1e-6, name


def test_chunks_equal_lerobots_normalised_and_in_robot_units(case, policy):
    description, tensors, _ = case
    seen = []
    for i, observation in observations(description, tensors):
        chunk, report = policy.infer(observation)
        assert relative_error(chunk.normalised, tensors[f'chunk_normalised_{i}']) <= 5e-5, i
        assert relative_error(chunk.actions, tensors[f'chunk_{i}']) <= 1e-4, i
        assert report.tokens == () and report.denoise_steps == 1
        seen.append(chunk.normalised)
    assert len(seen) < 2 or np.abs(seen[0] - seen[1]).max() > 1e-3, 'observations differ'
