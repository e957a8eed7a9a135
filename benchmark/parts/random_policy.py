"""Networks with seeded random weights, and inputs for them, to measure speed.

Imports torch, numpy and the networks alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from vla_runtime.declarations.pi import PiDims
from vla_runtime.engines.protocol import PolicyEngine, StepInputs
from vla_runtime.engines.torch.engine import TorchEngine
from vla_runtime.engines.torch.weights import PRECISIONS, compute_in_full_precision, state_of
from vla_runtime.family.dimensions import DecoderDims, VisionDims
from vla_runtime.family.listing import find_family
from vla_runtime.family.step_schedule import StepSchedule
from vla_runtime.inference.denoise import flow_times
from vla_runtime.models.base.flow_network import build_network
from vla_runtime.models.pi import PiNetwork

SIZES = ('tiny', 'reduced', 'full')


@dataclass(frozen=True)
class ChunkInputs:
    """Everything that one chunk is made of; shapes as in `engines.engine`.

    `pixels` of each camera are (3, height, width).
    """

    pixels: Sequence[np.ndarray] | np.ndarray
    image_mask: np.ndarray
    prefix_inputs: dict[str, np.ndarray]
    step_inputs: StepInputs
    schedule: StepSchedule

    @property
    def rows(self) -> int:
        return len(self.step_inputs.row_weight)


def sized_dims(family: str, size: str, cameras: int) -> PiDims:
    """The family's dimensions: full, reduced (about 40 M parameters) or tiny (for tests)."""
    full = replace(find_family(family).presets[family], cameras=cameras)
    if size == 'full':
        return full
    if size == 'reduced':
        language = DecoderDims(
            768, depth=2, mlp_dim=3072, num_heads=8, num_kv_heads=1, head_dim=256
        )
        vision = replace(full.vision, width=576, depth=2, num_heads=8, mlp_dim=2152)
        vocabulary = 4096
    else:
        language = DecoderDims(32, depth=2, mlp_dim=48, num_heads=4, num_kv_heads=1, head_dim=8)
        vision = VisionDims(24, depth=1, num_heads=2, mlp_dim=32, patch_size=14, image_size=28)
        vocabulary = 400
    return replace(
        full,
        vision=vision,
        language=language,
        expert=replace(language, width=language.width // 2, mlp_dim=language.mlp_dim // 2),
        vocabulary=vocabulary,
        prompt_length=full.prompt_length if size == 'reduced' else 24,
        horizon=full.horizon if size == 'reduced' else 8,
    )


@torch.no_grad()
def random_network(
    family: str, dims: PiDims, device: str, precision: str, seed: int = 0
) -> PiNetwork:
    """A network whose every weight matters, and whose activations stay of order one.

    The same seed gives the same weights on every device, rounded to `precision`, but the text
    table and matrices of more than 2^22 numbers: they are drawn on the device itself, for speed.

    Raises ValueError: unknown family or precision.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"precision '{precision}' is none of {', '.join(PRECISIONS)}")
    if torch.device(device).type == 'cuda':
        # As when a policy is loaded.
        compute_in_full_precision()
    with torch.device('meta'):
        network = build_network(family, dims)

    def drawn() -> Iterator[tuple[str, Tensor]]:
        for index, (name, like) in enumerate(network.state_dict().items()):
            drawn_on = device if like.numel() > 2**22 else 'cpu'
            generator = torch.Generator(drawn_on).manual_seed(seed * 100_003 + index)
            fan_in = like[0].numel() if like.dim() > 1 else 100
            numbers = torch.randn(like.shape, generator=generator, device=drawn_on)
            yield name, numbers.mul_(fan_in**-0.5).to(device)

    network.load_state_dict(state_of(network, drawn(), precision), assign=True)
    for module in network.modules():
        if isinstance(module, nn.LayerNorm):
            module.weight.add_(1.0)
    return network.eval().requires_grad_(False)


def with_cameras(network: PiNetwork, family: str, cameras: int) -> PiNetwork:
    """The same weights, not copied, for another number of cameras; nothing is joined yet."""
    with torch.device('meta'):
        other = build_network(family, replace(network.dims, cameras=cameras))
    other.load_state_dict(network.state_dict(), assign=True)
    return other.eval().requires_grad_(False)


def layer_by_layer(network: PiNetwork, family: str) -> PiNetwork:
    """The same weights, not copied, in a network that engines leave as it is."""
    other = with_cameras(network, family, network.dims.cameras)
    other.join = lambda static_shapes=False: None  # type: ignore[method-assign]
    return other


def random_inputs(
    dims: PiDims, rows: int, seed: int, *, steps: int = 10, beta: float = 2.0
) -> ChunkInputs:
    """Seeded inputs; two rows are guided prompts of different lengths, randomly padded."""
    random = np.random.default_rng(seed)
    size = dims.vision.image_size
    lengths = [dims.prompt_length * 3 // 4, dims.prompt_length // 2][:rows]
    plan_weight = np.zeros((steps, dims.horizon), dtype=np.float32)
    plan_weight[:, : dims.horizon // 4] = 0.5
    chunk = (dims.horizon, dims.action_dim)
    return ChunkInputs(
        pixels=random.uniform(-1, 1, (dims.cameras, 3, size, size)).astype(np.float32),
        image_mask=np.ones(dims.cameras, dtype=bool),
        prefix_inputs={
            'tokens': random.integers(0, dims.vocabulary, (rows, dims.prompt_length)),
            'token_mask': np.arange(dims.prompt_length) < np.array(lengths)[:, None],
        },
        step_inputs=StepInputs(
            x=random.standard_normal(chunk).astype(np.float32),
            row_weight=np.array([beta, 1 - beta] if rows == 2 else [1.0], dtype=np.float32),
            plan=random.uniform(-1, 1, chunk).astype(np.float32),
            plan_weight=plan_weight,
            rows={
                'state': np.repeat(random.uniform(-1, 1, (1, dims.state_dim)), rows, axis=0).astype(
                    np.float32
                )
            }
            if dims.state_dim
            else {},
        ),
        schedule=StepSchedule(flow_times(steps), -1.0 / steps),
    )


def encode(engine: PolicyEngine, inputs: ChunkInputs, slot: int = 0) -> None:
    """Images and prefix, into one slot."""
    for camera, pixels in enumerate(inputs.pixels):
        engine.encode_image(camera, pixels)
    engine.encode_prefix(inputs.image_mask, inputs.prefix_inputs, slot)


def denoise_chunk(engine: PolicyEngine, inputs: ChunkInputs, slot: int = 0) -> np.ndarray:
    """The chunk (H, A) over what the slot holds."""
    engine.use_prefix(inputs.rows, slot)
    engine.set_schedule(*inputs.schedule)
    engine.load_step_inputs(inputs.step_inputs)
    engine.run_steps()
    return engine.read_x()


def infer(engine: PolicyEngine, inputs: ChunkInputs, slot: int = 0) -> np.ndarray:
    """Encode all, then denoise."""
    encode(engine, inputs, slot)
    return denoise_chunk(engine, inputs, slot)


def torch_engine(network: PiNetwork, *, graphs: bool, max_rows: int = 2) -> TorchEngine:
    """An engine over the network."""
    return TorchEngine(network, max_rows=max_rows, use_cuda_graphs=graphs)
