"""Tiny policies with random weights, as real bundles on disk."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from made_once import made_once
from written_bundle import write_bundle

from vla_runtime.bundle.schema import (
    PACKED,
    ROTATION_LENGTH,
    ActionSpec,
    BundleSpec,
    CameraSpec,
    CropSpec,
    ImageSpec,
    NormalisationSpec,
    PoseSpec,
    StateSpec,
)
from vla_runtime.bundle.statistics import image_group
from vla_runtime.families.act.dimensions import ActDims, StackDims
from vla_runtime.families.bitvla.dimensions import BitVlaDims
from vla_runtime.families.blocks.dimensions import DecoderDims, VisionDims
from vla_runtime.families.blocks.resnet_dimensions import ResNetDims
from vla_runtime.families.blocks.ternary_weights import pack
from vla_runtime.families.evo1.dimensions import Evo1Dims, HeadDims
from vla_runtime.families.flow_network import build_network
from vla_runtime.families.groot import dimensions as groot
from vla_runtime.families.groot.n16_dimensions import GrootN16Dims, Siglip2Dims
from vla_runtime.families.groot.n17_dimensions import GrootN17Dims, QwenVisionDims
from vla_runtime.families.pi.dimensions import PiDims
from vla_runtime.families.smolvla.dimensions import SmolVlaDims
from vla_runtime.family.listing import family_names, find_family
from vla_runtime.processing.prompts import PromptFormat
from vla_runtime.processing.tokenizer import Tokenizer
from vla_runtime.types import AdvantageTemplate, Observation, RotationForm

_CASES = Path(__file__).parent / 'cases'
TOKENIZER = _CASES / 'lerobot_pi05_tiny' / 'tokenizer.json'
JOINTS = ('shoulder', 'elbow', 'gripper')
CAMERAS = ('top', 'wrist')
# Text tokens of N1.6's prompts.
N16_PROMPT = 192
# Families with a tiny policy here: those that answer in tokens have none yet.
TINY_FAMILIES = tuple(name for name in family_names() if find_family(name).head != 'tokens')
# Height and width of the observations' images.
IMAGE_SIZE = (48, 64)


def tokenizer_of(family: str) -> Path:
    """A vocabulary in the family's layout."""
    folders = {
        'smolvla': 'smolvla_folder/tokenizer.json',
        'evo1': 'smolvla_folder/tokenizer.json',
        'groot_n15': 'groot_tokenizer.json',
        'groot_n16': 'groot_tokenizer.json',
        'groot_n17': 'groot_tokenizer.json',
        'bitvla': 'bitvla_tokenizer.json',
    }
    return _CASES / folders[family] if family in folders else TOKENIZER


@lru_cache
def places_of(family: str, cameras: int = len(CAMERAS)) -> tuple[int, ...]:
    """Text tokens before each image of a family's prompts, in its tiny vocabulary."""
    (layout,) = find_family(family).templates.values()
    vocabulary = Tokenizer.load(tokenizer_of(family), bos=layout.bos)
    before, after = layout.around_task
    pieces = layout.pieces(cameras, (before, '', after), vocabulary.special)
    counts = [len(ids) for ids in vocabulary.piece_tokens(pieces)]
    # Only images behind the task depend on the prompt's length.
    return layout.image_places(counts, cameras, N16_PROMPT)


def tiny_dims(family: str, horizon: int = 8) -> Any:
    """Sizes of a tiny policy, the same to whoever looks at observations and actions."""
    if family == 'smolvla':
        return _tiny_smolvla(horizon)
    if family == 'groot_n15':
        return _tiny_groot(horizon)
    if family == 'groot_n16':
        return _tiny_groot_n16(horizon)
    if family == 'groot_n17':
        return _tiny_groot_n17(horizon)
    if family == 'act':
        return _tiny_act(horizon)
    if family == 'evo1':
        return _tiny_evo1(horizon)
    if family == 'bitvla':
        return _tiny_bitvla(horizon)
    language = DecoderDims(width=32, depth=2, mlp_dim=48, num_heads=4, num_kv_heads=1, head_dim=8)
    return PiDims(
        vision=VisionDims(width=24, depth=1, num_heads=2, mlp_dim=32, patch_size=14, image_size=28),
        language=language,
        expert=replace(language, width=16, mlp_dim=32),
        vocabulary=400,
        cameras=len(CAMERAS),
        prompt_length=64,
        horizon=horizon,
        action_dim=6,
        state_dim=6 if family == 'pi0' else 0,
    )


