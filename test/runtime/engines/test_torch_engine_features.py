"""Several noises, the Jacobian's tie and per-action time of the torch engine."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from tiny_policy import tiny_dims

from vla_runtime.engines.protocol import StepInputs
from vla_runtime.engines.torch.engine import TorchEngine
from vla_runtime.inference.denoise import denoise, flow_times
from vla_runtime.inference.real_time_chunking import plan_weights
from vla_runtime.inference.settings import row_weights
from vla_runtime.models.base.flow_network import build_network
from vla_runtime.models.base.flow_step import DenoiseStep, JacobianDenoiseStep
from vla_runtime.models.pi import PiNetwork
from vla_runtime.models.shapes.traced_shapes import trace_shapes

STEPS = 4
families = pytest.mark.parametrize('family', ['pi05', 'pi0'])


def seeded_network(family: str) -> PiNetwork:
    """Every weight drawn, so that nothing is the identity."""
    generator = torch.Generator().manual_seed(3)
    network = build_network(family, tiny_dims(family))
    network.load_state_dict(
        {
            name: torch.randn(value.shape, generator=generator) * 0.2
            for name, value in network.state_dict().items()
        }
    )
    return network.eval().requires_grad_(False)


def seeded_engine(family: str, rows: int = 1, slot: int = 0) -> TorchEngine:
    """An engine with images, one prefix and a schedule."""
    engine = TorchEngine(seeded_network(family))
    engine.set_schedule(flow_times(STEPS), -1 / STEPS)
    random = np.random.default_rng(0)
    for camera in range(2):
        engine.encode_image(camera, random.uniform(-1, 1, (3, 28, 28)).astype(np.float32))
    encode(engine, seed=0, rows=rows, slot=slot)
    engine.use_prefix(rows, slot)
    return engine


def encode(engine: TorchEngine, seed: int, rows: int = 1, slot: int = 0) -> None:
    random = np.random.default_rng(seed)
    tokens = random.integers(0, 400, (rows, 64))
    mask = np.arange(64)[None] < random.integers(5, 60, (rows, 1))
    engine.encode_prefix(np.array([True, True]), {'tokens': tokens, 'token_mask': mask}, slot)


def step_inputs(engine: TorchEngine, rows: int = 1, **changes) -> StepInputs:
    dims, random = engine.dims, np.random.default_rng(5)
    values = {
        'x': random.normal(size=(dims.horizon, dims.action_dim)).astype(np.float32),
        'row_weight': row_weights(2.0 if rows == 2 else None),
        'plan': np.zeros((dims.horizon, dims.action_dim), dtype=np.float32),
        'plan_weight': np.zeros((STEPS, dims.horizon), dtype=np.float32),
        'rows': {'state': np.full((rows, dims.state_dim), 0.3, dtype=np.float32)}
        if dims.state_dim
        else {},
    }
    return StepInputs(**{**values, **changes})


def planned(engine: TorchEngine, **changes) -> StepInputs:
    dims = engine.dims
    plan = np.random.default_rng(6).normal(size=(dims.horizon, dims.action_dim))
    weight = plan_weights(
        flow_times(STEPS),
        schedule='exp',
        delay=2,
        execution_horizon=6,
        horizon=dims.horizon,
        maximum=5.0,
    )
    return step_inputs(engine, plan=plan.astype(np.float32), plan_weight=weight, **changes)


# The tie through the Jacobian.


@pytest.fixture
def double_precision(monkeypatch):
    """Run the real networks wholly in float64: what casts to float32 casts to float64 instead."""
    # Engines trace their shapes once a process, in float32.
    for family in ('pi05', 'pi0'):
        trace_shapes(seeded_network(family))
    monkeypatch.setattr(torch.Tensor, 'float', torch.Tensor.double)


def _double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def double_step(family: str, module: type[DenoiseStep], row_weight: list[float]):
    """(x, weight) to (x_next, velocity) of one step at t = 0.6 in float64."""
    network = copy.deepcopy(seeded_network(family)).double()
    engine = seeded_engine(family, rows=len(row_weight))
    prefix = engine._buffers[len(row_weight)].slots[0]
    t, dt = torch.tensor(0.6, dtype=torch.float64), torch.tensor(-0.1, dtype=torch.float64)
    random = np.random.default_rng(8)
    plan = torch.tensor(random.normal(size=(1, 8, 6)))
    dims = network.dims
    state = torch.full((len(row_weight), dims.state_dim), 0.3).double()
    rows = {'state': state} if dims.state_dim else {}
    table = seeded_network(family).time_conditioning(torch.tensor([0.6])).double()
    step = module(network)

    def run(x: torch.Tensor, weight: torch.Tensor):
        return step(
            x,
            {name: _double(tensor) for name, tensor in prefix.items()},
            table,
            t,
            dt,
            torch.tensor(row_weight, dtype=torch.float64),
            plan,
            weight,
            rows,
        )

    return run, plan, float(t), float(dt)


@families
@pytest.mark.parametrize('row_weight', [[1.0], [2.0, -1.0]])
def test_the_jacobians_tie_equals_finite_differences_in_float64(
    family, row_weight, double_precision
):
    through, plan, t, dt = double_step(family, JacobianDenoiseStep, row_weight)
    free, *_ = double_step(family, DenoiseStep, row_weight)
    none = torch.zeros(1, 8, 1, dtype=torch.float64)
    weight = torch.linspace(3.0, 0.0, 8, dtype=torch.float64)[None, :, None]
    x = torch.tensor(np.random.default_rng(1).normal(size=(1, 8, 6)))

    def velocity(x: torch.Tensor) -> torch.Tensor:
        return (free(x, none)[0] - x) / dt

    def clean(x: torch.Tensor) -> torch.Tensor:
        return x - t * velocity(x)

    error = weight * (plan - clean(x))
    # Row i of the product is the sum over all outputs of error * d clean / d x_i.
    product, eps = torch.zeros_like(x), 1e-5
    for index in np.ndindex(*x.shape):
        shift = torch.zeros_like(x)
        shift[index] = eps
        product[index] = (error * (clean(x + shift) - clean(x - shift))).sum() / (2 * eps)
    expected = x + dt * (velocity(x) - product)
    got, _ = through(x, weight)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-7)
    # A negative control: the identity in place of the Jacobian is far away.
    assert (free(x, weight)[0] - expected).abs().max() > 1e-3


@families
def test_the_engine_ties_through_the_jacobian_and_back_again(family):
    engine = seeded_engine(family)
    identity = denoise(engine, planned(engine))
    through = denoise(engine, planned(engine, jacobian=True))
    assert np.abs(through - identity).max() > 1e-3
    np.testing.assert_array_equal(denoise(engine, planned(engine, jacobian=True)), through)
    np.testing.assert_array_equal(denoise(engine, planned(engine)), identity)
    free = denoise(engine, step_inputs(engine))
    np.testing.assert_allclose(denoise(engine, step_inputs(engine, jacobian=True)), free, atol=1e-5)


# Per-action time.


def velocity_of(engine: TorchEngine, index: int, **changes) -> np.ndarray:
    engine.load_step_inputs(step_inputs(engine, **changes))
    engine.step(index)
    return engine.read_velocity()[0]


@families
def test_per_action_time_equals_the_networks_own(family):
    engine = seeded_engine(family)
    network, known = engine._network, 3
    inputs = step_inputs(engine)
    got = velocity_of(engine, 1, clean_actions=known)
    buffers = engine._buffers[1]
    past = network.prefix(engine._image_tokens[0], engine._image_mask, **buffers.prefix_inputs)
    times = torch.tensor([0.0 if i < known else 0.75 for i in range(engine.dims.horizon)])
    conditioning = torch.cat([network.time_conditioning(t[None]) for t in times])[None]
    rows = {name: torch.from_numpy(value) for name, value in inputs.rows.items()}
    x = torch.from_numpy(inputs.x)[None]
    expected = network.velocity(x, past, conditioning, **rows)
    np.testing.assert_allclose(got, expected[0].numpy(), atol=2e-5)
    for other in (0, known + 1):
        assert np.abs(velocity_of(engine, 1, clean_actions=other) - got).max() > 1e-4


@families
def test_a_chunk_that_is_wholly_known_is_at_flow_time_zero(family):
    engine = seeded_engine(family)
    known = velocity_of(engine, 0, clean_actions=engine.dims.horizon)
    engine.set_schedule(np.zeros(STEPS), -1 / STEPS)
    np.testing.assert_allclose(known, velocity_of(engine, 0), atol=1e-5)
