"""LeRobot's GR00T folders: what they say, the slice of one embodiment, and what is refused."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from checkpoint_folders import edit_config, edit_json
from groot_cases import load_groot_case
from groot_folders import CAMERAS, JOINTS, SLOTS, write_groot_folder
from reference_cases import shipped
from safetensors.torch import load_file, save_file

from vla_convert.checkpoints.folder_facts import ExportError
from vla_convert.checkpoints.options import ExportOptions
from vla_convert.checkpoints.tensors import copy_tensors
from vla_convert.export.conversion import ExportPlan, plan_export
from vla_runtime.bundle.schema import CameraSpec
from vla_runtime.families.groot.dimensions import GrootDims
from vla_runtime.files.json_file import JsonError

OPTIONS = ExportOptions(
    state_names=JOINTS,
    action_names=JOINTS[:7],
    units=('rad',),
    rate_hz=30.0,
    vision_heads=4,
    heads={'context': 4, 'dit': 4},
    horizon=8,
    prompt_length=220,
)
REFUSED = (ExportError, JsonError)


@pytest.fixture
def folder(tmp_path) -> Path:
    return write_groot_folder(tmp_path / 'policy')


def plan(folder: Path, options: ExportOptions = OPTIONS) -> ExportPlan:
    return plan_export(folder, options, default_name='tiny')


def test_a_folder_says_all_but_names_units_rate_heads_and_an_unusual_horizon(folder):
    with pytest.raises(REFUSED) as caught:
        plan(folder, ExportOptions())
    asked = re.findall(r'^  (--\S+)', str(caught.value), flags=re.M)
    assert set(asked) == {
        *('--state-names', '--action-names', '--units', '--rate-hz', '--horizon'),
        *('--vision-heads', '--heads'),
    }


@pytest.mark.parametrize(
    ('given', 'option'),
    [
        ({'heads': {**OPTIONS.heads, 'contxt': 4}}, '--heads contxt=N'),
        ({'kv_heads': 1}, '--kv-heads'),
    ],
)
def test_heads_that_the_network_does_not_have_are_refused(folder, given, option):
    with pytest.raises(
        REFUSED, match=f'{option} is given, but LeRobot groot_n15 has no use for it'
    ):
        plan(folder, replace(OPTIONS, **given))


def test_all_sizes_are_those_of_the_reference_case(folder):
    spec = plan(folder).spec
    dims = spec.dims
    assert isinstance(dims, GrootDims)
    expected = load_groot_case(shipped('groot_n15_a'), 0).network.dims
    assert dims == replace(
        expected, image_places=dims.image_places, prompt_length=220, rope_base=1e6
    )
    # The text of the layout, byte by byte: before the first image, and from one to the next.
    first, second = dims.image_places
    assert second - first == len('<image 2>') + 2
    assert spec.cameras == tuple(CameraSpec(name) for name in sorted(CAMERAS))
    assert (spec.denoise_steps, spec.source['embodiment']) == (4, 'so100')
    assert (spec.images.padding, spec.images.resample) == ('stretch', 'bicubic_uint8')
    assert spec.normalisation.state == spec.normalisation.actions == 'min_max_flat'


@pytest.mark.parametrize('tag', SLOTS)
def test_the_bundle_holds_the_slice_of_its_embodiment(tmp_path, tag):
    folder = write_groot_folder(tmp_path / 'policy', tag)
    copy_tensors(plan(folder).tensors, tmp_path / 'weights.safetensors')
    ours = load_file(tmp_path / 'weights.safetensors')
    theirs = load_file(folder / 'model.safetensors')
    for name, whole in (
        ('state_encoder.fc1.weight', 'state_encoder.layer1.W'),
        ('action_encoder.mix.bias', 'action_encoder.W2.b'),
        ('action_decoder.fc2.weight', 'action_decoder.layer2.W'),
    ):
        assert ours[name].equal(theirs[f'_groot_model.action_head.{whole}'][SLOTS[tag]]), name


def test_another_embodiment_than_the_folder_s_is_refused(folder):
    with pytest.raises(REFUSED, match='groot_n15'):
        plan(folder, replace(OPTIONS, embodiment='gr1'))


def test_an_embodiment_that_the_weights_lack_is_refused(folder):
    def move(document):
        document['steps'][2]['config']['embodiment_mapping']['so100'] = 9

    edit_json(folder / 'policy_preprocessor.json', move)
    with pytest.raises(REFUSED, match=r'policy_preprocessor\.json'):
        plan(folder)


def test_a_negative_embodiment_is_refused(folder):
    def move(document):
        document['steps'][2]['config']['embodiment_mapping']['so100'] = -1

    edit_json(folder / 'policy_preprocessor.json', move)
    with pytest.raises(REFUSED, match='-1'):
        plan(folder)


def test_slice_0_of_an_unknown_tag_is_logged(folder, caplog):
    def forget(document):
        del document['steps'][2]['config']['embodiment_mapping']['so100']

    edit_json(folder / 'policy_preprocessor.json', forget)
    plan(folder)
    assert "embodiment_mapping has no 'so100'; slice 0 is taken" in caplog.text


def pack(folder: Path, **changes: object) -> None:
    edit_json(
        folder / 'policy_preprocessor.json',
        lambda document: document['steps'][2]['config'].update(changes),
    )


DEFECTS = {
    'several observations': (lambda f: edit_config(f, n_obs_steps=2), 'n_obs_steps'),
    'formalised language': (lambda f: pack(f, formalize_language=True), 'formalize_language'),
    'no normalisation': (lambda f: pack(f, normalize_min_max=False), 'normalize_min_max'),
    'several states': (lambda f: pack(f, state_horizon=2), 'state_horizon'),
    'no camera': (
        lambda f: edit_config(
            f, input_features={'observation.state': {'type': 'STATE', 'shape': [8]}}
        ),
        'no camera',
    ),
}


@pytest.mark.parametrize('defect', DEFECTS)
def test_what_this_runtime_does_not_do_is_refused_by_name(folder, defect):
    spoil, message = DEFECTS[defect]
    spoil(folder)
    with pytest.raises(REFUSED, match=message):
        plan(folder)


def test_statistics_that_differ_or_are_missing_are_refused(folder):
    path = next(folder.glob('policy_postprocessor_step_0*'))
    statistics = load_file(path)
    save_file({**statistics, 'action.min': statistics['action.min'] + 1}, str(path))
    with pytest.raises(REFUSED, match=r'action\.min'):
        plan(folder)
    before = next(folder.glob('policy_preprocessor_step_2*'))
    save_file({'action.min': statistics['action.min']}, str(before))
    with pytest.raises(REFUSED, match=r'state\.min'):
        plan(folder)


def test_heads_that_do_not_divide_are_refused(folder):
    with pytest.raises(REFUSED, match='--heads'):
        plan(folder, replace(OPTIONS, heads={'context': 4, 'dit': 3}))


def test_a_folder_of_nvidia_s_own_is_known_and_refused(folder):
    (folder / 'config.json').write_text('{"model_type": "gr00t_n1_5"}')
    path = folder / 'model.safetensors'
    bare = {name.removeprefix('_groot_model.'): t for name, t in load_file(path).items()}
    save_file(bare, str(path))
    with pytest.raises(ExportError, match='order'):
        plan(folder)
