"""End-effector groups of GR00T N1.6 and N1.7 through `vla_runtime export`.

The reference decodes a relative group to p = R_ref p_rel + p_ref and R = R_ref R_rel, rotations as
the first two rows of a matrix; the recorded actions are those of that formula in numpy.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from family_contracts.groot import stand_in
from groot_cases import N16, N17, load_groot_case
from groot_n17_folders import (
    cameras_of,
    joints_of,
    write_backbone,
    write_lerobot_folder,
    write_nvidia_folder,
)
from recorded_numbers import recorded
from reference_cases import shipped

from vla_runtime.bundle.folder import read_bundle
from vla_runtime.cli.main import main
from vla_runtime.policy import Policy
from vla_runtime.types import Observation

# Fields of the state and of the actions, in orders that differ.
WIDTHS = {'eef_9d': 9, 'gripper': 1, 'arm': 2}
STATE = ('gripper', 'arm', 'eef_9d')
# The relative joints stand at number 1 of the state and of these actions, and at 10 of those.
ORDER, OTHER_ORDER = ('gripper', 'arm', 'eef_9d'), ('eef_9d', 'gripper', 'arm')


def matrix(rows: np.ndarray) -> np.ndarray:
    """(6,) two rows to a matrix, made orthonormal."""
    first = rows[:3] / np.linalg.norm(rows[:3])
    second = rows[3:] - (first @ rows[3:]) * first
    second /= np.linalg.norm(second)
    return np.stack([first, second, np.cross(first, second)])


def ranges(random: np.random.Generator, *shape: int) -> dict[str, list]:
    low = random.uniform(-1.0, -0.5, shape)
    width = random.uniform(1.0, 2.0, shape)
    values = {'min': low, 'max': low + width}
    values |= {'q01': low + 0.05 * width, 'q99': low + 0.9 * width}
    return {name: value.tolist() for name, value in values.items()}


def posed(
    folder: Path,
    source: Path,
    *,
    percentiles: bool,
    relative: bool,
    order: tuple[str, ...] = ORDER,
    **settings: object,
) -> Path:
    """A case of the same weights whose groups are a pose, a gripper and joints, in any order."""
    d = json.loads(source.read_text())
    random = np.random.default_rng(5 + percentiles)
    steps = d['modality_config']['action']['delta_indices']
    rep = 'RELATIVE' if relative else 'ABSOLUTE'
    configs = {
        'eef_9d': {'rep': rep, 'type': 'EEF', 'format': 'XYZ_ROT6D'},
        'gripper': {'rep': 'ABSOLUTE', 'type': 'NON_EEF', 'format': 'DEFAULT'},
        'arm': {'rep': rep, 'type': 'NON_EEF', 'format': 'DEFAULT'},
    }
    d['modality_config'] = {
        'state': {'modality_keys': list(STATE), 'delta_indices': [0]},
        'action': {
            'modality_keys': list(order),
            'delta_indices': steps,
            'action_configs': [configs[name] for name in order],
        },
    }
    d['statistics'] = {
        'state': {name: ranges(random, WIDTHS[name]) for name in STATE},
        'action': {name: ranges(random, width) for name, width in WIDTHS.items()},
        'relative_action': {
            name: ranges(random, len(steps), WIDTHS[name]) for name in ('arm', 'eef_9d')
        },
    }
    d['use_percentiles'] = percentiles
    d |= settings
    folder.mkdir()
    case = folder / source.name
    for file in source.parent.glob(f'{source.stem}.*'):
        shutil.copy(file, folder / file.name)
    case.write_text(json.dumps(d))
    return case


@pytest.fixture
def source() -> Path:
    return shipped('groot_n17_a')


def exported(folder: Path, case: Path, *targets: str) -> Path:
    """A bundle of a folder, its case beside it."""
    tokenizer = write_backbone(folder.parent / 'backbone', case)
    bundle, d = folder.parent / 'bundle', json.loads(case.read_text())
    heads = f'dit={d["dit_heads"]}'
    if d.get('vlsa_layers'):
        heads += f',context={d["vlsa_heads"]}'
    size = ('--image-size', f'{d["raw_height"]}x{d["raw_width"]}') if d['kind'] == N16 else ()
    words = [
        *('--state-names', ','.join(joints_of(case))),
        *('--action-names', ','.join(joints_of(case, 'action'))),
        *('--units', 'rad', '--rate-hz', '30', '--prompt-length', '40'),
        *('--tokenizer', str(tokenizer), '--heads', heads),
        *size,
        *targets,
    ]
    words += ['--out', str(bundle), '--onnx-precision', 'none']
    assert main(['export', str(folder), *words]) == 0
    return bundle


def state_and_observation(source: Path) -> tuple[np.ndarray, Observation]:
    recorded = load_groot_case(source, 0)
    turned = matrix(np.array([0.2, 0.9, -0.3, -0.8, 0.1, 0.4]))
    state = np.concatenate([[0.1, 0.2, -0.3, 0.4, -0.1, 0.3], turned[:2].reshape(-1)])
    images = {name: recorded.tensors[name][0].numpy() for name in cameras_of(source)}
    return state, Observation(images, state, recorded.description['tasks'][0])


# Each value with each other one; all together are for the thorough tests.
PAIRS = {
    (N16, True, True, ORDER),
    (N16, False, False, OTHER_ORDER),
    (N17, True, False, OTHER_ORDER),
    (N17, False, True, ORDER),
    (N17, True, True, OTHER_ORDER),
}


@pytest.mark.parametrize(
    ('kind', 'percentiles', 'relative', 'order'),
    [
        pytest.param(*one, marks=() if one in PAIRS else pytest.mark.thorough)
        for one in product((N16, N17), (True, False), (True, False), (ORDER, OTHER_ORDER))
    ],
)
def test_groups_of_an_end_effector_become_absolute_poses(
    tmp_path, monkeypatch, kind, percentiles, relative, order
):
    source = shipped(f'{kind}_a')
    if kind == N16:
        stand_in(monkeypatch)
    case = posed(tmp_path / 'case', source, percentiles=percentiles, relative=relative, order=order)
    write = write_nvidia_folder if kind == N16 else write_lerobot_folder
    bundle = exported(write(tmp_path / 'policy', case), case)
    (pose,) = read_bundle(bundle).spec.poses
    assert (pose.name, pose.form) == ('eef_9d', 'rotation_6d_rows')
    assert (*pose.state_position, *pose.state_rotation) == joints_of(case)[3:]
    assert (pose.kind, pose.frame) == ('delta' if relative else 'absolute', 'tool')

    state, seen = state_and_observation(source)
    noise = load_groot_case(source, 0).tensors['noise'][0].numpy()
    policy = Policy.load(bundle, backend='torch')
    chunk, _ = policy.infer(seen, noise=noise)
    name = f'{kind} {percentiles} {relative} {order[0]}'
    expected = recorded('groot', name, torch.from_numpy(chunk.actions))
    np.testing.assert_allclose(chunk.actions, expected, atol=1e-4)
    if relative:
        moved, _ = policy.infer(replace(seen, state=state + np.eye(12)[3] * 0.25), noise=noise)
        assert np.abs(moved.actions - chunk.actions).max() > 0.1


# Height and width of the images, what is kept of them, and that in whole tokens of 16 pixels.
TARGET, KEPT, WHOLE = (48, 72), (44, 51), (48, 64)


@pytest.mark.parametrize(
    ('write', 'name'),
    [(write_nvidia_folder, 'seen_by_nvidia'), (write_lerobot_folder, 'seen_by_lerobot')],
)
def test_non_square_images_are_cut_as_the_folder_s_project_does(tmp_path, source, write, name):
    case = posed(
        tmp_path / 'case',
        source,
        percentiles=True,
        relative=True,
        order=OTHER_ORDER,
        image_target=TARGET,
        image_crop=KEPT,
    )
    bundle = exported(write(tmp_path / 'policy', case), case)
    assert read_bundle(bundle).spec.dims.image == WHOLE
    _, seen = state_and_observation(source)
    noise = load_groot_case(source, 0).tensors['noise'][0].numpy()
    chunk, _ = Policy.load(bundle, backend='torch').infer(seen, noise=noise)
    # As the networks gave it for images that the project's own transforms had cut.
    expected = recorded('groot', name, torch.from_numpy(chunk.actions))
    np.testing.assert_allclose(chunk.actions, expected, atol=1e-4)
