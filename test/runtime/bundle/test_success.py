"""Identity of a bundle, and judged success in its receipt: what may be lost, by whose files."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from onnx_bundles import copy_bundle, tiny_onnx_bundle
from paths import ROOT
from tiny_policy import tiny_spec, write_tiny_policy

from vla_runtime.bundle import success
from vla_runtime.bundle.folder import Bundle, BundleError, read_bundle
from vla_runtime.bundle.schema import BundleSpec
from vla_runtime.bundle.success import (
    JudgedCondition,
    difference_interval,
    spec_identity,
    success_fault,
    write_success,
)
from vla_runtime.bundle.writer import seal
from vla_runtime.files.json_file import JsonError

GOOD = JudgedCondition('still', episodes=200, succeeded=199, won=0, lost=1)
MOVING = JudgedCondition('moving', episodes=200, succeeded=192, won=3, lost=3)
BAD = JudgedCondition('moving', episodes=200, succeeded=180, won=2, lost=16)


@pytest.fixture
def bundle(tmp_path):
    return with_receipt(tmp_path / 'bundle', {'onnx': {'precision': 'int8'}})


def with_receipt(target: Path, document: dict[str, object]) -> Bundle:
    folder = copy_bundle(tiny_onnx_bundle(), target)
    spec = read_bundle(folder, verify=False).spec
    (folder / 'verification.json').write_text(json.dumps(document))
    seal(folder, spec)
    return read_bundle(folder)


def judge(bundle: Bundle, *conditions: JudgedCondition, **said: object) -> None:
    write_success(bundle, 'onnxruntime', 'int8', conditions, said)


def fault(bundle: Bundle, backend: str = 'onnxruntime', precision: str = 'int8') -> str:
    return success_fault(bundle, backend, precision)


@pytest.mark.parametrize(
    ('episodes', 'won', 'lost', 'expected'),
    # By hand: d - 1.96 sqrt(won + lost + 1 - (won - lost) d) / (n + 2), d = (won - lost) / (n + 2).
    [(200, 0, 0, -0.0097), (200, 5, 5, -0.0322), (200, 0, 8, -0.0682), (20, 0, 0, -0.0891)],
)
def test_the_least_difference_is_agresti_and_mins(episodes, won, lost, expected):
    judged = JudgedCondition('still', episodes, episodes - lost, won, lost)
    assert judged.least_difference == pytest.approx(expected, abs=1e-4)
    # Both ends: what is lost here is won the other way round.
    low, high = difference_interval(episodes, won, lost)
    assert low == judged.least_difference
    assert (-high, -low) == pytest.approx(difference_interval(episodes, lost, won))


def test_what_was_judged_stands_in_the_sealed_receipt_and_changes_no_identity(bundle):
    assert fault(bundle).startswith('no closed-loop success was judged')
    before = spec_identity(bundle.spec)
    judge(bundle, GOOD, MOVING, command='vla_runtime study eight_bits')
    again = read_bundle(bundle.folder)
    assert spec_identity(again.spec) == before
    assert fault(again) == ''
    receipt = json.loads((bundle.folder / 'verification.json').read_text())
    assert receipt['onnx'] == {'precision': 'int8'}
    record = receipt['judged']['onnxruntime']['int8']
    assert record['command'] == 'vla_runtime study eight_bits'


def test_every_backend_and_precision_has_a_record_of_its_own(bundle):
    judge(bundle, GOOD, MOVING)
    write_success(read_bundle(bundle.folder), 'torch', 'bfloat16', [GOOD, BAD], {})
    again = read_bundle(bundle.folder)
    assert fault(again) == ''
    assert fault(again, 'torch', 'bfloat16').startswith('moving: 180 of 200')
    none = 'no closed-loop success was judged: vla_runtime study eight_bits --bundle FOLDER'
    assert fault(again, 'torch', 'int8') == none
    assert fault(again, 'torch', 'float16') == none.replace('eight_bits', 'precision')
    # No study runs them on the device that has them.
    assert 'fp8' in fault(again, 'tensorrt', 'fp8') and 'nvfp4' in fault(again, 'tensorrt', 'nvfp4')
    # A second study replaces its own record and no other.
    write_success(again, 'torch', 'bfloat16', [GOOD, MOVING], {})
    last = read_bundle(bundle.folder)
    assert fault(last, 'torch', 'bfloat16') == fault(last) == ''


@pytest.mark.parametrize(
    ('conditions', 'said'),
    [
        ([GOOD], 'judged in 1 condition(s), not in 2'),
        ([GOOD, replace(MOVING, episodes=40, succeeded=40, won=0, lost=0)], 'only 40 episodes'),
        # Nothing is lost where nothing succeeds.
        ([GOOD, replace(MOVING, succeeded=0, won=0, lost=0)], 'succeeds in 0 of 200 episodes'),
    ],
)
def test_a_judgement_that_shows_little_proves_nothing(bundle, conditions, said):
    judge(bundle, *conditions)
    assert said in fault(read_bundle(bundle.folder))


@pytest.mark.parametrize(('lost', 'said'), [(1, ''), (16, '16 lost to float32')])
def test_receipts_from_before_other_backends_had_one_are_read(bundle, lost, said):
    conditions = [asdict(JudgedCondition('still', 200, 200 - lost, 0, lost)), asdict(MOVING)]
    record = {'bundle_sha256': spec_identity(bundle.spec), 'conditions': conditions}
    of_files = {'precision': 'int8', 'closed_loop': record}
    path = bundle.folder / 'verification.json'
    path.write_text(json.dumps({'onnx': of_files}))
    assert said in fault(bundle) and bool(said) == bool(fault(bundle))
    for other in (('torch', 'bfloat16'), ('onnxruntime', 'float16'), ('torch', 'int8')):
        assert fault(bundle, *other).startswith('no closed-loop success was judged')
    # One that is judged anew goes before it.
    path.write_text(json.dumps({'onnx': {**of_files, 'closed_loop': {'conditions': 1}}}))
    judge(bundle, GOOD, BAD)
    assert fault(read_bundle(bundle.folder)).startswith('moving: 180 of 200')


def test_a_receipt_with_other_things_of_these_names_is_read(tmp_path):
    """The shipped policies' receipts have their training's checks as `closed_loop`."""
    others = {'made': {'seed': 0}, 'closed_loop': [{'family': 'colour'}]}
    bundle = with_receipt(tmp_path / 'bundle', others)
    write_success(bundle, 'torch', 'bfloat16', [GOOD, MOVING], {})
    assert fault(read_bundle(bundle.folder), 'torch', 'bfloat16') == ''
    receipt = json.loads((bundle.folder / 'verification.json').read_text())
    assert {name: receipt[name] for name in others} == others


def test_success_in_pytorch_outlives_new_onnx_files_and_no_new_weights(bundle):
    write_success(bundle, 'torch', 'bfloat16', [GOOD, MOVING], {})
    judge(read_bundle(bundle.folder), GOOD, MOVING)
    now = read_bundle(bundle.folder)
    for name, of_torch in (('onnx/vision.onnx', False), ('weights.safetensors', True)):
        files = {**now.spec.files, name: 64 * 'a'}
        other = replace(now, spec=replace(now.spec, files=files))
        assert 'judged with other files' in fault(other)
        assert ('other files' in fault(other, 'torch', 'bfloat16')) == of_torch


def test_a_loss_in_one_condition_is_refused_with_its_counts(bundle):
    judge(bundle, GOOD, BAD)
    said = fault(read_bundle(bundle.folder))
    assert said.startswith('moving: 180 of 200 episodes succeed, 16 lost to float32 and 2 won')


def test_success_of_other_files_counts_for_nothing(bundle):
    judge(bundle, GOOD, MOVING)
    now = read_bundle(bundle.folder)
    other = replace(now, spec=replace(now.spec, name='another'))
    assert 'judged with other files' in fault(other)


def test_counts_that_cannot_be_are_an_error(bundle):
    judge(bundle, replace(GOOD, won=150, lost=100), MOVING)
    with pytest.raises(JsonError):
        fault(read_bundle(bundle.folder))


def test_a_bundle_without_a_receipt_gets_one(tmp_path):
    folder = write_tiny_policy(tmp_path / 'bundle', tiny_spec())
    bundle = read_bundle(folder)
    assert fault(bundle, 'torch', 'bfloat16').startswith('no closed-loop success was judged')
    write_success(bundle, 'torch', 'bfloat16', [GOOD, MOVING], {})
    assert fault(read_bundle(folder), 'torch', 'bfloat16') == ''


@pytest.mark.parametrize('receipt', [True, False])
def test_a_bundle_whose_weights_changed_keeps_its_receipt_and_can_be_mended(bundle, receipt):
    path, weights = bundle.folder / 'verification.json', bundle.folder / 'weights.safetensors'
    if not receipt:
        path.unlink()
        files = {k: v for k, v in bundle.spec.files.items() if k != path.name}
        bundle = replace(bundle, spec=replace(bundle.spec, files=files))
        seal(bundle.folder, bundle.spec)
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(BundleError, match='has changed'):
        judge(bundle, GOOD, MOVING)
    weights.write_bytes(whole)
    assert path.exists() == receipt
    assert fault(read_bundle(bundle.folder)).startswith('no closed-loop success was judged')


@pytest.mark.parametrize(
    ('study', 'precision'), [('precision', 'bfloat16'), ('precision', 'float16')]
)
def test_the_shipped_policy_says_what_the_shipped_study_found(study, precision):
    record = json.loads((ROOT / f'benchmark/results/study_{study}.json').read_text())
    receipt = json.loads((ROOT / 'engines/demo/verification.json').read_text())
    judged = receipt['judged']['torch'][precision]
    assert {key: judged[key] for key in ('command', 'seeds', 'code')} == {
        key: record[key] for key in ('command', 'seeds', 'code')
    }
    label = {'backend': 'torch', 'precision': precision}
    assert judged['conditions'] == [
        {
            'condition': one['label']['variant'],
            'episodes': one['groups']['all']['episodes'],
            'succeeded': one['groups']['all']['success']['count'],
            'won': one['versus_reference']['won'],
            'lost': one['versus_reference']['lost'],
        }
        for one in record['conditions']
        if all(one['label'].get(key, value) == value for key, value in label.items())
    ]


# --- Identity of a bundle: what later releases added is no part of it while it changes nothing


def contents_of(spec: BundleSpec, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Contents that an identity is of."""
    seen: list[dict[str, Any]] = []
    dumps = json.dumps

    def note(contents: dict[str, Any], **how: Any) -> str:
        seen.append(contents)
        return dumps(contents, **how)

    monkeypatch.setattr(success.json, 'dumps', note)
    spec_identity(spec)
    (contents,) = seen
    return contents


def test_what_older_bundles_lack_is_left_out_with_its_default(monkeypatch):
    contents = contents_of(tiny_spec('multi_task_dit'), monkeypatch)
    assert 'separate_encoders' not in contents['dims']
    assert 'angles' not in contents['normalisation']
    crop = contents_of(tiny_spec('groot_n17'), monkeypatch)['images'].get('crop')
    assert crop is None or 'letterbox' not in crop


def test_what_changes_the_output_changes_the_identity():
    spec = tiny_spec('multi_task_dit')
    separate = replace(spec, dims=replace(spec.dims, separate_encoders=True))
    angles = replace(spec.normalisation, angles=(spec.state_names[:2],))
    found = {spec_identity(one) for one in (spec, separate, replace(spec, normalisation=angles))}
    assert len(found) == 3
