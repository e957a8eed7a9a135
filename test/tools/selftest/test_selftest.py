"""The self-test: what passes is named, what fails says why, and wrong numbers never pass."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
from fake_cuda import CUresult
from fake_tensorrt import RELEASES, RTX, FakeEngine
from paths import ROOT
from tensorrt_machine import Machine
from thorough import thorough_but
from tiny_policy import TRIED_FAMILIES

from vla_runtime.cli.main import main
from vla_runtime.engines.cuda_driver import CudaError
from vla_runtime.engines.tensorrt.adapter import TensorRTError
from vla_runtime.policy import Policy
from vla_tools.selftest import checks, policies
from vla_tools.selftest.checks import run_selftest
from vla_tools.selftest.policies import infer_cases, largest_error
from vla_tools.selftest.steps import Step, Steps, lost_context

BFLOAT16 = 'pi05_bfloat16'


def selftest(device: str, *families: str) -> dict[str, Step]:
    """The steps of one run, by name."""
    begun: list[str] = []
    steps = Steps(begun.append, lambda step: None)
    run_selftest(device, families or ('pi05',), steps)
    assert begun == [step.name for step in steps.done]
    return {step.name: step for step in steps.done}


@pytest.fixture
def machine(monkeypatch, tmp_path):
    return lambda **options: Machine(monkeypatch, tmp_path, **options)


@pytest.fixture
def pytorch(monkeypatch):
    """PyTorch's half of the self-test on a GPU, with its policies on the CPU."""
    real = Policy.load

    def on_cpu(bundle, backend, device, **options) -> Policy:
        return real(bundle, backend, 'cpu', **options)

    monkeypatch.setattr(checks, 'check_cuda_device', lambda device, index: None)
    monkeypatch.setattr(checks, 'check_backend', lambda backend, device: None)
    monkeypatch.setattr(checks, '_pytorch_fits', lambda index: 'Orin')
    monkeypatch.setattr(checks, '_capability', lambda index: (8, 7))
    monkeypatch.setattr(Policy, 'load', on_cpu)


def test_on_a_cpu_both_backends_of_every_family_are_compared(tmp_path, capsys):
    out = tmp_path / 'selftest.json'
    assert main(['selftest', '--device', 'cpu', '--json', str(out)]) == 0
    document = json.loads(out.read_text())
    assert document['passed'] and {step['state'] for step in document['steps']} == {'passed'}
    assert set(document['milliseconds']) == {'torch', 'onnxruntime'}
    for times in document['milliseconds'].values():
        assert set(times) == set(TRIED_FAMILIES)
    assert {'numpy', 'torch', 'python', 'vla_runtime'} <= set(document['versions'])
    text = capsys.readouterr().out
    assert 'smolvla: compared' in text and f'PASSED: {3 + 6 * len(TRIED_FAMILIES)} steps' in text


def test_a_backend_that_is_not_installed_is_skipped_and_none_at_all_fails(monkeypatch, capsys):
    absent = {'torch'}
    monkeypatch.setattr(checks, 'missing_package', lambda name: name if name in absent else None)
    steps = selftest('cpu')
    assert steps['torch: imported'].state == 'skipped'
    assert steps['onnxruntime, pi05: timed'].state == 'passed'
    absent.add('onnxruntime')
    assert main(['selftest', '--device', 'cpu']) == 1
    assert 'pip install onnxruntime' in capsys.readouterr().out


@pytest.mark.parametrize('release', thorough_but(['8.6.1', '10.3.0'], RELEASES))
def test_with_tensorrt_engines_are_built_captured_compared_and_timed(machine, release):
    machine(release=release)
    steps = selftest('tensorrt', 'pi05', 'smolvla')
    assert {step.state for step in steps.values()} == {'passed'}
    assert steps['driver: a device answers'].detail == 'driver for CUDA 12.6'
    assert '16 multiprocessors' in steps['device: opened'].detail
    assert steps['smolvla: engines built'].detail.startswith('3 engines')
    assert steps['pi05: timed'].detail.endswith('graphs')
    # bfloat16 is tried where TensorRT runs it, and no closer than it rounds.
    found = [
        float(step.detail.split()[4])
        for step in steps.values()
        if step.name == f"{BFLOAT16}: compared with PyTorch's chunks"
    ]
    assert len(found) == (release != '8.6.1')
    assert all(1e-3 < error <= 8e-2 for error in found)


