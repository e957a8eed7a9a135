"""BitVLA's folders: read, refused, and driven from raw images to robot units."""

from __future__ import annotations

import json
import pickle
import resource
import zipfile
from collections import OrderedDict
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bitvla_cases import load_bitvla_case
from bitvla_folders import (
    DATA_SET,
    options_of,
    write_folder,
)
from checkpoint_folders import edit_config, edit_json
from recorded_numbers import recorded
from reference_cases import shipped
from safetensors.torch import load_file, save_file

from vla_convert.checkpoints.folder_facts import ExportError
from vla_convert.checkpoints.options import ExportOptions
from vla_convert.export.conversion import ExportPlan, plan_export, write_export
from vla_runtime.bundle.folder import BundleError, read_bundle
from vla_runtime.bundle.schema import WEIGHTS_FILE
from vla_runtime.files.json_file import JsonError
from vla_runtime.models.blocks.ternary import unpack
from vla_runtime.models.shapes.bundle_contents import check_contents, check_finite
from vla_runtime.policy import Policy
from vla_runtime.types import Observation

pytestmark = pytest.mark.cases
PATH = shipped('bitvla_a')
REFUSED = (ExportError, JsonError)


@pytest.fixture
def folder(tmp_path) -> Path:
    return write_folder(tmp_path / 'policy', PATH)


def plan(folder: Path, options: ExportOptions | None = None) -> ExportPlan:
    return plan_export(folder, options or options_of(PATH), default_name='tiny')


def observation(d: dict[str, Any], seed: int = 0) -> Observation:
    random = np.random.default_rng(seed)
    return Observation(
        images={
            f'camera_{i}': random.integers(0, 256, (48, 64, 3), dtype=np.uint8)
            for i in range(d['cameras'])
        },
        # Some numbers lie beyond the statistics.
        state=random.uniform(-2, 2, d['proprio_dim']).astype(np.float32),
        instruction='Pick up the RED cup',
    )


@pytest.mark.parametrize('parallel', [True, False])
def test_raw_images_to_robot_units(tmp_path: Path, parallel: bool):
    d = json.loads(PATH.read_text())
    source = write_folder(tmp_path / 'policy', PATH, parallel=parallel)
    write_export(plan(source), tmp_path / 'bundle')
    bundle = read_bundle(tmp_path / 'bundle')
    assert check_contents(bundle) and check_finite(bundle) == []
    with closing(Policy.load(tmp_path / 'bundle', backend='torch')) as policy:
        for seed in range(2):
            seen = observation(d, seed)
            chunk, _ = policy.infer(seen)
            # By OFT's evaluation, around our network of the case.
            name = f'robot_units_{seed}'
            expected = recorded('bitvla', name, torch.from_numpy(chunk.actions)).numpy()
            assert chunk.actions.shape == expected.shape
            # A code on the edge between two moves the actions by up to this.
            assert np.abs(chunk.actions - expected).max() <= 0.1 * max(1, np.abs(expected).max())
            assert np.abs(chunk.actions - expected).mean() <= 1e-3
            again, report = policy.infer(seen)
            assert all(outcome.reuse == 'hit' for outcome in report.cache.prefixes)
            assert np.array_equal(again.actions, chunk.actions)


def test_the_bundle_holds_two_bits_a_weight(tmp_path: Path, folder: Path):
    made, case = plan(folder), load_bitvla_case(PATH)
    write_export(made, tmp_path / 'bundle')
    stored = load_file(tmp_path / 'bundle' / WEIGHTS_FILE)
    state = case.network.state_dict()
    assert {name: value.shape for name, value in stored.items()} == {
        name: value.shape for name, value in state.items()
    }
    packed = [name for name in stored if name.endswith('.packed')]
    assert len(packed) == 6 * case.network.dims.vision.depth + 7 * case.network.dims.language.depth
    for name in packed:
        assert stored[name].dtype == torch.uint8 and torch.equal(stored[name], state[name])
        inputs = 4 * stored[name].shape[1]
        assert set(unpack(stored[name], inputs).unique().tolist()) == {-1, 0, 1}


def test_bfloat16_masters_are_rounded_in_float32(tmp_path: Path):
    source = write_folder(tmp_path / 'policy', PATH, torch.bfloat16)
    write_export(plan(source), tmp_path / 'bundle')
    stored = load_file(tmp_path / 'bundle' / WEIGHTS_FILE)
    theirs = load_file(source / 'model.safetensors')
    master = theirs['language_model.model.layers.0.self_attn.q_proj.weight'].float()
    scale = master.abs().mean().clamp(min=1e-5)
    meant = (master * scale.reciprocal()).round().clamp(-1, 1)
    layer = 'language.blocks.0.attention.q'
    found = unpack(stored[f'{layer}.packed'], master.shape[1])
    assert torch.equal(found, meant.to(torch.int8))
    assert torch.isclose(stored[f'{layer}.weight_scale'], scale, rtol=1e-6)
    assert stored['language.embedding.weight'].dtype == torch.bfloat16
    with closing(Policy.load(tmp_path / 'bundle', backend='torch', precision='bfloat16')) as policy:
        d = json.loads(PATH.read_text())
        assert np.isfinite(policy.infer(observation(d))[0].actions).all()


