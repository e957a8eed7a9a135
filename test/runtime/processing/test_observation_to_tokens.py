"""State and task to tokens, normalised chunk to robot units, against LeRobot's own processors."""

import json
from pathlib import Path

import numpy as np
import pytest
from reference_cases import find
from safetensors.numpy import load_file

from vla_runtime.family.listing import find_family
from vla_runtime.processing.actions import ActionSpace
from vla_runtime.processing.normalization import Normalizer
from vla_runtime.processing.prompts import PromptFormat, build_prompt
from vla_runtime.processing.tokenizer import Tokenizer

pytestmark = pytest.mark.cases

KINDS = {
    'QUANTILES': 'quantiles_lerobot',
    'MEAN_STD': 'mean_std_lerobot',
    'MIN_MAX': 'min_max',
    'IDENTITY': 'identity',
}


def _folder(case: Path) -> Path:
    return case.with_name(case.name.removesuffix('.end_to_end.json'))


def _is_of_pi(case: Path) -> bool:
    config = json.loads((_folder(case) / 'config.json').read_text())
    return config['type'] in ('pi05', 'pi0')


CASES = [case for case in find('*.end_to_end.json') if _is_of_pi(case)]


def _normalizer(folder: Path, pipeline: str, step_name: str, feature: str) -> Normalizer:
    steps = json.loads((folder / pipeline).read_text())['steps']
    step = next(step for step in steps if step['registry_name'] == step_name)
    kind = step['config']['norm_map']['ACTION' if feature == 'action' else 'STATE']
    statistics = {
        name.removeprefix(f'{feature}.'): values
        for name, values in load_file(folder / step['state_file']).items()
        if name.startswith(f'{feature}.')
    }
    return Normalizer(KINDS[kind], statistics)


@pytest.mark.parametrize('case', CASES, ids=lambda path: path.stem)
def test_tokens_equal_lerobots(case):
    folder, described = _folder(case), json.loads(case.read_text())
    tensors = load_file(case.with_suffix('.safetensors'))
    config = json.loads((folder / 'config.json').read_text())
    normalizer = _normalizer(
        folder, 'policy_preprocessor.json', 'normalizer_processor', 'observation.state'
    )
    template = 'pi05_state' if config['type'] == 'pi05' else 'pi0'
    fmt = PromptFormat(template, 'lerobot', None)
    layout = find_family(config['type']).templates[template]
    tokenizer = Tokenizer.load(folder / 'tokenizer.json')
    for i, observation in enumerate(described['observations']):
        state = normalizer.normalise(tensors[f'state_{i}'])
        prompt = build_prompt(layout, fmt, observation['task'], state)
        tokens, mask = tokenizer.encode(prompt, config['tokenizer_max_length'])
        np.testing.assert_array_equal(mask, tensors[f'token_mask_{i}'])
        np.testing.assert_array_equal(tokens, tensors[f'tokens_{i}'])


@pytest.mark.parametrize('case', CASES, ids=lambda path: path.stem)
def test_robot_units_equal_lerobots(case):
    folder, described = _folder(case), json.loads(case.read_text())
    tensors = load_file(case.with_suffix('.safetensors'))
    normalizer = _normalizer(
        folder, 'policy_postprocessor.json', 'unnormalizer_processor', 'action'
    )
    joints = tuple(described['joints'])
    delta = [described['relative_actions'] and 'gripper' not in joint for joint in joints]
    space = ActionSpace(
        names=joints,
        kinds=tuple('delta' if flag else 'absolute' for flag in delta),
        state_columns=tuple(range(len(joints))),
    )
    for i in range(len(described['observations'])):
        actions = normalizer.denormalise(tensors[f'chunk_normalised_{i}'])
        robot = space.to_robot(actions, tensors[f'state_{i}'])
        np.testing.assert_allclose(robot, tensors[f'chunk_{i}'], rtol=1e-6, atol=1e-6)
