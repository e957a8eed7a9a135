"""Loads pi0-FAST's network cases (test/cases/README.md), and folders made of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lerobot_folders import numbers_of, write_lerobot
from network_cases import ReferenceCase, load_case, vision_of_case
from safetensors.torch import load_file
from torch import Tensor

from vla_convert.checkpoints.options import ExportOptions
from vla_convert.readers.pi0_fast import NAMES
from vla_runtime.declarations.pi0_fast import Pi0FastDims
from vla_runtime.family.dimensions import DecoderDims
from vla_runtime.models.pi0_fast import Pi0Fast
from vla_runtime.processing.fast_tokens import FastScale, FastTokens
from vla_runtime.types import Observation


@dataclass(frozen=True)
class Pi0FastCase(ReferenceCase):
    """A case of pi0-FAST, and our network with its weights."""

    network: Pi0Fast
    path: Path

    @property
    def text_tokenizer(self) -> Path:
        return self.path.with_suffix('.text_tokenizer.json')

    @property
    def action_tokenizer(self) -> Path:
        return self.path.with_suffix('.fast_tokenizer.json')

    def prompt(self, b: int) -> tuple[Tensor, Tensor]:
        """Tokens (1, L + 1) and mask: the BOS that begins the answer behind the text."""
        tokens, mask = self.tensors['tokens'][b], self.tensors['token_mask'][b]
        end = int(mask.sum())
        ours = torch.zeros(1, len(tokens) + 1, dtype=torch.int64)
        ours[0, :end] = tokens[:end]
        ours[0, end] = self.description['bos']
        return ours, torch.arange(len(tokens) + 1)[None] <= end

    def places(self, b: int) -> Tensor:
        """Places of the reference's prefix in the order of ours, those that are valid."""
        return torch.nonzero(self.tensors['prefix_valid'][b])[:, 0]

    def decoder(self, checks_prefix: bool = False) -> FastTokens:
        d = self.description
        return FastTokens(
            self.text_tokenizer,
            self.action_tokenizer,
            FastScale(d['fast_scale'], d['fast_min_token']),
            (d['chunk'], d['action_dim']),
            skipped=d['fast_skip_tokens'],
            checks_prefix=checks_prefix,
        )

    def observation(self, b: int) -> Observation:
        """What the robot saw; a missing camera is absent."""
        d = self.description
        raw = (self.tensors.get(f'raw_image_{i}') for i in range(d['cameras']))
        images = {
            f'cam{i}': (image[b].permute(1, 2, 0) * 255).round().to(torch.uint8).numpy()
            for i, image in enumerate(raw)
            if image is not None
        }
        return Observation(images, self.tensors['raw_state'][b].numpy(), d['tasks'][b])


def dims_of_case(d: Mapping[str, Any]) -> Pi0FastDims:
    """Our dimensions of a case."""
    assert (d['rms_eps'], d['v_eps']) == (1e-6, 1e-6)
    names = ('width', 'depth', 'num_heads', 'num_kv_heads', 'head_dim')
    return Pi0FastDims(
        vision=vision_of_case(d),
        language=DecoderDims(mlp_dim=d['mlp'], **{name: d[name] for name in names}),
        vocabulary=d['vocab'],
        cameras=d['cameras'],
        prompt_length=d['tokens'] + 1,
        horizon=d['chunk'],
        action_dim=d['action_dim'],
        answer_tokens=d['max_decoding_steps'],
        skipped_tokens=d['fast_skip_tokens'],
        action_scale=float(d['fast_scale']),
        least_coefficient=float(d['fast_min_token']),
        checks_prefix=False,
        rope_base=d['rope_base'],
    )


@lru_cache(maxsize=4)
def load_pi0_fast_case(path: Path) -> Pi0FastCase:
    return load_case(path, Pi0FastCase, 'pi0_fast', dims_of_case, NAMES, path)


