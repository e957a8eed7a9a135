"""Sampling of the shipped policy against the schedulers' own formulas, written down once more."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from paths import ROOT
from thorough import thorough_but
from tiny_policy import observation

from vla_runtime.bundle.folder import read_bundle
from vla_runtime.engines.torch.weights import load_network
from vla_runtime.inference.settings import PolicySettings
from vla_runtime.policy import Policy

BUNDLE = ROOT / 'engines' / 'demo_diffusion'
TRAIN_STEPS = 100


def kept_shares() -> np.ndarray:
    """Cumulative product of 1 - beta of `squaredcos_cap_v2` (arXiv 2102.09672, equation 17)."""

    def share(t: float) -> float:
        return math.cos((t + 0.008) / 1.008 * math.pi / 2) ** 2

    betas = [
        min(1 - share((i + 1) / TRAIN_STEPS) / share(i / TRAIN_STEPS), 0.999)
        for i in range(TRAIN_STEPS)
    ]
    return np.cumprod(1.0 - np.array(betas))


def sample(kind, steps, predict, noise, clip):
    """Ancestral sampling (arXiv 2006.11239, algorithm 2) or DDIM with eta 0 (2010.02502, 12).

    Args:
        predict: (H, A) and training step to the predicted noise (H, A).
        noise: (draws, H, A).
    """
    kept, stride = kept_shares(), TRAIN_STEPS // steps
    x, fresh = noise[0].astype(np.float64), list(noise[1:])
    for t in range((steps - 1) * stride, -1, -stride):
        now, then = kept[t], kept[t - stride] if t else 1.0
        predicted = predict(x, t)
        clean = np.clip((x - math.sqrt(1 - now) * predicted) / math.sqrt(now), -clip, clip)
        if kind == 'ddim':
            x = math.sqrt(then) * clean + math.sqrt(1 - then) * predicted
            continue
        alpha = now / then
        x = (
            math.sqrt(then) * (1 - alpha) / (1 - now) * clean
            + math.sqrt(alpha) * (1 - then) / (1 - now) * x
        )
        if t:
            x += math.sqrt((1 - then) / (1 - now) * (1 - alpha)) * fresh.pop(0)
    assert not fresh
    return x


@pytest.mark.parametrize('kind', ['ddpm', 'ddim'])
@pytest.mark.parametrize('steps', thorough_but([10], [100, 10, 5]))
def test_the_shipped_policy_is_sampled_by_the_schedulers_formula(kind, steps):
    bundle = read_bundle(BUNDLE)
    settings = PolicySettings(noise_scheduler=kind, denoise_steps=steps)
    policy, cameras = Policy.load(BUNDLE, threads=1, settings=settings), bundle.spec.cameras
    random = np.random.default_rng(0)
    images = {
        camera.name: random.integers(0, 256, (48, 64, 3), dtype=np.uint8) for camera in cameras
    }
    state = np.array([0.1, -0.3, 0.5, 0.7, 0.0, 0.1], np.float32)
    chunk, report = policy.infer(observation(images=images, state=state))

    network = load_network(
        'diffusion', bundle.spec.dims, bundle.weights_path, device='cpu', precision='float32'
    )
    # The square has a bar above and below; pixels are -1 to 1.
    pixels = np.full((len(cameras), 3, 64, 64), -1.0, np.float32)
    pixels[:, :, 8:56] = np.stack([*images.values()]).transpose(0, 3, 1, 2) / 127.5 - 1.0
    low, high = (bundle.statistics[f'state.{name}'] for name in ('q01', 'q99'))
    normalised = ((state - low) / (high - low + 1e-6) * 2.0 - 1.0).astype(np.float32)
    with torch.inference_mode():
        past = network.prefix(
            network.vision(torch.from_numpy(pixels)),
            torch.ones(len(cameras), dtype=torch.bool),
            state=torch.from_numpy(normalised)[None, None],
        )

        def predict(x: np.ndarray, t: int) -> np.ndarray:
            time = network.time_conditioning(torch.tensor([float(t)]))
            found = network.velocity(torch.from_numpy(x.astype(np.float32))[None], past, time)
            return found[0].numpy().astype(np.float64)

        expected = sample(kind, steps, predict, report.noise.reshape(-1, *chunk.actions.shape), 2.0)
    np.testing.assert_allclose(chunk.normalised, expected, rtol=0, atol=5e-4)
