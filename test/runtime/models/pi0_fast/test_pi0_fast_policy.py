"""pi0-FAST from LeRobot's folder to robot units, on PyTorch and ONNX Runtime."""

from __future__ import annotations

import json
import re
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoint_folders import edit_config
from onnx_bundles import sessions_opened_once, write_onnx_once  # noqa: F401
from pi0_fast_cases import load_pi0_fast_case, options_of, write_folder
from reference_cases import shipped
from safetensors.torch import load_file, save_file

from vla_convert.checkpoints.folder_facts import ExportError
from vla_convert.checkpoints.options import ExportOptions
from vla_convert.export.conversion import plan_export, write_export
from vla_convert.export.onnx.cases import record_cases
from vla_runtime.bundle.folder import BundleError, read_bundle
from vla_runtime.bundle.schema import BundleSpec
from vla_runtime.files.json_file import JsonError
from vla_runtime.inference.recorded_check import check_recorded_cases
from vla_runtime.policy import Policy

pytestmark = [pytest.mark.cases, pytest.mark.usefixtures('sessions_opened_once')]
PATH = shipped('pi0_fast_a')


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / 'policy', PATH)


def planned(folder: Path, **further):
    return plan_export(folder, options_of(PATH, folder, **further), default_name='tiny')


def test_a_malformed_answer_is_refused_with_its_reason(folder: Path):
    """These weights write no prefix, which a trained policy does and its folder demands."""
    edit_config(folder, validate_action_token_prefix=True)
    write_export(planned(folder), folder.parent / 'bundle')
    case = load_pi0_fast_case(PATH)
    with closing(Policy.load(folder.parent / 'bundle', backend='torch')) as policy:
        # A black image need not lead to actions.
        policy.warm_up()
        with pytest.raises(ValueError, match='Action:'):
            policy.infer(case.observation(0))


def test_the_action_tokenizer_is_asked_for_and_checked(folder: Path):
    with pytest.raises(ExportError) as caught:
        planned(folder, action_tokenizer=None)
    assert '--action-tokenizer' in re.findall(r'^  (--\S+)', str(caught.value), flags=re.M)
    with pytest.raises(ExportError, match='--action-tokenizer'):
        planned(folder, action_tokenizer=folder.parent / 'nothing')
    numbers = folder.parent / 'fast' / 'processor_config.json'
    for damaged, field in (
        ('{}', 'scale'),
        ('{"scale": 0, "min_token": -3}', 'scale'),
        ('{"scale": Infinity, "min_token": -3}', 'scale'),
        ('{"scale": NaN, "min_token": -3}', 'scale'),
        ('{"scale": 10, "min_token": 0.5}', 'min_token'),
        (f'{{"scale": 10, "min_token": -1{"0" * 400}}}', 'min_token'),
    ):
        numbers.write_text(damaged)
        with pytest.raises(ExportError, match=rf'{re.escape(str(numbers))}.*\b{field}\b'):
            planned(folder)
    numbers.unlink()
    with pytest.raises(ExportError, match='processor_config'):
        planned(folder)


@pytest.mark.parametrize('content', ['{', '[]', '{"model": {"vocab": {}}}'])
def test_an_action_tokenizer_that_is_none_is_refused_by_its_file(folder: Path, content: str):
    path = folder.parent / 'fast' / 'tokenizer.json'
    path.write_text(content)
    with pytest.raises(ExportError, match=re.escape(str(path))) as caught:
        planned(folder)
    assert '--action-tokenizer' in str(caught.value)


def test_an_action_tokenizer_must_fit_into_the_text_vocabulary(folder: Path):
    path = folder.parent / 'fast' / 'tokenizer.json'
    kept = path.read_bytes()
    path.write_bytes((folder / 'tokenizer.json').read_bytes())
    with pytest.raises(ExportError, match=re.escape(str(path))) as caught:
        planned(folder)
    assert 'fast_skip_tokens' in str(caught.value) and '--action-tokenizer' in str(caught.value)
    path.write_bytes(kept)
    planned(folder)
    edit_config(folder, fast_skip_tokens=10_000)
    with pytest.raises(ExportError, match='fast_skip_tokens'):
        planned(folder)


