"""From a LeRobot checkpoint folder through `vla_runtime export` to chunks in robot units.

Every `*.end_to_end` case in the cases folder: raw observations in, LeRobot's own tokens and chunks
out.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from checkpoint_folders import end_to_end_cases, folder_of, lerobot_arguments
from safetensors.numpy import load_file

from vla_runtime.cli.main import main
from vla_runtime.policy import Policy
from vla_runtime.types import Observation

pytestmark = pytest.mark.cases


@pytest.fixture(
    scope='module',
    params=end_to_end_cases(),
    ids=lambda path: path.stem.removesuffix('.end_to_end'),
)
def case(request, tmp_path_factory):
    """Description, tensors and the exported policy of one case."""
    path: Path = request.param
    bundle = tmp_path_factory.mktemp('end_to_end') / 'bundle'
    arguments = ['export', str(folder_of(path)), '--out', str(bundle), *lerobot_arguments(path)]
    assert main([*arguments, '--onnx-precision', 'none']) == 0
    tensors = load_file(path.with_suffix('.safetensors'))
    return json.loads(path.read_text()), tensors, Policy.load(bundle)


def observations(description, tensors, policy):
    cameras = [camera.name for camera in policy.spec.cameras if camera.present]
    for i, entry in enumerate(description['observations']):
        yield (
            i,
            Observation(
                images={name: tensors[f'{name}_{i}'] for name in cameras},
                state=tensors[f'state_{i}'],
                instruction=entry['task'],
            ),
        )


def test_tokens_equal_lerobots(case):
    description, tensors, policy = case
    for i, observation in observations(description, tensors, policy):
        state = policy._codec.check(observation)
        rows = policy._codec.rows(observation.instruction, state, (None,))
        for name in ('tokens', 'token_mask'):
            np.testing.assert_array_equal(rows[name][0], tensors[f'{name}_{i}'])


def test_chunks_equal_lerobots_normalised_and_in_robot_units(case):
    description, tensors, policy = case
    noise = tensors['noise'][0]
    for i, observation in observations(description, tensors, policy):
        chunk, _ = policy.infer(observation, noise=noise)
        width = len(policy.spec.actions)
        error = np.abs(chunk.normalised[:, :width] - tensors[f'chunk_normalised_{i}']).max()
        assert error <= 2e-5, f'observation {i}, normalised'
        error = np.abs(chunk.actions - tensors[f'chunk_{i}']).max()
        assert error <= 1e-4, f'observation {i}, robot units'


def test_relative_actions_are_deltas_except_the_gripper(case):
    description, _, policy = case
    kinds = {action.name: action.kind for action in policy.spec.actions}
    for name, kind in kinds.items():
        relative = description['relative_actions'] and 'gripper' not in name
        assert kind == ('delta' if relative else 'absolute'), name