@pytest.mark.thorough
@pytest.mark.parametrize('tensor', ['image_tokens', 'past_key', 'past_value', 'x_next'])
def test_a_bfloat16_network_that_computes_something_else_fails(machine, tensor):
    here = machine(release='10.3.0')
    here.trt.distort = (tensor, 0.5)
    step = selftest('tensorrt', 'pi05')[f"{BFLOAT16}: compared with PyTorch's chunks"]
    assert step.state == 'failed' and 'bound 0.08' in step.detail


@pytest.mark.thorough
@pytest.mark.parametrize(('capability', 'tried'), [((8, 7), True), ((7, 5), False)])
def test_pytorch_on_a_gpu_is_tried_in_bfloat16_where_the_gpu_multiplies_it(
    pytorch, monkeypatch, capability, tried
):
    monkeypatch.setattr(checks, '_capability', lambda index: capability)
    steps = selftest('cuda', 'pi05')
    names = [name for name, step in steps.items() if 'compared' in name and step.state == 'passed']
    expected = ['pi05', *([BFLOAT16] if tried else [])]
    assert names == [f"torch, {name}: compared with PyTorch's chunks" for name in expected]


def test_all_policies_are_built_by_one_builder_with_the_kernel_times_of_those_before(machine):
    here = machine()
    selftest('tensorrt', 'pi0', 'act')
    assert len(here.trt.builders) == 1
    # The stand-in's cache grows by one byte a build.
    times = [len(config._cache._data) for config in here.trt.configs]
    assert times == list(range(len(times))) and len(times) > 3


@pytest.mark.thorough
def test_nothing_stays_on_the_device(machine):
    here = machine()
    selftest('tensorrt')
    assert (here.cuda.live, here.cuda.streams, here.cuda.events) == ((0, 0), 0, 0)


def test_without_a_driver_tensorrt_is_not_asked(machine):
    here = machine(devices=None)
    steps = selftest('tensorrt')
    last = list(steps.values())[-1]
    assert (last.name, last.state) == ('driver: a device answers', 'failed')
    assert 'libcuda.so.1 is not found' in last.detail
    assert here.trt.used == set()


def test_engines_that_compute_something_else_fail_and_other_families_go_on(machine):
    here = machine()
    here.trt.distort = ('x_next', 0.05)
    steps = selftest('tensorrt', 'pi05', 'pi0')
    failed = [step for step in steps.values() if step.state == 'failed']
    assert [step.name for step in failed] == [
        "pi05: compared with PyTorch's chunks",
        "pi0: compared with PyTorch's chunks",
        "pi05_bfloat16: compared with PyTorch's chunks",
    ]
    assert 'differ from PyTorch' in failed[0].detail and 'do not use' in failed[0].mend


def test_networks_without_a_graph_fail_and_say_which(machine):
    here = machine()
    here.cuda.graph_bytes = 1 << 40
    steps = selftest('tensorrt')
    # Already the copy that is captured for a trial.
    assert 'CUDA_ERROR_OUT_OF_MEMORY' in list(steps.values())[-1].detail
    here.cuda.graph_bytes = 0
    here.cuda.failing['cuEventElapsedTime'] = CUresult.CUDA_ERROR_LAUNCH_FAILED
    assert 'CUDA_ERROR_LAUNCH_FAILED' in list(selftest('tensorrt').values())[-1].detail


