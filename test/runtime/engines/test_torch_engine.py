"""The torch engine: reference chunks through its buffers, guidance, plans, reuse and fallback."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from network_cases import (
    NetworkCase,
    batch_entries,
    largest_error,
    load_network_case,
    network_case_paths,
)
from tiny_policy import tiny_dims

from vla_runtime.engines.graphed_work import GraphedWork
from vla_runtime.engines.protocol import StepInputs
from vla_runtime.engines.torch import weights
from vla_runtime.engines.torch.cuda_graph import Capturer
from vla_runtime.engines.torch.engine import TorchEngine
from vla_runtime.engines.torch.loading import load_torch_engine
from vla_runtime.inference.denoise import denoise, flow_times
from vla_runtime.inference.settings import row_weights
from vla_runtime.models.base.flow_network import build_network

pytestmark = pytest.mark.cases


def engine_for(case: NetworkCase, b: int, prompts: tuple[str, ...] = ('',)) -> TorchEngine:
    """An engine with the case's schedule, images and prompt rows encoded."""
    engine = TorchEngine(case.network)
    engine.set_schedule(flow_times(case.steps), -1 / case.steps)
    pixels, image_mask = case.images(b)
    for camera in np.flatnonzero(image_mask.numpy()):
        engine.encode_image(int(camera), pixels[camera].numpy())
    rows = [case.prompt(b, prompt) for prompt in prompts]
    tokens, masks = (torch.stack(tensors).numpy() for tensors in zip(*rows, strict=True))
    engine.encode_prefix(image_mask.numpy(), {'tokens': tokens, 'token_mask': masks})
    engine.use_prefix(len(rows))
    return engine


def inputs_for(case: NetworkCase, b: int, **changes) -> StepInputs:
    weights = changes.pop('row_weight', row_weights(None))
    dims = case.network.dims
    state = case.state(b)
    values = {
        'x': case.tensors['noise'][b].numpy(),
        'row_weight': weights,
        'plan': np.zeros((dims.horizon, dims.action_dim), dtype=np.float32),
        'plan_weight': np.zeros((case.steps, dims.horizon), dtype=np.float32),
        'rows': {} if state is None else {'state': state.repeat(len(weights), 1).numpy()},
    }
    return StepInputs(**{**values, **changes})


entries = pytest.mark.parametrize(
    ('path', 'b'), list(batch_entries()), ids=lambda value: getattr(value, 'stem', value)
)


@pytest.mark.parametrize('path', network_case_paths('pi05'), ids=lambda path: path.stem)
def test_beta_one_over_two_rows_is_the_conditioned_row_up_to_rounding(path: Path):
    # Matrix products round differently for two rows than for one; the policy therefore runs
    # beta = 1 as a single row, which is exact (test_policy.py).
    case = load_network_case(path)
    for b in range(case.batch):
        conditioned = denoise(engine_for(case, b), inputs_for(case, b))
        engine = engine_for(case, b, ('', 'uncond_'))
        guided = denoise(engine, inputs_for(case, b, row_weight=row_weights(1.0)))
        assert np.abs(guided - conditioned).max() <= 5e-6


@pytest.mark.parametrize('path', network_case_paths('pi05'), ids=lambda path: path.stem)
def test_guidance_of_a_wrong_kind_is_far_from_the_reference(path: Path):
    """Negative controls: what must fail does fail by a wide margin."""
    case = load_network_case(path)
    if 'cfg_actions_beta_2.5' not in case.tensors:
        pytest.skip('this case has no guided chunks')
    reference = case.tensors['cfg_actions_beta_2.5'][0]
    if largest_error(case.tensors['cfg_actions_beta_1.0'][0], reference) < 1e-2:
        pytest.skip('in this case the rows hardly differ, so neither do right and wrong')
    unguided = denoise(engine_for(case, 0), inputs_for(case, 0))
    swapped = denoise(
        engine_for(case, 0, ('uncond_', '')), inputs_for(case, 0, row_weight=row_weights(2.5))
    )
    for wrong in (unguided, swapped):
        assert largest_error(wrong, reference) > 1e-3


@pytest.mark.parametrize('path', network_case_paths(), ids=lambda path: path.stem)
def test_many_schedules_keep_only_the_last_few(path: Path):
    case = load_network_case(path)
    engine = engine_for(case, 0)
    first = denoise(engine, inputs_for(case, 0))
    for steps in range(20, 30):
        engine.set_schedule(flow_times(steps), -1 / steps)
    assert len(engine._schedules) == 4
    engine.set_schedule(flow_times(case.steps), -1 / case.steps)
    np.testing.assert_array_equal(denoise(engine, inputs_for(case, 0)), first)


def tiny_network():
    return build_network('pi05', tiny_dims('pi05'))


def test_denoising_without_a_schedule_is_an_error():
    with pytest.raises(RuntimeError, match='set_schedule'):
        TorchEngine(tiny_network()).run_steps()