def test_no_token_behind_those_of_actions_is_legal_and_less_is_not(folder: Path):
    edit_config(folder, fast_skip_tokens=0)
    bundle = write_export(planned(folder), folder.parent / 'bundle')
    assert bundle.spec.dims.skipped_tokens == 0
    edit_config(folder, fast_skip_tokens=-1)
    with pytest.raises(JsonError, match='fast_skip_tokens'):
        planned(folder)


def test_a_bundle_without_its_action_tokenizer_is_refused(folder: Path):
    target = write_export(planned(folder), folder.parent / 'bundle').folder
    (target / 'action_tokenizer.json').write_text('{"model": {"vocab": {}}}')
    with pytest.raises(BundleError, match='action_tokenizer'):
        read_bundle(target)
    (target / 'action_tokenizer.json').unlink()
    with pytest.raises(BundleError, match='action_tokenizer'):
        read_bundle(target)


@pytest.mark.parametrize('backend', ['torch', 'onnxruntime'])
def test_an_answer_ends_at_its_mark_and_is_the_same_again(folder: Path, backend: str):
    def finish(target: Path, spec: BundleSpec) -> None:
        write_onnx_once(target, spec, 'float32')
        record_cases(target, spec)

    bundle = write_export(planned(folder), folder.parent / 'bundle', finish=finish).folder
    case = load_pi0_fast_case(PATH)
    with closing(Policy.load(bundle, backend=backend)) as policy:
        check_recorded_cases(policy._engine, bundle, 'float32')
        chunk, report = policy.infer(case.observation(0))
        assert report.runs['expert'] == case.description['first_end_marker'][0]
        again, _ = policy.infer(case.observation(0))
        assert np.array_equal(again.actions, chunk.actions)


def test_a_part_of_a_coefficient_is_refused_in_a_bundle(folder: Path):
    bundle = write_export(planned(folder), folder.parent / 'bundle').folder
    path = bundle / 'policy.yaml'
    text = path.read_text()
    path.write_text(re.sub(r'least_coefficient: .*', 'least_coefficient: -63.5', text))
    with pytest.raises(BundleError, match='least_coefficient'):
        read_bundle(bundle)


@pytest.mark.parametrize('kept', ['lm_head', 'embed_tokens'])
def test_one_of_table_and_head_stands_for_both(folder: Path, kept: str):
    other = {'lm_head': 'embed_tokens', 'embed_tokens': 'lm_head'}[kept]
    path = folder / 'model.safetensors'
    tensors = load_file(path)
    save_file({name: t for name, t in tensors.items() if other not in name}, path)
    written = write_export(planned(folder), folder.parent / 'bundle')
    weights = load_file(written.weights_path)
    assert torch.equal(weights['language.embedding.weight'], weights['token_head.weight'])


@pytest.mark.parametrize(
    ('key', 'value'),
    [('temperature', 0.5), ('max_decoding_steps', 0), ('use_relative_actions', True)],
)
def test_settings_that_are_not_served_are_refused(folder: Path, key: str, value: object):
    edit_config(folder, **{key: value})
    with pytest.raises((ExportError, JsonError), match=key):
        planned(folder)


def test_the_action_tokenizer_is_for_pi0_fast_alone(tmp_path: Path):
    other = shipped('openvla_full_a')
    from openvla_folders import options_of as others_options
    from openvla_folders import write_folder as write_other

    source = write_other(tmp_path / 'policy', other)
    with pytest.raises(ExportError, match='--action-tokenizer'):
        plan_export(source, others_options(other, action_tokenizer=tmp_path), default_name='tiny')


def test_the_folder_says_the_rest(folder: Path):
    with pytest.raises(ExportError) as caught:
        plan_export(folder, ExportOptions(), default_name='tiny')
    asked = set(re.findall(r'^  (--\S+)', str(caught.value), flags=re.M))
    assert json.loads(PATH.read_text())['kind'] == 'pi0_fast'
    assert {'--action-tokenizer', '--kv-heads', '--vision-heads', '--rate-hz'} <= asked
    assert not asked & {'--horizon', '--prompt-length', '--tokenizer', '--prompt-template'}