def _tiny_smolvla(horizon: int) -> SmolVlaDims:
    language = DecoderDims(width=40, depth=3, mlp_dim=48, num_heads=6, num_kv_heads=2, head_dim=8)
    return SmolVlaDims(
        vision=VisionDims(width=24, depth=1, num_heads=2, mlp_dim=32, patch_size=7, image_size=28),
        pixel_shuffle=2,
        language=language,
        expert=replace(language, width=28, mlp_dim=36),
        self_attention_every=2,
        vocabulary=360,
        cameras=len(CAMERAS),
        prompt_length=64,
        horizon=horizon,
        action_dim=6,
        state_dim=5,
    )


def _tiny_groot(horizon: int) -> groot.GrootDims:
    return groot.GrootDims(
        vision=VisionDims(width=24, depth=1, num_heads=2, mlp_dim=32, patch_size=7, image_size=28),
        pixel_shuffle=2,
        connector_layers=2,
        language=DecoderDims(
            width=40, depth=2, mlp_dim=48, num_heads=6, num_kv_heads=2, head_dim=8
        ),
        context=groot.StackDims(depth=1, num_heads=4, head_dim=10, mlp_dim=60),
        dit=groot.StackDims(depth=3, num_heads=4, head_dim=6, mlp_dim=40),
        head_width=20,
        future_tokens=3,
        positions=12,
        vocabulary=264,
        cameras=len(CAMERAS),
        image_places=places_of('groot_n15'),
        prompt_length=places_of('groot_n15')[-1] + 64,
        horizon=horizon,
        action_dim=6,
        state_dim=5,
    )


def _tiny_groot_n16(horizon: int) -> GrootN16Dims:
    return GrootN16Dims(
        vision=Siglip2Dims(
            width=32,
            depth=2,
            num_heads=2,
            mlp_dim=40,
            patch_size=8,
            merge=2,
            positions=5,
            rope_base=3.0,
            window=3,
            full_attention=(2,),
        ),
        image=(32, 48),
        language=DecoderDims(
            width=40, depth=2, mlp_dim=48, num_heads=6, num_kv_heads=2, head_dim=8
        ),
        dit=groot.StackDims(depth=5, num_heads=4, head_dim=6, mlp_dim=40),
        text_every=2,
        head_width=20,
        positions=12,
        vocabulary=264,
        cameras=len(CAMERAS),
        image_places=places_of('groot_n16'),
        prompt_length=N16_PROMPT,
        horizon=horizon,
        real_horizon=horizon,
        action_dim=6,
        state_dim=5,
    )