def test_a_context_that_broke_ends_in_a_verdict_and_other_families_are_skipped(
    machine, monkeypatch, tmp_path, capsys
):
    here = machine()

    def breaks(policy: Policy) -> dict[str, np.ndarray]:
        here.cuda.broken = CUresult.CUDA_ERROR_LAUNCH_FAILED
        return infer_cases(policy)

    monkeypatch.setattr(checks, 'infer_cases', breaks)
    out = tmp_path / 'selftest.json'
    families = ['--family', 'pi05', '--family', 'smolvla']
    assert main(['selftest', '--device', 'tensorrt', *families, '--json', str(out)]) == 1
    tried = json.loads(out.read_text())['steps']
    steps = [step for step in tried if step['state'] == 'failed']
    failed = {step['name']: step['detail'] for step in steps}
    assert steps[0]['mend'].startswith('nothing more is compared: the CUDA context is lost')
    skipped = {step['name']: step['detail'] for step in tried if step['state'] == 'skipped'}
    assert skipped == dict.fromkeys(('smolvla', BFLOAT16), 'the CUDA context is lost')
    assert list(failed) == [
        "pi05: compared with PyTorch's chunks",
        'pi05: closed',
        'device: closed',
    ]
    assert all('CUDA_ERROR_LAUNCH_FAILED' in detail for detail in failed.values())
    assert "FAILED: pi05: compared with PyTorch's chunks; pi05: closed" in capsys.readouterr().out


def test_a_kernel_that_faults_at_load_is_a_lost_context(machine, monkeypatch):
    here = machine()

    def faults(*arguments: object) -> None:
        here.cuda.broken = CUresult.CUDA_ERROR_LAUNCH_FAILED

    monkeypatch.setattr(FakeEngine, '_run', faults)
    steps = selftest('tensorrt', 'pi0', 'act')
    assert steps['pi0: engines built'].state == 'passed'
    assert steps['pi0: loaded'].mend.startswith('nothing more is compared: the CUDA context')
    assert steps['act'].state == 'skipped'


def test_pytorchs_error_of_a_lost_context_is_known(pytorch, monkeypatch):
    def faults(policy: Policy) -> None:
        raise RuntimeError(
            'CUDA error: an illegal memory access was encountered\n'
            'CUDA kernel errors might be asynchronously reported at some other API call'
        )

    monkeypatch.setattr(checks, 'infer_cases', faults)
    steps = selftest('cuda', 'pi0', 'act')
    compared = steps["torch, pi0: compared with PyTorch's chunks"]
    assert compared.mend.startswith('nothing more is compared: the CUDA context')
    assert steps['torch, act'].state == 'skipped'


@pytest.mark.parametrize(
    ('package', 'release', 'told', 'mend'),
    [
        ('tensorrt-cu13', '10.13.3', '10.13.3 needs a driver for CUDA 13', 'tensorrt-cu12'),
        ('tensorrt-rtx-cu13-bindings', '1.7.1.116', '', 'tensorrt-rtx-cu12-bindings'),
    ],
)
def test_a_tensorrt_for_a_newer_cuda_than_the_driver_is_named(
    machine, monkeypatch, package, release, told, mend
):
    machine()
    real = checks.metadata.version
    monkeypatch.setattr(
        checks.metadata, 'version', lambda name: release if name == package else real(name)
    )
    last = list(selftest('tensorrt').values())[-1]
    assert last.state == 'failed'
    assert told in last.detail and f'pip install {mend}' in last.detail


@pytest.fixture
def rtx(machine, monkeypatch):
    """A machine with TensorRT for RTX and a GPU of the given compute capability."""

    def make(capability: tuple[int, int]):
        here = machine(release=RTX, name='NVIDIA GeForce RTX', capability=capability)
        monkeypatch.setitem(sys.modules, 'tensorrt', None)
        monkeypatch.setitem(sys.modules, 'tensorrt_rtx', here.trt)

    return make


def test_tensorrt_for_rtx_is_tried_as_the_other_is(rtx):
    rtx((8, 9))
    steps = selftest('tensorrt', 'pi0')
    assert {step.state for step in steps.values()} == {'passed'}
    assert 'for RTX' in steps['TensorRT: imported, release taken'].detail