def write_folder(target: Path, path: Path, **changes: Any) -> Path:
    """Write a folder as LeRobot saves it, and the action tokenizer's beside it (`fast`)."""
    d = json.loads(path.read_text())
    fast = target.parent / 'fast'
    fast.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(path.with_suffix('.fast_tokenizer.json'), fast / 'tokenizer.json')
    numbers = {'scale': d['fast_scale'], 'min_token': d['fast_min_token']}
    (fast / 'processor_config.json').write_text(json.dumps(numbers))
    shape = [3, d['raw_height'], d['raw_width']]
    present = d['cameras'] - d['missing_cameras']
    cameras = {
        f'observation.images.cam{i}': {'type': 'VISUAL', 'shape': shape} for i in range(present)
    }
    state = {'observation.state': {'type': 'STATE', 'shape': [d['state_dim']]}}
    actions = {'action': {'type': 'ACTION', 'shape': [d['action_dim']]}}
    mapping = {
        'VISUAL': 'IDENTITY',
        'STATE': d['normalization'],
        'ACTION': d['normalization'],
    }
    config = {
        'type': 'pi0_fast',
        'n_obs_steps': 1,
        'input_features': {**cameras, **state},
        'output_features': actions,
        'paligemma_variant': 'tiny',
        'chunk_size': d['chunk'],
        'n_action_steps': d['chunk'],
        'max_state_dim': d['max_state_dim'],
        'max_action_dim': 32,
        'image_resolution': [d['image'], d['image']],
        'empty_cameras': d['missing_cameras'],
        'tokenizer_max_length': d['tokens'],
        'normalization_mapping': mapping,
        'use_peft': False,
        'use_relative_actions': False,
        'relative_exclude_joints': [],
        'temperature': 0.0,
        'max_decoding_steps': d['max_decoding_steps'],
        'fast_skip_tokens': d['fast_skip_tokens'],
        'validate_action_token_prefix': False,
        **changes,
    }
    relative = {'enabled': False, 'exclude_joints': [], 'action_names': None}
    normal = {'eps': 1e-8, 'features': {**cameras, **state, **actions}, 'norm_map': mapping}
    weights = load_file(path.with_suffix('.weights.safetensors'))
    write_lerobot(
        target,
        {f'{d["key_prefix_in_checkpoints"]}{name}': tensor for name, tensor in weights.items()},
        config,
        before=[
            ('relative_actions_processor', relative),
            ('normalizer_processor', normal),
            ('pi0_fast_prepare_state_tokenizer_processor_step', {}),
            ('tokenizer_processor', {'max_length': d['tokens'], 'padding_side': 'right'}),
            ('action_tokenizer_processor', {'max_action_tokens': d['max_action_tokens']}),
        ],
        after=[
            ('unnormalizer_processor', normal),
            ('absolute_actions_processor', {'enabled': False}),
        ],
        statistics=numbers_of(d['statistics']),
    )
    shutil.copyfile(path.with_suffix('.text_tokenizer.json'), target / 'tokenizer.json')
    return target


def options_of(path: Path, folder: Path, **further: Any) -> ExportOptions:
    """What the folder of a case does not say."""
    d = json.loads(path.read_text())
    given = {
        'action_tokenizer': folder.parent / 'fast',
        'state_names': tuple(f's{i}' for i in range(d['state_dim'])),
        'action_names': tuple(f'a{i}' for i in range(d['action_dim'])),
        'units': ('rad',),
        'rate_hz': 10.0,
        'vision_heads': d['v_heads'],
        'kv_heads': d['num_kv_heads'],
        'targets': tuple(f'a{i}' for i in range(d['action_dim'])),
    }
    return ExportOptions(**{**given, **further})


def refused(decoder: FastTokens, tokens: np.ndarray) -> bool:
    """Return whether a stream of tokens is refused."""
    try:
        decoder.decode(tokens)
    except ValueError:
        return True
    return False
