"""Several robots on TensorRT over a fake device: chunks as alone, shared graphs, memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from engine_inputs import encode, step_inputs
from tensorrt_machine import STEPS, Machine, linked_copy, write_exported_policy
from tiny_policy import observation

from vla_runtime.bundle.folder import read_bundle
from vla_runtime.engines.cuda_driver import CudaError
from vla_runtime.engines.cuda_runtime import CudaRuntime
from vla_runtime.engines.protocol import SLOTS
from vla_runtime.engines.tensorrt import loading as tensorrt_loading
from vla_runtime.engines.tensorrt.engine import TensorRTEngine
from vla_runtime.inference.denoise import denoise, flow_times
from vla_runtime.inference.sessions import Request
from vla_runtime.inference.settings import PolicySettings
from vla_runtime.policy import Policy
from vla_runtime.types import CommittedPlan, Observation, Reuse


@pytest.fixture(scope='module')
def bundle(tmp_path_factory) -> Path:
    return write_exported_policy(tmp_path_factory.mktemp('sessions') / 'policy')


@pytest.fixture
def machine(monkeypatch, bundle, tmp_path):
    """Make a machine with engines of its own for the bundle."""

    def make(**options) -> Machine:
        target = tmp_path / f'policy_{len(list(tmp_path.iterdir()))}'
        here = Machine(monkeypatch, linked_copy(bundle, target), **options)
        here.build()
        return here

    return make


def chunk(engine: TensorRTEngine, session: int, seed: int, steps: int = STEPS) -> np.ndarray:
    """Chunk of one prompt row, of inputs drawn from the seed."""
    engine.set_schedule(flow_times(steps), -1 / steps)
    encode(engine, 1, seed, session=session)
    engine.use_prefix(1, session * SLOTS)
    return denoise(engine, step_inputs(engine, 1, seed, steps))


def seen_by(robot: int, turn: int) -> Observation:
    """Robots 0 and 2 see in every turn what they saw in the first."""
    instruction = ('pick up the red cup', 'go', 'push the green box left')[robot]
    return observation(10 * robot + (turn if robot % 2 else 0), instruction=instruction)


@pytest.mark.parametrize('graphs', [True, False])
@pytest.mark.parametrize('late', [False, True])
def test_every_chunk_is_the_one_of_a_robot_alone(machine, graphs: bool, late: bool):
    here = machine(late=late)
    shared, single = (
        Policy(read_bundle(here.bundle), here.load(use_cuda_graphs=graphs)) for _ in range(2)
    )
    sessions = [None, shared.open_session(), shared.open_session()]
    settings = [
        PolicySettings(),
        # Two prompt rows, and one after the other in two slots.
        PolicySettings(cfg_beta=2.0),
        PolicySettings(cfg_beta=1.5, cfg_mode='serial', rtc_mode='guided'),
    ]
    for turn in range(3):
        seen = [seen_by(robot, turn) for robot in range(3)]
        rows = seen[2].state + np.linspace(0.0, 0.4, 8)[:, None]
        plans = [None, None, CommittedPlan(rows.astype(np.float32), 2, 4) if turn else None]
        requests = [
            Request(*one, number=turn) for one in zip(seen, sessions, settings, plans, strict=True)
        ]
        found = shared.infer_batch(requests)
        for request, (actions, report) in zip(requests, found, strict=True):
            ((expected, _),) = single.infer_batch([replace(request, session=None)])
            assert np.array_equal(actions.actions, expected.actions)
            assert report.together == 1
            assert report.cuda_graph['prefix'] == ('captured' if graphs else 'eager')
        hits = [report.cache.prefixes[0].reuse is Reuse.HIT for _, report in found]
        assert hits == [turn > 0, False, turn > 0]


def test_a_session_takes_its_own_memory_and_no_graph(machine):
    here = machine()
    engine = here.load()
    alone = [chunk(engine, 0, seed) for seed in range(4)]
    graphs = here.cuda.live[1]
    engine.open_session()
    # Of prefix and denoise loop, of one and of two rows.
    assert here.cuda.live[1] == graphs + 4
    here.cuda.calls = []
    used = here.cuda.used_bytes
    for session in (2, 3):
        assert engine.open_session() == session
    assert here.cuda.used_bytes == used + 2 * engine.session_bytes
    assert 'capture' not in here.cuda.calls
    live = here.cuda.live
    for session, expected in enumerate(alone):
        assert np.array_equal(chunk(engine, session, session), expected)
    assert here.cuda.live == live
    # Two cameras, one prefix, one denoise loop.
    assert len(here.cuda.calls) == 4 * 4
    engine.close()
    assert here.cuda.live == (0, 0)


def test_another_number_of_steps_is_captured_once_for_all_sessions(machine):
    here = machine()
    engine = here.load()
    expected = [chunk(engine, 0, seed, steps=5) for seed in (8, 9)]
    for _ in range(2):
        engine.open_session()
    assert np.array_equal(chunk(engine, 1, 8, steps=5), expected[0])
    assert engine.cuda_graph['denoise'] == 'captured'
    here.cuda.calls = []
    assert np.array_equal(chunk(engine, 2, 9, steps=5), expected[1])
    assert 'capture' not in here.cuda.calls


@pytest.mark.parametrize('fails_at', [1, 4, 13])
def test_a_session_that_does_not_fit_is_refused_and_the_others_go_on(
    machine, monkeypatch, fails_at: int
):
    here = machine()
    policy = Policy(read_bundle(here.bundle), here.load())
    session = policy.open_session()
    asked = Request(seen_by(1, 0), session, number=0)
    ((expected, _),) = policy.infer_batch([asked])
    live, allocate, calls = here.cuda.live, CudaRuntime.allocate, []

    def fails(self: CudaRuntime, size: int) -> int:
        calls.append(size)
        if len(calls) == fails_at:
            raise CudaError('cuMemAlloc', 'CUDA_ERROR_OUT_OF_MEMORY', 'out of memory')
        return allocate(self, size)

    with monkeypatch.context() as patched:
        patched.setattr(CudaRuntime, 'allocate', fails)
        with pytest.raises(ValueError, match='max-sessions'):
            policy.open_session()
    assert here.cuda.live == live
    ((again, report),) = policy.infer_batch([asked])
    assert np.array_equal(again.actions, expected.actions)
    assert report.cache.prefixes[0].reuse is Reuse.HIT
    # Once there is room: as if nothing had been.
    other = policy.open_session()
    ((again, _),) = policy.infer_batch([replace(asked, session=other)])
    assert np.array_equal(again.actions, expected.actions)


def test_sessions_fill_the_device_but_for_what_a_load_leaves_free(machine, monkeypatch):
    reserve = 1 << 20
    monkeypatch.setattr(tensorrt_loading, 'LOAD_RESERVE_BYTES', reserve)
    here = machine(integrated=False)
    policy = Policy(read_bundle(here.bundle), here.load())
    first = policy.open_session()
    here.cuda.total_bytes = here.cuda.used_bytes + reserve + 2 * policy.session_bytes
    for _ in range(2):
        policy.open_session()
    with pytest.raises(ValueError, match=r'0\.0 MB are free'):
        policy.open_session()
    assert here.cuda.total_bytes - here.cuda.used_bytes >= reserve
    policy.close_session(first)
    assert policy.open_session().cache is first.cache
