"""VLA-JEPA."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from reference_cases import find
from safetensors.torch import load_file
from torch import Tensor
from vla_jepa_cases import VlaJepaCase, load_vla_jepa_case

from family_contracts.declaration import (
    Case,
    FamilyContract,
    Fault,
    Folder,
    OtherDims,
    Patched,
    Recorded,
)
from family_contracts.robot import CAMERAS, numbered, places_of
from vla_convert.checkpoints.options import ExportOptions
from vla_runtime.bundle.schema import BundleSpec, ImageSpec
from vla_runtime.declarations.vla_jepa import VlaJepaDims
from vla_runtime.family import dit
from vla_runtime.family.dimensions import DecoderDims
from vla_runtime.family.dit import StackDims
from vla_runtime.family.frame_vision import FrameVisionDims
from vla_runtime.models.blocks.layers import normalise_rms
from vla_runtime.models.blocks.qwen3_vl import QwenVision
from vla_runtime.models.vla_jepa import VlaJepa
from vla_runtime.types import Observation

TOKENIZER = 'vla_jepa_a.tokenizer.json'


def tiny(horizon: int) -> VlaJepaDims:
    return VlaJepaDims(
        vision=FrameVisionDims(
            width=32,
            depth=2,
            num_heads=2,
            mlp_dim=40,
            patch_size=8,
            merge=2,
            positions=5,
            deepstack=(1,),
        ),
        image=(32, 48),
        language=DecoderDims(
            width=40, depth=3, mlp_dim=48, num_heads=4, num_kv_heads=2, head_dim=16
        ),
        rope_sections=(4, 2, 2),
        dit=StackDims(depth=4, num_heads=4, head_dim=6, mlp_dim=40),
        head_width=20,
        positions=12,
        future_tokens=5,
        vocabulary=340,
        tokens_behind=9,
        frames=2,
        frame_tokens=3,
        cameras=len(CAMERAS),
        image_places=places_of('vla_jepa', TOKENIZER),
        prompt_length=160,
        horizon=horizon,
        action_dim=6,
        state_dim=5,
    )


def past(dims: VlaJepaDims) -> Mapping[str, tuple[int, ...]]:
    heads = dims.dit
    shape = (len(dims.cross_blocks), 1, heads.num_heads, dims.future_tokens, heads.head_dim)
    return {'cross_key': shape, 'cross_value': shape}


def case(path: Path, b: int) -> Case:
    found = load_vla_jepa_case(path, b, padding=3)
    of, network = found.tensors, found.network
    return Case(
        network=network,
        steps=found.steps,
        pixels=list(found.pixels),
        image_mask=found.visible,
        rows=found.rows(),
        head=found.state(),
        noise=of['noise'][b],
        actions=of['actions_normalised'][b],
        # The training code's velocity points the other way.
        velocities=-of['v_t'][:, b],
        image_tokens=image_tokens(found),
        past=past_of(found),
        unlike=of['actions_normalised_without_state'][b],
    )


def image_tokens(found: VlaJepaCase) -> list[Tensor]:
    """Image tokens of each camera, with those of deepstack beside them."""
    of = found.tensors
    features = torch.cat([of['image_features'], *of['deepstack_features']], dim=-1)
    images = features.unflatten(0, (-1, found.network.dims.image_tokens))
    return list(images[found.b * found.cameras : (found.b + 1) * found.cameras])


def past_of(found: VlaJepaCase) -> dict[str, Tensor]:
    """Keys and values of the context that the case recorded."""
    network, context = found.network, found.tensors['context'][found.b : found.b + 1]
    pairs = [
        network.blocks[block].attention.keys_values(context) for block in network.dims.cross_blocks
    ]
    names = ('cross_key', 'cross_value')
    return dict(zip(names, map(torch.stack, zip(*pairs, strict=True)), strict=True))


_TINY = tiny(8)
VARIANTS = {
    'without a state': replace(_TINY, state_dim=0),
    'a frame of one token': replace(_TINY, frames=1, frame_tokens=1),
    'without deepstack': replace(_TINY, vision=replace(_TINY.vision, deepstack=())),
    'three tall images, one block': replace(
        _TINY,
        vision=replace(_TINY.vision, patch_size=6, positions=7, deepstack=(1, 2)),
        image=(60, 24),
        dit=StackDims(depth=1, num_heads=2, head_dim=10, mlp_dim=32),
        cameras=3,
        image_places=(0, 0, 5),
        action_dim=9,
        state_dim=22,
    ),
}

# --- faults ---------------------------------------------------------------------------------------

_PLACES, _READ, _TOKENS = VlaJepa.places, VlaJepa.read, VlaJepa.embed_tokens
_STARTS, _BUCKET = VlaJepa.starts, dit.bucket


def one_before(self: VlaJepa, token_mask: Tensor) -> Tensor:
    places = _PLACES(self, token_mask)
    return torch.where(places > 0, places - 1, 0)


def last_of_all(self: VlaJepa, token_mask: Tensor) -> Tensor:
    """The last tokens of the prompt, whatever they are."""
    return _PLACES(self, token_mask) + self.dims.tokens_behind


def behind_a_norm(self: VlaJepa, features: Tensor, token_mask: Tensor) -> Tensor:
    return normalise_rms(_READ(self, features, token_mask))


def one_position_a_token(self: VlaJepa, mask: Tensor) -> Tensor:
    return mask.long().cumsum(dim=1) - 1


def sections_in_a_row(self: VlaJepa, device: torch.device) -> Tensor:
    times, rows, columns = self.dims.rope_sections
    pair = torch.arange(times + rows + columns, device=device)
    return (pair >= times).long() + (pair >= times + rows).long()


def no_positions(self: VlaJepa, x: Tensor, state: Tensor, conditioning: Tensor) -> Any:
    tokens, modulations = _TOKENS(self, x, state, conditioning)
    first, actions = tokens.tensor_split([tokens.shape[1] - self.dims.horizon], dim=1)
    return torch.cat([first, actions - self.positions[: self.dims.horizon]], dim=1), modulations


def positions_of_all(self: VlaJepa, x: Tensor, state: Tensor, conditioning: Tensor) -> Any:
    """Positions that are counted from the state on."""
    tokens, modulations = no_positions(self, x, state, conditioning)
    return tokens + self.positions.repeat(4, 1)[: tokens.shape[1]], modulations


def no_future_tokens(self: VlaJepa, x: Tensor, state: Tensor, conditioning: Tensor) -> Any:
    tokens, modulations = _TOKENS(self, x, state, conditioning)
    count, first = self.dims.future_tokens, state.shape[1]
    return torch.cat([tokens[:, :first], tokens[:, first + count :]], dim=1), modulations


def shift_first(self: VlaJepa, x: Tensor, state: Tensor, conditioning: Tensor) -> Any:
    tokens, modulations = _TOKENS(self, x, state, conditioning)
    *blocks, last = modulations
    return tokens, (*(one.roll(one.shape[-1] // 2, dims=-1) for one in blocks), last)


def of_four_steps(spec: BundleSpec) -> BundleSpec:
    return replace(spec, denoise_steps=4)


def faults() -> Mapping[str, Fault]:
    planted: dict[str, dict[str, Any]] = {
        'vision.onnx': {
            'patches row by row': (QwenVision, 'squares', lambda self, x, *size: x),
        },
        'prefix.onnx': {
            'features of the tokens one before': (VlaJepa, 'places', one_before),
            'features of the last tokens': (VlaJepa, 'places', last_of_all),
            'features behind a norm': (VlaJepa, 'read', behind_a_norm),
            'one position a token': (VlaJepa, 'starts', one_position_a_token),
            'rope sections in a row': (VlaJepa, 'axes', sections_in_a_row),
        },
        'expert.onnx': {
            'actions without positions': (VlaJepa, 'embed_tokens', no_positions),
            'positions of all tokens': (VlaJepa, 'embed_tokens', positions_of_all),
            'no future tokens': (VlaJepa, 'embed_tokens', no_future_tokens),
            'shift before scale': (VlaJepa, 'embed_tokens', shift_first),
        },
        'time table': {'buckets off by one': (dit, 'bucket', lambda t: _BUCKET(t) + 1)},
    }
    return {
        name: Patched(*of, file, quick=number == 0)  # type: ignore[arg-type]
        for file, of_file in planted.items()
        for number, (name, of) in enumerate(of_file.items())
    } | {
        'other tokens read': OtherDims(lambda dims: replace(dims, tokens_behind=8), 'prefix.onnx'),
        'images at another place': OtherDims(
            lambda dims: replace(dims, image_places=(dims.image_places[0], dims.prompt_length)),
            'prefix.onnx',
        ),
    }


# --- folders --------------------------------------------------------------------------------------


def folders() -> Mapping[str, Callable[[Path], Folder]]:
    return {
        path.name.removesuffix('.end_to_end.json'): partial(folder, path)
        for path in find('vla_jepa_*.end_to_end.json')
    }


def options_of(path: Path) -> ExportOptions:
    """What completes the folder of a case: names, and what its Qwen3-VL is."""
    description, of = json.loads(path.read_text()), load_file(path.with_suffix('.safetensors'))
    return ExportOptions(
        state_names=numbered('state', len(of['state_0'])) if 'state_0' in of else ('joint',),
        action_names=numbered('action', of['chunk_0'].shape[1]),
        units=('1',),
        rate_hz=20.0,
        tokenizer=path.with_name(description['base']) / 'tokenizer.json',
    )


def in_robot_units(own: Path, normalised: Tensor) -> Tensor:
    """What LeRobot's steps make of a chunk with the settings of the training."""
    config = json.loads((own / 'config.json').read_text())
    statistics = load_file(next(own.glob('policy_postprocessor_step_*.safetensors')))
    column, threshold = config['gripper_dim'], config['gripper_threshold']
    x = normalised.clamp(-1, 1) if config['clip_normalized_actions'] else normalised.clone()
    has_gripper = x.shape[1] > column
    if config['pre_snap_gripper_action'] and has_gripper:
        x[:, column] = (x[:, column] >= threshold).float()
    mode = config['normalization_mapping']['ACTION']
    if mode == 'MIN_MAX':
        low, high = statistics['action.min'], statistics['action.max']
        x = (x + 1) / 2 * (high - low) + low
    elif mode == 'MEAN_STD':
        x = x * statistics['action.std'] + statistics['action.mean']
    if config['binarize_gripper_action'] and has_gripper:
        x[:, column] = 1 - 2 * (x[:, column] > threshold).float()
    return x


