"""The TensorRT engine over a fake device: built from our ONNX files, it computes what torch does.

Below our own code stand a fake CUDA runtime on real memory and a fake `tensorrt` that runs the ONNX
graph on ONNX Runtime with whatever lies at the bound addresses. No GPU is needed, and what a GPU
does differently (speed, rounding, what can be captured) is not shown here.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from engine_inputs import chunk, encode, step_inputs
from fake_cuda import CUresult
from fake_tensorrt import RELEASES
from tensorrt_machine import STEPS, Machine, linked_copy, write_exported_policy
from thorough import thorough_but
from tiny_policy import tiny_dims

from vla_runtime.bundle.folder import read_bundle
from vla_runtime.engines.cuda_driver import CudaError
from vla_runtime.engines.cuda_runtime import CudaRuntime
from vla_runtime.engines.protocol import StepInputs
from vla_runtime.engines.tensorrt import engine as tensorrt_engine
from vla_runtime.engines.tensorrt import loading as tensorrt_loading
from vla_runtime.engines.tensorrt.adapter import Network, TensorRT, TensorRTError
from vla_runtime.engines.tensorrt.engine import TensorRTEngine
from vla_runtime.engines.tensorrt.loading import closed_on_failure, load_networks
from vla_runtime.engines.torch.engine import TorchEngine
from vla_runtime.engines.torch.loading import load_torch_engine
from vla_runtime.inference.denoise import denoise, flow_times
from vla_runtime.inference.settings import PolicySettings
from vla_runtime.policy import Policy


@pytest.fixture(scope='module')
def bundles(tmp_path_factory) -> dict[str, Path]:
    """Tiny bundles of every kind of prefix and head with their ONNX files."""
    families = ('pi05', 'pi0', 'smolvla')
    return {
        family: write_exported_policy(tmp_path_factory.mktemp(family) / 'policy', family)
        for family in families
    }


@pytest.fixture
def machine(monkeypatch, bundles, tmp_path):
    """Make a machine with a bundle of its own (engines are written into it)."""

    def make(family: str = 'pi05', **options) -> Machine:
        target = tmp_path / f'{family}_{len(list(tmp_path.iterdir()))}'
        return Machine(monkeypatch, linked_copy(bundles[family], target), **options)

    return make


def torch_engine(bundle: Path, family: str) -> TorchEngine:
    return load_torch_engine(
        family,
        tiny_dims(family),
        bundle / 'weights.safetensors',
        device='cpu',
        precision='float32',
        max_rows=2,
        use_cuda_graphs=False,
    )


@pytest.mark.parametrize('release', thorough_but([RELEASES[0], RELEASES[-1]], RELEASES))
@pytest.mark.parametrize('family', ['pi05', 'pi0', 'smolvla'])
def test_the_built_engines_give_the_chunk_of_torch(machine, family, release):
    here = machine(family, release=release)
    here.build()
    engine, reference = here.load(family), torch_engine(here.bundle, family)
    for rows in (1, 2):
        expected = chunk(reference, rows, seed=4)
        assert np.abs(chunk(engine, rows, seed=4) - expected).max() <= 1e-5
    assert set(engine.cuda_graph.values()) == {'captured'}


@pytest.mark.parametrize('release', RELEASES)
def test_one_profile_serves_one_and_two_rows_from_10_on(machine, release):
    """With two, plans of later releases store the matrices of products that are cut twice."""
    here = machine('pi05', release=release)
    here.build()
    profiles = {len(config._profiles) for config in here.trt.configs}
    # Vision has no rows.
    assert profiles == ({0, 2} if release.startswith('8') else {0, 1})
    engine = here.load()
    assert engine.max_rows == 2
    engine.close()


def test_without_graphs_the_chunk_is_the_same(machine):
    here = machine()
    here.build()
    plain = here.load(use_cuda_graphs=False)
    assert set(plain.cuda_graph.values()) == {'eager'}
    assert np.array_equal(chunk(plain, 2, seed=2), chunk(here.load(), 2, seed=2))


def test_running_replays_graphs_and_takes_no_memory(machine):
    here = machine()
    here.build()
    engine = here.load()
    chunk(engine, 1, seed=1)
    live, here.cuda.calls = here.cuda.live, []
    for seed in range(3):
        chunk(engine, 1, seed)
    assert here.cuda.live == live
    # Two cameras, one prefix, one denoise loop; and nothing is captured again.
    assert len(here.cuda.calls) == 3 * 4
    assert not any(call == 'capture' for call in here.cuda.calls)


def test_a_device_far_behind_the_host_computes_the_same(machine):
    here = machine(late=True)
    here.build()
    engine = here.load()
    for rows in (1, 2):
        expected = chunk(torch_engine(here.bundle, 'pi05'), rows, seed=6)
        assert np.abs(chunk(engine, rows, seed=6) - expected).max() <= 1e-5


def test_another_number_of_steps_is_captured_when_first_run_and_leaves_the_inputs_alone(machine):
    here = machine()
    here.build()
    engine = here.load()
    expected = chunk(torch_engine(here.bundle, 'pi05'), 1, seed=8, steps=5)
    assert np.abs(chunk(engine, 1, seed=8, steps=5) - expected).max() <= 1e-5
    assert engine.cuda_graph['denoise'] == 'captured'
    here.cuda.calls = []
    assert np.abs(chunk(engine, 1, seed=8, steps=5) - expected).max() <= 1e-5
    assert 'capture' not in here.cuda.calls


def test_schedules_beyond_the_last_few_are_given_back(machine):
    here = machine()
    here.build()
    engine = here.load()
    for steps in range(4, 9):
        chunk(engine, 1, seed=1, steps=steps)
    live = here.cuda.live
    for steps in range(9, 12):
        chunk(engine, 1, seed=1, steps=steps)
    assert here.cuda.live == live


def test_the_prefix_runs_without_a_graph_where_memory_is_short_and_the_expert_keeps_its_own(
    machine, monkeypatch
):
    monkeypatch.setattr(tensorrt_loading, 'LOAD_RESERVE_BYTES', 0)
    here = machine()
    here.build()
    here.load()
    # Room for the buffers and the graphs of the denoise loop: 2 numbers of rows, 2 slots.
    buffers, total = here.cuda.used_bytes, 1 << 32
    small = machine(graph_bytes=total // 8, total_bytes=total // 2 + buffers + (1 << 22))
    small.build()
    engine = small.load()
    out_of_memory = 'eager: out of memory while capturing'
    assert engine.cuda_graph == {
        'vision': out_of_memory,
        'prefix': out_of_memory,
        'denoise': 'captured',
    }
    expected = chunk(torch_engine(small.bundle, 'pi05'), 2, seed=4)
    assert np.abs(chunk(engine, 2, seed=4) - expected).max() <= 1e-5


def test_a_graph_that_does_not_follow_its_inputs_is_not_used(machine):
    here = machine(stale_graphs=True)
    here.build()
    engine = here.load()
    assert set(engine.cuda_graph.values()) == {'eager: a replay differed from a plain run'}
    expected = chunk(torch_engine(here.bundle, 'pi05'), 1, seed=4)
    assert np.abs(chunk(engine, 1, seed=4) - expected).max() <= 1e-5
    # What is not used is given back.
    assert here.cuda.live[1] == 0


def test_an_engine_that_ignores_its_inputs_is_refused(machine):
    here = machine()
    here.build()
    here.trt.freeze_outputs = True
    with pytest.raises(ValueError, match='denoise'):
        here.load()
    assert here.cuda.live == (0, 0)


def test_an_engine_of_numbers_that_are_not_finite_is_refused(machine):
    here = machine()
    here.build()
    here.trt.poison_outputs = True
    with pytest.raises(ValueError, match=r'not finite'):
        here.load()


def test_every_graph_is_captured_as_often_as_asked_and_the_fastest_is_kept(machine):
    here = machine()
    here.build(captures=3)
    here.cuda.milliseconds = iter([5.0] * 3 + [2.0] * 3 + [4.0] * 3)
    engine = here.load(max_rows=1)
    # 2 slots each of prefix and denoise loop, and vision, each captured three times.
    assert here.cuda.calls.count('capture') == 15
    assert here.cuda.live[1] == 5
    here.cuda.calls = []
    encode(engine, 1, seed=0)
    denoise(engine, step_inputs(engine, 1, seed=0))
    # The very first work captured was the loop over slot 0, and its second graph was fastest.
    assert here.cuda.calls[-1] == 'launch 2'


def test_close_gives_everything_back(machine):
    here = machine()
    here.build()
    engine = here.load()
    chunk(engine, 2, seed=1)
    engine.close()
    assert here.cuda.live == (0, 0)


def test_an_engine_on_a_context_that_broke_is_closed_with_the_error(machine):
    here = machine()
    here.build()
    engine = here.load()
    here.cuda.broken = CUresult.CUDA_ERROR_LAUNCH_FAILED
    with pytest.raises(CudaError, match='CUDA_ERROR_LAUNCH_FAILED'):
        engine.close()
    # Nothing is left to close, though the device still fails.
    engine.close()


def test_a_load_that_fails_raises_its_own_error_and_not_that_of_closing(machine):
    here = machine()

    def breaks() -> None:
        here.cuda.broken = CUresult.CUDA_ERROR_LAUNCH_FAILED
        raise CudaError('cuGraphLaunch', 'CUDA_ERROR_ILLEGAL_ADDRESS', 'the first error')

    with (
        pytest.raises(CudaError),
        closed_on_failure(0, {}, 'cuda:0', here.bundle),
    ):
        breaks()


def test_a_load_that_fails_leaves_no_engine_to_be_collected_later(machine, monkeypatch):
    here = machine()
    here.build()
    loaded = {}

    def load(*arguments: object) -> dict[str, Network]:
        loaded.update(load_networks(*arguments))
        return dict(loaded)

    monkeypatch.setattr(tensorrt_engine, 'load_networks', load)
    here.trt.freeze_outputs = True
    with pytest.raises(ValueError, match='numbers'):
        here.load()
    assert loaded and all(one._engine is one._context is None for one in loaded.values())


def test_a_load_that_fails_in_the_middle_closes_the_engines_before_it(machine, monkeypatch):
    here = machine()
    here.build()
    load, loaded = TensorRT.load, []

    def fails_third(self: TensorRT, *arguments: object, **options: object) -> list[Network]:
        if len(loaded) == 2:
            raise TensorRTError('the plan is of another version.')
        loaded.append(load(self, *arguments, **options))
        return loaded[-1]

    monkeypatch.setattr(TensorRT, 'load', fails_third)
    with pytest.raises(ValueError, match='version'):
        here.load()
    assert len(loaded) == 2
    assert all(one._engine is one._context is None for networks in loaded for one in networks)
    assert here.cuda.live == (0, 0)


@pytest.mark.parametrize('call', ['cuStreamCreate', 'cuEventCreate'])
def test_a_runtime_without_memory_is_an_error_with_its_mend_and_leaves_no_stream(
    machine, monkeypatch, call
):
    here = machine()
    here.build()
    destroyed = []

    def fails(*arguments: object) -> tuple[CUresult, int]:
        return CUresult.CUDA_ERROR_OUT_OF_MEMORY, 0

    def destroy(stream: object) -> tuple[CUresult]:
        destroyed.append(stream)
        return (CUresult.CUDA_SUCCESS,)

    monkeypatch.setattr(here.cuda, call, fails, raising=False)
    monkeypatch.setattr(here.cuda, 'cuStreamDestroy', destroy, raising=False)
    with pytest.raises(ValueError, match='engines'):
        here.load()
    assert len(destroyed) == (call == 'cuEventCreate')


def test_a_schedule_that_does_not_fit_leaves_nothing(machine, monkeypatch):
    here = machine()
    here.build()
    engine = here.load()
    live, allocate, calls = here.cuda.live, CudaRuntime.allocate, []

    def fails_third(self: CudaRuntime, size: int) -> int:
        calls.append(size)
        if len(calls) == 3:
            raise CudaError('cuMemAlloc', 'CUDA_ERROR_OUT_OF_MEMORY', 'out of memory')
        return allocate(self, size)

    monkeypatch.setattr(CudaRuntime, 'allocate', fails_third)
    with pytest.raises(CudaError, match='OUT_OF_MEMORY'):
        chunk(engine, 1, seed=1, steps=5)
    assert here.cuda.live == live


def test_what_this_backend_cannot_do_is_refused(machine):
    here = machine()
    here.build()
    engine = here.load()
    assert engine.features == frozenset()
    inputs = step_inputs(engine, 1, seed=1)
    engine.set_schedule(flow_times(STEPS), -1 / STEPS)
    with pytest.raises(ValueError, match='Jacobian'):
        engine.load_step_inputs(replace(inputs, jacobian=True))


def test_a_setting_that_it_cannot_serve_is_refused_with_the_backends_that_can(machine):
    here = machine()
    here.build()
    policy = Policy(read_bundle(here.bundle), here.load())
    for settings, setting, able in (
        (PolicySettings(pipeline='throughput'), "pipeline 'throughput'", 'torch, onnxruntime'),
        (PolicySettings(rtc_mode='jacobian'), "rtc_mode 'jacobian'", 'torch'),
    ):
        told = f"^{setting} .*, which backend 'tensorrt' cannot do; name one that can: {able}$"
        with pytest.raises(ValueError, match=told):
            policy.check(settings)
    policy.close()


def test_settings_refused_at_load_are_the_error_also_where_closing_fails(machine, monkeypatch):
    here = machine()
    here.build()
    close = TensorRTEngine.close

    def breaks(engine: TensorRTEngine) -> None:
        here.cuda.broken = CUresult.CUDA_ERROR_LAUNCH_FAILED
        close(engine)

    monkeypatch.setattr(TensorRTEngine, 'close', breaks)
    settings = PolicySettings(rtc_mode='jacobian')
    with pytest.raises(ValueError, match='jacobian'):
        Policy.load(here.bundle, 'tensorrt', 'cuda', precision='float32', settings=settings)


def test_a_missing_state_is_an_error(machine):
    here = machine('pi0')
    here.build()
    engine = here.load('pi0')
    inputs = step_inputs(engine, 1, seed=1)
    stateless = StepInputs(inputs.x, inputs.row_weight, inputs.plan, inputs.plan_weight)
    with pytest.raises(ValueError, match='state'):
        engine.load_step_inputs(stateless)


def test_engines_of_other_dimensions_are_refused_with_engine_and_tensor(machine):
    here = machine()
    here.build()
    with pytest.raises(ValueError, match="'expert'"):
        TensorRTEngine.load(
            here.bundle,
            'pi05',
            tiny_dims('pi05', horizon=9),
            files=read_bundle(here.bundle, verify=False).spec.files,
            device='cuda',
            precision='float32',
            max_rows=1,
            denoise_steps=STEPS,
            use_cuda_graphs=True,
        )


def test_an_engine_used_on_another_thread_chooses_its_device_there(machine):
    here = machine(devices=2)
    here.build()
    chosen = []
    engine = here.load(device='cuda:1')
    real = here.cuda.cuCtxSetCurrent
    here.cuda.cuCtxSetCurrent = lambda context: chosen.append(context) or real(context)
    chunk(engine, 1, seed=1)
    # The fake's contexts are numbered as its devices.
    assert set(chosen) == {1}
