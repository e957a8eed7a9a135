"""The ONNX Runtime engine: the torch engine's own reference chunks, its buffers, and its errors."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from network_cases import batch_entries, load_network_case
from onnx_bundles import copy_bundle, onnx_of_case, reseal, tiny_onnx_bundle
from paths import ROOT
from tiny_policy import observation, tiny_spec, write_tiny_policy

from vla_runtime.bundle.onnx_files import graph_path
from vla_runtime.engines.onnx.engine import OnnxEngine
from vla_runtime.engines.onnx.session import Placement, Session
from vla_runtime.engines.protocol import StepInputs
from vla_runtime.engines.torch.engine import TorchEngine
from vla_runtime.family.listing import read_time_table
from vla_runtime.inference.denoise import denoise, flow_times
from vla_runtime.inference.real_time_chunking import plan_weights
from vla_runtime.inference.request import cache_words
from vla_runtime.inference.settings import PolicySettings, row_weights
from vla_runtime.policy import Policy
from vla_runtime.types import CommittedPlan

# What the project promises of ONNX Runtime on a CPU in float32.
TOLERANCE = 1e-5


def tolerance(kind: str, expected: np.ndarray) -> float:
    """Bound of the error: absolute, under guidance relative to the largest number (about 4).

    Guidance amplifies: at a beta of 2.5 a change of the noise changes this chunk 9 to 23 times as
    much, so that PyTorch and LeRobot's own recorded chunk are 1.6e-5 apart, and both 2e-4 from the
    same loop in float64. Unguided they are 2.6e-6 apart, and ONNX Runtime as near. Another order of
    the keys in PyTorch's attention, which is a set, moves a guided chunk by up to 4.4e-5.
    """
    guided = kind.replace('.', '').isdigit()
    return TOLERANCE * (2.0 * max(1.0, float(np.abs(expected).max())) if guided else 1.0)


def case_engine(path: Path) -> OnnxEngine:
    folder, spec = onnx_of_case(path)
    return OnnxEngine(spec.family, spec.dims, folder, device='cpu', precision='float32', max_rows=2)


def case_inputs(path: Path, b: int, prompts: tuple[str, ...]) -> dict[str, np.ndarray]:
    case = load_network_case(path)
    pixels, image_mask = case.images(b)
    rows = [case.prompt(b, prompt) for prompt in prompts]
    return {
        'pixels': pixels.numpy(),
        'image_mask': image_mask.numpy(),
        'tokens': torch.stack([tokens for tokens, _ in rows]).numpy(),
        'token_mask': torch.stack([mask for _, mask in rows]).numpy(),
    }


def step_inputs(path: Path, b: int, kind: str) -> StepInputs:
    """Inputs of a plain, guided (`beta` number) or planned (`exp`, `linear`) reference chunk."""
    case = load_network_case(path)
    dims, state = case.network.dims, case.state(b)
    guided = kind.replace('.', '').isdigit()
    weight = row_weights(float(kind) if guided else None)
    plan = np.zeros((dims.horizon, dims.action_dim), dtype=np.float32)
    plan_weight = np.zeros((case.steps, dims.horizon), dtype=np.float32)
    if kind in ('exp', 'linear'):
        previous = case.tensors['rtc_previous_chunk'][b].numpy()
        plan = previous[np.minimum(np.arange(dims.horizon), len(previous) - 1)]
        plan_weight = plan_weights(
            flow_times(case.steps),
            schedule=kind,
            delay=2,
            execution_horizon=min(6, len(previous)),
            horizon=dims.horizon,
            maximum=10.0,
        )
    return StepInputs(
        x=case.tensors['noise'][b].numpy(),
        row_weight=weight,
        plan=plan,
        plan_weight=plan_weight,
        rows={} if state is None else {'state': state.repeat(len(weight), 1).numpy()},
    )


def reference_chunks():
    """Every chunk in the reference cases: (case, batch entry, kind)."""
    prefixes = {'cfg_actions_beta_': '', 'rtc_actions_': ''}
    # One plain, one guided, one tied to a plan.
    by_default = ('plain', '1.5', 'exp')
    for path, b in batch_entries():
        yield pytest.param(path, b, 'plain', id=f'{path.stem}-{b}-plain')
        for name in load_network_case(path).tensors:
            for prefix in prefixes:
                if name.startswith(prefix):
                    kind = name.removeprefix(prefix)
                    marks = [] if kind in by_default else [pytest.mark.thorough]
                    yield pytest.param(path, b, kind, id=f'{path.stem}-{b}-{kind}', marks=marks)


def torch_chunk(path: Path, b: int, kind: str) -> np.ndarray:
    """The same chunk by the PyTorch engine."""
    case = load_network_case(path)
    prompts = ('', 'uncond_') if kind.replace('.', '').isdigit() else ('',)
    engine = TorchEngine(case.network)
    return run_engine(engine, path, b, kind, prompts)


def run_engine(engine, path: Path, b: int, kind: str, prompts: tuple[str, ...]) -> np.ndarray:
    case, given = load_network_case(path), case_inputs(path, b, prompts)
    engine.set_schedule(flow_times(case.steps), -1 / case.steps)
    for camera in np.flatnonzero(given['image_mask']):
        engine.encode_image(int(camera), given['pixels'][camera])
    prompt = {name: given[name] for name in ('tokens', 'token_mask')}
    engine.encode_prefix(given['image_mask'], prompt)
    engine.use_prefix(len(prompts))
    return denoise(engine, step_inputs(path, b, kind))


def run_monolithic(path: Path, b: int, kind: str, prompts: tuple[str, ...]) -> np.ndarray:
    folder, spec = onnx_of_case(path)
    given, inputs = case_inputs(path, b, prompts), step_inputs(path, b, kind)
    times = flow_times(spec.denoise_steps)
    table = read_time_table(spec.family, spec.dims, folder / 'weights.safetensors')(times)
    values = {
        **given,
        'x': inputs.x[None],
        'time_conditioning': table,
        't': times.astype(np.float32),
        'dt': np.asarray(-1 / spec.denoise_steps, dtype=np.float32),
        'row_weight': inputs.row_weight,
        'plan': inputs.plan[None].astype(np.float32),
        'plan_weight': inputs.plan_weight[:, None, :, None],
    }
    values |= inputs.rows
    session = Session(graph_path(folder, 'monolithic', len(prompts)), Placement.of('cpu'))
    return session.run(values)['x_next'][0]


@pytest.mark.cases
@pytest.mark.parametrize(('path', 'b', 'kind'), list(reference_chunks()))
def test_every_reference_chunk_equals_pytorch_decomposed_and_monolithic(path, b, kind):
    guided = kind.replace('.', '').isdigit()
    prompts = ('', 'uncond_') if guided else ('',)
    case = load_network_case(path)
    name = f'cfg_actions_beta_{kind}' if guided else f'rtc_actions_{kind}'
    recorded = case.tensors['actions' if kind == 'plain' else name][b].numpy()
    chunk = run_engine(case_engine(path), path, b, kind, prompts)
    expected = torch_chunk(path, b, kind)
    bound = tolerance(kind, expected)
    assert np.abs(chunk - expected).max() <= bound
    assert np.abs(run_monolithic(path, b, kind, prompts) - expected).max() <= bound
    for found in (chunk, expected):
        assert np.abs(found - recorded).max() <= (2e-5 if kind == 'plain' else 5e-5)


@pytest.mark.parametrize('family', ['pi05', 'pi0', 'smolvla'])
@pytest.mark.parametrize('beta', [None, 2.0])
def test_a_policy_gives_torchs_chunks_with_cache_guidance_and_plan(family, beta):
    bundle = tiny_onnx_bundle(family)
    settings = PolicySettings(cfg_enabled=beta is not None, cfg_beta=beta or 1.5, rtc_mode='guided')
    policies = [Policy.load(bundle, b, settings=settings) for b in ('torch', 'onnxruntime')]
    rows = np.linspace(-0.4, 0.4, 6)[:, None].repeat(3, axis=1)
    plan = CommittedPlan(rows, delay_steps=2, execution_horizon=4)
    for number in range(3):
        # The second repeats the first observation (a hit), the third has another.
        look = replace(observation(seed=number // 2), stamps_ns={'state': number * 100_000_000})
        results = [policy.infer(look, plan=plan if number else None) for policy in policies]
        (expected, torch_report), (found, report) = results
        assert np.abs(found.normalised - expected.normalised).max() <= TOLERANCE
        assert cache_words(report.cache) == cache_words(torch_report.cache)
        assert report.number == number
    assert cache_words(policies[1].infer(look)[1].cache)['prefix'] == 'hit (0.000 s old)'


def test_same_inputs_same_chunk_bit_for_bit():
    policies = [Policy.load(tiny_onnx_bundle(), 'onnxruntime') for _ in range(2)]
    first, second = (policy.infer(observation())[0].normalised for policy in policies)
    np.testing.assert_array_equal(first, second)


def test_float16_files_stay_within_their_stated_bound():
    chunks = []
    for precision, backend in (('float32', 'torch'), ('float16', 'onnxruntime')):
        policy = Policy.load(tiny_onnx_bundle('pi05', precision), backend, precision=precision)
        chunks.append(policy.infer(observation())[0].normalised)
    error = np.abs(chunks[0] - chunks[1]).max()
    assert 0 < error <= 1e-2


@pytest.mark.parametrize(
    ('device', 'message'),
    [
        ('cuda', 'CUDAExecutionProvider.*onnxruntime-gpu'),
        ('tensorrt:1', 'TensorrtExecutionProvider'),
        ('tpu', "'tpu'"),
        ('cpu:1', "'cpu:1'"),
        ('cuda:x', "'cuda:x'"),
    ],
)
def test_a_provider_that_is_not_here_is_an_error_and_never_the_cpu(device, message):
    if device in ('cuda', 'tensorrt:1'):
        import onnxruntime

        if 'CUDAExecutionProvider' in onnxruntime.get_available_providers():
            pytest.skip('this ONNX Runtime has the provider')
    with pytest.raises(ValueError, match=message):
        Policy.load(tiny_onnx_bundle(), 'onnxruntime', device)


def test_a_provider_that_onnx_runtime_drops_is_an_error(monkeypatch):
    import onnxruntime

    # ONNX Runtime lists a provider whose libraries do not load, warns, and goes on with the CPU.
    listed = ['CUDAExecutionProvider', 'CPUExecutionProvider']
    monkeypatch.setattr(onnxruntime, 'get_available_providers', lambda: listed)
    with pytest.raises(ValueError, match=r"device 'cuda'"):
        Session(graph_path(tiny_onnx_bundle(), 'vision'), Placement.of('cuda'))


def test_another_precision_than_the_files_is_told_before_the_large_ones_are_loaded(tmp_path):
    bundle = copy_bundle(tiny_onnx_bundle(), tmp_path / 'bundle')
    for name in ('vision.onnx', 'prefix.onnx'):
        (bundle / 'onnx' / name).write_bytes(b'cannot be loaded')
    reseal(bundle)
    with pytest.raises(ValueError, match="'float16'"):
        Policy.load(bundle, 'onnxruntime', precision='float16')


def test_bfloat16_on_the_cpu_is_an_error_that_says_what_runs_it():
    bundle = tiny_onnx_bundle('pi05', 'bfloat16')
    with pytest.raises(ValueError, match='--onnx-precision'):
        Policy.load(bundle, 'onnxruntime', precision='bfloat16')


def test_a_bundle_without_onnx_files_says_how_to_make_them(tmp_path):
    bundle = write_tiny_policy(tmp_path / 'bundle', tiny_spec())
    with pytest.raises(ValueError, match=r'vision\.onnx.*vla_runtime'):
        Policy.load(bundle, 'onnxruntime')


def test_serving_needs_no_pytorch():
    script = (
        'import sys, numpy as np\n'
        "sys.modules['torch'] = None\n"
        'from vla_runtime.policy import Policy\n'
        'from vla_runtime.types import Observation\n'
        "policy = Policy.load(sys.argv[1], 'onnxruntime')\n"
        'image = np.zeros((28, 28, 3), dtype=np.uint8)\n'
        "look = Observation({'top': image, 'wrist': image}, np.zeros(3, np.float32), 'go')\n"
        'chunk, _ = policy.infer(look)\n'
        'print(np.isfinite(chunk.actions).all(), chunk.actions.shape)\n'
    )
    done = subprocess.run(
        [sys.executable, '-c', script, str(tiny_onnx_bundle())],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=120,
    )
    assert done.stdout.split() == ['True', '(8,', '3)'], done.stderr
