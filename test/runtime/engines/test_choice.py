"""Choice of `auto`: the receipt decides what may run, a measurement with a margin what does."""

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
from vla_runtime.engines import choice as choices
from vla_runtime.engines import cpu, remembered_choices
from vla_runtime.engines.candidates import INT8, Candidate, candidates, reduced_precisions
from vla_runtime.engines.choice import choose, load_chosen
from vla_runtime.engines.remembered_choices import memory_path
from vla_runtime.engines.torch import weights
from vla_runtime.inference.preparation import Preparation
from vla_runtime.inference.settings import PolicySettings
from vla_runtime.policy import Policy

TORCH, ONNX = Candidate('torch', 'float32'), Candidate('onnxruntime', 'float32')


@pytest.fixture(autouse=True)
def _memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))


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


def timed(times: dict[Candidate, float], asked: list[Candidate] | None = None):
    def measure(candidate: Candidate) -> float:
        if asked is not None:
            asked.append(candidate)
        if candidate not in times:
            raise ValueError(f'{candidate.backend} is broken')
        return times[candidate]

    return measure


def test_a_bundle_without_onnx_files_leaves_pytorch(tmp_path: Path):
    bundle = read_bundle(write_tiny_policy(tmp_path / 'bundle', tiny_spec()))
    assert candidates(bundle, 'auto', 'cpu', 'auto') == [TORCH]
    asked: list[Candidate] = []
    found = choose(bundle, [TORCH], 'cpu', 1, {}, timed({}, asked))
    assert (found.backend, found.precision) == ('torch', 'float32')
    assert not asked


def test_onnx_files_need_a_receipt(tmp_path: Path, bundle: Bundle):
    assert candidates(bundle, 'auto', 'cpu', 'auto') == [TORCH, ONNX]
    unseen = read_bundle(tiny_onnx_bundle())
    assert candidates(unseen, 'auto', 'cpu', 'auto') == [TORCH]