@pytest.mark.parametrize('capability', [(7, 5), (9, 0)])
def test_a_gpu_that_tensorrt_for_rtx_does_not_serve_is_named_before_a_build(rtx, capability):
    rtx(capability)
    last = list(selftest('tensorrt', 'pi0').values())[-1]
    assert (last.name, last.state) == ('TensorRT: imported, release taken', 'failed')
    assert f'{capability[0]}.{capability[1]}); install TensorRT' in last.detail


@pytest.mark.parametrize(
    ('architecture', 'capability', 'driver', 'fits'),
    [
        ('sm_87', (8, 7), (12, 6), True),
        # NVIDIA promises cubins of another minor revision on desktop GPUs alone.
        *((f'sm_{other}', (8, 7), (12, 6), False) for other in ('80', '86', '89', '90', '90a')),
        # Older code is compiled.
        ('compute_80', (8, 7), (12, 6), True),
        *((f'compute_{other}', (8, 7), (12, 6), False) for other in ('90', '80a', '80f')),
        *((damaged, (8, 7), (12, 6), False) for damaged in ('odd', 'sm_')),
        ('sm_80', (8, 6), (12, 6), True),
        ('sm_86', (8, 0), (12, 6), False),
        ('sm_87', (8, 9), (12, 6), False),
        ('sm_80', (8, 7), (13, 1), False),
        ('sm_80', (8, 7), (13, 2), True),
        ('sm_110', (11, 0), (13, 0), True),
        # Of one architecture alone.
        ('sm_90a', (9, 0), (12, 6), True),
        ('compute_90a', (9, 0), (12, 6), True),
        ('compute_90a', (11, 0), (13, 0), False),
        ('sm_100a', (10, 3), (13, 0), False),
        # Of one family.
        ('sm_100f', (10, 3), (13, 0), True),
        ('compute_100f', (10, 3), (13, 0), True),
        ('compute_100f', (11, 0), (13, 0), False),
    ],
)
def test_kernels_run_where_nvidia_promises_it(architecture, capability, driver, fits):
    assert checks._serves(architecture, *capability, driver) is fits


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        (lambda chunks: chunks['plain_2'].fill(np.nan), 'plain_2'),
        (lambda chunks: chunks.update(plain_2=chunks['plain_1']), 'two different inputs'),
        (lambda chunks: chunks['guided_1'].__iadd__(0.02), 'guided_1'),
    ],
)
def test_chunks_that_are_wrong_are_refused(change, message):
    random = np.random.default_rng(0)
    names = ('plain_1', 'plain_2', 'guided_1', 'guided_2')
    reference = {name: random.normal(size=(8, 3)) for name in names}
    chunks = {name: value.copy() for name, value in reference.items()}
    assert largest_error(chunks, reference) == 0.0
    change(chunks)
    with pytest.raises(ValueError, match=message):
        largest_error(chunks, reference)


@pytest.mark.parametrize(
    ('text', 'expected'),
    [
        (
            '# R36 (release), REVISION: 4.3, GCID: 38968081, BOARD: generic, EABI: aarch64',
            {'jetson_linux': '36.4.3', 'jetpack': '6'},
        ),
        (
            '# R36 (release), REVISION: 4.7, GCID: 1',
            {'jetson_linux': '36.4.7', 'jetpack': '6', 'known_problem': checks._REFUSALS},
        ),
        ('# R38 (release), REVISION: 4.0, GCID: 1', {'jetson_linux': '38.4.0', 'jetpack': '7'}),
        ('something else', {'jetson_linux': 'something else'}),
    ],
)
def test_a_jetson_names_its_release_and_power_mode(text, expected, monkeypatch, tmp_path):
    release = tmp_path / 'nv_tegra_release'
    release.write_text(text + '\n# later lines\n')
    nvpmodel = tmp_path / 'nvpmodel'
    nvpmodel.write_text('#!/bin/sh\nprintf "NV Power Mode: 15W\\n0\\n"\n')
    nvpmodel.chmod(0o755)
    monkeypatch.setenv('PATH', str(tmp_path), prepend=':')
    monkeypatch.setattr(checks, '_RELEASE', release)
    monkeypatch.setattr(checks, '_MODEL', tmp_path / 'none')
    assert checks.describe_jetson() == {**expected, 'power_mode': '15W 0'}


