"""Tiny policies that answer in tokens, and requests to them, for tests of packed requests."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from network_cases import random_network

from vla_runtime.declarations.pi0_fast import Pi0FastDims
from vla_runtime.engines.protocol import StepInputs
from vla_runtime.engines.torch.token_engine import TorchTokenEngine
from vla_runtime.family.dimensions import DecoderDims, VisionDims
from vla_runtime.family.step_schedule import StepSchedule
from vla_runtime.inference.packed import write_answer
from vla_runtime.inference.prefix_cache import PrefixInputs
from vla_runtime.inference.request import ChunkRequest
from vla_runtime.inference.settings import PolicySettings

# Token that ends an answer; a vocabulary this small writes it often.
END = 5
INSTRUCTIONS = ('lift', 'push', 'open')
DIMS = Pi0FastDims(
    vision=VisionDims(width=8, depth=1, num_heads=2, mlp_dim=8, patch_size=7, image_size=14),
    language=DecoderDims(width=16, depth=2, mlp_dim=24, num_heads=2, num_kv_heads=1, head_dim=8),
    vocabulary=12,
    cameras=1,
    prompt_length=6,
    horizon=2,
    action_dim=2,
    answer_tokens=5,
    skipped_tokens=1,
    action_scale=10.0,
    least_coefficient=-5.0,
)
# Likeliest tokens are this much likelier than the next: rounding decides none.
_MARGIN = 1e-3


def token_engine() -> TorchTokenEngine:
    """Make an engine of a random network."""
    with torch.no_grad():
        return TorchTokenEngine(random_network('pi0_fast', DIMS), max_rows=1)


def request_of(seed: int, instruction: str, number: int = 0) -> ChunkRequest:
    """Make a request of an observation that is drawn from a seed."""
    random = np.random.default_rng(seed)
    size = DIMS.vision.image_size
    length = int(random.integers(2, DIMS.prompt_length + 1))
    tokens = random.integers(0, DIMS.vocabulary, (1, DIMS.prompt_length))
    tokens[0, 0] = INSTRUCTIONS.index(instruction)
    prefix = PrefixInputs(
        pixels=[random.uniform(-1, 1, (3, size, size)).astype(np.float32)],
        image_mask=np.ones(1, dtype=bool),
        rows={'tokens': tokens, 'token_mask': np.arange(DIMS.prompt_length)[None] < length},
        words=(instruction, (None,)),
        state_bins=np.zeros(0, dtype=np.int64),
        time_s=float(number),
    )
    chunk = np.zeros((DIMS.horizon, DIMS.action_dim), dtype=np.float32)
    inputs = StepInputs(chunk, np.ones(1, np.float32), chunk, chunk[None, :, 0])
    return ChunkRequest(
        settings=PolicySettings(),
        number=number,
        prefixes=(prefix,),
        schedule=StepSchedule(np.ones(1), -1.0),
        inputs=inputs,
        guidance='none',
        noise=chunk,
    )


def answer_alone(engine: TorchTokenEngine, request: ChunkRequest) -> tuple[tuple[int, ...], float]:
    """Return the answer of a request that runs alone, and its least margin."""
    (prefix,) = request.prefixes
    engine.encode_image(0, prefix.pixels[0])
    engine.encode_prefix(prefix.image_mask, prefix.rows)
    engine.use_prefix(1)
    margins: list[float] = []

    def look(place: int, tokens: np.ndarray, logits: np.ndarray) -> None:
        second, first = np.sort(logits)[-2:]
        margins.append(float(first - second))

    tokens = write_answer(engine, DIMS.answer_tokens, END, look)
    return tuple(int(token) for token in tokens), min(margins)


@lru_cache(maxsize=1)
def known_answers(count: int = 24) -> dict[tuple[int, str], tuple[int, ...]]:
    """Answers of requests whose tokens no rounding changes, by seed and instruction."""
    engine, found = token_engine(), {}
    for seed in range(4 * count):
        for instruction in INSTRUCTIONS:
            answer, margin = answer_alone(engine, request_of(seed, instruction))
            if margin > _MARGIN:
                found[seed, instruction] = answer
    engine.close()
    lengths = {len(answer) for answer in found.values()}
    # Early ends, and answers without an end.
    assert {1, DIMS.answer_tokens} <= lengths and len(lengths) > 2, lengths
    return dict(list(found.items())[: 3 * count])


def keys_of(instruction: str) -> Sequence[tuple[int, str]]:
    """Keys of the known answers with an instruction."""
    return [key for key in known_answers() if key[1] == instruction]