def test_a_tower_in_full_precision_is_read(tmp_path: Path, folder: Path):
    edit_config(folder, vision_config={**vision_config(folder), 'vit_weight_bits': 32})
    with pytest.raises(REFUSED, match='vit_weight_bits'):
        plan(folder)
    whole = {key: value for key, value in vision_config(folder).items() if 'vit' not in key}
    edit_config(folder, vision_config=whole)
    found = plan(folder)
    assert not found.spec.dims.ternary_vision
    assert 'vision.blocks.0.mlp.fc1.weight' in found.tensors
    write_export(found, tmp_path / 'bundle')
    with closing(Policy.load(tmp_path / 'bundle', backend='torch')) as policy:
        d = json.loads(PATH.read_text())
        assert np.isfinite(policy.infer(observation(d))[0].actions).all()


def vision_config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / 'config.json').read_text())['vision_config']


def test_a_number_that_never_changed_and_one_that_is_not_scaled(folder: Path):
    edit_json(
        folder / 'dataset_statistics.json',
        lambda sets: sets[DATA_SET]['proprio'].update(
            q01=[0.5] * 8, q99=[0.5] * 7 + [2.0], mask=[True] * 7 + [False]
        ),
    )
    statistics = plan(folder).statistics
    low, high = (statistics[f'state.{name}'].astype(np.float32) for name in ('low', 'high'))
    assert (low[:7] < high[:7]).all() and np.allclose(low[:7], high[:7], atol=1e-6)
    assert (low[7], high[7]) == (-1.0, 1.0)


class Runs:
    """Calls a function where it is unpickled."""

    def __reduce__(self):
        return (Path.touch, (Path(Runs.mark),))

    mark = ''


@pytest.mark.parametrize(
    'state',
    [
        OrderedDict(a=Runs()),
        [torch.zeros(2)],
        OrderedDict(),
        OrderedDict(a=torch.zeros(2, dtype=torch.int64)),
    ],
    ids=['code', 'list', 'nothing', 'whole numbers'],
)
def test_a_head_file_of_anything_but_tensors_is_refused_and_runs_nothing(
    folder: Path, tmp_path: Path, state: Any
):
    Runs.mark = str(tmp_path / 'executed')
    (path,) = folder.glob('action_head--*')
    torch.save(state, path)
    with pytest.raises(ExportError, match=path.name):
        plan(folder)
    assert not Path(Runs.mark).exists()


def test_a_head_file_that_asks_for_room_is_refused(folder: Path):
    """Pickle's own reader in C makes room for as many objects as an index says."""
    (path,) = folder.glob('action_head--*')
    bombs = [
        pickle.EMPTY_DICT + pickle.LONG_BINPUT + (0x3FFFFFFF).to_bytes(4, 'little') + pickle.STOP,
        pickle.BYTEARRAY8 + (1 << 40).to_bytes(8, 'little') + pickle.STOP,
    ]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for bomb in bombs:
        with zipfile.ZipFile(path, 'w') as archive:
            archive.writestr('head/data.pkl', pickle.PROTO + b'\2' + bomb)
        with pytest.raises(ExportError, match=path.name):
            plan(folder)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000


def test_a_damaged_head_file_is_refused(folder: Path):
    (path,) = folder.glob('action_head--*')
    whole = path.read_bytes()
    random = np.random.default_rng(0)
    for size in (0, 100, len(whole) // 2, len(whole) - 10):
        path.write_bytes(whole[:size])
        with pytest.raises(ExportError, match=path.name):
            plan(folder)
    for _ in range(50):
        damaged = bytearray(whole)
        for place in random.integers(0, len(whole), 20):
            damaged[place] = random.integers(256)
        path.write_bytes(damaged)
        with suppress(REFUSED):
            plan(folder)


def test_masters_that_are_not_finite_are_refused(tmp_path: Path, folder: Path):
    theirs = load_file(folder / 'model.safetensors')
    theirs['language_model.model.layers.0.mlp.up_proj.weight'][0, 0] = torch.nan
    save_file(theirs, folder / 'model.safetensors')
    with pytest.raises(ExportError, match='up_proj'):
        write_export(plan(folder), tmp_path / 'bundle')
    assert not (tmp_path / 'bundle').exists()


def test_weights_that_stand_for_nothing_are_found(tmp_path: Path, folder: Path):
    write_export(plan(folder), tmp_path / 'bundle')
    path = tmp_path / 'bundle' / WEIGHTS_FILE
    stored = load_file(path)
    stored['language.blocks.0.mlp.up.packed'][0, 0] = 0b10
    save_file(stored, path)
    with pytest.raises(BundleError, match=r'mlp\.up\.packed'):
        check_finite(read_bundle(tmp_path / 'bundle', verify=False))
    # Floats in place of packed weights are none.
    stored['language.blocks.0.mlp.up.packed'] = torch.zeros(
        stored['language.blocks.0.mlp.up.packed'].shape
    )
    save_file(stored, path)
    with pytest.raises(BundleError, match=r'mlp\.up\.packed'):
        read_bundle(tmp_path / 'bundle', verify=False)
