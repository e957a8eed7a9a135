"""The bench: each inference is of the kind it is filed under, and every figure has a source."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from fake_cuda import FakeCuda
from onnx_bundles import tiny_onnx_bundle
from tensorrt_machine import Machine, linked_copy
from tiny_policy import CAMERAS, JOINTS, pose_spec, tiny_spec, write_tiny_policy

from vla_runtime.bundle.schema import CropSpec, ImageSpec
from vla_runtime.engines import cuda_runtime, devices
from vla_runtime.family.declaration import image_sizes
from vla_runtime.inference.prefix_cache import PrefixCache
from vla_runtime.inference.request import cache_words
from vla_runtime.policy import Policy
from vla_runtime.types import CacheOutcome, Reuse
from vla_tools.performance import bench, device_rates
from vla_tools.performance.bench import (
    BenchOptions,
    DeviceFacts,
    device_facts,
    kinds_of,
    look,
    run_bench,
)

PHASES = {'tokens', 'images', 'vision', 'prefix', 'denoise', 'actions', 'total'}
QUICK = BenchOptions(repeats=2)


@pytest.fixture(scope='module')
def bundle(tmp_path_factory) -> Path:
    spec = tiny_spec(advantage='task_newline')
    return write_tiny_policy(tmp_path_factory.mktemp('bench') / 'bundle', spec)


@pytest.fixture(scope='module', autouse=True)
def small_probes():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_rates, '_SIDE', 32)
        patch.setattr(device_rates, '_ARRAY_BYTES', 2**16)
        yield


@pytest.fixture(scope='module')
def figures(bundle, small_probes) -> dict:
    return run_bench(bundle, QUICK)


def test_every_kind_has_every_phase_and_so_many_samples(figures):
    assert list(figures['milliseconds']) == ['miss', 'one new view', 'hit']
    for phases in figures['milliseconds'].values():
        assert set(phases) == PHASES
        assert {found['count'] for found in phases.values()} == {2}
    assert figures['views'] == 2
    assert figures['steps'] == 3


def test_a_miss_has_a_floor_for_every_view_and_a_hit_for_the_denoise_loop_alone(figures):
    floors = figures['floors_ms']
    assert set(floors['hit']) == {'denoise'}
    assert set(floors['miss']) == {'vision', 'prefix', 'denoise'}
    one, both = (floors[kind]['vision']['milliseconds'] for kind in ('one new view', 'miss'))
    assert both == pytest.approx(2 * one)
    assert floors['miss']['denoise'] == floors['hit']['denoise']


def test_fewer_views_two_rows_and_other_steps_are_what_runs(bundle, monkeypatch):
    seen = []
    real = bench._check_kind

    def watching(kind, report):
        seen.append(
            (kind.name, report.guidance, report.denoise_steps, cache_words(report.cache)['vision'])
        )
        real(kind, report)

    monkeypatch.setattr(bench, '_check_kind', watching)
    run_bench(bundle, replace(QUICK, views=1, rows=2, steps=5, repeats=1))
    assert {name for name, *_ in seen} == {'miss', 'hit'}
    assert {(guidance, steps) for _, guidance, steps, _ in seen} == {('fused', 5)}
    assert [cache[:10] for name, *_, cache in seen if name == 'hit'] == ['top: hit ('] * 3


def test_an_inference_that_is_not_of_its_kind_is_not_measured(bundle, monkeypatch):
    monkeypatch.setattr(PrefixCache, 'encode_images', _hit_whatever_came)
    with pytest.raises(RuntimeError, match='vision'):
        run_bench(bundle, QUICK)


def _hit_whatever_came(self, inputs, policy):
    return dict.fromkeys(CAMERAS, CacheOutcome(Reuse.HIT, age_s=0.0))


def test_onnx_runtime_is_measured_the_same_way():
    figures = run_bench(tiny_onnx_bundle(), replace(QUICK, backend='onnxruntime', repeats=1))
    assert set(figures['milliseconds']['miss']) == PHASES
    assert figures['backend'] == 'onnxruntime'
    assert figures['memory']['resident_peak'] >= figures['memory']['resident_before'] > 0
    assert figures['memory']['device'] is None


def test_a_policy_of_poses_is_given_a_rotation_that_is_one(tmp_path):
    spec = pose_spec('quaternion_wxyz')
    state = look(spec, {}).state
    np.testing.assert_array_equal(state, [0, 0, 0, 1, 0, 0, 0])
    bundle = write_tiny_policy(tmp_path / 'bundle', spec)
    assert run_bench(bundle, replace(QUICK, repeats=1))['steps'] == spec.denoise_steps
    assert not look(tiny_spec(), {}).state.any()
    assert len(look(tiny_spec(), {}).state) == len(JOINTS)


def test_images_of_one_aspect_only_are_made_in_that_aspect():
    area = ImageSpec('crop', 'area', CropSpec(48, 0.95))
    shapes = bench._image_shapes(replace(tiny_spec(), images=area))
    assert shapes == [(*size, 3) for size in image_sizes(tiny_spec().dims)]
    assert bench._image_shapes(tiny_spec()) == [(480, 640, 3)] * len(CAMERAS)


def test_one_view_has_no_kind_between_a_miss_and_a_hit():
    assert [(kind.name, kind.new_views) for kind in kinds_of(1)] == [('miss', 1), ('hit', 0)]
    assert [kind.new_views for kind in kinds_of(3)] == [3, 1, 0]


def test_a_gpu_in_no_table_is_measured_and_left_as_it_was(monkeypatch, tmp_path):
    machine = Machine(
        monkeypatch, linked_copy(tiny_onnx_bundle(), tmp_path / 'bundle'), name='NVIDIA Unheard Of'
    )
    machine.build()
    figures = run_bench(machine.bundle, replace(QUICK, backend='tensorrt', device='cuda'))
    assert figures['device_name'] == 'NVIDIA Unheard Of'
    assert set(figures['milliseconds']) == {'miss', 'one new view', 'hit'}
    assert set(figures['cuda_graph'].values()) == {'captured'}
    assert figures['notes'] == []
    if not torch.cuda.is_available():
        assert (figures['rates'], figures['floors_ms']) == (None, {})
    assert machine.cuda.live == (0, 0)
    assert machine.cuda.streams == 0


def test_looking_at_a_gpu_leaves_no_stream_behind(monkeypatch):
    cuda = FakeCuda(name='NVIDIA H200', total_bytes=1 << 30)
    monkeypatch.setattr(cuda_runtime, 'import_cuda', lambda: cuda)
    taken = cuda.cuMemAlloc(1 << 20)
    facts = device_facts(replace(QUICK, backend='tensorrt', device='cuda'))
    assert taken[0] == 0
    assert (facts.name, facts.total_bytes, facts.used_bytes) == ('NVIDIA H200', 1 << 30, 1 << 20)
    assert cuda.streams == 0


@pytest.mark.parametrize('what', ['device_facts', 'rates_of'])
def test_a_late_step_that_fails_is_noted_and_loses_nothing(bundle, monkeypatch, what):
    def fail(*arguments: object) -> None:
        raise RuntimeError('cuMemGetInfo: CUDA_ERROR_UNKNOWN')

    monkeypatch.setattr(bench, what, fail)
    figures = run_bench(bundle, QUICK)
    assert set(figures['milliseconds']['hit']) == PHASES
    (note,) = figures['notes']
    assert note.endswith(': RuntimeError: cuMemGetInfo: CUDA_ERROR_UNKNOWN')


def test_a_policy_that_cannot_be_closed_loses_nothing(bundle, monkeypatch):
    def fail(self: Policy) -> None:
        raise RuntimeError('cuMemFree: CUDA_ERROR_LAUNCH_FAILED')

    monkeypatch.setattr(Policy, 'close', fail)
    figures = run_bench(bundle, QUICK)
    assert figures['milliseconds']['miss']['total']['count'] == 2
    assert figures['notes'] == [
        'closing the policy: RuntimeError: cuMemFree: CUDA_ERROR_LAUNCH_FAILED'
    ]


def test_a_measurement_that_is_stopped_says_so_also_where_closing_fails(bundle, monkeypatch):
    def fail(self: Policy, *arguments: object, **options: object) -> None:
        raise RuntimeError('cuMemFree: CUDA_ERROR_LAUNCH_FAILED')

    monkeypatch.setattr(Policy, 'close', fail)

    def stop(rounds: range):
        yield rounds[0]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_bench(bundle, QUICK, stop)


def test_a_gpu_that_could_not_be_named_is_not_compared_with_the_cpu(monkeypatch):
    asked = []
    monkeypatch.setattr(bench, 'rates_of', lambda *arguments: asked.append(arguments))
    options = replace(QUICK, backend='onnxruntime', device='tensorrt:1', precision='float16')
    bench._rates(options, DeviceFacts(), 2)
    assert asked == [('tensorrt:1', 0, 'cuda:1', 'float16')]


def test_a_cpu_s_rates_are_those_of_the_run_s_threads(monkeypatch):
    used, before = [], torch.get_num_threads()
    measure = device_rates._torch_rates

    def noted(*arguments: str):
        used.append(torch.get_num_threads())
        return measure(*arguments)

    monkeypatch.setattr(device_rates, '_torch_rates', noted)
    run_bench(tiny_onnx_bundle(), replace(QUICK, backend='onnxruntime', repeats=1, threads=2))
    assert used == [2] and torch.get_num_threads() == before


def test_no_threads_are_all_cores_but_one_as_in_the_node(bundle, monkeypatch):
    monkeypatch.setenv('OMP_NUM_THREADS', '1')
    monkeypatch.setattr(devices, 'available_cores', lambda: 3)
    before = torch.get_num_threads()
    try:
        figures = run_bench(bundle, replace(QUICK, repeats=1, threads=0))
        assert figures['threads'] == torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_the_peak_is_this_programs_and_not_its_parents():
    # More than the child will ever hold.
    held = np.ones(2**29, dtype=np.uint8)
    code = 'from vla_tools.performance import bench; print(bench._peak_resident_bytes())'
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, timeout=60)
    assert 2**20 < int(done.stdout) < held.nbytes