@pytest.mark.parametrize(
    ('receipt', 'native', 'expected'),
    [
        ('bfloat16', True, ['torch in bfloat16', 'torch in float32']),
        ('bfloat16', False, ['torch in float32']),
        # PyTorch emulates float16 on a CPU.
        ('float16', True, ['torch in float32', 'onnxruntime in float16']),
        ('float32', True, ['torch in float32', 'onnxruntime in float32']),
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
    assert candidates(bundle, 'auto', 'cpu', 'float32') == [TORCH, ONNX]
    # A precision without a receipt is never chosen, but it can be named.
    assert candidates(bundle, 'auto', 'cpu', 'bfloat16') == [Candidate('torch', 'bfloat16')]


def test_nothing_installed_is_an_error_that_says_what_to_do(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(candidates_module, 'missing_backend', lambda name: name)
    with pytest.raises(ValueError, match='nothing'):
        candidates(bundle, 'auto', 'cpu', 'auto')


@pytest.mark.parametrize(
    ('torch_ms', 'onnx_ms', 'expected'),
    [(10.0, 5.0, 'onnxruntime'), (10.0, 9.5, 'torch'), (5.0, 10.0, 'torch')],
)
def test_a_later_candidate_must_be_faster_by_a_margin(
    bundle: Bundle, torch_ms: float, onnx_ms: float, expected: str
):
    times = {TORCH: torch_ms, ONNX: onnx_ms}
    found = choose(bundle, [TORCH, ONNX], 'cpu', 1, {}, timed(times))
    assert found.backend == expected
    assert f'torch in float32 {torch_ms:.1f} ms' in found.why


BFLOAT16 = Candidate('torch', 'bfloat16')
TENSORRT = Candidate('tensorrt', 'bfloat16')


@pytest.mark.parametrize(
    ('times', 'expected'),
    [
        # Slower, or as fast, or within the margin.
        ({BFLOAT16: 10.9, TORCH: 10.0}, TORCH),
        ({BFLOAT16: 9.5, TORCH: 10.0}, TORCH),
        ({TENSORRT: 9.5, TORCH: 10.0}, TORCH),
        ({BFLOAT16: 8.9, TORCH: 10.0}, BFLOAT16),
        # Over every one of more bits: also one further down, of another backend.
        ({BFLOAT16: 8.9, TORCH: 10.0, ONNX: 8.95}, ONNX),
        ({BFLOAT16: 9.5, TORCH: 20.0, INT8: 8.9}, BFLOAT16),
        ({BFLOAT16: 12.0, TORCH: 10.0, INT8: 8.9}, INT8),
        ({BFLOAT16: 12.0, TORCH: 10.0, INT8: 9.5}, TORCH),
        ({TORCH: 10.0, INT8: 9.5}, TORCH),
        ({TORCH: 10.0, INT8: 8.9}, INT8),
        # Of as many bits the order and the margin decide.
        ({TENSORRT: 10.0, BFLOAT16: 9.5, TORCH: 20.0}, TENSORRT),
        ({TENSORRT: 10.0, BFLOAT16: 8.9, TORCH: 20.0}, BFLOAT16),
    ],
    ids=lambda one: ', '.join(map(str, one.items())) if isinstance(one, dict) else None,
)
def test_fewer_bits_must_be_faster_by_the_margin_than_all_of_more(
    bundle: Bundle, times: dict[Candidate, float], expected: Candidate
):
    found = choose(bundle, list(times), 'cpu', 1, {}, timed(times))
    assert Candidate(found.backend, found.precision) == expected


def test_a_choice_by_an_older_rule_is_made_again(bundle: Bundle, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patch:
        patch.setattr(remembered_choices, '_RULE', 1)
        choose(bundle, [TORCH, ONNX], 'cpu', 1, {}, timed({TORCH: 9.0, ONNX: 1.0}))
    now = timed({TORCH: 1.0, ONNX: 9.0})
    assert choose(bundle, [TORCH, ONNX], 'cpu', 1, {}, now).backend == 'torch'


def test_a_choice_is_remembered_until_the_file_is_removed_or_its_facts_change(
    bundle: Bundle, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    caplog.set_level('INFO')
    first = choose(bundle, [TORCH, ONNX], 'cpu', 1, {}, timed({TORCH: 9.0, ONNX: 1.0}))
    assert 'once for this machine: torch in float32, onnxruntime in float32' in caplog.text
    caplog.clear()
    now = timed({TORCH: 1.0, ONNX: 9.0})
    assert choose(bundle, [TORCH, ONNX], 'cpu', 1, {}, now) == first
    assert not caplog.text
    assert choose(bundle, [TORCH, ONNX], 'cpu', 2, {}, now).backend == 'torch'
    assert choose(bundle, [TORCH, ONNX], 'cpu', 1, {'samples': 4}, now).backend == 'torch'
    for fact in ('cpu_name', 'cpu_instructions'):
        memory_path().unlink()
        choose(bundle, [TORCH, ONNX], 'cpu', 1, {}, timed({TORCH: 9.0, ONNX: 1.0}))
        with monkeypatch.context() as patch:
            patch.setattr(remembered_choices, fact, lambda: 'another CPU')
            assert choose(bundle, [TORCH, ONNX], 'cpu', 1, {}, now).backend == 'torch'
    memory_path().unlink()
    assert choose(bundle, [TORCH, ONNX], 'cpu', 1, {}, now).backend == 'torch'


def test_a_choice_for_one_gpu_is_measured_again_on_another(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
):
    both, cuda = [TORCH, Candidate('torch', 'bfloat16')], 'cuda'
    for gpu, times in (('small', (1.0, 9.0)), ('large', (9.0, 1.0)), ('small', (9.0, 9.0))):
        monkeypatch.setattr(remembered_choices, 'gpu_name', lambda device, gpu=gpu: gpu)
        found = choose(bundle, both, cuda, 1, {}, timed(dict(zip(both, times, strict=True))))
        assert found.precision == ('float32' if gpu == 'small' else 'bfloat16')


@pytest.mark.parametrize('text', ['', '{"a": 1}', '[]', 'no json'])
def test_a_damaged_memory_is_measured_again(bundle: Bundle, text: str):
    memory_path().parent.mkdir(parents=True)
    memory_path().write_text(text)
    found = choose(bundle, [TORCH, ONNX], 'cpu', 1, {}, timed({TORCH: 9.0, ONNX: 1.0}))
    assert found.backend == 'onnxruntime'


def test_a_candidate_that_is_refused_is_named_and_not_tried_at_every_load(bundle: Bundle):
    found = choose(bundle, [TORCH, ONNX], 'cpu', 1, {}, timed({TORCH: 9.0}))
    assert found.backend == 'torch'
    assert 'onnxruntime in float32 cannot: onnxruntime is broken' in found.why
    assert choose(bundle, [TORCH, ONNX], 'cpu', 1, {}, timed({})) == found
    memory_path().unlink()
    with pytest.raises(ValueError, match='broken'):
        choose(bundle, [TORCH, ONNX], 'cpu', 1, {}, timed({}))


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
    def measure(candidate: Candidate) -> float:
        if candidate == TORCH:
            raise error
        return 5.0

    found = choose(bundle, [TORCH, ONNX], 'cpu', 1, {}, measure)
    assert found.backend == 'onnxruntime'
    assert f'torch in float32 cannot: {error}' in found.why
    # It may have them next time.
    assert not memory_path().exists()


def test_the_first_of_a_large_bundle_that_cannot_be_loaded_gives_way_to_the_next(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(choices, 'MOST_MEASURED_BYTES', 1)
    # More actions at once than ONNX Runtime has: engines of another GPU fail in the same way.
    monkeypatch.setattr(choices, 'candidates', lambda *_: [ONNX, TORCH])
    settings = PolicySettings(samples=4)
    with closing(Policy.load(bundle, settings=settings)) as policy:
        assert policy.backend == 'torch'
        assert 'onnxruntime in float32 cannot: ' in policy.why


@pytest.mark.parametrize('short', ['time', 'memory'])
def test_a_large_bundle_is_not_loaded_once_per_candidate(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, short: str
):
    if short == 'time':
        monkeypatch.setattr(choices, 'MOST_MEASURED_BYTES', 1)
    else:
        free = 2 * bundle.weights_path.stat().st_size
        monkeypatch.setattr(choices, 'available_host_bytes', lambda: free)
    asked: list[Candidate] = []
    assert choose(bundle, [TORCH, ONNX], 'cpu', 1, {}, timed({}, asked)).backend == 'torch'
    assert not asked


def test_a_policy_says_what_runs_it_and_gives_that_backends_chunk(bundle: Bundle):
    chosen = Policy.load(bundle)
    assert (chosen.backend, chosen.precision) in {('torch', 'float32'), ('onnxruntime', 'float32')}
    assert 'torch in float32' in chosen.why and 'onnxruntime in float32' in chosen.why
    assert memory_path().is_file()
    named = Policy.load(bundle, chosen.backend, precision=chosen.precision)
    assert named.why == ''
    observation = looked()
    ours, theirs = (policy.infer(observation)[0] for policy in (chosen, named))
    assert (ours.actions == theirs.actions).all()


def test_a_backend_that_cannot_do_what_is_set_is_not_chosen(bundle: Bundle):
    policy = Policy.load(bundle, settings=PolicySettings(samples=2))
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
    monkeypatch.setattr(cpu, 'cpu_flags', lambda: {'avx512_vnni'} if has_vnni else {'avx2'})
    bundle = with_receipt(tmp_path / 'bundle', 'int8')
    if lost is not None:
        judge(bundle, INT8, lost)
        bundle = read_bundle(bundle.folder)
    refusal = reduced_precisions(bundle, 'cpu')[INT8]
    assert (said in refusal) and bool(refusal) == bool(said)
    found = candidates(bundle, 'auto', 'cpu', 'auto')
    assert found == ([TORCH] if said else [TORCH, INT8])
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
    monkeypatch.setattr(candidates_module, 'missing_backend', lambda name: None)
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


@pytest.mark.parametrize('measured', [True, False], ids=['measured', 'by order'])
def test_a_candidate_that_failed_is_freed_before_the_next_is_loaded(bundle, monkeypatch, measured):
    if not measured:
        monkeypatch.setattr(choices, 'MOST_MEASURED_BYTES', 0)
    held = []

    def load(candidate: Candidate) -> Candidate:
        if candidate == TORCH:
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
        1,
        {},
        load=load,
        check=lambda one: None,
        measure=lambda one: 1.0,
    )
    assert loaded == ONNX and 'torch in float32 cannot: not enough memory' in why


@pytest.mark.parametrize('measured', [True, False], ids=['measured', 'by order'])
def test_pytorch_that_gives_other_chunks_in_the_receipts_precision_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measured: bool
):
    monkeypatch.setattr(candidates_module, 'multiplies_bfloat16', lambda: True)
    if not measured:
        monkeypatch.setattr(choices, 'MOST_MEASURED_BYTES', 0)
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
    memory_path().unlink(missing_ok=True)
    with closing(Policy.load(bundle, verify=False, threads=1)) as policy:
        assert (policy.backend, policy.precision) == ('torch', 'float32')
        assert 'torch in bfloat16 cannot: ' in policy.why
        assert "from the export's in float32 (accepted: " in policy.why
    # Named outright, it is the user's choice.
    with closing(Policy.load(bundle, precision='bfloat16', verify=False, threads=1)) as policy:
        assert policy.precision == 'bfloat16'


def test_a_choice_is_timed_with_the_settings_in_force(bundle: Bundle, monkeypatch):
    asked = []
    run_one = Preparation.run_one

    def noted(self: Preparation, settings: PolicySettings) -> None:
        asked.append(settings)
        run_one(self, settings)

    monkeypatch.setattr(Preparation, 'run_one', noted)
    settings = PolicySettings(denoise_steps=3)
    with closing(Policy.load(bundle, settings=settings, threads=1)):
        assert asked and set(asked) == {settings}
