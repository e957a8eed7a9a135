"""Drawn inputs of an engine of a tiny policy, and the chunks that it makes of them."""

from __future__ import annotations

import numpy as np
from tensorrt_machine import STEPS

from vla_runtime.declarations.smolvla import SmolVlaDims
from vla_runtime.engines.protocol import SLOTS, PolicyEngine, StepInputs
from vla_runtime.inference.denoise import denoise, flow_times


def encode(
    engine: PolicyEngine,
    rows: int,
    seed: int,
    slot: int = 0,
    session: int = 0,
    *,
    images: bool = True,
) -> None:
    """Encode drawn images and prompts into a slot of a session; `images` False: the prompts."""
    random = np.random.default_rng(seed)
    dims = engine.dims
    for camera in range(dims.cameras):
        size = dims.vision.image_size
        pixels = random.uniform(-1, 1, (3, size, size)).astype(np.float32)
        if images:
            engine.encode_image(session * dims.cameras + camera, pixels)
    mask = np.ones((rows, dims.prompt_length), bool)
    mask[:, 20:] = False
    tokens = random.integers(0, dims.vocabulary, mask.shape)
    prompt = {'tokens': tokens, 'token_mask': mask}
    if isinstance(dims, SmolVlaDims):
        prompt['state'] = random.standard_normal((rows, dims.state_dim), np.float32)
    seen = np.array([True, seed % 2 == 0])
    engine.encode_prefix(seen, prompt, session * SLOTS + slot)


def step_inputs(engine: PolicyEngine, rows: int, seed: int, steps: int = STEPS) -> StepInputs:
    random = np.random.default_rng(seed)
    dims = engine.dims
    shape = (dims.horizon, dims.action_dim)
    return StepInputs(
        x=random.standard_normal(shape, np.float32),
        row_weight=np.array([1.0] if rows == 1 else [1.8, -0.8], np.float32),
        plan=random.standard_normal(shape, np.float32),
        plan_weight=random.uniform(0, 1, (steps, dims.horizon)).astype(np.float32),
        rows={'state': random.standard_normal((rows, dims.state_dim), np.float32)}
        if dims.state_dim and not isinstance(dims, SmolVlaDims)
        else {},
    )


def chunk(engine: PolicyEngine, rows: int, seed: int, steps: int = STEPS) -> np.ndarray:
    engine.set_schedule(flow_times(steps), -1 / steps)
    encode(engine, rows, seed)
    engine.use_prefix(rows)
    return denoise(engine, step_inputs(engine, rows, seed, steps))
