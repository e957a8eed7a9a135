"""GR00T N1.5, N1.6 and N1.7."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from groot_cases import N15, N16, N17, GrootCase, GrootN16Case, load_groot_case
from network_cases import network_case_paths
from torch import Tensor
from torch.nn import functional as F

from family_contracts.declaration import (
    Case,
    FamilyContract,
    Fault,
    Folder,
    InGraph,
    OtherDims,
    Patched,
    Recorded,
    Training,
)
from family_contracts.robot import CAMERAS, places_of
from vla_convert.checkpoints.options import ExportOptions
from vla_runtime.bundle.schema import BundleSpec, CropSpec, ImageSpec
from vla_runtime.declarations.groot import (
    GROOT_N16,
    GROOT_N17,
    GrootDims,
    GrootN16Dims,
    GrootN17Dims,
    Siglip2Dims,
)
from vla_runtime.family import dit as declaration
from vla_runtime.family.dimensions import DecoderDims, VisionDims
from vla_runtime.family.dit import StackDims
from vla_runtime.family.frame_vision import FrameVisionDims
from vla_runtime.family.listing import find_family
from vla_runtime.models.blocks import qwen3_vl
from vla_runtime.models.blocks.attention import Rotary, rotate
from vla_runtime.models.blocks.interleaving import separated
from vla_runtime.models.blocks.qwen3_vl import QwenVision
from vla_runtime.models.groot import networks, towers
from vla_runtime.models.groot.networks import GrootN15, GrootN16, GrootN17
from vla_runtime.models.groot.towers import EagleVision, EagleVision2, GridAttention
from vla_runtime.processing.prompts import PromptLayout

TOKENIZER = 'groot_tokenizer.json'
# Text tokens of N1.6's prompts: its images stand behind the task.
N16_PROMPT = 192
_LANGUAGE = DecoderDims(width=40, depth=2, mlp_dim=48, num_heads=6, num_kv_heads=2, head_dim=8)


def shared(family: str, horizon: int, prompt_length: int | None = None) -> dict[str, Any]:
    """Sizes that the tiny policies of all versions have."""
    places = places_of(family, TOKENIZER, length=N16_PROMPT)
    return {
        'head_width': 20,
        'positions': 12,
        'vocabulary': 264,
        'cameras': len(CAMERAS),
        'image_places': places,
        'prompt_length': prompt_length or places[-1] + 64,
        'horizon': horizon,
        'action_dim': 6,
        'state_dim': 5,
    }


def tiny_n15(horizon: int) -> GrootDims:
    return GrootDims(
        vision=VisionDims(width=24, depth=1, num_heads=2, mlp_dim=32, patch_size=7, image_size=28),
        pixel_shuffle=2,
        connector_layers=2,
        language=_LANGUAGE,
        context=StackDims(depth=1, num_heads=4, head_dim=10, mlp_dim=60),
        dit=StackDims(depth=3, num_heads=4, head_dim=6, mlp_dim=40),
        future_tokens=3,
        **shared(N15, horizon),
    )


_TOWER = {'width': 32, 'depth': 2, 'num_heads': 2, 'mlp_dim': 40, 'patch_size': 8, 'merge': 2}


def tiny_n16(horizon: int) -> GrootN16Dims:
    return GrootN16Dims(
        vision=Siglip2Dims(positions=5, rope_base=3.0, window=3, full_attention=(2,), **_TOWER),
        image=(32, 48),
        language=_LANGUAGE,
        dit=StackDims(depth=5, num_heads=4, head_dim=6, mlp_dim=40),
        text_every=2,
        real_horizon=horizon,
        **shared(N16, horizon, N16_PROMPT),
    )


def tiny_n17(horizon: int) -> GrootN17Dims:
    return GrootN17Dims(
        vision=FrameVisionDims(positions=5, deepstack=(1,), **_TOWER),
        image=(32, 48),
        language=DecoderDims(
            width=40, depth=3, mlp_dim=48, num_heads=4, num_kv_heads=2, head_dim=16
        ),
        rope_sections=(4, 2, 2),
        context=StackDims(depth=1, num_heads=4, head_dim=10, mlp_dim=60),
        dit=StackDims(depth=5, num_heads=4, head_dim=6, mlp_dim=40),
        text_every=2,
        real_horizon=horizon,
        **shared(N17, horizon),
    )


def case(path: Path, b: int) -> Case:
    found = load_groot_case(path, b, padding=3)
    of, network, kind = found.tensors, found.network, found.description['kind']
    reached = of['train_t_bucket'][b : b + 1]
    # The head of the training code sees padding, ours does not; N1.7 has chunks without any.
    alike = found.masks_padding
    return Case(
        network=network,
        steps=found.steps,
        pixels=found.pixels,
        image_mask=found.visible,
        rows=found.rows(),
        head=found.state(),
        noise=of['noise'][b],
        actions=found.actions() if alike or kind == N17 else None,
        # The training code's velocity points the other way.
        velocities=-of['v_t'][:, b] if alike else None,
        image_tokens=image_tokens(found),
        past=past_of_n15(found) if kind == N15 else past_of_two(found),
        training=Training(
            x=of['train_x_t'][b : b + 1],
            # A flow time in the middle of the bucket.
            conditioning=network.time_conditioning(1 - (reached + 0.5) / 1000),
            velocity=-of['train_v'][b] if alike else None,
        ),
        unlike=of['actions_without_alternation'][b] if kind != N15 else None,
    )


def image_tokens(found: GrootCase) -> Tensor:
    features, cameras = found.tensors['image_features'], found.description['cameras']
    if features.ndim == 2:
        # N1.7's are those of all images in a row, without the deepstack behind them.
        deep = found.tensors['deepstack_features']
        features = torch.cat([features, *deep], dim=-1)
        features = features.unflatten(0, (-1, found.network.dims.image_tokens))
    return features[found.b * cameras : (found.b + 1) * cameras]


def past_of_n15(found: GrootCase) -> dict[str, Tensor]:
    if not found.masks_padding:
        return {}
    keys = {'cross_key': 'cross_keys', 'cross_value': 'cross_values'}
    return {ours: found.tensors[theirs][:, found.b : found.b + 1] for ours, theirs in keys.items()}


def past_of_two(found: GrootCase) -> dict[str, Tensor]:
    """Keys and values of text and images apart, as each block of the head reads one of them."""
    if not isinstance(found, GrootN16Case) and not found.valid.all():
        return {}
    network, dims = found.network, found.network.dims
    parts: dict[str, list[Tensor]] = {}
    for ours, theirs in (('key', 'cross_keys'), ('value', 'cross_values')):
        for order, block in enumerate(dims.cross_blocks):
            whole = found.tensors[theirs][order, found.b].transpose(0, 1)[None, found.valid]
            of = dict(
                zip(
                    ('text', 'images'),
                    separated(whole, dims.image_places, dims.image_tokens),
                    strict=True,
                )
            )
            part = 'text' if block in network.readers['text'] else 'images'
            parts.setdefault(f'{part}_{ours}', []).append(of[part].transpose(1, 2))
    return {name: torch.stack(blocks) for name, blocks in parts.items()}


def past_n15(dims: GrootDims) -> Mapping[str, tuple[int, ...]]:
    shape = (2, 1, dims.dit.num_heads, dims.prefix_length, dims.dit.head_dim)
    return {'cross_key': shape, 'cross_value': shape, 'prefix_mask': (1, dims.prefix_length)}


def past_two(dims: GrootN16Dims | GrootN17Dims) -> Mapping[str, tuple[int, ...]]:
    lengths = {'text': dims.prompt_length, 'images': dims.cameras * dims.image_tokens}
    blocks = {'text': len(dims.text_blocks), 'images': len(dims.image_blocks)}
    found: dict[str, tuple[int, ...]] = {}
    for part, length in lengths.items():
        if blocks[part]:
            keys = (blocks[part], 1, dims.dit.num_heads, length, dims.dit.head_dim)
            found |= {f'{part}_key': keys, f'{part}_value': keys, f'{part}_seen': (1, length)}
    return found


# --- faults of all versions -----------------------------------------------------------------------

_BUCKET = declaration.bucket


def of_four_steps(spec: BundleSpec) -> BundleSpec:
    """With the published 4 steps a bucket computed in floats is right, with 5 it is wrong."""
    return replace(spec, denoise_steps=4)


def faults_of_buckets() -> dict[str, Fault]:
    buckets: dict[str, Any] = {
        'buckets in floats': lambda t: ((1.0 - np.asarray(t, np.float64)) * 1000).astype(np.int64),
        'buckets in half precision': lambda t: (
            (1.0 - np.asarray(t, np.float16).astype(np.float64)) * 1000
        ).astype(np.int64),
        'buckets off by one': lambda t: _BUCKET(t) + 1,
        'buckets not turned round': lambda t: 1000 - _BUCKET(t),
    }
    return {name: Patched(declaration, 'bucket', of, 'time table') for name, of in buckets.items()}


def moved_images(first: int, second: int) -> OtherDims:
    def change(dims: Any) -> Any:
        before, after = dims.image_places
        return replace(dims, image_places=(before + first, after + second))

    return OtherDims(change, 'prefix.onnx')


def angles_in_half(*more: str) -> dict[str, Fault]:
    plants = ('rotary_angles_rounded', 'rotary_cosines_rounded', *more)
    return {plant: InGraph('prefix.onnx', plant) for plant in plants}


# --- faults of N1.5 -------------------------------------------------------------------------------


def shuffled(*order: int) -> Callable[[Tensor, int, int], Tensor]:
    def wrong(x: Tensor, side: int, edge: int) -> Tensor:
        n, _, width = x.shape
        few = side // edge
        squares = x.view(n, few, edge, few, edge, width).permute(0, *order)
        return squares.reshape(n, few * few, edge * edge * width)

    return wrong


def column_positions(self: EagleVision) -> Tensor:
    return self.position_embedding.view(self.side, self.side, -1).transpose(0, 1).flatten(0, 1)


_TOKENS_N15 = GrootN15.embed_tokens


def actions_off_by_one(self: GrootN15, x: Tensor, state: Tensor, conditioning: Tensor) -> Any:
    tokens, modulation = _TOKENS_N15(self, x, state, conditioning)
    horizon = self.dims.horizon
    first, actions = tokens[:, :-horizon], tokens[:, -horizon:]
    actions = actions - self.positions[:horizon] + self.positions[1 : horizon + 1]
    return torch.cat([first, actions], dim=1), modulation


def faults_n15() -> Mapping[str, Fault]:
    rotary = networks.rotary
    return {
        'squares column by column': Patched(
            towers, 'shuffle_pixels', shuffled(1, 3, 4, 2, 5), 'vision.onnx', quick=True
        ),
        'channels of squares first': Patched(
            towers, 'shuffle_pixels', shuffled(1, 3, 5, 2, 4), 'vision.onnx'
        ),
        'patch positions off by one': Patched(
            EagleVision,
            'positions',
            lambda self: self.position_embedding.roll(1, 0),
            'vision.onnx',
        ),
        'patch positions column by column': Patched(
            EagleVision, 'positions', column_positions, 'vision.onnx'
        ),
        'rope base of Llama': Patched(
            networks, 'rotary', lambda p, size, base: rotary(p, size, 1e4), 'prefix.onnx'
        ),
        'rope positions backwards': Patched(
            networks,
            'rotary',
            lambda p, size, base: rotary(-p, size, base),
            'prefix.onnx',
            quick=True,
        ),
        'action positions off by one': Patched(
            GrootN15, 'embed_tokens', actions_off_by_one, 'expert.onnx', quick=True
        ),
        'images at another place': moved_images(0, 1),
        **angles_in_half('positions_to_half', 'position_in_half'),
        **faults_of_buckets(),
    }


# --- faults of N1.6 -------------------------------------------------------------------------------

_CUT_N16, _PLACES = EagleVision2.cut, EagleVision2.places


def cut_channels_first(self: EagleVision2, pixels: Tensor) -> Tensor:
    """Numbers of a patch as a convolution has them."""
    patches, patch = _CUT_N16(self, pixels), self.dims.patch_size
    return patches.unflatten(-1, (patch, patch, 3)).permute(0, 1, 4, 2, 3).flatten(2)


def resizing_without_antialias(side: int, count: int, device: torch.device) -> Tensor:
    """A triangle of one step, whatever the scale."""
    centres = ((torch.arange(count, device=device) + 0.5) * side / count - 0.5).clamp(0, side - 1)
    return F.relu(1 - (torch.arange(side, device=device) - centres[:, None]).abs())


def resizing_between_corners(side: int, count: int, device: torch.device) -> Tensor:
    places = torch.linspace(0, side - 1, count, device=device)
    return F.relu(1 - (torch.arange(side, device=device) - places[:, None]).abs())


def pixel_shuffle_of_n15(self: EagleVision2, x: Tensor, rows: int, columns: int) -> Tensor:
    """Numbers of a square by row, then column, then channel."""
    edge = self.dims.merge
    squares = x.view(x.shape[0], rows // edge, edge, columns // edge, edge, -1)
    return squares.permute(0, 1, 3, 2, 4, 5).flatten(3).flatten(1, 2)


def memories_turned(right: Callable[[Any, Any], dict[int, Any]]) -> Callable[[Any, Any], Any]:
    """Blocks of the head that read text and images in another order."""

    def wrong(self: Any, past: Any) -> dict[int, Any]:
        found = right(self, past)
        return {block: found[other] for block, other in zip(found, reversed(found), strict=True)}

    return wrong


def other_tower(**changes: Any) -> OtherDims:
    return OtherDims(partial(with_tower, **changes), 'vision.onnx')


def faults_n16() -> Mapping[str, Fault]:
    vision: dict[str, tuple[Any, str, Any]] = {
        'numbers of a patch by channel': (EagleVision2, 'cut', cut_channels_first),
        'rows and columns': (
            *(EagleVision2, 'places'),
            lambda self, rows, columns, device: _PLACES(self, rows, columns, device).flip(-1),
        ),
        'positions between corners': (towers, 'resizing', resizing_between_corners),
        'positions without antialias': (towers, 'resizing', resizing_without_antialias),
        "N1.5's pixel shuffle": (EagleVision2, 'unshuffled', pixel_shuffle_of_n15),
        # Pairs of a head's two halves, as the language model has them.
        'pairs in halves': (GridAttention, 'rotate', lambda self, x, angles: rotate(x, angles)),
        'no windows': (EagleVision2, 'windows', lambda self, *size: None),
        'no rotary positions': (EagleVision2, 'rotary', lambda self, *size: None),
    }
    quick = {'pairs in halves', 'positions without antialias', 'no windows'}
    return {
        name: Patched(*of, 'vision.onnx', quick=name in quick) for name, of in vision.items()
    } | {
        'windows of 2': other_tower(window=2),
        'full attention in another block': other_tower(full_attention=(1,)),
        'another rope base': other_tower(rope_base=3.5),
        'a tower without rope': other_tower(rope_base=None),
        'text and images in another order': Patched(
            GrootN16, 'memories', memories_turned(GrootN16.memories), 'expert.onnx', quick=True
        ),
        'images at another place': moved_images(-1, 0),
        **angles_in_half(),
        **faults_of_buckets(),
    }


# --- faults of N1.7 -------------------------------------------------------------------------------

_CUT_N17, _POSITIONS, _TAPS = QwenVision.cut, QwenVision.positions, qwen3_vl._taps
_VISION_ROTARY = QwenVision.rotary
_STARTS, _OFFSETS, _TURN = GrootN17.starts, GrootN17.offsets, GrootN17.rotary_positions


def columns_of_squares(self: QwenVision, x: Tensor, rows: int, columns: int) -> Tensor:
    """Patches of a square column by column."""
    edge, lead = self.dims.merge, x.shape[:-2]
    x = x.view(*lead, rows // edge, edge, columns // edge, edge, x.shape[-1])
    x = x.transpose(-4, -3).transpose(-3, -2)
    return x.reshape(*lead, rows * columns, x.shape[-1])


def positions_turned(self: QwenVision, rows: int, columns: int) -> Tensor:
    """The table read column by column."""
    side = self.dims.positions
    table = self.position_embedding.view(side, side, -1).transpose(0, 1).flatten(0, 1)
    tower: Any = SimpleNamespace(position_embedding=table, dims=self.dims, squares=self.squares)
    return _POSITIONS(tower, rows, columns)


def taps_of_centres(count: int, side: int, device: torch.device) -> object:
    """Interpolation between centres of cells, as images are resized, not between corners."""
    places = ((torch.arange(count) + 0.5) * side / count - 0.5).clamp(0, side - 1).to(device)
    low = places.long()
    return (low, 1 - (places - low)), ((low + 1).clamp(max=side - 1), places - low)


def taps_nearest(count: int, side: int, device: torch.device) -> object:
    """No interpolation."""
    (low, weight), (high, share) = _TAPS(count, side, device)
    return (low, (weight >= 0.5).float()), (high, (share > 0.5).float())


def vision_rotary_columns_first(self: QwenVision, *size: Any) -> Any:
    """Column angles before row angles."""
    quarter = self.dims.head_dim // 4
    return tuple(
        torch.cat([x.narrow(-1, quarter * i, quarter) for i in (1, 0, 3, 2)], dim=-1)
        for x in _VISION_ROTARY(self, *size)
    )


def starts_behind_rows(self: GrootN17, mask: Tensor) -> Tensor:
    """Behind an image the next token continues after its rows, not after its longer side."""
    rows, columns = self.dims.grid
    assert rows < columns
    count, place = self.dims.image_tokens, torch.arange(mask.shape[1], device=mask.device)
    behind = [
        (place >= number * count + before).long()
        for number, before in enumerate(self.dims.image_places, start=1)
    ]
    return _STARTS(self, mask) - (columns - rows) * sum(behind)


def rows_and_columns_swapped(self: GrootN17, device: torch.device) -> Tensor:
    time, row, column = _OFFSETS(self, device).unbind(1)
    return torch.stack((time, column, row), dim=1)


def sections_in_a_row(self: GrootN17, device: torch.device) -> Tensor:
    """Sections of frequencies one after the other instead of interleaved."""
    times, rows, columns = self.dims.rope_sections
    pair = torch.arange(times + rows + columns, device=device)
    return (pair >= times).long() + (pair >= times + rows).long()


def rope_backwards(self: GrootN17, starts: Tensor) -> Rotary:
    return _TURN(self, -starts)


def vision_table_rounded(place: int) -> Callable[[Any], None]:
    """Round the cosines (0) or sines (1) of the patches, which are constants: sizes are fixed."""

    def fault(model: Any) -> None:
        from onnx_faults import round_tensor

        sizes = tiny_n17(8)
        rows, columns = sizes.patches
        shape = [1, 1, rows * columns, sizes.vision.head_dim]
        tables = [t.name for t in model.graph.initializer if list(t.dims) == shape]
        assert len(tables) == 2
        round_tensor(model, tables[place])

    return fault


def faults_n17() -> Mapping[str, Fault]:
    vision: dict[str, tuple[Any, str, Any]] = {
        'patches row by row': (QwenVision, 'squares', lambda self, x, *size: x),
        'squares column by column': (QwenVision, 'squares', columns_of_squares),
        'numbers of a patch turned': (
            *(QwenVision, 'cut'),
            lambda self, pixels: _CUT_N17(self, pixels).transpose(-1, -2),
        ),
        'patch positions turned': (QwenVision, 'positions', positions_turned),
        'positions between centres': (qwen3_vl, '_taps', taps_of_centres),
        'positions not interpolated': (qwen3_vl, '_taps', taps_nearest),
        'vision rope columns first': (QwenVision, 'rotary', vision_rotary_columns_first),
    }
    prefix: dict[str, tuple[Any, str, Any]] = {
        'one position a token': (
            *(GrootN17, 'starts'),
            lambda self, mask: mask.long().cumsum(dim=1) - 1,
        ),
        'starts behind rows': (GrootN17, 'starts', starts_behind_rows),
        'rows and columns': (GrootN17, 'offsets', rows_and_columns_swapped),
        'no rows and columns': (
            *(GrootN17, 'offsets'),
            lambda self, device: _OFFSETS(self, device) * 0,
        ),
        'rope sections in a row': (GrootN17, 'axes', sections_in_a_row),
        'rope backwards': (GrootN17, 'rotary_positions', rope_backwards),
    }
    quick = {
        *('squares column by column', 'positions between centres'),
        *('starts behind rows', 'rope sections in a row'),
    }
    return {
        name: Patched(*of, file, quick=name in quick)  # type: ignore[arg-type]
        for file, part in (('vision.onnx', vision), ('prefix.onnx', prefix))
        for name, of in part.items()
    } | {
        'deepstack of another block': other_tower(deepstack=(2,)),
        'text and images in another order': Patched(
            GrootN17, 'memories', memories_turned(GrootN17.memories), 'expert.onnx', quick=True
        ),
        'images at another place': moved_images(0, 1),
        'cosines of the patches in half': InGraph('vision.onnx', vision_table_rounded(0)),
        'sines of the patches in half': InGraph('vision.onnx', vision_table_rounded(1)),
        **angles_in_half(),
        **faults_of_buckets(),
    }


# --- folders --------------------------------------------------------------------------------------

# The cases' prompts are a stand-in: NVIDIA's has a system message and numbers the images.
STAND_IN = PromptLayout(
    '<|im_start|>user\n{task}{images}<|im_end|>\n',
    image='<img>{tokens}</img>',
    bos=False,
    special=('<|im_start|>', '<|im_end|>', '<img>', '</img>'),
)


def stand_in(patch: pytest.MonkeyPatch) -> None:
    """Read N1.6's folders with the cases' prompt."""
    patch.setitem(find_family(N16).templates, 'chat', STAND_IN)  # type: ignore[arg-type]


def folders(family: str) -> Mapping[str, Callable[[Path], Folder]]:
    from groot_n17_folders import is_of_a_folder

    paths = [path for path in network_case_paths(family) if is_of_a_folder(path)]
    return {path.stem: partial(folder, path) for path in paths}


def folder(path: Path, target: Path) -> Folder:
    """N1.6 as NVIDIA writes it, N1.7 as LeRobot does."""
    import groot_n17_folders as write

    d, found = json.loads(path.read_text()), load_groot_case(path, 0)
    of_n16 = d['kind'] == N16
    source = (write.write_nvidia_folder if of_n16 else write.write_lerobot_folder)(
        target / 'policy', path
    )
    heads = {'dit': d['dit_heads']} | ({'context': d['vlsa_heads']} if d.get('vlsa_layers') else {})
    actions = write.joints_of(path, 'action')
    options = ExportOptions(
        tokenizer=write.write_backbone(target / 'backbone', path),
        state_names=write.joints_of(path),
        action_names=actions,
        units=('deg',),
        rate_hz=30.0,
        prompt_length=40,
        heads=heads,
    )
    if of_n16:
        kinds = [kind for _, width, _, kind in d['groups'] for _ in range(width)]
        pairs = zip(actions, kinds, strict=True)
        options = replace(
            options,
            # Their ranges are random numbers, so no look at them can say that these are targets.
            targets=tuple(name for name, kind in pairs if kind == 'absolute'),
            image_size=(d['raw_height'], d['raw_width']),
        )
    text = found.ids[found.ids != d['image_token']]
    recorded = Recorded(
        seen=write.observation_of(path),
        noise=write.noise_of(path),
        normalised=found.tensors['actions'][0],
        actions=found.tensors['actions_robot_units'][0].double(),
        tokens=text,
    )

    return Folder(
        source, options, [recorded], 1e-4, prepare=stand_in if of_n16 else lambda patch: None
    )


def fewer_places(dims: Any) -> Any:
    return replace(dims, image_places=dims.image_places[:1])


def positions_of_7(dims: Any) -> Any:
    return replace(dims, positions=7)


def text_every_0(dims: Any) -> Any:
    return replace(dims, text_every=0)


def with_tower(dims: Any, **changes: Any) -> Any:
    return replace(dims, vision=replace(dims.vision, **changes))


_N15, _N16, _N17 = tiny_n15(8), tiny_n16(8), tiny_n17(8)
VARIANTS_N15 = {
    'one camera': replace(
        _N15,
        vision=VisionDims(width=20, depth=2, num_heads=4, mlp_dim=24, patch_size=5, image_size=15),
        pixel_shuffle=1,
        connector_layers=1,
        context=StackDims(depth=2, num_heads=2, head_dim=6, mlp_dim=20),
        cameras=1,
        image_places=(3,),
        future_tokens=1,
    ),
    'four cameras': replace(
        _N15,
        vision=VisionDims(width=12, depth=1, num_heads=3, mlp_dim=20, patch_size=4, image_size=24),
        pixel_shuffle=3,
        language=DecoderDims(
            width=24, depth=3, mlp_dim=36, num_heads=4, num_kv_heads=4, head_dim=6
        ),
        context=StackDims(depth=1, num_heads=6, head_dim=4, mlp_dim=28),
        dit=StackDims(depth=4, num_heads=2, head_dim=10, mlp_dim=32),
        cameras=4,
        image_places=(0, 2, 2, 7),
        action_dim=9,
        state_dim=11,
    ),
}
VARIANTS_N16 = {
    'without rotary positions and windows': replace(
        _N16,
        vision=replace(_N16.vision, rope_base=None, window=None, full_attention=()),
        image=(48, 80),
        cameras=1,
        image_places=(5,),
    ),
    'two time steps of the state, three tall images': replace(
        _N16,
        vision=Siglip2Dims(
            width=24,
            depth=3,
            num_heads=3,
            mlp_dim=32,
            patch_size=6,
            merge=3,
            positions=9,
            rope_base=14.0,
            window=4,
            full_attention=(2,),
        ),
        image=(54, 36),
        text_every=3,
        dit=StackDims(depth=8, num_heads=2, head_dim=10, mlp_dim=32),
        cameras=3,
        image_places=(0, 0, 5),
        state_dim=14,
        state_steps=2,
    ),
    'windows without rotary positions': replace(
        _N16, vision=replace(_N16.vision, rope_base=None, full_attention=())
    ),
    'full': GROOT_N16,
}
VARIANTS_N17 = {
    'without self-attention over the features': replace(_N17, context=None),
    'without deepstack': replace(_N17, vision=replace(_N17.vision, deepstack=())),
    'all blocks read the text': replace(_N17, text_every=1),
    'three tall images': replace(
        _N17,
        vision=FrameVisionDims(
            width=24,
            depth=3,
            num_heads=3,
            mlp_dim=32,
            patch_size=6,
            merge=2,
            positions=7,
            deepstack=(1, 3),
        ),
        image=(60, 24),
        language=DecoderDims(
            width=24, depth=4, mlp_dim=36, num_heads=4, num_kv_heads=1, head_dim=12
        ),
        rope_sections=(2, 2, 2),
        context=None,
        dit=StackDims(depth=8, num_heads=2, head_dim=10, mlp_dim=32),
        text_every=3,
        cameras=3,
        image_places=(0, 0, 5),
        action_dim=9,
        state_dim=22,
    ),
    'wide images, as many sections as layers': replace(
        _N17,
        vision=replace(_N17.vision, depth=4, positions=3, merge=3, deepstack=(2, 3, 4)),
        image=(24, 72),
        rope_sections=(3, 3, 2),
        context=StackDims(depth=2, num_heads=2, head_dim=20, mlp_dim=24),
        dit=StackDims(depth=2, num_heads=3, head_dim=8, mlp_dim=32),
        cameras=1,
        image_places=(1,),
    ),
    'full': GROOT_N17,
}

CONTRACTS = (
    FamilyContract(
        family=N15,
        tiny=tiny_n15,
        case=case,
        template='chat',
        tokenizer=TOKENIZER,
        images=ImageSpec('stretch', 'bicubic_uint8'),
        parameters={'groot_n15': 2_092_779_280},
        past=past_n15,
        variants=VARIANTS_N15,
        refused={
            'pixel_shuffle': lambda dims: replace(dims, pixel_shuffle=3),
            'connector_layers': lambda dims: replace(dims, connector_layers=3),
            'positions': positions_of_7,
            'image_places': fewer_places,
            'image_places .*ascend': lambda dims: replace(dims, image_places=(4, 2)),
            'prompt_length': lambda dims: replace(dims, image_places=(2, 65), prompt_length=64),
        },
        faults=faults_n15,
        fault_spec=of_four_steps,
    ),
    FamilyContract(
        family=N16,
        tiny=tiny_n16,
        case=case,
        template='chat',
        tokenizer=TOKENIZER,
        images=ImageSpec(
            'crop', 'bicubic_uint8', CropSpec(36, 0.9, size=(36, 36), last='bicubic_pillow')
        ),
        parameters={'groot_n16': 2_645_571_440},
        past=past_two,
        variants=VARIANTS_N16,
        refused={
            'image': lambda dims: replace(dims, image=(32, 40)),
            'state_steps': lambda dims: replace(dims, state_steps=2),
            'positions': positions_of_7,
            'text_every': text_every_0,
            **{
                name: partial(with_tower, **change)
                for name, change in {
                    'full_attention': {'full_attention': (3,)},
                    'num_heads 16': {'num_heads': 16},
                    'num_heads 5': {'num_heads': 5, 'rope_base': None},
                    'window': {'window': 0},
                    'rope_base': {'rope_base': -1.0},
                }.items()
            },
        },
        faults=faults_n16,
        fault_spec=of_four_steps,
        folders=partial(folders, N16),
    ),
    FamilyContract(
        family=N17,
        tiny=tiny_n17,
        case=case,
        template='chat',
        tokenizer=TOKENIZER,
        images=ImageSpec('crop', 'bicubic_uint8', CropSpec(edge=36, fraction=0.9)),
        parameters={'groot_n17': 2_828_411_012},
        past=past_two,
        variants=VARIANTS_N17,
        refused={
            'image': lambda dims: replace(dims, image=(32, 40)),
            'rope_sections': lambda dims: replace(dims, rope_sections=(4, 2, 1)),
            'positions': positions_of_7,
            'real_horizon': lambda dims: replace(dims, real_horizon=9),
            'image_places': fewer_places,
            'text_every': text_every_0,
            'deepstack': partial(with_tower, deepstack=(2, 1)),
            'num_heads': partial(with_tower, num_heads=3),
        },
        faults=faults_n17,
        fault_spec=of_four_steps,
        folders=partial(folders, N17),
    ),
)
