"""The networks of Diffusion Policy against LeRobot's own numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusion_cases import DiffusionCase, load_diffusion_case
from network_cases import each_case, each_entry, relative_error
from sampled_cases import Sampling
from tiny_policy import observation, tiny_spec, write_tiny_policy

from vla_runtime.family.noise_schedule import NoiseScheduler
from vla_runtime.inference.settings import PolicySettings
from vla_runtime.models.base.diffusion_network import advance
from vla_runtime.policy import Policy

# Relative to the largest value: float32's own noise is up to 1.5e-5 in the actions.
BOUND = 5e-5

entries = each_entry('diffusion')
cases = each_case('diffusion')


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.inference_mode():
        yield


def step(
    case: DiffusionCase,
    sampling: Sampling,
    past: dict[str, torch.Tensor],
    k: int,
    b: int,
    x: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The next x (H, A) and the prediction of a step from x (H, A)."""
    times, _, updates = sampling.schedule
    assert updates is not None
    table = case.network.time_conditioning(torch.tensor([float(times[k])]))
    predicted = case.network.velocity(x[None], past, table)
    zero = torch.zeros_like(x)[None]
    moved = advance(
        x[None],
        predicted,
        torch.from_numpy(updates[k]),
        torch.from_numpy(case.step_noise(sampling, b)[k])[None],
        torch.ones(1),
        zero,
        zero[:, :, :1],
    )
    return moved[0], predicted[0]


@pytest.mark.cases
@cases
def test_tables_of_the_schedules_equal_the_reference(path: Path):
    case = load_diffusion_case(path)
    d, tensors = case.description, case.tensors
    names = [name.removeprefix('betas.') for name in tensors if name.startswith('betas.')]
    assert names
    for name in names:
        scheduler = NoiseScheduler(
            'ddpm', d['num_train_timesteps'], name, d['beta_start'], d['beta_end']
        )
        assert relative_error(scheduler.beta_table(), tensors[f'betas.{name}']) <= 1e-8
        assert relative_error(scheduler.kept_table(), tensors[f'alphas_cumprod.{name}']) == 0
    own = case.network.dims.scheduler
    for steps, expected in d['timesteps_by_num_inference_steps'].items():
        assert own.timesteps(int(steps)).tolist() == expected


@pytest.mark.cases
@entries
def test_every_step_of_every_sampler_equals_the_reference(path: Path, b: int):
    case = load_diffusion_case(path)
    past, tensors = case.prefix(b), case.tensors
    for sampling in case.samplings:
        x = tensors[f'{sampling.prefix}x_t'][0, b]
        for k, t in enumerate(tensors[f'{sampling.prefix}t']):
            assert sampling.schedule.times[k] == t
            recorded = tensors[f'{sampling.prefix}x_t'][k, b]
            moved, predicted = step(case, sampling, past, k, b, recorded)
            expected = tensors[f'{sampling.prefix}x_next'][k, b]
            # An early step divides float32's noise of the prediction by sqrt(alpha).
            update = sampling.schedule.updates[k]
            gain = max(1.0, abs(float(update[1] / update[2] * update[4] + update[6])))
            assert relative_error(moved, expected) <= BOUND * gain, (sampling.name, k)
            if not sampling.prefix:
                assert relative_error(predicted, tensors['model_output'][k, b]) <= BOUND
            x, _ = step(case, sampling, past, k, b, x)
        ends = tensors[f'{sampling.prefix}trajectory'][b]
        assert relative_error(x, ends) <= sampling.bound, sampling.name


@pytest.mark.cases
@entries
def test_numpy_updates_as_the_engines_do(path: Path, b: int):
    from vla_runtime.family.noise_schedule import advance as in_numpy

    random = np.random.default_rng(b)
    case = load_diffusion_case(path)
    shape = (case.network.dims.horizon, case.network.dims.action_dim)
    x, mixed, noise, plan = (random.normal(size=shape).astype(np.float32) for _ in range(4))
    weight = random.uniform(size=(shape[0], 1)).astype(np.float32)
    for sampling in case.samplings:
        for update in sampling.schedule.updates:
            tensors = (torch.from_numpy(a)[None] for a in (x, mixed))
            theirs = advance(
                *tensors,
                torch.from_numpy(update),
                torch.from_numpy(noise)[None],
                torch.ones(1),
                torch.from_numpy(plan)[None],
                torch.from_numpy(weight)[None],
            )
            found = in_numpy(x, mixed, update, noise, plan, weight)
            assert relative_error(found, theirs[0]) <= 1e-6


def test_a_scheduler_that_is_set_is_that_of_a_policy_that_has_it(tmp_path: Path):
    """What each sampler computes is held to the cases."""
    specs = {}
    for kind in ('ddpm', 'ddim'):
        spec = tiny_spec('diffusion')
        scheduler = replace(spec.dims.scheduler, kind=kind)
        specs[kind] = replace(spec, dims=replace(spec.dims, scheduler=scheduler))
        write_tiny_policy(tmp_path / kind, specs[kind])
    chunks = {
        (own, chosen): Policy.load(
            tmp_path / own, settings=PolicySettings(noise_scheduler=chosen, denoise_steps=4)
        )
        .infer(observation())[0]
        .normalised
        for own in specs
        for chosen in specs
    }
    for kind in specs:
        assert np.array_equal(chunks['ddpm', kind], chunks['ddim', kind])
    assert np.abs(chunks['ddpm', 'ddpm'] - chunks['ddpm', 'ddim']).max() > 1e-3
