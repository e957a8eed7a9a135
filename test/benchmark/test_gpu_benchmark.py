"""benchmark/gpu.py: its checks pass what is right and fail what is not, with torch and numpy alone.

There is no GPU here, so everything runs on the CPU at a tiny size; graphs are then 'eager'.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from time import perf_counter

import numpy as np
import pytest
import torch
from paths import ROOT
from tiny_policy import TINY_FAMILIES

from vla_runtime.engines import preflight
from vla_runtime.families.operation_counts import count_operations
from vla_runtime.family.listing import performance_figures
from vla_runtime.performance.devices import DEVICES
from vla_runtime.performance.kernel_times import predicted_ms
from vla_runtime.performance.roofline import phase_floors, published_rates

sys.path.insert(0, str(ROOT / 'benchmark'))

import gpu
import gpu_checks
import gpu_family_checks
import gpu_latency
import gpu_targets
import random_policy
import time_limits

# What a GPU machine may lack; some of it this project needs elsewhere.
ABSENT = ('cv2', 'sentencepiece', 'tokenizers', 'rclpy', 'mujoco', 'onnx', 'onnxruntime', 'PIL')
TINY = ['--device', 'cpu', '--size', 'tiny']


def tiny(rows: int, seed: int = 0, family: str = 'pi05'):
    """A network, and inputs for it."""
    dims = random_policy.sized_dims(family, 'tiny', cameras=2)
    network = random_policy.random_network(family, dims, 'cpu', 'float32')
    return network, random_policy.random_inputs(dims, rows, seed)


def engine(network, **options):
    return random_policy.torch_engine(network, graphs=False, **options)


class StaleEngine:
    """A real engine whose prefix keeps what was encoded first, as a stale graph would."""

    def __init__(self, real) -> None:
        self._real, self._encoded = real, set()

    def encode_prefix(self, image_mask, rows, slot=0):
        if slot not in self._encoded:
            self._encoded.add(slot)
            self._real.encode_prefix(image_mask, rows, slot)

    def __getattr__(self, name):
        return getattr(self._real, name)


def test_without_a_gpu_it_says_so_before_pytorch_is_imported():
    code = f'import sys; sys.path.insert(0, {str(ROOT / "benchmark")!r}); import gpu; '
    code += 'from vla_runtime.engines import preflight; '
    code += "preflight._DRIVER = 'libcuda-that-is-not-here.so'; "
    code += "code = gpu.main([]); assert 'torch' not in sys.modules; sys.exit(code)"
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: device 'cuda': no CUDA device answers here")
    assert 'nvidia-smi' in done.stderr


def test_a_pytorch_that_does_not_see_the_gpu_is_told(monkeypatch, capsys):
    monkeypatch.setattr(preflight, '_cuda_devices', lambda: (1, ''))
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
    assert gpu.main([]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f'error: PyTorch {torch.__version__} (')
    assert 'does not see the GPU that the driver shows' in error


def test_without_pytorch_it_says_so(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, 'torch', None)
    assert gpu.main([]) == 2
    assert "the Python package 'torch' is not installed" in capsys.readouterr().err


@pytest.mark.thorough
def test_it_runs_from_the_source_tree_without_what_a_gpu_machine_lacks(tmp_path):
    out = tmp_path / 'gpu.json'
    blocked = '; '.join(f'sys.modules[{name!r}] = None' for name in ABSENT)
    code = f'import sys; {blocked}; import runpy; sys.argv = {["gpu.py", *TINY]!r} + sys.argv[1:]; '
    code += f'runpy.run_path({str(ROOT / "benchmark" / "gpu.py")!r}, run_name="__main__")'
    # On a busy machine a tiny policy takes longer than a large one on a GPU.
    command = [sys.executable, '-c', code, '--quick', '--budget-s', '3600', '--json', str(out)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=3600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == f'wrote {out}'
    result = json.loads(out.read_text())
    assert result['versions']['torch'] == torch.__version__
    assert '--quick' in result['command']
    figures = result['figures']
    assert set(figures['checks']) == set(gpu_checks.CHECKS)
    assert all(check['passed'] for check in figures['checks'].values())
    assert [(r['rows'], r['mode']) for r in figures['latency']] == [
        (1, 'graph'),
        (2, 'graph'),
        (1, 'eager'),
        (2, 'eager'),
    ]


def latency(budget_s: float, *more: str):
    """Results of `run_latency`, and what it left out."""
    found = list(gpu.run_latency(gpu._arguments([*TINY, *more]), time_limits.Clock(budget_s)))
    left_out = {}
    for part, one in found:
        left_out |= one if part == 'left_out' else {}
    return [one for part, one in found if part == 'latency'], left_out


def test_what_does_not_fit_in_the_time_is_named_and_not_measured():
    results, left_out = latency(0.0)
    assert results == []
    assert len(left_out) == 8
    assert all('time budget' in reason for reason in left_out.values())


def test_kernels_that_are_not_used_here_are_left_out_with_the_reason(monkeypatch):
    def refuse(engine, word, precision):
        assert (word, precision) == ('on', 'bfloat16')
        engine.why_triton = 'denoise eager (in Triton kernels differs by 1)'

    monkeypatch.setattr(gpu_latency, 'choose_layers', refuse)
    mode = gpu_latency.TRITON_GRAPH
    monkeypatch.setattr(gpu_latency, 'configurations', lambda *arguments, **options: [(1, 1, mode)])
    results, left_out = latency(60.0)
    assert results == []
    assert 'differs by 1' in left_out['1 view(s), 1 row(s), triton, graph']


def test_a_check_that_raises_has_failed_and_the_others_run(monkeypatch):
    def broken(device, size):
        raise RuntimeError('out of memory')

    checks = {'broken': broken, 'guidance': gpu_checks.guidance}
    monkeypatch.setattr(gpu_checks, 'CHECKS', checks)
    found = dict(gpu.run_checks('cpu', 'tiny', time_limits.Clock(100.0)))
    assert found['broken']['passed'] is False
    assert found['broken']['note'] == 'RuntimeError: out of memory'
    assert found['guidance']['passed'] is True


def test_an_exit_code_of_1_says_that_a_check_failed(monkeypatch, capsys):
    failing = {'wrong': lambda device, size: gpu_checks.Finding(False, 'off by 1')}
    monkeypatch.setattr(gpu_checks, 'CHECKS', failing)
    assert gpu.main([*TINY, '--budget-s', '5']) == 1
    assert 'FAILED  off by 1' in capsys.readouterr().out


@pytest.mark.parametrize(('half', 'checks', 'measured'), [('checks', 1, 0), ('latency', 0, 1)])
def test_one_half_may_be_left_out(half, checks, measured, monkeypatch, tmp_path):
    monkeypatch.setattr(gpu_checks, 'CHECKS', ONE_CHECK)
    one = [(1, 1, gpu_latency.EAGER)]
    monkeypatch.setattr(gpu_latency, 'configurations', lambda *arguments, **options: one)
    out = tmp_path / 'gpu.json'
    assert gpu.main([*TINY, '--quick', '--only', half, '--json', str(out)]) == 0
    figures = written(out)
    assert (len(figures['checks']), len(figures['latency'])) == (checks, measured)
    assert figures['complete']


def written(path) -> dict:
    return json.loads(path.read_text())['figures']


ONE_CHECK = {'right': lambda device, size: gpu_checks.Finding(True, 'equal')}


@pytest.mark.parametrize('broken', ['measure', 'random_network'])
def test_an_error_without_text_leaves_a_configuration_out_and_nothing_else(
    monkeypatch, capsys, tmp_path, broken
):
    """Of a measurement, and of the weights before it."""

    def fail(*arguments, **options):
        raise AssertionError

    monkeypatch.setattr(gpu_checks, 'CHECKS', ONE_CHECK)
    home = {'measure': gpu_latency, 'random_network': random_policy}[broken]
    monkeypatch.setattr(home, broken, fail)
    out = tmp_path / 'gpu.json'
    assert gpu.main([*TINY, '--quick', '--json', str(out)]) == 0
    figures = written(out)
    assert figures['complete'] and figures['checks']['right']['passed']
    assert set(figures['left_out'].values()) == {'AssertionError'}
    assert len(figures['left_out']) == 4
    assert capsys.readouterr().out.splitlines()[-1] == f'wrote {out}'


@pytest.mark.thorough
@pytest.mark.parametrize('dies_in', ['checks', 'second configuration', 'table'])
def test_whatever_ends_a_run_all_that_it_had_found_is_written(monkeypatch, tmp_path, dies_in):
    def stop(*arguments, **options):
        raise KeyboardInterrupt

    checks = dict(ONE_CHECK)
    if dies_in == 'checks':
        checks['second'] = stop
    measured = []
    real = gpu_latency.measure

    def measure(*arguments, **options):
        if dies_in == 'second configuration' and measured:
            stop()
        measured.append(1)
        return real(*arguments, **options)

    monkeypatch.setattr(gpu_checks, 'CHECKS', checks)
    monkeypatch.setattr(gpu_latency, 'measure', measure)
    if dies_in == 'table':
        monkeypatch.setattr(gpu, 'show', stop)
    out = tmp_path / 'gpu.json'
    with pytest.raises(KeyboardInterrupt):
        gpu.main([*TINY, '--quick', '--json', str(out)])
    figures = written(out)
    assert figures['checks'] == {'right': {'passed': True, 'note': 'equal', 'figures': {}}}
    counts = {'checks': 0, 'second configuration': 1, 'table': 6}
    assert len(figures['latency']) == counts[dies_in]
    assert figures['complete'] == (dies_in == 'table')
    assert [path.name for path in tmp_path.iterdir()] == ['gpu.json']


def test_a_file_that_cannot_be_written_is_told_before_anything_is_measured(
    monkeypatch, capsys, tmp_path
):
    (tmp_path / 'file').write_text('')
    monkeypatch.setattr(gpu_checks, 'CHECKS', {})
    assert gpu.main([*TINY, '--json', str(tmp_path / 'file' / 'gpu.json')]) == 2
    assert capsys.readouterr().err.startswith('error: ')


def _busy(*arguments, **options):
    """Never end, and take every error for one of what is tried."""
    while True:
        try:
            sum(range(1000))
        except Exception:
            continue


def test_a_check_that_does_not_end_has_failed_and_the_others_run(monkeypatch):
    checks = {'endless': _busy, 'right': ONE_CHECK['right']}
    monkeypatch.setattr(gpu_checks, 'CHECKS', checks)
    monkeypatch.setattr(gpu, 'CHECK_S', 0.2)
    found = dict(gpu.run_checks('cpu', 'tiny', time_limits.Clock(100.0)))
    assert found['endless']['passed'] is False
    assert found['endless']['note'] == 'cut off after 0 s'
    assert found['right']['passed'] is True


def test_checks_have_a_part_of_the_time_and_what_is_not_run_has_not_passed(monkeypatch):
    monkeypatch.setattr(gpu_checks, 'CHECKS', {'endless': _busy, 'right': ONE_CHECK['right']})
    clock = time_limits.Clock(1.0)
    found = dict(gpu.run_checks('cpu', 'tiny', clock))
    assert clock.left_s < 0.75
    assert [one['passed'] for one in found.values()] == [False, False]
    assert found['right']['note'].startswith('not run')


@pytest.mark.thorough
def test_a_configuration_that_does_not_end_is_cut_off_and_the_next_are_measured(monkeypatch):
    real, called = gpu_latency.measure, []

    def measure(*arguments, **options):
        called.append(1)
        if len(called) == 1:
            _busy()
        return real(*arguments, **options)

    monkeypatch.setattr(gpu_latency, 'measure', measure)
    limited, asked = gpu.limited, []

    def short(seconds):
        asked.append(seconds)
        return limited(seconds if called else 2.0)

    monkeypatch.setattr(gpu, 'limited', short)
    results, left_out = latency(600.0, '--quick')
    assert left_out == {'2 view(s), 1 row(s), graph': 'cut off after 2 s'}
    assert len(called) == 6 and len(results) == 5
    # Within the budget and its grace, whatever is left.
    assert all(seconds <= 600.0 + gpu.GRACE_S for seconds in asked)
    assert gpu.BUDGET_S + gpu.GRACE_S < gpu.BUDGET_S + gpu.LAST_S < 600.0


def test_a_process_that_waits_for_a_library_ends_all_the_same(tmp_path):
    code = (
        f'import sys; sys.path.insert(0, {str(ROOT / "benchmark")!r}); import time_limits, signal\n'
        # What Python's own interruption does not reach.
        'signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])\n'
        'with time_limits.ended_after(0.5), time_limits.limited(0.1):\n'
        '    while True: pass'
    )
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert 'Timeout' in done.stderr


def test_what_follows_a_limit_is_not_interrupted():
    with time_limits.limited(0.05):
        pass
    end = perf_counter() + 0.15
    while perf_counter() < end:
        pass


@pytest.mark.parametrize('family', ['pi05', 'pi0'])
def test_the_same_seed_gives_the_same_weights_and_another_seed_others(family):
    dims = random_policy.sized_dims(family, 'tiny', cameras=2)
    first, again, other = (
        random_policy.random_network(family, dims, 'cpu', 'bfloat16', seed).state_dict()
        for seed in (0, 0, 1)
    )
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)


def test_another_number_of_cameras_shares_the_weights():
    network, _ = tiny(1)
    other = random_policy.with_cameras(network, 'pi05', 3)
    assert other.dims == replace(network.dims, cameras=3)
    assert other.action_in.weight.data_ptr() == network.action_in.weight.data_ptr()


def test_a_wrong_weight_is_an_error_that_correctness_would_refuse():
    network, inputs = tiny(1)
    expected = random_policy.infer(engine(network), inputs)
    network.vision.blocks[0].mlp.fc1.weight.data[0] *= 3.0
    wrong = random_policy.infer(engine(network), inputs)
    assert gpu_checks.relative_error(wrong, expected) > gpu_checks.FLOAT32_BOUND
    assert gpu_checks.relative_error(np.full_like(expected, np.nan), expected) == float('inf')


@pytest.mark.thorough
@pytest.mark.parametrize('name', ['plain', 'jacobian', 'samples', 'action_time'])
def test_a_prefix_that_stands_still_is_seen_in_every_variant(name):
    network, first = tiny(2, seed=10)
    _, second = tiny(2, seed=20)
    first, second = (gpu_checks.variants(inputs)[name] for inputs in (first, second))
    honest = gpu_checks.replay_errors(engine(network), engine(network), first, second)
    assert honest.pop('distance') > gpu_checks.DISTINCT
    assert set(honest.values()) == {0.0}
    stale = gpu_checks.replay_errors(StaleEngine(engine(network)), engine(network), first, second)
    assert stale['other observation'] > gpu_checks.BFLOAT16_BOUND / 3


def test_guidance_that_is_none_breaks_the_identity():
    network, inputs = tiny(2)
    plan_weight = np.zeros_like(inputs.step_inputs.plan_weight)
    steps = replace(inputs.step_inputs, plan_weight=plan_weight)
    inputs = replace(inputs, step_inputs=steps)
    subject = engine(network)
    assert gpu_checks.identity_error(subject, inputs) <= gpu_checks.FLOAT32_BOUND
    # The engine is given one weight, the identity is checked with another.
    real, unguided = subject.load_step_inputs, np.array([1, 0], dtype=np.float32)
    subject.load_step_inputs = lambda given: real(replace(given, row_weight=unguided))
    assert gpu_checks.identity_error(subject, inputs) > gpu_checks.DISTINCT


def test_products_on_a_gpu_must_take_the_next_operation_along(monkeypatch):
    found = gpu_checks.products('cpu', 'tiny')
    assert found.passed and found.note.startswith('0 of 7 products')
    assert 'pi05 gelu (256, 4304, 1152)' in found.figures
    usable = {'cpu': True, 'cuda': False}
    for device, taken in usable.items():
        monkeypatch.setattr(gpu_checks.epilogues, 'usable', lambda *of, taken=taken: taken or None)
        assert not gpu_checks.products(device, 'tiny').passed


@pytest.mark.thorough
def test_packed_keys_of_other_numbers_or_of_no_kernel_fail_the_check(monkeypatch):
    found = gpu_checks.packed_keys('cpu', 'tiny')
    assert found.passed, found.note
    assert 'is not used' in found.note
    assert found.figures['usable'] == {'pi05': False, 'smolvla': False}
    with monkeypatch.context() as patch:
        real, packed = gpu_checks.infer, []

        def other_numbers(subject, inputs):
            packed[:] = packed or [subject]
            return real(subject, inputs) * (1.1 if subject is packed[0] else 1.0)

        patch.setattr(gpu_checks, 'infer', other_numbers)
        assert not gpu_checks.packed_keys('cpu', 'tiny').passed
    # A kernel where none is expected, as none where one is.
    monkeypatch.setattr(gpu_checks, 'usable', lambda kernel, *of: kernel)
    found = gpu_checks.packed_keys('cpu', 'tiny')
    assert found.figures['usable'] == {'pi05': True, 'smolvla': True}
    assert not found.passed


@pytest.mark.thorough
def test_overlapped_chunks_that_are_not_the_sequential_ones_fail_the_check(monkeypatch):
    found = gpu_checks.overlap('cpu', 'tiny')
    assert found.passed, found.note
    assert len(found.figures['overlap ms']) == 12
    # A runner that forgets which slots are being read, as a missing event would.
    real = gpu_checks.ChunkRunner.denoise

    def last_slot(self, request, encoded, clock, on_step=None):
        wrong = replace(encoded, slots=tuple(1 - slot for slot in encoded.slots))
        return real(self, request, wrong, clock, on_step)

    class Confused(gpu_checks.ChunkPipeline):
        def __init__(self, runner):
            monkeypatch.setattr(gpu_checks.ChunkRunner, 'denoise', last_slot)
            super().__init__(runner)

    monkeypatch.setattr(gpu_checks, 'ChunkPipeline', Confused)
    assert not gpu_checks.overlap('cpu', 'tiny').passed


@pytest.mark.thorough
def test_memory_that_is_allocated_and_freed_in_steady_state_fails_the_check(monkeypatch):
    real, made = gpu_checks.infer, []

    def allocating(subject, inputs):
        made.append(1)
        return real(subject, inputs)

    monkeypatch.setattr(gpu_checks, 'infer', allocating)
    monkeypatch.setattr(gpu_checks, 'allocations', lambda device: len(made))
    found = gpu_checks.memory('cpu', 'tiny', chunks=2)
    assert found.figures['growth bytes'] == 0
    assert not found.passed and found.figures['allocations'] == 4
    assert '4 allocations' in found.note


@pytest.mark.thorough
def test_memory_that_grows_fails_the_check(monkeypatch):
    kept = []
    real = gpu_checks.infer

    def leaking(subject, inputs):
        kept.append(torch.zeros(8))
        return real(subject, inputs)

    monkeypatch.setattr(gpu_checks, 'infer', leaking)
    found = gpu_checks.memory('cpu', 'tiny', chunks=2)
    assert not found.passed
    assert found.figures['growth bytes'] == 4 * 8 * 4
    assert found.figures['left after close bytes'] == 6 * 8 * 4


@pytest.mark.thorough
def test_wrong_chunks_of_the_triton_kernels_fail_the_check(monkeypatch):
    """The operators stand in for the kernels: what is tested is who is compared with whom."""

    def take(engine, word, precision, action_times):
        engine.triton = word

    monkeypatch.setattr(gpu_checks, 'choose_layers', take)
    found = gpu_checks.triton('cpu', 'tiny')
    assert found.passed, found.note
    assert len(found.figures) == 2 * 2 * 2 * 3
    assert {'pi05 float32 rows=1 short prompt', 'pi0 bfloat16 rows=2 action_time'} <= set(
        found.figures
    )
    run = gpu_checks.infer

    def wrong(subject, inputs):
        chunk = run(subject, inputs)
        return chunk * 1.7 if subject.triton == 'on' and inputs.rows == 2 else chunk

    monkeypatch.setattr(gpu_checks, 'infer', wrong)
    found = gpu_checks.triton('cpu', 'tiny')
    assert not found.passed and '7.0e-01 (bound 1e-04)' in found.note


def test_triton_kernels_must_be_taken_on_a_gpu(monkeypatch):
    monkeypatch.delenv('TRITON_INTERPRET', raising=False)
    found = gpu_checks.triton('cpu', 'tiny')
    assert found.passed and 'its kernels run on device cuda' in found.note

    def refuse(engine, word, precision, action_times):
        engine.why_triton = 'a layer differs by 1'

    monkeypatch.setattr(gpu_checks, 'choose_layers', refuse)
    network = gpu_checks.random_network
    on_cpu = lambda family, dims, device, precision: network(family, dims, 'cpu', precision)  # noqa: E731
    monkeypatch.setattr(gpu_checks, 'random_network', on_cpu)
    found = gpu_checks.triton('cuda', 'tiny')
    assert not found.passed
    assert 'not taken for pi05 in float32, pi05 in bfloat16' in found.note
    assert 'differs by 1' in found.note


@pytest.mark.thorough
def test_every_familys_chunks_are_compared_and_those_of_one_that_is_wrong_fail(monkeypatch):
    found = gpu_checks.families('cpu', 'tiny')
    assert found.passed, found.note
    for family in TINY_FAMILIES:
        assert {f'{family} {precision} rows=2' for precision in gpu_checks.BOUNDS} <= set(
            found.figures
        )
    assert {e for name, e in found.figures.items() if 'float32' in name} == {0.0}
    load, loaded = gpu_family_checks.load_network, []

    def with_a_wrong_weight(family, *of, device, precision):
        network = load(family, *of, device=device, precision=precision)
        loaded.append(family)
        if family == 'groot_n17' and precision == 'float32' and loaded.count(family) == 1:
            # The device's; the next is the CPU's.
            with torch.no_grad():
                max(network.parameters(), key=torch.numel).mul_(2.0)
        return network

    monkeypatch.setattr(gpu_family_checks, 'load_network', with_a_wrong_weight)
    found = gpu_checks.families('cpu', 'tiny')
    assert not found.passed and found.figures['groot_n17 float32 rows=1'] > 2e-4
    # On a GPU an eager network is a fault; here all are eager.
    monkeypatch.setattr(
        gpu_family_checks,
        'load_network',
        lambda *of, device, precision: load(*of, device='cpu', precision=precision),
    )
    found = gpu_checks.families('cuda', 'tiny')
    assert not found.passed and 'act float32: vision eager' in found.note


def test_a_chunk_that_is_wrong_is_shown_meets_no_target_and_fails_the_run(
    monkeypatch, capsys, tmp_path
):
    mode = gpu_latency.GRAPH
    fault = gpu_latency.fault_of(mode, 1.7)
    assert 'off by 1.7e+00' in fault and not gpu_latency.fault_of(mode, 7e-2)
    assert gpu_latency.fault_of(mode, float('inf')) and gpu_latency.fault_of(mode, float('nan'))
    result = {
        **_result(1, 6.0, 2.0, 6.6),
        'error_against_eager': 1.7,
        'fault': fault,
        'peak_memory_gib': None,
    }
    for phase in ('vision', 'prefix', 'denoise'):
        result['milliseconds'][phase] = {'median': 1.0}
    assert {one.found for one in gpu_targets.targets([result])} == {None}
    head, line = gpu_latency.table([result])
    assert head.endswith('off eager by') and line.endswith('1.7e+00 WRONG')
    monkeypatch.setattr(gpu_checks, 'CHECKS', {})
    monkeypatch.setattr(gpu, 'run_latency', lambda *of: iter([('latency', result)]))
    assert gpu.main([*TINY, '--json', str(tmp_path / 'out.json')]) == 1
    said = capsys.readouterr().out
    assert 'WRONG: 3 view(s), 1 row(s), graph: its chunk is off by 1.7e+00' in said
    assert 'NOT MET' not in said and ': met' not in said


@pytest.mark.thorough
@pytest.mark.parametrize('mode', [gpu_latency.EAGER, gpu_latency.GRAPH])
def test_a_configuration_is_measured_and_compared_with_eager(mode):
    network, _ = tiny(1)
    result = gpu_latency.measure(network, 'pi05', 1, 2, mode, repeats=3)
    assert result['error_against_eager'] <= gpu_checks.FLOAT32_BOUND
    assert {p['count'] for p in result['milliseconds'].values()} == {3}
    shown = gpu_latency.table([result])
    assert len(shown) == 2
    assert mode.name in shown[1]


@pytest.mark.thorough
def test_the_table_has_the_least_times_of_a_gpu_whose_rates_are_published():
    network, _ = tiny(1)
    result = gpu_latency.measure(network, 'pi05', 1, 1, gpu_latency.EAGER, repeats=2)
    assert result['least_ms'] is None
    dims = random_policy.sized_dims('pi05', 'full', 3)
    least = gpu_latency.least_ms('pi05', dims, 2, 'NVIDIA H200', 139 * 2**30)
    floors = phase_floors(
        count_operations('pi05', dims),
        published_rates(DEVICES['h200'], 'bfloat16'),
        precision='bfloat16',
        rows=2,
        steps=10,
        views=3,
    )
    assert least == {phase: floors[phase].milliseconds for phase in ('miss', 'hit')}
    lines = gpu_latency.table([{**result, 'least_ms': least}])
    assert lines[0].split()[-6:] == ['least', 'miss/hit', 'memory', 'off', 'eager', 'by']
    assert f'{least["miss"]:.2f}' in lines[1]
    assert gpu_latency.least_ms('pi05', dims, 2, 'NVIDIA Unheard Of', 139 * 2**30) is None


def _result(rows: int, miss: float, hit: float, p99: float, mode: str = 'graph') -> dict:
    return {
        'views': 3,
        'rows': rows,
        'mode': mode,
        'fault': '',
        'least_ms': {'miss': 6.0, 'hit': 2.0},
        'milliseconds': {
            'miss': {'median': miss, 'p99': p99, 'count': 1234},
            'hit': {'median': hit},
        },
    }


def test_targets_are_compared_with_what_was_measured():
    results = [_result(1, 9.0, 6.0, 9.45), _result(2, 18.0, 6.6, 20.0)]
    others = [{**results[0], 'views': 2}, {**results[0], 'mode': 'eager'}]
    found = {one.name: one for one in gpu_targets.targets([*others, *results, *others])}
    figures = [one.found for one in found.values()]
    assert figures[:5] == pytest.approx([1.5, 3.0, 2.0, 1.1, 1.05])
    assert figures[5:] == [None] * 5
    assert found['graph: miss, of its roofline'].line.endswith('1.5 (at most 1.5): met')
    assert found['graph: hit, of its roofline'].line.endswith('NOT MET')
    in_triton = _result(1, 6.0, 2.0, 6.6, 'triton, graph')
    triton = gpu_targets.targets([*results, in_triton])[5]
    assert triton.line.startswith('triton, graph: miss') and triton.line.endswith('met')
    assert {one.found for one in gpu_targets.targets(others)} == {None}
    assert 'not measured' in gpu_targets.targets([])[0].line


def test_the_slowest_are_said_with_their_number_and_too_few_are_not_judged():
    result = _result(1, 9.0, 6.0, 9.45)
    line = gpu_targets.targets([result])[4].line
    assert line == (
        'graph: p99 of a miss, of its median: 1.05 over 1,234 samples (at most 1.1): met'
    )
    result['milliseconds']['miss']['count'] = 37
    assert 'not measured' in gpu_targets.targets([result])[4].line


def test_the_headline_has_its_samples_and_the_rest_few():
    assert gpu_targets.samples_of(3, 1, 'triton, graph')[:2] == (2000, 50)
    for rows, mode in ((1, 'graph'), (2, 'graph'), (2, 'triton, graph')):
        assert gpu_targets.samples_of(3, rows, mode)[:2] == (200, 50)
    few = gpu_targets.samples_of(2, 1, 'graph')
    assert few == gpu_targets.samples_of(3, 1, 'eager')
    assert few[:2] == (30, 3)


def test_the_headlines_samples_fit_into_its_share_of_the_time_as_predicted_for_an_h200():
    dims = random_policy.sized_dims('pi05', 'full', 3)
    counts = count_operations('pi05', dims)
    rates = published_rates(DEVICES['h200'], 'bfloat16')
    floors = phase_floors(counts, rates, precision='bfloat16', rows=1, steps=10, views=3)
    kernels = performance_figures('pi05').kernels
    left_s = (1 - gpu.CHECKS_SHARE) * gpu.BUDGET_S
    for mode, name in (('torch', 'graph'), ('triton', 'triton, graph')):
        predicted = predicted_ms(floors, kernels[mode], views=3, steps=10)
        samples = gpu_targets.samples_of(3, 1, name)
        rounds = samples.count + samples.warm_up
        needed_s = rounds * (predicted['miss'] + predicted['hit']) / 1e3
        assert needed_s < samples.share * left_s
        left_s -= needed_s


def test_the_headline_is_measured_first():
    wanted = [(v, r, mode.name) for v, r, mode in gpu_latency.configurations(False)]
    plain = [(3, rows, mode) for mode in ('graph', 'eager') for rows in (1, 2)]
    # What may end the process comes after what PyTorch runs by itself.
    assert wanted[:6] == [*plain, (3, 1, 'triton, graph'), (3, 2, 'triton, graph')]
    assert len(wanted) == len(set(wanted)) == 14


def test_sampling_ends_with_its_time_and_keeps_what_there_is():
    network, _ = tiny(1)
    inputs = random_policy.random_inputs(network.dims, 1, seed=1)
    samples = gpu_latency.time_phases(engine(network), inputs, repeats=50, warm_up=1, most_s=0.0)
    assert {len(values) for values in samples.values()} == {1}
