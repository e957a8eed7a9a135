"""Choice of `auto`: the receipt decides what may run, a fixed order what does."""

from __future__ import annotations

import json
import weakref
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from onnx_bundles import copy_bundle, tiny_onnx_bundle
from thorough import thorough_after
from tiny_policy import observation as looked
from tiny_policy import tiny_spec, write_tiny_policy

from vla_convert.export.onnx.cases import record_cases
from vla_runtime.bundle.folder import Bundle, read_bundle
from vla_runtime.bundle.success import JudgedCondition, write_success
from vla_runtime.bundle.writer import seal
from vla_runtime.cli.info import _backends
from vla_runtime.engines import candidates as candidates_module
from vla_runtime.engines import devices, preflight
from vla_runtime.engines.candidates import (
    INT8,
    Candidate,
    candidates,
    load_chosen,
    reduced_precisions,
)
from vla_runtime.engines.torch import weights
from vla_runtime.inference.settings import PolicySettings
from vla_runtime.policy import Policy

TORCH, ONNX = Candidate('torch', 'float32'), Candidate('onnxruntime', 'float32')


def with_receipt(target: Path, precision: str) -> Bundle:
    """A bundle with ONNX files, and a receipt for them."""
    bundle = copy_bundle(tiny_onnx_bundle(), target)
    spec = read_bundle(bundle, verify=False).spec
    (bundle / 'verification.json').write_text(json.dumps({'onnx': {'precision': precision}}))
    seal(bundle, spec)
    return read_bundle(bundle)


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    return with_receipt(tmp_path / 'bundle', 'float32')


def test_a_bundle_without_onnx_files_leaves_pytorch(tmp_path: Path):
    bundle = read_bundle(write_tiny_policy(tmp_path / 'bundle', tiny_spec()))
    assert candidates(bundle, 'auto', 'cpu', 'auto') == [TORCH]
    loaded, why = load_chosen(
        bundle, 'auto', 'cpu', 'auto', load=lambda one: one, check=lambda one: None
    )
    assert loaded == TORCH and why == 'nothing else may run this bundle here'


def test_onnx_files_need_a_receipt(tmp_path: Path, bundle: Bundle):
    assert candidates(bundle, 'auto', 'cpu', 'auto') == [ONNX, TORCH]
    unseen = read_bundle(tiny_onnx_bundle())
    assert candidates(unseen, 'auto', 'cpu', 'auto') == [TORCH]


@pytest.mark.parametrize(
    ('receipt', 'native', 'expected'),
    [
        ('bfloat16', True, ['torch in bfloat16', 'torch in float32']),
        ('bfloat16', False, ['torch in float32']),
        # PyTorch emulates float16 on a CPU.
        ('float16', True, ['torch in float32', 'onnxruntime in float16']),
        ('float32', True, ['onnxruntime in float32', 'torch in float32']),
    ],
)
def test_reduced_precision_needs_a_receipt_and_a_cpu_that_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, receipt: str, native: bool, expected: list[str]
):
    monkeypatch.setattr(candidates_module, 'multiplies_bfloat16', lambda: native)
    bundle = with_receipt(tmp_path / 'bundle', receipt)
    assert [str(one) for one in candidates(bundle, 'auto', 'cpu', 'auto')] == expected


def test_what_was_named_is_kept(bundle: Bundle):
    assert candidates(bundle, 'onnxruntime', 'cpu', 'auto') == [ONNX]
    assert candidates(bundle, 'auto', 'cpu', 'float32') == [ONNX, TORCH]
    # A precision without a receipt is never chosen, but it can be named.
    assert candidates(bundle, 'auto', 'cpu', 'bfloat16') == [Candidate('torch', 'bfloat16')]