def _tiny_groot_n17(horizon: int) -> GrootN17Dims:
    return GrootN17Dims(
        vision=QwenVisionDims(
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
        context=groot.StackDims(depth=1, num_heads=4, head_dim=10, mlp_dim=60),
        dit=groot.StackDims(depth=5, num_heads=4, head_dim=6, mlp_dim=40),
        text_every=2,
        head_width=20,
        positions=12,
        vocabulary=264,
        cameras=len(CAMERAS),
        image_places=places_of('groot_n17'),
        prompt_length=places_of('groot_n17')[-1] + 64,
        horizon=horizon,
        real_horizon=horizon,
        action_dim=6,
        state_dim=5,
    )


def _tiny_act(horizon: int) -> ActDims:
    stack = {'width': 24, 'num_heads': 3, 'mlp_dim': 32}
    return ActDims(
        backbone=ResNetDims(stem=6, channels=(6, 8, 10, 12), blocks=(1, 2, 1, 1)),
        encoder=StackDims(depth=2, **stack),
        decoder=StackDims(depth=2, **stack),
        cameras=len(CAMERAS),
        images=(IMAGE_SIZE,),
        horizon=horizon,
        action_dim=len(JOINTS),
        state_dim=len(JOINTS),
    )


def _tiny_evo1(horizon: int) -> Evo1Dims:
    return Evo1Dims(
        vision=VisionDims(width=24, depth=1, num_heads=2, mlp_dim=32, patch_size=7, image_size=28),
        pixel_shuffle=2,
        language=DecoderDims(
            width=40, depth=2, mlp_dim=48, num_heads=4, num_kv_heads=2, head_dim=8
        ),
        head=HeadDims(depth=2, num_heads=5, mlp_dim=56, state_hidden=20, velocity_hidden=28),
        vocabulary=360,
        cameras=len(CAMERAS),
        image_places=places_of('evo1'),
        prompt_length=places_of('evo1')[-1] + 64,
        horizon=horizon,
        action_dim=6,
        real_actions=len(JOINTS),
        state_dim=5,
    )


def _tiny_bitvla(horizon: int) -> BitVlaDims:
    return BitVlaDims(
        vision=VisionDims(width=24, depth=1, num_heads=2, mlp_dim=32, patch_size=7, image_size=28),
        language=DecoderDims(
            width=40, depth=2, mlp_dim=48, num_heads=4, num_kv_heads=2, head_dim=10
        ),
        vocabulary=264,
        cameras=len(CAMERAS),
        image_places=places_of('bitvla'),
        state_place=places_of('bitvla')[-1],
        prompt_length=places_of('bitvla')[-1] + 160,
        stop_token=257,
        horizon=horizon,
        action_dim=6,
        state_dim=5,
        head_dim=36,
    )


_TEMPLATES: Mapping[str, str] = {
    'pi05': 'pi05_state',
    'pi0': 'pi0',
    'smolvla': 'task_line',
    'evo1': 'after_images',
    'groot_n15': 'chat',
    'groot_n16': 'chat',
    'groot_n17': 'chat',
    'bitvla': 'bitvla',
}


# Images that are not padded.
_IMAGES = {
    'act': ImageSpec('none', 'none'),
    'evo1': ImageSpec('stretch', 'bicubic'),
    'bitvla': ImageSpec('crop', 'lanczos', CropSpec(28, 0.9)),
    'groot_n15': ImageSpec('stretch', 'bicubic_uint8'),
    'groot_n16': ImageSpec(
        'crop', 'bicubic_uint8', CropSpec(36, 0.9, size=(36, 36), last='bicubic_pillow')
    ),
    'groot_n17': ImageSpec('crop', 'bicubic_uint8', CropSpec(edge=36, fraction=0.9)),
}
# Families whose images are normalised by channel.
_NORMALISED = ('act', 'evo1')


def tiny_spec(
    family: str = 'pi05',
    *,
    advantage: AdvantageTemplate | None = None,
    delta: bool = False,
) -> BundleSpec:
    without_language = family == 'act'
    return BundleSpec(
        name=f'tiny {family}',
        family=family,
        dims=tiny_dims(family),
        cameras=tuple(CameraSpec(name) for name in CAMERAS),
        images=_IMAGES.get(family, ImageSpec(padding='centre', resample='bilinear')),
        state=tuple(StateSpec(name, 'rad') for name in JOINTS),
        actions=tuple(
            ActionSpec(name, 'rad', 'delta', relative_to=name)
            if delta and name != 'gripper'
            else ActionSpec(name, 'rad', 'absolute')
            for name in JOINTS
        ),
        step_time_s=0.05,
        denoise_steps=3 if find_family(family).head == 'flow' else 1,
        prompt=None
        if without_language
        else PromptFormat(
            template=_TEMPLATES[family],
            cleaning='lerobot',
            advantage=advantage,
        ),
        normalisation=NormalisationSpec(
            state='quantiles_lerobot',
            actions='mean_std_lerobot',
            images='mean_std_lerobot' if family in _NORMALISED else None,
        ),
        tokenizer=None if without_language else 'tokenizer.json',
    )


def aloha_spec() -> BundleSpec:
    """A pi0.5 policy of openpi for ALOHA's 14 joints, arms as deltas, in pi's joint space."""
    names = tuple(f'{side}{joint}' for side in 'lr' for joint in (*range(1, 7), 'g'))
    spec = tiny_spec()
    units = tuple('1' if name.endswith('g') else 'rad' for name in names)
    return replace(
        spec,
        dims=replace(spec.dims, action_dim=16),
        state=tuple(StateSpec(name, unit) for name, unit in zip(names, units, strict=True)),
        actions=tuple(
            ActionSpec(name, unit, 'absolute')
            if unit == '1'
            else ActionSpec(name, unit, 'delta', relative_to=name)
            for name, unit in zip(names, units, strict=True)
        ),
        joint_space='openpi_aloha',
    )


def two_frames_spec(steps_ago: int = 4) -> BundleSpec:
    """A policy that sees an earlier frame of every camera, then the newest of each."""
    spec = tiny_spec('groot_n17')
    earlier = (CameraSpec(f'{name}_before', frame_of=name, steps_ago=steps_ago) for name in CAMERAS)
    places = places_of('groot_n17', 2 * len(CAMERAS))
    dims = replace(
        spec.dims,
        cameras=2 * len(CAMERAS),
        image_places=places,
        prompt_length=places[-1] + 64,
    )
    return replace(spec, cameras=(*earlier, *spec.cameras), dims=dims)


def pose_spec(form: RotationForm) -> BundleSpec:
    """A policy whose actions are one end-effector pose, relative to the measured one."""
    width = ROTATION_LENGTH[form]
    position, rotation = ('x', 'y', 'z'), tuple(f'r{i}' for i in range(width))
    names = (*position, *rotation)
    spec = tiny_spec()
    return replace(
        spec,
        dims=replace(spec.dims, action_dim=12),
        state=tuple(StateSpec(name, 'm' if name in position else '1') for name in names),
        actions=tuple(
            ActionSpec(name, 'm' if name in position else '1', 'delta') for name in names
        ),
        poses=(
            PoseSpec(
                name='hand',
                position=position,
                rotation=rotation,
                form=form,
                kind='delta',
                frame='base',
                state_position=position,
                state_rotation=rotation,
            ),
        ),
    )


def tiny_statistics(
    spec: BundleSpec, seed: int = 0, action_scale: float = 1.0
) -> dict[str, np.ndarray]:
    """Statistics of a tiny policy's joints, actions and images."""
    random = np.random.default_rng(seed)
    count = len(spec.actions)
    statistics = {
        'state.q01': np.full(len(spec.state), -1.5),
        'state.q99': np.full(len(spec.state), 1.5),
        'actions.mean': action_scale * random.normal(size=count) * 0.1,
        'actions.std': action_scale * random.uniform(0.2, 1.0, size=count),
    }
    if spec.normalisation.images is not None:
        for name in spec.camera_names:
            statistics[f'{image_group(name)}.mean'] = random.uniform(0.4, 0.6, 3)
            statistics[f'{image_group(name)}.std'] = random.uniform(0.2, 0.3, 3)
    return statistics


def write_tiny_policy(
    target: Path, spec: BundleSpec, seed: int = 0, action_scale: float = 1.0
) -> Path:
    """Write a bundle with random weights of a size that makes everything matter.

    Zero-initialised modulations would make the expert the identity, so every weight is drawn.
    `action_scale` makes all actions smaller, for a robot that moves by them. A test run draws and
    seals each policy once, and copies it.
    """

    def draw(folder: Path) -> None:
        _draw_tiny_policy(folder, spec, seed, action_scale)

    if 'VLA_RUNTIME_TEST_SCRATCH' in os.environ:
        drawn = hashlib.sha256(repr((spec, seed, action_scale)).encode()).hexdigest()
        # As if it was written now: what was remembered of a file goes by its time.
        shutil.copytree(made_once(f'tiny_{drawn}', draw), target, copy_function=shutil.copyfile)
    else:
        draw(target)
    return target


def _draw_tiny_policy(target: Path, spec: BundleSpec, seed: int, action_scale: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    network = build_network(spec.family, spec.dims)
    weights = {
        name: (torch.randn(value.shape, generator=generator) * 0.2).numpy()
        for name, value in network.state_dict().items()
    }
    for name in weights:
        if name.endswith(PACKED):
            outputs, width = weights[name].shape
            drawn = torch.randint(-1, 2, (outputs, 4 * width), generator=generator)
            weights[name] = pack(drawn.to(torch.int8).numpy())
        elif name.endswith(('.weight_scale', 'running_var')):
            weights[name] = np.abs(weights[name]) + 0.1
        elif (
            spec.family in ('act', 'bitvla', 'evo1') and 'norm' in name and name.endswith('.weight')
        ):
            # Norms pass on what they get, or images and positions would hardly matter.
            weights[name] = weights[name] + 1.0
    statistics = tiny_statistics(spec, seed, action_scale)
    tokenizer = tokenizer_of(spec.family) if spec.tokenizer else None
    write_bundle(target, spec, weights=weights, statistics=statistics, tokenizer=tokenizer)


def observation(seed: int = 0, **changes) -> Observation:
    """A seeded observation of the tiny policies' robot."""
    random = np.random.default_rng(seed)
    values = {
        'images': {
            name: random.integers(0, 256, (*IMAGE_SIZE, 3), dtype=np.uint8) for name in CAMERAS
        },
        'state': random.uniform(-1, 1, len(JOINTS)).astype(np.float32),
        'instruction': 'pick up the red cup',
    }
    return Observation(**{**values, **changes})
