"""Building engines: what is refused before it is tried, what is kept, what a stop leaves behind."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_tensorrt import RELEASES
from tensorrt_machine import Machine, linked_copy, write_exported_policy

from vla_convert.export.tensorrt import build as tensorrt_build
from vla_convert.export.tensorrt.build import MemoryEstimate, build_engines, check_fits, plan_build
from vla_runtime.bundle.folder import read_bundle
from vla_runtime.engines import free_memory
from vla_runtime.engines.cuda_runtime import CudaRuntime
from vla_runtime.engines.tensorrt.adapter import TensorRT, TensorRTError, TensorRTMemoryError
from vla_runtime.engines.tensorrt.store import RECEIPT, REJECTION, TIMING_CACHE, read_metadata


@pytest.fixture(scope='module')
def exported(tmp_path_factory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp('build')
    return {
        precision: write_exported_policy(base / precision, 'pi05', precision)
        for precision in ('float32', 'bfloat16')
    }


@pytest.fixture(autouse=True)
def no_swap(monkeypatch):
    monkeypatch.setattr(tensorrt_build, 'free_swap_bytes', lambda: 0)


@pytest.fixture
def machine(monkeypatch, exported, tmp_path):
    def make(precision: str = 'float32', **options) -> Machine:
        bundle = tmp_path / precision
        if not bundle.exists():
            linked_copy(exported[precision], bundle)
        return Machine(monkeypatch, bundle, **options)

    return make


def with_memory_of_its_own(here: Machine) -> CudaRuntime:
    here.cuda.integrated = False
    return here.runtime()


def plan_on(here: Machine, **options):
    return plan_build(here.bundle, TensorRT(here.trt), here.runtime(), **{'rows': 2, **options})


def test_an_engine_that_does_not_load_beside_the_builder_is_kept(machine):
    here = machine()
    here.trt.short = 'beside a builder'
    here.build()
    here.load().close()
    here.trt.short = 'always'
    with pytest.raises(TensorRTMemoryError):
        here.build(force=True)


def test_engines_are_built_once_and_again_when_the_onnx_files_change(machine):
    here = machine()
    assert len(plan_on(here).to_build) == 3
    here.build()
    assert plan_on(here).to_build == []
    assert len(plan_on(here, force=True).to_build) == 3
    graph = here.bundle / 'onnx' / 'expert_rows.onnx'
    data = graph.read_bytes()
    graph.unlink()
    # Another producer's name: as good a graph, but not the one that was built.
    graph.write_bytes(data.replace(b'vla_runtime', b'vla_rantime'))
    assert plan_on(here).to_build == ['expert']


def test_changed_weights_mean_building_everything_again(machine):
    here = machine()
    here.build()
    weights = here.bundle / 'onnx' / 'weights.data'
    data = bytearray(weights.read_bytes())
    data[0] ^= 1
    weights.unlink()
    weights.write_bytes(data)
    assert len(plan_on(here).to_build) == 3


def test_a_changed_sha256_in_policy_yaml_means_building_again(machine):
    here = machine()
    here.build()
    listed = read_bundle(here.bundle, verify=False).spec.files
    assert plan_on(here, files=listed).to_build == []
    other = {**listed, 'onnx/prefix_rows.onnx': '0' * 64}
    assert plan_on(here, files=other).to_build == ['prefix']
    other = {**listed, 'onnx/weights.data': '0' * 64}
    assert len(plan_on(here, files=other).to_build) == 3


def test_engines_for_another_number_of_rows_replace_those_with_rows_alone(machine):
    here = machine()
    here.build()
    assert plan_on(here, rows=1).to_build == ['prefix', 'expert']
    here.build(rows=1)
    metadata = read_metadata(plan_on(here).folder, '')
    assert sorted(metadata.engines) == ['expert', 'prefix', 'vision'] and metadata.rows == 1
    engine = here.load(max_rows=2)
    assert engine.max_rows == 1
    engine.close()
    assert plan_on(here).to_build == ['prefix', 'expert']


def test_an_engine_file_that_belongs_to_nothing_is_removed(machine):
    here = machine()
    here.build()
    left = plan_on(here).folder / 'prefix_r2.engine'
    left.write_bytes(b'of an earlier release')
    assert plan_on(here).surplus == [left]
    here.build()
    assert not left.exists()


def test_a_receipt_is_gone_before_the_first_engine_is_replaced(machine):
    here = machine()
    here.build()
    folder = plan_on(here).folder
    for name in (RECEIPT, REJECTION):
        (folder / name).write_text('{}')
    here.build()
    # Nothing was built.
    assert (folder / RECEIPT).exists()
    here.trt.fail_build = 'out of tactics'
    with pytest.raises(TensorRTError):
        here.build(force=True)
    assert not (folder / RECEIPT).exists() and not (folder / REJECTION).exists()


def test_a_damaged_engine_is_built_again_alone(machine):
    here = machine()
    here.build()
    (plan_on(here).folder / 'prefix.engine').write_bytes(b'half')
    assert plan_on(here).to_build == ['prefix']


def test_a_build_that_was_stopped_goes_on(machine):
    here = machine()
    plan = plan_on(here)

    def stop_at_the_third(name, entry):
        if name == plan.to_build[2]:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_engines(
            plan, TensorRT(here.trt), here.runtime(), captures=1, report=stop_at_the_third
        )
    assert plan_on(here).to_build == plan.to_build[3:]


def test_a_failed_build_keeps_what_was_finished_and_leaves_no_half_file(machine):
    here = machine()
    here.build(rows=1)
    here.trt.fail_build = 'out of tactics'
    with pytest.raises(TensorRTError):
        here.build()
    plan = plan_on(here)
    assert plan.to_build == ['prefix', 'expert']
    assert sorted(path.name for path in plan.folder.iterdir()) == [
        'engine.json',
        'expert.engine',
        'prefix.engine',
        TIMING_CACHE,
        'vision.engine',
    ]


def test_measurements_are_handed_from_build_to_build(machine):
    here = machine()
    here.build()
    assert (plan_on(here).folder / TIMING_CACHE).read_bytes() == b'+++'


def test_the_workspace_reaches_tensorrt(machine):
    here = machine()
    here.build(workspace_bytes=7 << 20)
    assert [config._limits for config in here.trt.configs] == [{'WORKSPACE': 7 << 20}] * 3


def test_only_the_rows_asked_for_are_built(machine):
    assert plan_on(machine(), rows=1).to_build == ['vision', 'prefix', 'expert']


def test_bfloat16_is_refused_on_8_6_and_built_later(machine):
    with pytest.raises(ValueError, match='TensorRT'):
        plan_on(machine('bfloat16', release=RELEASES[0]))
    assert plan_on(machine('bfloat16', release=RELEASES[1])).precision == 'bfloat16'


def test_another_precision_than_the_files_is_refused(machine):
    with pytest.raises(ValueError, match='float'):
        plan_on(machine(), precision='float16')
    assert plan_on(machine(), precision='float32').precision == 'float32'


def test_a_bundle_without_onnx_files_is_told_what_to_do(machine):
    here = machine()
    (here.bundle / 'onnx' / 'prefix_rows.onnx').unlink()
    with pytest.raises(ValueError, match=r'prefix_rows\.onnx.*vla_runtime'):
        plan_on(here)


def test_what_cannot_fit_is_refused_before_tensorrt_is_asked(machine, monkeypatch):
    monkeypatch.setattr(tensorrt_build, 'available_host_bytes', lambda: 3 << 30)
    here = machine()
    with pytest.raises(ValueError, match='memory'):
        plan_on(here, workspace_bytes=2 << 30)
    assert here.trt.used == set()
    # What is there already needs no memory to build.
    monkeypatch.setattr(tensorrt_build, 'available_host_bytes', lambda: 64 << 30)
    here.build()
    monkeypatch.setattr(tensorrt_build, 'available_host_bytes', lambda: 0)
    assert plan_on(here).to_build == []


def test_a_gpu_with_memory_of_its_own_is_checked_apart_from_the_host(machine, monkeypatch):
    here = machine(total_bytes=4 << 30)
    runtime, discrete = here.runtime(), with_memory_of_its_own(here)
    monkeypatch.setattr(tensorrt_build, 'available_host_bytes', lambda: 4 << 30)
    estimate = MemoryEstimate.of(weight_bytes=1 << 30, workspace_bytes=1 << 30)
    assert (estimate.device, estimate.host) == (3 << 30, 3 << 30)
    check_fits(estimate, discrete)
    with pytest.raises(ValueError, match='memory'):
        check_fits(estimate, runtime)
    with pytest.raises(ValueError, match='memory'):
        check_fits(MemoryEstimate(device=5 << 30, host=1), discrete)


def test_swap_holds_the_share_of_the_host_and_not_that_of_the_gpu(machine, monkeypatch):
    estimate = MemoryEstimate(device=3 << 30, host=3 << 30)
    runtime = machine().runtime()
    assert runtime.info.integrated

    def free(memory: int, swap: int) -> None:
        monkeypatch.setattr(tensorrt_build, 'available_host_bytes', lambda: memory)
        monkeypatch.setattr(tensorrt_build, 'free_swap_bytes', lambda: swap)

    free(4 << 30, 2 << 30)
    check_fits(estimate, runtime)
    # What is asked for is enough.
    free(4 << 30, 1 << 30)
    with pytest.raises(ValueError, match='swap'):
        check_fits(estimate, runtime)
    free((3 << 30) - 1, 64 << 30)
    with pytest.raises(ValueError, match='swapped') as caught:
        check_fits(estimate, runtime)
    assert 'add' not in str(caught.value)


def test_beside_a_gpu_with_memory_of_its_own_the_host_may_swap(machine, monkeypatch):
    runtime = with_memory_of_its_own(machine(total_bytes=4 << 30))
    monkeypatch.setattr(tensorrt_build, 'available_host_bytes', lambda: 2 << 30)
    estimate = MemoryEstimate(device=1 << 30, host=3 << 30)
    with pytest.raises(ValueError, match='swap'):
        check_fits(estimate, runtime)
    monkeypatch.setattr(tensorrt_build, 'free_swap_bytes', lambda: 1 << 30)
    check_fits(estimate, runtime)
    with pytest.raises(ValueError, match='memory') as caught:
        check_fits(MemoryEstimate(device=5 << 30, host=1), runtime)
    assert 'swap' not in str(caught.value)


def test_an_unknown_amount_of_host_memory_refuses_nothing(machine, monkeypatch, tmp_path):
    monkeypatch.setattr(free_memory, '_MEMINFO', tmp_path / 'none')
    check_fits(MemoryEstimate(device=1 << 40, host=1 << 40), machine().runtime())


def test_available_memory_is_read_as_the_kernel_gives_it(monkeypatch, tmp_path):
    path = tmp_path / 'meminfo'
    path.write_text('MemTotal:  16000 kB\nMemAvailable:  2048 kB\n')
    monkeypatch.setattr(free_memory, '_MEMINFO', path)
    assert free_memory.available_host_bytes() == 2 << 20


def test_swap_is_what_disks_have_left_and_no_compressed_memory(monkeypatch, tmp_path):
    path = tmp_path / 'swaps'
    monkeypatch.setattr(free_memory, '_SWAPS', path)
    assert free_memory.free_swap_bytes() == 0
    head = 'Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority\n'
    path.write_text(head)
    assert free_memory.free_swap_bytes() == 0
    path.write_text(
        head
        + '/swapfile                               file\t\t4096\t\t1024\t\t-2\n'
        + '/dev/nvme0n1p3                          partition\t512\t\t0\t\t-3\n'
        + '/dev/zram0                              partition\t9999\t\t0\t\t5\n'
    )
    assert free_memory.free_swap_bytes() == (3072 + 512) * 1024
