"""Judged success in a receipt: what may be lost, and by whose files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from onnx_bundles import copy_bundle, tiny_onnx_bundle

from vla_runtime.bundle.folder import Bundle, BundleError, read_bundle
from vla_runtime.bundle.identity import spec_identity
from vla_runtime.bundle.success import JudgedCondition, success_fault, write_success
from vla_runtime.bundle.writer import seal
from vla_runtime.files.json_file import JsonError, read_json

GOOD = JudgedCondition('still', episodes=200, succeeded=199, won=0, lost=1)
BAD = JudgedCondition('moving', episodes=200, succeeded=180, won=2, lost=16)


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    return with_receipt(tmp_path / 'bundle', {'onnx': {'precision': 'int8'}})


def with_receipt(target: Path, document: dict[str, object]) -> Bundle:
    folder = copy_bundle(tiny_onnx_bundle(), target)
    spec = read_bundle(folder, verify=False).spec
    (folder / 'verification.json').write_text(json.dumps(document))
    seal(folder, spec)
    return read_bundle(folder)


def fault(bundle: Bundle) -> str:
    return success_fault(read_json(bundle.folder / 'verification.json').mapping('onnx'), bundle)


@pytest.mark.parametrize(
    ('episodes', 'won', 'lost', 'expected'),
    # By hand: d - 1.96 sqrt(won + lost + 1 - (won - lost) d) / (n + 2), d = (won - lost) / (n + 2).
    [(200, 0, 0, -0.0097), (200, 5, 5, -0.0322), (200, 0, 8, -0.0682), (20, 0, 0, -0.0891)],
)
def test_the_least_difference_is_agresti_and_mins(
    episodes: int, won: int, lost: int, expected: float
):
    judged = JudgedCondition('still', episodes, episodes - lost, won, lost)
    assert judged.least_difference == pytest.approx(expected, abs=1e-4)


def test_what_was_judged_stands_in_the_sealed_receipt_and_changes_no_identity(bundle: Bundle):
    assert fault(bundle) == 'no closed-loop success was judged'
    before = spec_identity(bundle.spec)
    write_success(bundle, [GOOD], {'command': 'vla_runtime study int8'})
    again = read_bundle(bundle.folder)
    assert spec_identity(again.spec) == before
    assert fault(again) == ''
    receipt = json.loads((bundle.folder / 'verification.json').read_text())['onnx']
    assert receipt['precision'] == 'int8'
    assert receipt['closed_loop']['command'] == 'vla_runtime study int8'


def test_a_loss_in_one_condition_is_refused_with_its_counts(bundle: Bundle):
    write_success(bundle, [GOOD, BAD], {})
    said = fault(read_bundle(bundle.folder))
    assert said.startswith('moving: 180 of 200 episodes succeed, 16 lost to float32 and 2 won')


def test_success_of_other_files_counts_for_nothing(bundle: Bundle):
    write_success(bundle, [GOOD], {})
    other = replace(bundle, spec=replace(bundle.spec, name='another'))
    assert fault(other).endswith('is that of other files')


def test_counts_that_cannot_be_are_an_error(bundle: Bundle):
    write_success(bundle, [replace(GOOD, won=150, lost=100)], {})
    with pytest.raises(JsonError, match='cannot be counts'):
        fault(read_bundle(bundle.folder))


def test_a_bundle_without_a_receipt_is_not_judged(tmp_path: Path):
    with pytest.raises(BundleError, match='no receipt of ONNX files'):
        write_success(with_receipt(tmp_path / 'bundle', {}), [GOOD], {})


def test_a_bundle_whose_weights_changed_keeps_its_receipt_and_can_be_mended(bundle: Bundle):
    weights = bundle.folder / 'weights.safetensors'
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(BundleError, match='has changed'):
        write_success(bundle, [GOOD], {})
    weights.write_bytes(whole)
    assert fault(read_bundle(bundle.folder)) == 'no closed-loop success was judged'
