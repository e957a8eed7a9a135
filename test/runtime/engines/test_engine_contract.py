"""What every engine does with slots, rows, schedules and steps; TensorRT's on a fake device."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from engine_inputs import chunk, encode, step_inputs
from tensorrt_machine import STEPS, Machine, linked_copy, write_exported_policy
from tiny_policy import tiny_dims

from vla_runtime.engines.onnx.engine import OnnxEngine
from vla_runtime.engines.protocol import SLOTS, PolicyEngine
from vla_runtime.engines.torch.loading import load_torch_engine
from vla_runtime.inference.denoise import denoise, flow_times
from vla_runtime.models.base.flow_network import empty_network
from vla_runtime.models.shapes.traced_shapes import trace_shapes

FEATURES = {
    'torch': {'jacobian', 'action_time', 'overlap', 'packed', 'together'},
    'onnxruntime': {'overlap'},
    'tensorrt': set(),
}


@pytest.fixture(scope='module')
def bundle(tmp_path_factory) -> Path:
    return write_exported_policy(tmp_path_factory.mktemp('engines') / 'policy')


@pytest.fixture(params=FEATURES)
def backend(request) -> str:
    return request.param


@pytest.fixture
def engine(backend: str, bundle: Path, monkeypatch, tmp_path) -> Iterator[PolicyEngine]:
    options = {'device': 'cpu', 'precision': 'float32', 'max_rows': 2}
    if backend == 'torch':
        weights = bundle / 'weights.safetensors'
        made = load_torch_engine(
            'pi05', tiny_dims('pi05'), weights, use_cuda_graphs=False, **options
        )
    elif backend == 'onnxruntime':
        made = OnnxEngine('pi05', tiny_dims('pi05'), bundle, **options)
    else:
        here = Machine(monkeypatch, linked_copy(bundle, tmp_path / 'policy'))
        here.build()
        made = here.load()
    with closing(made):
        made.set_schedule(flow_times(STEPS), -1 / STEPS)
        yield made


def test_an_engine_says_what_it_can_do_and_refuses_the_rest(engine, backend: str):
    assert engine.features == FEATURES[backend]
    if 'jacobian' not in engine.features:
        with pytest.raises(ValueError, match=r'(?i)jacobian'):
            engine.load_step_inputs(replace(step_inputs(engine, 1, seed=1), jacobian=True))


def test_each_slot_keeps_its_own_prefix_of_each_number_of_rows(engine):
    inputs = step_inputs(engine, 1, seed=3)

    def denoised(slot: int) -> np.ndarray:
        engine.use_prefix(1, slot)
        return denoise(engine, inputs)

    alone = []
    for seed in (5, 6):
        encode(engine, 1, seed)
        alone.append(denoised(0))
    assert not np.array_equal(*alone)
    encode(engine, 1, 5, slot=0)
    first = denoised(0)
    encode(engine, 1, 6, slot=1)
    # Over the slot that is in use, while the other was written.
    np.testing.assert_array_equal(denoise(engine, inputs), first)
    np.testing.assert_array_equal([denoised(0), denoised(1)], alone)
    encode(engine, 2, 7, slot=0)
    np.testing.assert_array_equal(denoised(0), alone[0])
    engine.use_prefix(2, 0)
    denoise(engine, step_inputs(engine, 2, seed=3))
    assert engine.read_velocity().shape == (2, *inputs.x.shape)


@pytest.mark.parametrize('rows', [1, 2])
def test_sessions_keep_image_tokens_and_prefixes_of_their_own(engine, rows: int):
    inputs = step_inputs(engine, rows, seed=3)

    def denoised(session: int, slot: int = 0, *, by_step: bool = False) -> np.ndarray:
        engine.use_prefix(rows, session * SLOTS + slot)
        return denoise(engine, inputs, (lambda *step: None) if by_step else None)

    alone = []
    for seed in (5, 6, 7):
        encode(engine, rows, seed)
        alone.append(denoised(0))
    assert not np.array_equal(alone[1], alone[2])
    assert [engine.open_session() for _ in range(2)] == [1, 2]
    for session in range(3):
        encode(engine, rows, 5 + session, session=session)
    for session in (2, 0, 1):
        np.testing.assert_array_equal(denoised(session), alone[session])
        np.testing.assert_array_equal(denoised(session, by_step=True), alone[session])
    # Over images that others did not touch; the other slot is as it was.
    encode(engine, rows, 6, 1, session=1, images=False)
    encode(engine, rows, 5, session=2)
    np.testing.assert_array_equal(denoised(1, 1), alone[1])
    np.testing.assert_array_equal(
        [denoised(session) for session in range(3)], [alone[0], alone[1], alone[0]]
    )


def test_a_session_says_what_its_images_and_slots_take(engine):
    shapes = trace_shapes(empty_network('pi05', engine.dims))
    numbers = engine.dims.cameras * math.prod(shapes.image_tokens)
    slots = [tensor for rows in (1, 2) for tensor in shapes.past_buffers(rows).values()]
    assert engine.session_bytes == 4 * numbers + SLOTS * sum(tensor.nbytes for tensor in slots)


def test_steps_one_by_one_are_the_loop_and_move_x_by_dt_times_velocity(engine):
    encode(engine, 1, seed=7)
    engine.use_prefix(1)
    tied = step_inputs(engine, 1, seed=7)
    inputs = replace(tied, plan_weight=np.zeros_like(tied.plan_weight))
    trace = []
    at_once = denoise(engine, inputs)
    found = denoise(engine, inputs, lambda k, x, velocity: trace.append((k, x, velocity[0])))
    np.testing.assert_array_equal(found, at_once)
    assert [k for k, _, _ in trace] == list(range(STEPS))
    before = inputs.x
    for _, x, velocity in trace:
        np.testing.assert_allclose(x, before - velocity / STEPS, atol=1e-6)
        before = x


def test_a_written_x_is_what_the_next_step_starts_from(engine):
    end = chunk(engine, 1, seed=1)
    inputs = step_inputs(engine, 1, seed=1)
    engine.load_step_inputs(inputs)
    engine.step(0)
    first, velocity = engine.read_x(), engine.read_velocity()
    engine.write_x(inputs.x)
    np.testing.assert_array_equal(engine.read_x(), inputs.x)
    engine.step(0)
    np.testing.assert_array_equal(engine.read_x(), first)
    np.testing.assert_array_equal(engine.read_velocity(), velocity)
    for k in range(1, STEPS):
        engine.step(k)
    np.testing.assert_array_equal(engine.read_x(), end)


def test_other_schedules_and_back_give_the_first_chunk_again(engine):
    first = chunk(engine, 1, seed=1)
    for steps in range(STEPS + 1, STEPS + 7):
        assert not np.array_equal(chunk(engine, 1, seed=1, steps=steps), first)
    np.testing.assert_array_equal(chunk(engine, 1, seed=1), first)
