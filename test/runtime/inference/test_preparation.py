"""Changes of settings wait for CUDA graphs of PyTorch that the engine lacks."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from guided_policies import policy_on_engine, write_guided
from recorded_graphs import RecordedGraphs
from tiny_policy import observation, tiny_spec, write_tiny_policy

from vla_runtime.engines.torch import cuda_graph
from vla_runtime.engines.torch import engine as torch_engine
from vla_runtime.policy import Policy


@pytest.fixture(scope='module')
def bundle(tmp_path_factory) -> Path:
    return write_guided(tmp_path_factory.mktemp('bundles'), 'pi05')


@pytest.fixture
def warm(monkeypatch, bundle):
    """A policy whose engine captures graphs, after its warm-up with these settings."""

    def make(max_rows: int = 2, **settings) -> Policy:
        monkeypatch.setattr(torch_engine, 'captures_graphs', lambda device: True)
        monkeypatch.setattr(cuda_graph, 'CudaGraphCapture', RecordedGraphs)
        policy, _ = policy_on_engine(bundle, max_rows, True, **{'rtc_mode': 'off', **settings})
        policy.warm_up()
        return policy

    return make


@pytest.mark.parametrize(
    'change',
    [
        {'rtc_mode': 'guided'},
        # This policy was not trained with a delay.
        {'rtc_mode': 'hard_prefix'},
        {'denoise_steps': 3},
        {'cfg_mode': 'fused'},
        {'seed': 5},
    ],
    ids=str,
)
def test_a_change_whose_graphs_are_there_waits_for_nothing(warm, change):
    policy = warm()
    wanted = replace(policy.settings, **change)
    assert policy.is_prepared(wanted)
    before = RecordedGraphs.captured
    assert policy.prepare(wanted)
    policy.settings = replace(wanted, cfg_enabled=True, cfg_beta=1.5)
    policy.infer(observation())
    assert RecordedGraphs.captured == before


@pytest.mark.parametrize(
    ('change', 'pieces'),
    [
        ({'denoise_steps': 2}, 2),
        # Without a plan the Jacobian is not needed, and that graph is there.
        ({'rtc_mode': 'jacobian'}, 2),
        # Slot 1 with one row and with two.
        ({'pipeline': 'throughput'}, 2),
        # Slot 1 with one row; no graph of the loop.
        ({'cfg_mode': 'serial'}, 1),
    ],
    ids=str,
)
def test_a_change_waits_for_the_graphs_that_are_missing_alone(warm, change, pieces):
    policy = warm()
    wanted = replace(policy.settings, **change)
    for left in reversed(range(pieces)):
        assert not policy.is_prepared(wanted)
        before = RecordedGraphs.captured
        assert policy.prepare(wanted) == (left == 0)
        assert RecordedGraphs.captured > before
    assert policy.is_prepared(wanted) and policy.is_prepared(policy.settings)
    before = RecordedGraphs.captured
    policy.warm_up()
    for enabled in (False, True):
        guided = enabled and wanted.rtc_mode != 'jacobian'
        policy.settings = replace(wanted, cfg_enabled=guided, cfg_beta=1.5)
        policy.submit(observation()).result()
    assert RecordedGraphs.captured == before
    policy.close()


def encode_second_while_first_is_denoised(policy: Policy, monkeypatch) -> None:
    engine, encoded = policy._engine, threading.Event()
    run_steps = engine.run_steps

    def run_after_encoding() -> None:
        assert encoded.wait(30.0)
        run_steps()

    with monkeypatch.context() as patched:
        patched.setattr(engine, 'run_steps', run_after_encoding)
        before = engine._encodings[1, 1]
        futures = [policy.submit(observation(seed)) for seed in (1, 2)]
        assert engine._encodings[1, 1] == before + 1
        encoded.set()
        for future in futures:
            future.result()


def test_what_used_both_slots_leaves_nothing_to_capture_behind(warm, monkeypatch):
    policy = warm()
    latency = replace(policy.settings, denoise_steps=2)
    throughput = replace(policy.settings, pipeline='throughput')
    for settings in (throughput, latency, throughput):
        while not policy.prepare(settings):
            pass
        policy.settings = settings
        if settings is latency:
            policy.infer(observation(1))
        else:
            encode_second_while_first_is_denoised(policy, monkeypatch)
    assert policy.is_prepared(latency)
    before = RecordedGraphs.captured
    policy.settings = latency
    policy.infer(observation(2))
    assert RecordedGraphs.captured == before
    policy.close()


@pytest.mark.parametrize('change', [{'cfg_mode': 'fused'}, {'rtc_mode': 'jacobian'}], ids=str)
def test_settings_that_guidance_cannot_join_are_prepared_without_it(warm, change):
    """On an engine of one row, where fused guidance and the Jacobian of serial one do not run."""
    policy = warm(max_rows=1, **change)
    assert policy.is_prepared(policy.settings)
    before = RecordedGraphs.captured
    policy.infer(observation())
    assert RecordedGraphs.captured == before
    with pytest.raises(ValueError, match='cfg_mode'):
        policy.prepare(replace(policy.settings, cfg_enabled=True, cfg_beta=1.5))
    policy.close()


def test_a_network_that_gave_up_its_graphs_is_waited_for_by_no_change(warm):
    policy = warm()
    capturer = policy._engine._capturers['denoise']

    def fail(work):
        raise RuntimeError('out of memory')

    capturer._capture = fail
    wanted = replace(policy.settings, denoise_steps=2)
    assert policy.prepare(wanted)
    assert policy.is_prepared(replace(wanted, denoise_steps=4))


def test_serial_guidance_reports_that_its_steps_use_no_graph(warm):
    policy = warm(cfg_mode='serial', cfg_beta=2.0)
    for enabled, denoise in ((False, 'captured'), (True, 'eager: serial guidance')):
        policy.settings = replace(policy.settings, cfg_enabled=enabled, cfg_beta=1.5)
        _, report = policy.infer(observation())
        assert report.cuda_graph == {'vision': 'captured', 'prefix': 'captured', 'denoise': denoise}


def test_a_switch_to_packed_waits_for_its_ring_and_captures_nothing_afterwards(
    monkeypatch, tmp_path
):
    monkeypatch.setattr(torch_engine, 'captures_graphs', lambda device: True)
    monkeypatch.setattr(cuda_graph, 'CudaGraphCapture', RecordedGraphs)
    bundle = write_tiny_policy(tmp_path / 'tokens', tiny_spec('openvla'))
    policy, engine = policy_on_engine(bundle, 1, True, rtc_mode='off')
    policy.warm_up()
    expected = policy.infer(observation())[0].actions
    wanted = replace(policy.settings, pipeline='packed')
    assert not policy.is_prepared(wanted) and 'tick' not in engine.cuda_graph
    assert policy.prepare(wanted) and policy.is_prepared(wanted)
    assert engine.cuda_graph['tick'] == 'captured'
    # Other inferences go on as before.
    assert np.array_equal(policy.infer(observation())[0].actions, expected)
    before = RecordedGraphs.captured
    policy.settings = wanted
    assert np.array_equal(policy.infer(observation())[0].actions, expected)
    assert RecordedGraphs.captured == before
    policy.close()