@pytest.mark.parametrize(
    ('missing', 'chosen', 'left'),
    [
        ((), 'onnxruntime', ()),
        (('onnxruntime',), 'torch', ('onnxruntime in float32 cannot',)),
        (('onnxruntime', 'torch'), None, ()),
    ],
    ids=['all', 'without onnxruntime', 'nothing'],
)
def test_what_is_not_installed_is_left_out_with_the_reason(
    bundle: Bundle,
    monkeypatch: pytest.MonkeyPatch,
    missing: tuple[str, ...],
    chosen: str | None,
    left: tuple[str, ...],
):
    found = preflight.missing_package
    monkeypatch.setattr(
        preflight,
        'missing_package',
        lambda *names: next((one for one in names if one in missing), None) or found(*names),
    )
    if chosen is None:
        with pytest.raises(ValueError, match=r"'onnxruntime': .* is not installed; install"):
            Policy.load(bundle, threads=1)
        return
    with closing(Policy.load(bundle, threads=1)) as policy:
        assert (policy.backend, policy.precision) == (chosen, 'float32')
        assert f'{chosen} in float32 is the first in order' in policy.why
        assert policy.why.count(' cannot: ') == len(left)
        assert all(one in policy.why for one in left)


def test_the_first_in_order_is_loaded_and_nothing_else(bundle: Bundle):
    asked = []
    loaded, why = load_chosen(
        bundle,
        'auto',
        'cpu',
        'auto',
        load=lambda one: asked.append(one) or one,
        check=lambda one: None,
    )
    assert asked == [loaded] == [ONNX]
    assert why == 'onnxruntime in float32 is the first in order that can run here'


def test_engines_for_a_gpu_are_named_where_the_device_is_the_cpu(bundle: Bundle):
    built = bundle.engines_folder / 'gpu-trt10'
    built.mkdir(parents=True)
    (built / 'verification.json').write_text('{}')
    with closing(Policy.load(bundle, threads=1)) as policy:
        assert policy.backend == 'onnxruntime'
        assert "tensorrt in float32 is left out: it does not run on device 'cpu'" in policy.why


@pytest.mark.parametrize(
    'error',
    thorough_after(
        1,
        [
            RuntimeError('CUDA out of memory'),
            OSError('libcuda.so.1 is not found'),
            ImportError('built for another NumPy'),
        ],
    ),
    ids=str,
)
def test_a_candidate_without_memory_driver_or_library_leaves_the_others(
    bundle: Bundle, error: Exception
):
    def load(candidate: Candidate) -> Candidate:
        if candidate == ONNX:
            raise error
        return candidate

    def nothing(candidate: Candidate) -> Candidate:
        raise error if candidate == ONNX else ValueError('another')

    given = (bundle, 'auto', 'cpu', 'auto')
    loaded, why = load_chosen(*given, load=load, check=lambda one: None)
    assert loaded == TORCH and f'onnxruntime in float32 cannot: {error}' in why
    with pytest.raises(type(error), match=str(error)):
        load_chosen(*given, load=nothing, check=lambda one: None)


def test_a_policy_says_what_runs_it_and_gives_that_backends_chunk(bundle: Bundle):
    chosen = Policy.load(bundle)
    named = Policy.load(bundle, chosen.backend, precision=chosen.precision)
    assert chosen.why and named.why == ''
    observation = looked()
    ours, theirs = (policy.infer(observation)[0] for policy in (chosen, named))
    assert (ours.actions == theirs.actions).all()


def test_a_backend_that_cannot_do_what_is_set_is_not_chosen(bundle: Bundle):
    settings = PolicySettings(rtc_mode='jacobian')
    with closing(Policy.load(bundle, settings=settings, threads=1)) as policy:
        assert policy.backend == 'torch'
        assert 'onnxruntime in float32 cannot' in policy.why


@pytest.mark.parametrize(
    ('given', 'text'),
    [
        ({'backend': 'jax'}, "'jax'"),
        ({'precision': 'int4'}, "'int4'"),
    ],
)
def test_an_unknown_word_is_refused(bundle: Bundle, given: dict[str, str], text: str):
    with pytest.raises(ValueError, match=text):
        Policy.load(bundle, **given)