@pytest.mark.parametrize(
    ('model', 'kernel', 'expected'),
    [
        (
            'NVIDIA Jetson AGX Orin Developer Kit\0',
            '5.15.148-tegra',
            {'kernel': '5.15.148-tegra', 'model': 'NVIDIA Jetson AGX Orin Developer Kit'},
        ),
        (None, '6.8.12-tegra', {'kernel': '6.8.12-tegra'}),
        ('NVIDIA Jetson Thor\0', '6.8.12', {'kernel': '6.8.12', 'model': 'NVIDIA Jetson Thor'}),
        ('Raspberry Pi 5 Model B\0', '6.6.31', {}),
        (None, '6.8.12', {}),
    ],
)
def test_in_a_container_a_jetson_is_known_by_its_model_or_kernel(
    model, kernel, expected, monkeypatch, tmp_path
):
    if model is not None:
        (tmp_path / 'model').write_text(model)
    monkeypatch.setattr(checks, '_RELEASE', tmp_path / 'none')
    monkeypatch.setattr(checks, '_MODEL', tmp_path / 'model')
    monkeypatch.setattr(checks.platform, 'release', lambda: kernel)
    assert checks.describe_jetson() == expected


def test_tensorrt_is_tried_without_pytorch_and_onnx(tmp_path):
    script = f"""
import sys, types
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'test')!r}]
from fake_cuda import FakeCuda
from fake_tensorrt import FakeTensorRT
for name in ('torch', 'onnx'):
    sys.modules[name] = None
cuda = FakeCuda()
sys.modules['cuda.bindings.driver'] = cuda
sys.modules['tensorrt'] = FakeTensorRT('10.3.0', cuda)
from vla_runtime.cli.main import main
sys.exit(main(['selftest', '--device', 'tensorrt', '--family', 'pi0']))
"""
    done = subprocess.run([sys.executable, '-c', script], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert 'PASSED' in done.stdout


def test_every_family_has_its_policy(tmp_path):
    policies.unpack(tmp_path)
    folders = {path.name for path in tmp_path.iterdir() if path.is_dir()}
    assert folders == {*TRIED_FAMILIES, BFLOAT16}


def _wrapped(error: Exception) -> Exception:
    """As `find_device` tells it."""
    try:
        raise ValueError('no CUDA device answers here') from error
    except ValueError as found:
        return found


@pytest.mark.parametrize(
    ('error', 'lost'),
    [
        (CudaError('cuMemAlloc', 'CUDA_ERROR_ILLEGAL_ADDRESS', ''), True),
        (CudaError('cuMemAlloc', 'CUDA_ERROR_CONTEXT_IS_DESTROYED', ''), True),
        (CudaError('cuMemAlloc', 'CUDA_ERROR_UNKNOWN', ''), True),
        (_wrapped(CudaError('cuInit', 'CUDA_ERROR_LAUNCH_FAILED', '')), True),
        (CudaError('cuMemAlloc', 'CUDA_ERROR_OUT_OF_MEMORY', 'out of memory'), False),
        (RuntimeError('CUDA error: unspecified launch failure\nCompile with'), True),
        (RuntimeError('CUDA error: out of memory'), False),
        (TensorRTError('Error Code 1: Cuda Runtime (misaligned address)'), True),
        (TensorRTError('unknown error of the parser'), False),
        (ValueError('CUDA error: unknown error'), False),
    ],
)
def test_a_lost_context_is_known_by_code_or_text(error, lost):
    assert lost_context(error) is lost