def test_a_hidden_camera_whose_tokens_overflowed_spoils_nothing():
    engine = TorchEngine(tiny_network())
    mask = np.array([True, False])
    tokens, token_mask = np.ones((1, 64), dtype=np.int64), np.ones((1, 64), dtype=bool)
    pixels = np.zeros((3, 28, 28), dtype=np.float32)
    engine.encode_image(0, pixels)
    engine.encode_prefix(mask, {'tokens': tokens, 'token_mask': token_mask})
    clean = engine._buffers[1].slots[0]['past_value'].clone()
    engine.encode_image(1, np.full_like(pixels, np.nan))
    engine.encode_prefix(mask, {'tokens': tokens, 'token_mask': token_mask})
    assert torch.equal(engine._buffers[1].slots[0]['past_value'], clean)
    assert clean.isfinite().all()


def test_work_is_captured_once_and_replayed_from_then_on():
    ran, captures, replays = [], [], []

    def capture(work):
        captures.append(work)
        return lambda: replays.append('replay')

    graphed = GraphedWork(lambda: ran.append('eager'), Capturer('prefix', capture))
    graphed.run()
    graphed.run()
    assert (len(captures), len(replays), ran) == (1, 2, [])
    assert graphed.status == 'captured'


@pytest.mark.parametrize(
    ('error', 'reason'),
    [
        (torch.cuda.OutOfMemoryError('CUDA out of memory. Tried to allocate'), 'out of memory'),
        (RuntimeError('CUDA error: CUBLAS_STATUS_ALLOC_FAILED'), 'out of memory'),
        (RuntimeError('cudaErrorStreamCaptureInvalidated'), 'out of memory'),
        (RuntimeError('operation not permitted when stream is capturing'), 'failed'),
        # As an error of Triton's, which is no RuntimeError.
        (Exception('out of resource: shared memory'), 'failed'),
    ],
)
def test_a_capture_that_fails_falls_back_once_for_good_and_says_so(caplog, error, reason):
    ran, tries = [], []

    def capture(work):
        tries.append(work)
        raise error

    capturer = Capturer('denoise', capture)
    # The work of another schedule belongs to the same network.
    for graphed in [GraphedWork(lambda: ran.append('eager'), capturer) for _ in range(2)]:
        graphed.run()
        graphed.run()
        assert graphed.status == f'eager: {reason} while capturing'
    assert len(tries) == 1, 'a capture that failed is not tried again'
    assert len(ran) == 4
    assert [r.levelname for r in caplog.records] == ['WARNING']
    assert 'denoise' in caplog.text


@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device')
@entries
def test_captured_graphs_on_cuda_equal_eager_and_the_reference(path: Path, b: int):
    case = load_network_case(path)
    on_cuda = NetworkCase(case.description, case.tensors, case.network.cuda())
    try:
        engine = engine_for(on_cuda, b)
        chunk = denoise(engine, inputs_for(on_cuda, b))
        again = denoise(engine, inputs_for(on_cuda, b))
        assert set(engine.cuda_graph.values()) == {'captured'}
    finally:
        case.network.cpu()
    np.testing.assert_array_equal(chunk, again)
    assert largest_error(chunk, case.tensors['actions'][b]) <= 2e-5


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'device': 'cuda:99'}, 'cuda:99.*CUDA devices'),
        ({'device': 'tpu'}, 'tpu'),
        ({'device': 'cpu:3'}, 'cpu:3'),
        ({'precision': 'int3'}, 'int3.*float32, bfloat16, float16'),
    ],
)
def test_a_device_or_precision_that_is_not_to_be_had_is_an_error(tmp_path, changes, message):
    options = {'device': 'cpu', 'precision': 'float32', 'max_rows': 1, 'use_cuda_graphs': True}
    with pytest.raises(ValueError, match=message):
        load_torch_engine('pi05', tiny_dims('pi05'), tmp_path / 'none', **{**options, **changes})


# Of a process, and on as PyTorch starts.
REDUCING = [
    (torch.backends.cudnn, 'allow_tf32'),
    (torch.backends.cuda.matmul, 'allow_bf16_reduced_precision_reduction'),
    (torch.backends.cuda.matmul, 'allow_fp16_reduced_precision_reduction'),
]


@pytest.fixture
def reducing():
    before = [getattr(owner, name) for owner, name in REDUCING]
    for owner, name in REDUCING:
        setattr(owner, name, True)
    yield lambda: [getattr(owner, name) for owner, name in REDUCING]
    for (owner, name), value in zip(REDUCING, before, strict=True):
        setattr(owner, name, value)


@pytest.mark.parametrize(('device', 'allowed'), [('cuda', False), ('cpu', True)])
def test_a_load_on_cuda_computes_in_full_precision_and_one_on_a_cpu_changes_nothing(
    tmp_path, monkeypatch, reducing, device, allowed
):
    monkeypatch.setattr(weights, 'torch_device', torch.device)
    options = {'precision': 'float32', 'max_rows': 1, 'use_cuda_graphs': True}
    # Settings come before the weights, which are not there: no GPU is needed.
    with pytest.raises(FileNotFoundError):
        load_torch_engine('act', tiny_dims('act'), tmp_path / 'none', device=device, **options)
    assert reducing() == [allowed] * 3