@pytest.mark.parametrize(
    ('lost', 'has_vnni', 'said'),
    [
        (None, True, 'no closed-loop success was judged'),
        (0, True, ''),
        (12, True, '188 of 200 episodes succeed, 12 lost to float32'),
        (0, False, 'VNNI'),
    ],
)
def test_int8_is_taken_by_auto_only_with_judged_success_and_instructions_for_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    lost: int | None,
    has_vnni: bool,
    said: str,
):
    monkeypatch.setattr(devices, 'cpu_flags', lambda: {'avx512_vnni'} if has_vnni else {'avx2'})
    bundle = with_receipt(tmp_path / 'bundle', 'int8')
    if lost is not None:
        judge(bundle, INT8, lost)
        bundle = read_bundle(bundle.folder)
    refusal = reduced_precisions(bundle, 'cpu')[INT8]
    assert (said in refusal) and bool(refusal) == bool(said)
    found = candidates(bundle, 'auto', 'cpu', 'auto')
    assert found == ([TORCH] if said else [INT8, TORCH])
    if said:
        with pytest.raises(ValueError, match="'auto'"):
            candidates(bundle, 'onnxruntime', 'cpu', 'auto')
        policy = Policy.load(bundle, device='cpu', threads=1)
        assert f'int8 is left out: {refusal}' in policy.why
        policy.close()
    # Named outright, it is the user's choice; no other backend has it.
    assert candidates(bundle, 'auto', 'cpu', 'int8') == [INT8]
    assert 'for the CPU' in reduced_precisions(bundle, 'cuda')[INT8]


def judge(bundle: Bundle, candidate: Candidate, lost: int) -> None:
    judged = [JudgedCondition(name, 200, 200 - lost, 0, lost) for name in ('still', 'moving')]
    write_success(bundle, candidate.backend, candidate.precision, judged, {})


@pytest.mark.parametrize('backend', ['auto', 'torch', 'onnxruntime'])
@pytest.mark.parametrize('precision', ['int8', 'fp8', 'nvfp4'])
def test_fewer_bits_than_16_are_those_of_files_alone(tmp_path: Path, backend: str, precision: str):
    """Also where success in fp8 was judged, when PyTorch had it."""
    bundle = with_receipt(tmp_path / 'bundle', 'bfloat16')
    judge(bundle, Candidate('torch', 'fp8'), 0)
    bundle = read_bundle(bundle.folder)
    for device in ('cpu', 'cuda'):
        with pytest.raises(ValueError, match=f'--onnx-precision {precision} '):
            candidates(bundle, backend, device, precision)
        assert precision not in {one.precision for one in reduced_precisions(bundle, device)}


@pytest.mark.parametrize(
    ('lost', 'said', 'device', 'precision'),
    [
        (None, '', 'cpu', 'bfloat16'),
        (1, '', 'cpu', 'bfloat16'),
        (12, '188 of 200 episodes succeed, 12 lost to float32', 'cpu', 'bfloat16'),
        (12, '188 of 200 episodes succeed, 12 lost to float32', 'cuda', 'float16'),
    ],
)
def test_16_bits_whose_success_was_judged_are_taken_by_auto_only_where_it_is_kept(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    lost: int | None,
    said: str,
    device: str,
    precision: str,
):
    monkeypatch.setattr(candidates_module, 'multiplies_bfloat16', lambda: True)
    bundle = with_receipt(tmp_path / 'bundle', precision)
    half = Candidate('torch', precision)
    if lost is not None:
        judge(bundle, half, lost)
        bundle = read_bundle(bundle.folder)
    refusal = reduced_precisions(bundle, device)[half]
    assert (said in refusal) and bool(refusal) == bool(said)
    found = candidates(bundle, 'torch', device, 'auto')
    assert found == ([TORCH] if said else [half, TORCH])
    told = f'and not {half}: {refusal}'
    assert (told in _backends(bundle)) == bool(said and device == 'cpu')
    # Named outright, it is the user's choice.
    assert candidates(bundle, 'torch', device, precision) == [half]
    # Weights that nobody judged rest on their own receipt.
    files = {**bundle.spec.files, 'weights.safetensors': 64 * 'a'}
    other = replace(bundle, spec=replace(bundle.spec, files=files))
    assert reduced_precisions(other, device)[half] == ''


