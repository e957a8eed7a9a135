"""Cases of policies whose chunks a case recorded under several settings (test/cases/README.md)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from network_cases import ReferenceCase
from torch import Tensor

from vla_runtime.family.noise_schedule import NoiseScheduler, Scheduler
from vla_runtime.family.step_schedule import StepSchedule
from vla_runtime.inference.denoise import flow_times
from vla_runtime.models.base.flow_network import FlowNetwork


@dataclass(frozen=True)
class Sampling:
    """One chunk that a case recorded; `prefix` begins the names of its tensors.

    Attributes:
        scheduler: of a policy that takes noise away; None: of one that follows a flow.
        integrator: the flow's.
        steps: denoise steps.
    """

    name: str
    prefix: str
    scheduler: Scheduler | None
    integrator: str
    steps: int

    @property
    def bound(self) -> float:
        """Of the chunk, relative to its largest value: float32's own noise.

        Ten steps of DDIM make 1.6e-5 of one unit in the last place of the first noise, and 5.4e-5
        of another processor's order of sums.
        """
        return 1e-4 if self.name == 'ddim_10' else 5e-5

    @property
    def schedule(self) -> StepSchedule:
        if self.scheduler is None:
            return StepSchedule(flow_times(self.steps), -1.0 / self.steps)
        times = self.scheduler.timesteps(self.steps).astype(np.float64)
        return StepSchedule(times, -1.0, self.scheduler.updates(self.steps))


@dataclass(frozen=True)
class SampledCase(ReferenceCase):
    """A case with a history of observations, and our network with its weights."""

    network: Any

    @property
    def cameras(self) -> range:
        return range(self.description['cameras'])

    @property
    def samplings(self) -> tuple[Sampling, ...]:
        """The case's own chunk, and those under other settings."""
        d = self.description
        others = [_sampling(one['name'], {**d, **one}) for one in d['samplers']]
        return (_sampling('', d), *others)

    def pixels(self, b: int) -> Tensor:
        """Normalised images of batch entry b, (V, 3, height, width), the newest step first."""
        steps = self.description['n_obs_steps']
        return torch.stack(
            [
                self._image(camera)[b, step]
                for step in reversed(range(steps))
                for camera in self.cameras
            ]
        )

    def _image(self, camera: int) -> Tensor:
        """Images of a camera (B, T, 3, height, width), normalised by the case's statistics."""
        statistics = self.description['statistics'][f'observation.images.cam{camera}']
        mean, std = (torch.tensor(statistics[name])[:, None, None] for name in ('mean', 'std'))
        raw = self.tensors[f'raw_image_{camera}'].permute(0, 1, 4, 2, 3).float() / 255
        mode = self.description['normalization']['VISUAL']
        if mode == 'MEAN_STD':
            return (raw - mean) / (std + 1e-8)
        assert mode == 'IDENTITY'
        return raw

    def rows(self, b: int) -> dict[str, Tensor]:
        """Inputs of the prefix for batch entry b, one row."""
        raise NotImplementedError

    def visible(self) -> Tensor:
        """A mask (V,) that hides nothing."""
        return torch.ones(self.network.dims.cameras, dtype=torch.bool)

    def image_tokens(self, b: int) -> Tensor:
        """Image tokens of all images as an engine holds them, (V, N, W)."""
        tokens: Tensor = self.network.vision(self.pixels(b))
        return tokens

    def prefix(self, b: int) -> Mapping[str, Tensor]:
        """Outputs of the prefix network for batch entry b."""
        past: Mapping[str, Tensor] = self.network.prefix(
            self.image_tokens(b), self.visible(), **self.rows(b)
        )
        return past

    def noise(self, sampling: Sampling, b: int) -> np.ndarray:
        """The noise (H, A) that a chunk begins with; that of the case where it has none."""
        found = self.tensors.get(f'{sampling.prefix}x_t')
        first: Tensor = self.tensors['noise'][b] if found is None else found[0, b]
        return first.numpy()

    def step_noise(self, sampling: Sampling, b: int) -> np.ndarray:
        """Noise of every step (N, H, A); zeros where none is drawn."""
        found = self.tensors.get(f'{sampling.prefix}step_noise')
        dims = self.network.dims
        if found is None or not found.numel():
            return np.zeros((sampling.steps, dims.horizon, dims.action_dim), np.float32)
        return found[:, b].numpy()

    def head(self, b: int) -> dict[str, Tensor]:
        """Inputs of the head for batch entry b, one row."""
        return {}

    def network_of(self, sampling: Sampling, b: int = 0) -> FlowNetwork:
        """Our network of a chunk; by default one samples them all."""
        network: FlowNetwork = self.network
        return network

    def trajectory(self, sampling: Sampling, b: int) -> Tensor:
        """The chunk (H, a) that the case recorded, of the network's first numbers."""
        return self.tensors[f'{sampling.prefix}trajectory'][b]


def _sampling(name: str, d: Mapping[str, Any]) -> Sampling:
    prefix = f'sampler_{name}.' if name else ''
    is_flow = d.get('objective', 'diffusion') != 'diffusion'
    steps = d['num_integration_steps'] if is_flow else d['num_inference_steps']
    return Sampling(
        name or 'own',
        prefix,
        None if is_flow else scheduler_of_case(d),
        d.get('integration_method', ''),
        steps or d['num_train_timesteps'],
    )


def scheduler_of_case(d: Mapping[str, Any]) -> NoiseScheduler:
    """Our scheduler of a case's description."""
    return NoiseScheduler(
        kind=d['noise_scheduler_type'].lower(),
        train_steps=d['num_train_timesteps'],
        betas=d['beta_schedule'],
        beta_start=d['beta_start'],
        beta_end=d['beta_end'],
        prediction=d['prediction_type'],
        clip=d['clip_sample_range'] if d['clip_sample'] else None,
    )
