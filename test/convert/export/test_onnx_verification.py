"""The receipt: what it holds, and that files which differ are found by tensor."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import numpy as np
import pytest
from int8_bundles import OBSERVATIONS, needs_int8
from onnx_bundles import (  # noqa: F401
    copy_bundle,
    make_exports_once,
    sessions_opened_once,
    tiny_onnx_bundle,
)
from onnx_faults import change_weight
from safetensors.torch import load_file, save_file
from thorough import thorough_after, thorough_but
from tiny_policy import aloha_spec, tiny_spec, write_tiny_policy

from vla_convert.checkpoints.folder_facts import ExportError
from vla_convert.export.onnx.bundle import export_bundle
from vla_convert.export.onnx.cases import Case, seeded_cases
from vla_convert.export.onnx.verification import receipt_dict, verification_steps, verify_onnx
from vla_convert.export.receipt import VerificationError, chunk_bound
from vla_runtime.bundle.folder import read_bundle
from vla_runtime.bundle.onnx_files import ONNX_FOLDER, QUANTISED
from vla_runtime.bundle.schema import WEIGHTS_FILE
from vla_runtime.engines.recorded_cases import BOUNDS, Bounds
from vla_runtime.processing.tokenizer import Tokenizer


def verify(bundle, **options):
    return verify_onnx(bundle, read_bundle(bundle, verify=False).spec, **options)


@pytest.mark.parametrize('precision', thorough_but(['float16'], ['float32', 'float16', 'bfloat16']))
def test_exported_files_are_within_their_bounds_and_the_receipt_says_what_was_compared(precision):
    told: list[int] = []
    receipt = verify(tiny_onnx_bundle('pi0', precision), advance=told.append)
    assert receipt.failures == []
    assert sum(told) == verification_steps()
    document = json.loads(json.dumps(receipt_dict(receipt)))
    assert document['precision'] == precision
    assert set(document['versions']) == {'python', 'torch', 'onnx', 'onnxruntime', 'numpy'}
    assert document['bounds'] == {
        'tensor': BOUNDS[precision].tensor,
        'chunk': BOUNDS[precision].chunk,
        'ceiling': BOUNDS[precision].ceiling,
    }
    compared = {(item['file'], item['tensor']) for item in document['tensors']}
    assert {
        ('vision.onnx', 'image_tokens'),
        ('prefix.onnx', 'past_key'),
        ('prefix_r2.onnx', 'past_value'),
        ('prefix_r2.onnx', 'prefix_mask'),
        ('expert.onnx', 'velocity'),
        ('expert_r2.onnx', 'x_next'),
        ('time table', 'time_conditioning'),
    } <= compared
    for item in document['tensors']:
        assert 0 <= item['mean_error'] <= item['max_error'] <= item['bound']
    decomposed = [item for item in document['chunks'] if item['growth']]
    assert len(decomposed) == len(document['chunks']) / 2 == len(document['cases'])
    for item in decomposed:
        # A growth a step, ending at the chunk's own error.
        assert len(item['growth']) == 3
        assert item['growth'][-1] == item['max_error']
    for item in document['chunks']:
        assert item['gain'] > 0
        assert (item['bound'], item['bound_by']) == chunk_bound(precision, item['gain'])
    assert {item['rows'] for item in document['cases']} == {1, 2}
    assert {item['plan'] for item in document['cases']} == {None, 'exp', 'linear'}


@pytest.mark.usefixtures('sessions_opened_once')
def test_errors_of_actions_are_those_of_the_robots_joints(tmp_path):
    write_tiny_policy(tmp_path / 'p', aloha_spec())
    export_bundle(read_bundle(tmp_path / 'p'), tmp_path / 'made', 'float16')
    spec = read_bundle(tmp_path / 'made').spec
    found, own = (
        {item.name: item.max_error for item in verify_onnx(tmp_path / 'made', one).actions}
        for one in (spec, replace(spec, joint_space=None))
    )
    # A motor's angle in rad is 1 / 2.1123 of its way.
    expected = {
        name: error / (2.1123 if name in ('lg', 'rg') else 1) for name, error in own.items()
    }
    assert found == pytest.approx(expected, rel=1e-3)
    assert min(found.values()) > 0


@pytest.mark.parametrize(
    'precision', ['float32', pytest.param('int8', marks=needs_int8), 'fp8', 'nvfp4']
)
@pytest.mark.parametrize('number', [np.nan, np.inf])
def test_a_weight_that_is_not_finite_is_named_before_anything_is_compared(
    tmp_path, precision, number
):
    source = read_bundle(write_tiny_policy(tmp_path / 'p', tiny_spec()), verify=False)
    name = 'language.blocks.0.mlp.up.weight'
    weights = load_file(source.folder / WEIGHTS_FILE)
    weights[name][1, 2] = number
    save_file(weights, source.folder / WEIGHTS_FILE)
    observations = OBSERVATIONS if precision in QUANTISED else ()
    with pytest.raises(ExportError, match=rf"1 of the .* numbers of weight '{name}' are not fin"):
        export_bundle(source, tmp_path / 'made', precision, observations=observations)
    assert not (tmp_path / 'made').exists()


def test_the_cases_are_the_same_every_time_and_cover_what_differs():
    bundle = read_bundle(tiny_onnx_bundle())
    first, second = (seeded_cases(bundle.folder, bundle.spec) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        for name in ('pixels', 'x', 'plan', 'plan_weight'):
            np.testing.assert_array_equal(getattr(a, name), getattr(b, name))
        for name, array in a.prefix_inputs.items():
            np.testing.assert_array_equal(array, b.prefix_inputs[name])
    assert any(not case.image_mask.all() for case in first)
    masks = [case.prefix_inputs['token_mask'] for case in first]
    assert any(mask.all(axis=1).any() for mask in masks)
    assert any(not mask.all() for mask in masks)
    # As prompts do: BOS first.
    bos = Tokenizer.load(bundle.tokenizer_path).bos
    assert all((case.prefix_inputs['tokens'][:, 0] == bos).all() for case in first)


def test_the_cases_of_a_single_head_are_what_a_policy_gives_it():
    bundle = read_bundle(tiny_onnx_bundle('act'))
    cases = seeded_cases(bundle.folder, bundle.spec)
    for case in cases:
        assert not case.x.any() and not case.plan.any() and not case.plan_weight.any()
        assert case.row_weight.tolist() == ([1.0] if case.rows == 1 else [1.0, 0.0])
        assert case.words['beta'] is None and case.words['plan'] is None
    receipt = verify_onnx(bundle.folder, bundle.spec)
    assert receipt.failures == []
    assert max(chunk.bound for chunk in receipt.chunks) == pytest.approx(5e-5, rel=1e-3)


@pytest.mark.parametrize(
    ('part', 'named', 'untouched'),
    thorough_after(
        1,
        [
            ('vision.blocks.0.mlp', 'vision.onnx.*image_tokens', 'prefix'),
            ('language.blocks.0.attention', r'prefix\.onnx.*past_', 'vision.onnx'),
            ('expert.blocks.1.mlp', r'expert\.onnx.*velocity', 'prefix'),
        ],
    ),
)
def test_another_number_in_the_weights_is_found_in_its_file_alone(tmp_path, part, named, untouched):
    bundle = copy_bundle(tiny_onnx_bundle(), tmp_path / 'changed')
    change_weight(bundle, part, 1.01)
    failures = verify(bundle).failures
    assert failures
    tensors = [line for line in failures if "tensor '" in line]
    assert any(re.search(named, line) for line in tensors)
    assert not any(untouched in line for line in tensors)
    # A whole chunk is off as well, decomposed and monolithic.
    assert any(line.startswith('monolithic') for line in failures)


def test_a_number_that_is_none_is_within_no_bound(tmp_path):
    bundle = copy_bundle(tiny_onnx_bundle(), tmp_path / 'changed')
    change_weight(bundle, 'expert.blocks.0.mlp', float('nan'))
    assert any("'velocity' differs from PyTorch by nan" in line for line in verify(bundle).failures)


def test_beyond_the_bounds_no_bundle_is_written(tmp_path, monkeypatch):
    make_exports_once(monkeypatch)
    tight = {**BOUNDS, 'float16': Bounds(tensor=1e-6, chunk=1e-6, ceiling=1e-6)}
    monkeypatch.setattr('vla_convert.export.receipt.BOUNDS', tight)
    source = read_bundle(tiny_onnx_bundle())
    with pytest.raises(VerificationError, match="'image_tokens'"):
        export_bundle(source, tmp_path / 'made', 'float16')
    assert list(tmp_path.iterdir()) == []


def test_missing_files_say_how_to_make_them(tmp_path):
    bundle = copy_bundle(tiny_onnx_bundle(), tmp_path / 'changed')
    (bundle / ONNX_FOLDER / 'expert_r2.onnx').unlink()
    with pytest.raises(ValueError, match=r'expert_r2\.onnx.*vla_runtime'):
        verify_onnx(bundle, read_bundle(tiny_onnx_bundle()).spec)


def case(**past: np.ndarray) -> Case:
    nothing = np.zeros(0, dtype=np.float32)
    found = Case({}, [], nothing, {}, {}, nothing, nothing, nothing, nothing)
    found.past, found.row_axes = past, dict.fromkeys(past, 0)
    return found


def test_positions_that_a_mask_of_any_name_hides_are_left_out():
    context = np.arange(12, dtype=np.float32).reshape(1, 3, 4)
    seen = np.array([[True, False, True]])
    visible = case(context=context, seen=seen).visible({'context': context, 'seen': seen})
    np.testing.assert_array_equal(visible['context'], context[0, [0, 2]])
    np.testing.assert_array_equal(visible['seen'], seen)


def test_of_two_masks_one_is_enough_to_show_a_position():
    context = np.arange(12, dtype=np.float32).reshape(1, 3, 4)
    images, text = np.array([[True, False, False]]), np.array([[False, False, True]])
    found = case(context=context, images=images, text=text)
    np.testing.assert_array_equal(
        found.visible({'context': context})['context'], context[0, [0, 2]]
    )


@pytest.mark.parametrize('images', [2, 3])
def test_each_part_of_a_prefix_has_its_own_mask(images):
    """Also where both parts are as long."""
    past = {
        'text_key': np.arange(12, dtype=np.float32).reshape(1, 3, 4),
        'images_key': np.arange(4 * images, dtype=np.float32).reshape(1, images, 4),
        'text_seen': np.array([[True, True, False]]),
        'images_seen': np.arange(images)[None] > 0,
    }
    visible = case(**past).visible(past)
    np.testing.assert_array_equal(visible['text_key'], past['text_key'][0, :2])
    np.testing.assert_array_equal(visible['images_key'], past['images_key'][0, 1:])


def test_a_prefix_without_a_mask_is_compared_whole():
    context = np.ones((1, 3, 4), dtype=np.float32)
    assert case(context=context).visible({'context': context})['context'] is context
