"""From a SmolVLA checkpoint folder through `vla_runtime export` to chunks in robot units.

Every `smolvla_*.end_to_end` case in the cases folder: raw observations in, LeRobot's own tokens and
chunks out.
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


def folder_cases() -> list[Path]:
    return find('smolvla_*.end_to_end.json')


def arguments(case: Path) -> list[str]:
    """The options that complete a reference folder."""
    description = json.loads(case.read_text())
    tensors = load_file(case.with_suffix('.safetensors'))
    state = ','.join(f'state_{i}' for i in range(len(tensors['state_0'])))
    actions = ','.join(f'action_{i}' for i in range(tensors['chunk_0'].shape[1]))
    return [
        *('--state-names', state, '--action-names', actions, '--units', 'deg', '--rate-hz', '30'),
        *('--vision-heads', str(description['dims']['v_heads'])),
        *('--kv-heads', str(description['dims']['num_kv_heads'])),
    ]


@pytest.fixture(
    scope='module', params=folder_cases(), ids=lambda path: path.stem.removesuffix('.end_to_end')
)
def case(request, tmp_path_factory):
    """Description, tensors and bundle of one case."""
    path: Path = request.param
    folder = path.with_name(path.name.removesuffix('.end_to_end.json'))
    bundle = tmp_path_factory.mktemp('smolvla') / 'bundle'
    assert main(['export', str(folder), '--out', str(bundle), *arguments(path)]) == 0
    return json.loads(path.read_text()), load_file(path.with_suffix('.safetensors')), bundle


@pytest.fixture(scope='module', params=['torch', 'onnxruntime'])
def policy(request, case):
    return Policy.load(case[2], backend=request.param)


def observations(description, tensors):
    for i, entry in enumerate(description['observations']):
        yield (
            i,
            Observation(
                images={name: tensors[f'{name}_{i}'].numpy() for name in description['cameras']},
                state=tensors[f'state_{i}'].numpy(),
                instruction=entry['task'],
            ),
        )


def test_tokens_and_state_equal_lerobots(case, policy):
    description, tensors, _ = case
    for i, observation in observations(description, tensors):
        state = policy._codec.check(observation)
        rows = policy._codec.rows(observation.instruction, state, (None,))
        tokens, mask = rows['tokens'], rows['token_mask']
        expected = tensors[f'tokens_{i}'][tensors[f'token_mask_{i}']].numpy()
        np.testing.assert_array_equal(tokens[0][mask[0]], expected)
        assert mask[0][: len(expected)].all(), 'the prompt comes first'
        assert relative_error(state, tensors[f'state_normalised_{i}']) <= 1e-6


def test_chunks_equal_lerobots_normalised_and_in_robot_units(case, policy):
    description, tensors, _ = case
    noise = tensors['noise'][0].numpy()
    for i, observation in observations(description, tensors):
        chunk, _ = policy.infer(observation, noise=noise)
        width = len(policy.spec.actions)
        expected = tensors[f'chunk_normalised_{i}']
        assert relative_error(chunk.normalised[:, :width], expected) <= 5e-5, i
        assert relative_error(chunk.actions, tensors[f'chunk_{i}']) <= 1e-4, i
