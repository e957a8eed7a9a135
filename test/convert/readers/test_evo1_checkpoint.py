"""LeRobot's Evo-1 folders: read, refused, and driven from raw observations to robot units."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoint_folders import (
    edit_config,
    edit_tensors,
)
from evo1_cases import load_evo1_case
from evo1_folders import options_of, write_folder
from network_cases import relative_error
from reference_cases import shipped
from safetensors.torch import load_file

from vla_convert.checkpoints.folder_facts import ExportError
from vla_convert.checkpoints.options import ExportOptions
from vla_convert.checkpoints.reader import find_reader
from vla_convert.export.conversion import ExportPlan, plan_export, write_export
from vla_convert.readers.evo1 import of_embodiment
from vla_runtime.bundle.tensors import StoredTensor
from vla_runtime.declarations.evo1 import Evo1Dims
from vla_runtime.files.json_file import JsonError
from vla_runtime.policy import Policy
from vla_runtime.types import Observation

PATH = shipped('evo1_a')
REFUSED = (ExportError, JsonError)


@pytest.fixture
def folder(tmp_path) -> Path:
    return write_folder(tmp_path / 'policy', PATH, 0)


def plan(folder: Path, options: ExportOptions | None = None) -> ExportPlan:
    return plan_export(folder, options or options_of(PATH, 0), default_name='tiny')


def test_the_embodiment_of_the_folder_is_cut_out_of_all(tmp_path):
    weight = StoredTensor('W1', tmp_path, 'F32', (3, 4, 5), 100)
    bias = StoredTensor('b1', tmp_path, 'F32', (3, 5), 900)
    other = StoredTensor('norm', tmp_path, 'F32', (4,), 1000)
    tensors = {'action_encoder.fc1.weight': weight, 'action_encoder.fc1.bias': bias, 'norm': other}
    chosen = of_embodiment(tensors, 2)
    assert chosen['action_encoder.fc1.weight'].shape == (4, 5)
    assert chosen['action_encoder.fc1.weight'].offset == 100 + 2 * 4 * 5 * 4
    assert (chosen['action_encoder.fc1.bias'].shape, chosen['norm']) == ((5,), other)
    with pytest.raises(ExportError, match=r'config\.json'):
        of_embodiment(tensors, 3)


def test_a_folder_of_several_embodiments_gives_the_chunk_of_its_own(folder):
    """Stack the matrices behind others', transposed, as LeRobot stores them."""
    case = load_evo1_case(PATH, 0)
    pattern = re.compile(r'(.*(?:encoder|mlp_head)\.\w+)\.linear\.(weight|bias)')

    def stack(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        stacked = {}
        for name, value in tensors.items():
            match = pattern.fullmatch(name)
            if match:
                own = value.T if match[2] == 'weight' else value
                stacked[f'{match[1]}.{match[2]}'] = torch.stack([own * 0.5, own]).contiguous()
            else:
                stacked[name] = value
        return stacked

    edit_tensors(folder, stack)
    edit_config(folder, default_embodiment_id=1)
    write_export(plan(folder), folder / 'bundle')
    policy = Policy.load(folder / 'bundle', backend='torch')
    dims = policy.spec.dims
    assert isinstance(dims, Evo1Dims) and dims.input_major
    weights = load_file(folder / 'bundle/weights.safetensors')
    for name, value in case.network.state_dict().items():
        projection = name.startswith(('state_encoder', 'action_encoder', 'velocity_head'))
        turned = projection and name.endswith('weight')
        assert torch.equal(weights[name].T if turned else weights[name], value), name
    noise = case.of('noise').numpy()
    images = {f'camera_{i}': np.zeros((60, 90, 3), np.uint8) for i in range(2)}
    seen = Observation(images, case.of('raw_state').numpy(), 'pick up the red cup')
    chunk, _ = policy.infer(seen, noise=noise)
    alone = write_folder(folder.with_name('alone'), PATH, 0)
    write_export(plan(alone), alone / 'bundle')
    expected, _ = Policy.load(alone / 'bundle', backend='torch').infer(seen, noise=noise)
    assert relative_error(chunk.normalised, torch.from_numpy(expected.normalised)) <= 1e-5


@pytest.mark.parametrize('file', ['mp_rank_00_model_states.pt', 'model.safetensors'])
def test_a_folder_of_its_authors_is_named_and_what_is_served(tmp_path, file):
    """Whether its pickle was converted or not: nothing would be gained by that."""
    config = {'vlm_name': 'OpenGVLab/InternVL3-1B', 'per_action_dim': 24, 'state_dim': 24}
    (tmp_path / 'config.json').write_text(json.dumps(config))
    (tmp_path / file).write_bytes(b'')
    with pytest.raises(ExportError, match=r'LeRobot'):
        find_reader(tmp_path)