def folder(path: Path, target: Path) -> Folder:
    description, of = json.loads(path.read_text()), load_file(path.with_suffix('.safetensors'))
    own = path.with_name(path.name.removesuffix('.end_to_end.json'))
    written = target / 'checkpoint'
    shutil.copytree(own, written, copy_function=shutil.copyfile)
    cameras = description['cameras']

    def recorded(i: int, task: str) -> Recorded:
        normalised = of[f'chunk_normalised_{i}']
        actions = in_robot_units(own, normalised)
        config = json.loads((own / 'config.json').read_text())
        if (config['gripper_dim'], config['gripper_threshold']) == (6, 0.5):
            # Else LeRobot has forgotten them.
            actions = of[f'chunk_{i}']
        return Recorded(
            seen=Observation(
                {camera: of[f'{camera}_{i}'].numpy() for camera in cameras},
                of[f'state_{i}'].numpy() if f'state_{i}' in of else torch.zeros(1).numpy(),
                task,
            ),
            noise=of['noise'][0].numpy(),
            normalised=normalised,
            actions=actions,
            state=of.get(f'state_normalised_{i}'),
        )

    tasks = [entry['task'] for entry in description['observations']]
    return Folder(
        path=written,
        options=options_of(path),
        recorded=[recorded(i, task) for i, task in enumerate(tasks)],
    )


def with_tower(dims: VlaJepaDims, **changes: Any) -> VlaJepaDims:
    return replace(dims, vision=replace(dims.vision, **changes))


CONTRACTS = (
    FamilyContract(
        family='vla_jepa',
        tiny=tiny,
        case=case,
        template='chat',
        tokenizer=TOKENIZER,
        images=ImageSpec('stretch', 'bicubic_float'),
        parameters={'vla_jepa': 2_282_712_327},
        past=past,
        variants=VARIANTS,
        refused={
            'image': lambda dims: replace(dims, image=(32, 40)),
            'rope_sections': lambda dims: replace(dims, rope_sections=(4, 2, 1)),
            'positions': lambda dims: replace(dims, positions=7),
            'image_places': lambda dims: replace(dims, image_places=dims.image_places[:1]),
            'tokens_behind': lambda dims: replace(dims, tokens_behind=156),
            'deepstack': partial(with_tower, deepstack=(2, 1)),
            'num_heads': partial(with_tower, num_heads=3),
            'dit': lambda dims: replace(dims, dit=replace(dims.dit, depth=0)),
        },
        faults=faults,
        fault_spec=of_four_steps,
        folders=folders,
    ),
)
