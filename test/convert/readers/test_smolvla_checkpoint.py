"""LeRobot's SmolVLA folders: what they say, what they leave to the model they were cut from."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch
from checkpoint_folders import (
    edit_config,
    edit_json,
    edit_tensors,
    full_size_shapes,
    write_sparse_checkpoint,
)
from safetensors.torch import load_file
from tiny_policy import tokenizer_of

from vla_convert.checkpoints.folder_facts import ExportError
from vla_convert.checkpoints.options import ExportOptions
from vla_convert.checkpoints.tensors import read_tensors
from vla_convert.export.conversion import ExportPlan, plan_export
from vla_convert.readers.smolvla import NAMES
from vla_runtime.bundle.tensors import check_tensors
from vla_runtime.cli.main import main
from vla_runtime.families.flow_network import weight_shapes
from vla_runtime.families.smolvla.dimensions import SMOLVLA, SmolVlaDims
from vla_runtime.files.json_file import JsonError

REFERENCE = tokenizer_of('smolvla').parent
JOINTS = tuple('abcdef')
OPTIONS = ExportOptions(
    state_names=JOINTS,
    action_names=JOINTS,
    units=('deg',),
    rate_hz=30.0,
    vision_heads=4,
    kv_heads=2,
)

REFUSED = (ExportError, JsonError)


@pytest.fixture
def folder(tmp_path) -> Path:
    return Path(shutil.copytree(REFERENCE, tmp_path / 'policy'))


def plan(folder: Path, options: ExportOptions = OPTIONS) -> ExportPlan:
    return plan_export(folder, options, default_name='tiny')


def test_the_tensors_are_those_of_the_network_but_for_the_output_table(folder):
    theirs = load_file(folder / 'model.safetensors')
    tensors = read_tensors(folder, NAMES)
    assert len(tensors) == len(theirs) - 1
    check_tensors(tensors, weight_shapes('smolvla', plan(folder).spec.dims))


@pytest.mark.parametrize('every', [0, -1])
def test_no_expert_layer_may_attend_to_itself(folder, every):
    def all_cross(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        for name, value in tensors.items():
            if re.search(r'lm_expert\.layers\.[02]\.self_attn\.[kv]_proj', name):
                tensors[name] = torch.zeros(value.shape[0], 32)
        return tensors

    edit_config(folder, self_attn_every_n_layers=every)
    with pytest.raises(REFUSED, match=r'blocks\.0\.attention\.k'):
        plan(folder)
    edit_tensors(folder, all_cross)
    dims = plan(folder).spec.dims
    assert isinstance(dims, SmolVlaDims)
    assert dims.self_layers == () and dims.cross_layers == (0, 1, 2, 3)


def test_a_full_size_policy_is_planned_without_reading_its_weights(folder, capsys):
    path = folder / 'model.safetensors'
    write_sparse_checkpoint(path, full_size_shapes('smolvla', NAMES, load_file(path)))
    camera = {'type': 'VISUAL', 'shape': [3, 480, 640]}
    edit_json(
        folder / 'config.json',
        lambda d: d['input_features'].update({'observation.images.third': camera}),
    )
    edit_config(folder, chunk_size=50, resize_imgs_with_padding=[512, 512])
    arguments = ['--state-names', ','.join(JOINTS), '--action-names', ','.join(JOINTS)]
    arguments += ['--units', 'deg', '--rate-hz', '30', '--dry-run']
    assert main(['export', str(folder), '--out', str(folder / 'b'), *arguments]) == 0
    assert 'vision 12x768, language 16x960, expert 16x720' in capsys.readouterr().out
    options = ExportOptions(state_names=JOINTS, action_names=JOINTS, units=('deg',), rate_hz=30.0)
    assert plan(folder, options).spec.dims == SMOLVLA
