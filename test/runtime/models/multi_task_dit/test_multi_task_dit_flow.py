"""Multi-Task DiT on a flow through `Policy`: Runge-Kutta steps, and all that flows share."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from guided_policies import NOISE as WIDE_NOISE
from guided_policies import load_policy
from network_cases import relative_error
from onnx_bundles import write_onnx_once
from recorded_bag import ROBOT, Turn, record
from tensorrt_machine import Machine, linked_copy
from tiny_policy import history_spec, observation, tiny_spec, write_tiny_policy

from vla_convert.export.onnx.cases import record_cases
from vla_convert.export.onnx.export import is_unrolled
from vla_runtime.bundle.folder import read_bundle
from vla_runtime.bundle.rules import dump_spec, parse_spec
from vla_runtime.bundle.schema import BundleSpec
from vla_runtime.bundle.writer import seal
from vla_runtime.engines.torch.loading import load_network
from vla_runtime.family.step_schedule import stage_times
from vla_runtime.files.field_error import FieldError
from vla_runtime.models.base.flow_step import DenoiseStep, JacobianDenoiseStep
from vla_runtime.policy import Policy
from vla_runtime.recording.bag_reader import BagReader
from vla_runtime.types import CommittedPlan
from vla_tools.distillation.student import Distillation, DistillationSettings
from vla_tools.replay.recorded import read_run
from vla_tools.replay.rerun import Replay
from vla_tools.replay.setup import Changes

FLOW = 'multi_task_dit_flow'
NOISE = WIDE_NOISE[:, :3]
PLAN = CommittedPlan(np.cumsum(np.full((6, 3), 0.1), axis=0), delay_steps=2, execution_horizon=6)
STEPS = 3


def runge_kutta(spec: BundleSpec) -> BundleSpec:
    return replace(spec, dims=replace(spec.dims, integrator='rk4'), denoise_steps=STEPS)


@pytest.fixture(scope='module')
def bundle(tmp_path_factory) -> Path:
    """A policy with advantage tags, its flow followed by Runge-Kutta, and its ONNX files."""
    folder = tmp_path_factory.mktemp('flow') / 'policy'
    write_tiny_policy(folder, runge_kutta(tiny_spec(FLOW, advantage='task_newline')))
    spec = read_bundle(folder).spec
    write_onnx_once(folder, spec, 'float32')
    record_cases(folder, spec)
    seal(folder, spec)
    return folder


@pytest.fixture(scope='module')
def parts(bundle: Path):
    """The network, a prefix of it, noise, a plan and its weight."""
    spec = read_bundle(bundle).spec
    network = load_network(
        FLOW, spec.dims, bundle / 'weights.safetensors', device='cpu', precision='float32'
    )
    generator = torch.Generator().manual_seed(0)
    shape = (1, spec.dims.horizon, spec.dims.action_dim)
    x, plan = (torch.randn(shape, generator=generator) for _ in range(2))
    width = spec.dims.transformer.modulations
    past = {'modulation': torch.randn(1, width, generator=generator)}
    weight = torch.linspace(1.0, 0.0, spec.dims.horizon)[None, :, None]
    return network, past, x, plan, weight


def test_a_step_is_the_classical_runge_kutta_step_and_its_jacobian(parts):
    network, past, x, plan, weight = parts
    t, dt = torch.tensor(0.75), torch.tensor(-0.25)

    def velocity(at: torch.Tensor, time: float) -> torch.Tensor:
        return network.velocity(at, past, network.time_conditioning(torch.tensor([time])))

    def mean(at: torch.Tensor) -> torch.Tensor:
        first = velocity(at, 0.75)
        second = velocity(at - 0.125 * first, 0.625)
        third = velocity(at - 0.125 * second, 0.625)
        fourth = velocity(at - 0.25 * third, 0.5)
        return first / 6 + second / 3 + third / 3 + fourth / 6

    (times,) = stage_times(network.dims, np.array([0.75]), -0.25)
    seen = [network.time_conditioning(torch.tensor([float(time)])) for time in times]
    given = (past, torch.cat(seen, dim=1), t, dt, torch.ones(1), plan, weight, {})
    found, moved_by = DenoiseStep(network)(x, *given)
    expected = mean(x)
    assert relative_error(moved_by, expected) <= 1e-5
    tied = expected - weight * (plan - (x - t * expected))
    assert relative_error(found, x + dt * tied) <= 1e-5

    clean, pull = torch.func.vjp(lambda at: at - t * mean(at), x)
    (correction,) = pull(weight * (plan - clean))
    through, _ = JacobianDenoiseStep(network)(x, *given)
    assert relative_error(through, x + dt * (expected - correction)) <= 1e-5
    assert relative_error(through, found) > 1e-4


@pytest.mark.parametrize('mode', ['guided', 'jacobian', 'hard_prefix'])
def test_chunks_are_tied_to_the_plan_in_every_mode(bundle, mode):
    free, _ = load_policy(bundle, rtc_mode='off').infer(observation(), noise=NOISE)
    tied, report = load_policy(bundle, rtc_mode=mode).infer(observation(), plan=PLAN, noise=NOISE)
    assert report.rtc_mode == mode
    away, near = (np.abs(one.actions[:2] - PLAN.actions[:2]).max() for one in (free, tied))
    assert near < away
    if mode == 'hard_prefix':
        assert near < 1e-5


@pytest.mark.parametrize('plan', [None, PLAN], ids=['free', 'tied'])
def test_rows_one_after_the_other_are_rows_together(bundle, plan):
    chunks = []
    for rows, mode in ((2, 'fused'), (1, 'serial')):
        policy = load_policy(bundle, rows, cfg_enabled=True, cfg_beta=2.5, cfg_mode=mode)
        chunk, report = policy.infer(observation(), plan=plan, noise=NOISE)
        assert report.guidance == mode
        chunks.append(chunk.normalised)
    # Guidance and plan term multiply the last bits of a row, which are another processor's own.
    np.testing.assert_allclose(*chunks, rtol=1e-5, atol=2e-4)
    plain, _ = load_policy(bundle).infer(observation(), plan=plan, noise=NOISE)
    assert np.abs(plain.normalised - chunks[0]).max() > 1e-3


def test_the_number_of_steps_changes_live_and_on_both_engines_alike(bundle):
    with (
        closing(Policy.load(bundle)) as torch_,
        closing(Policy.load(bundle, 'onnxruntime')) as onnx,
    ):
        found = []
        for steps in (1, STEPS, 7, 2):
            chunks = []
            for policy in (torch_, onnx):
                policy.settings = replace(policy.settings, denoise_steps=steps)
                chunk, report = policy.infer(observation(), noise=NOISE)
                assert report.denoise_steps == steps
                chunks.append(chunk.normalised)
            np.testing.assert_allclose(*chunks, rtol=1e-5, atol=5e-5)
            found.append(chunks[0])
        assert np.abs(found[0] - found[2]).max() > 1e-4


def test_engines_of_tensorrt_take_all_rows_of_a_step(bundle, monkeypatch, tmp_path):
    """Over a fake device, which runs our files on ONNX Runtime."""
    machine = Machine(monkeypatch, linked_copy(bundle, tmp_path / 'copy'))
    machine.build()
    expected = Policy.load(bundle)
    with closing(Policy.load(machine.bundle, 'tensorrt', 'cuda', precision='float32')) as policy:
        for steps in (STEPS, 5):
            chunks = []
            for one in (expected, policy):
                one.settings = replace(one.settings, denoise_steps=steps)
                chunks.append(one.infer(observation(), noise=NOISE)[0].normalised)
            np.testing.assert_allclose(*chunks, rtol=1e-5, atol=5e-5)


@pytest.mark.parametrize('family', ['diffusion', 'multi_task_dit', FLOW])
def test_a_recording_of_a_history_replays_bit_for_bit(tmp_path, family):
    # Cameras of the size that the policy takes.
    size = 'width: 64, height: 48'
    robot = tmp_path / 'robot.yaml'
    robot.write_text(
        ROBOT.replace('aliases: [top]', f'aliases: [top], {size}').replace(
            'width: 40, height: 30', size
        )
    )
    spec = replace(history_spec(3, family), step_time_s=0.2)
    policy = write_tiny_policy(tmp_path / 'policy', runge_kutta(spec) if family == FLOW else spec)
    turns = [
        Turn(),
        Turn({'real_time_chunking': True}),
        Turn({'denoise_steps': 5}, still=True),
        Turn(episode=2),
    ]
    folder = record(tmp_path / 'bag', policy, robot, turns)
    found = list(Replay(read_run(BagReader(folder)), Changes()).inferences())
    assert [one.error is not None and one.error.identical for one in found] == [True] * len(turns)
    assert [one.report.denoise_steps for one in found] == [3, 3, 5, 3]
    assert found[1].report.rtc_mode == 'guided'


def test_long_unrolled_baselines_are_not_written():
    spec = tiny_spec(FLOW)
    assert is_unrolled(replace(spec, denoise_steps=50))
    assert not is_unrolled(replace(spec, denoise_steps=51))
    assert not is_unrolled(replace(runge_kutta(spec), denoise_steps=17))


def test_a_time_for_each_action_is_refused_where_the_first_are_of_the_past():
    spec = replace(history_spec(2, FLOW), trained_delay_steps=2)
    with pytest.raises(FieldError) as error:
        parse_spec(dump_spec(spec))
    assert error.value.field == 'trained_delay_steps'


@pytest.mark.parametrize('spec', [runge_kutta(tiny_spec(FLOW)), history_spec(2, FLOW)])
def test_students_that_would_be_taught_otherwise_than_they_are_run_are_refused(tmp_path, spec):
    made = read_bundle(write_tiny_policy(tmp_path / 'policy', spec))
    settings = DistillationSettings(steps=(1,), teacher_steps=4)
    with pytest.raises(ValueError, match=FLOW):
        Distillation(made, [], settings, tmp_path)