@pytest.mark.parametrize('precision', ['bfloat16', 'float16'])
@pytest.mark.parametrize('kept_by_onnxruntime', [False, True])
def test_16_bits_that_lost_success_with_a_backend_are_left_out_of_those_that_nobody_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str, kept_by_onnxruntime: bool
):
    monkeypatch.setattr(candidates_module, 'accepts_device', lambda device, backend: True)
    bundle = with_receipt(tmp_path / 'bundle', precision)
    built = bundle.engines_folder / 'gpu-trt10'
    built.mkdir(parents=True)
    (built / 'verification.json').write_text('{}')
    ways = torch, onnx, tensorrt = [
        Candidate(backend, precision) for backend in ('torch', 'onnxruntime', 'tensorrt')
    ]
    assert candidates(bundle, 'auto', 'cuda', 'auto') == [tensorrt, torch, TORCH, onnx]
    judge(bundle, torch, 100)
    bundle = read_bundle(bundle.folder)
    if kept_by_onnxruntime:
        judge(bundle, onnx, 0)
        bundle = read_bundle(bundle.folder)
    refused = reduced_precisions(bundle, 'cuda')
    lost = '100 of 200 episodes succeed, 100 lost'
    left_out = [one for one in ways if lost in refused[one]]
    assert left_out == ([torch, tensorrt] if kept_by_onnxruntime else ways)
    assert 'judged with torch, and not with tensorrt' in refused[tensorrt]
    kept = [onnx] if kept_by_onnxruntime else []
    assert candidates(bundle, 'auto', 'cuda', 'auto') == [TORCH, *kept]
    with pytest.raises(ValueError, match=rf'does not take its {precision} files: .*{lost}'):
        candidates(bundle, 'tensorrt', 'cuda', 'auto')
    # Named outright, it is the user's choice.
    assert candidates(bundle, 'auto', 'cuda', precision) == [tensorrt, torch, onnx]


class _Networks:
    """Gigabytes that a candidate has loaded when it fails; held in a cycle, as an engine is."""

    def __init__(self) -> None:
        self.replay = self.run

    def run(self) -> None:
        raise RuntimeError('CUDA_ERROR_OUT_OF_MEMORY')


def test_a_candidate_that_failed_is_freed_before_the_next_is_loaded(bundle):
    held = []

    def load(candidate: Candidate) -> Candidate:
        if candidate == ONNX:
            networks = _Networks()
            held.append(weakref.ref(networks))
            try:
                networks.replay()
            except RuntimeError as error:
                raise ValueError('not enough memory') from error
        assert [one() for one in held] == [None]
        return candidate

    loaded, why = load_chosen(
        bundle,
        'auto',
        'cpu',
        'auto',
        load=load,
        check=lambda one: None,
    )
    assert loaded == TORCH and 'onnxruntime in float32 cannot: not enough memory' in why


def test_pytorch_that_gives_other_chunks_in_the_receipts_precision_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(candidates_module, 'multiplies_bfloat16', lambda: True)
    bundle = with_receipt(tmp_path / 'bundle', 'bfloat16')
    record_cases(bundle.folder, bundle.spec)
    with closing(Policy.load(bundle, verify=False, threads=1)) as policy:
        assert 'torch in bfloat16 cannot' not in policy.why
    # As a backend that rounds elsewhere.
    cast = weights.state_of

    def coarse(network, tensors, precision):
        state = cast(network, tensors, precision)
        if precision == 'bfloat16':
            state = {name: tensor * 1.5 for name, tensor in state.items()}
        return state

    monkeypatch.setattr(weights, 'state_of', coarse)
    with closing(Policy.load(bundle, verify=False, threads=1)) as policy:
        assert (policy.backend, policy.precision) == ('torch', 'float32')
        assert 'torch in bfloat16 cannot: ' in policy.why
        assert "from the export's in float32 (accepted: " in policy.why
    # Named outright, it is the user's choice.
    with closing(Policy.load(bundle, precision='bfloat16', verify=False, threads=1)) as policy:
        assert policy.precision == 'bfloat16'
