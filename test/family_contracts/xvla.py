"""X-VLA."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from checkpoint_folders import edit_config
from reference_cases import find
from safetensors.torch import load_file
from tokenizers import Tokenizer as Tokens
from torch import Tensor
from torch.nn import functional as F
from xvla_cases import load_xvla_case

from family_contracts.declaration import Case, FamilyContract, Fault, Folder, Patched, Recorded
from family_contracts.robot import CAMERAS, numbered
from vla_convert.checkpoints.options import ExportOptions
from vla_runtime.bundle.schema import CameraSpec, ImageSpec
from vla_runtime.declarations.xvla import BartDims, DavitDims, SoftPromptedDims, XvlaDims
from vla_runtime.models import xvla as networks
from vla_runtime.models.base import diffusion_network
from vla_runtime.models.blocks.attention import attend
from vla_runtime.models.xvla import ChannelBlock, Convolution, DavitVision, Xvla
from vla_runtime.types import Observation


def tiny(horizon: int) -> XvlaDims:
    return XvlaDims(
        vision=DavitDims(
            channels=(8, 12, 16, 18),
            blocks=(1, 1, 1, 1),
            num_heads=(2, 3, 2, 3),
            groups=(4, 2, 4, 3),
            mlp_dim=(16, 16, 24, 20),
            kernels=(7, 3, 3, 3),
            strides=(4, 2, 2, 2),
            paddings=(3, 1, 1, 1),
            pre_norms=(False, True, True, True),
            window=4,
            positions=6,
        ),
        text=BartDims(width=24, depth=2, num_heads=3, mlp_dim=32, positions=80),
        head=SoftPromptedDims(
            width=32,
            depth=2,
            num_heads=4,
            mlp_dim=48,
            positions=horizon + 84,
            time_width=9,
            soft_prompts=3,
        ),
        vocabulary=330,
        image=(40, 48),
        empty_views=2,
        cameras=len(CAMERAS),
        prompt_length=64,
        horizon=horizon,
        action_dim=14,
        action_mode='so101_bimanual',
        state_dim=13,
    )


def past(dims: XvlaDims) -> Mapping[str, tuple[int, ...]]:
    found = {'context': (1, dims.prefix_length, dims.head.width)}
    return found if dims.sees_padding else found | {'context_mask': (1, dims.prefix_length)}


def case(path: Path, b: int) -> Case:
    found = load_xvla_case(path)
    of, network = found.tensors, found.network_of(found.samplings[0], b)
    tokens = of['image_tokens'].unflatten(0, (found.batch, -1))[b]
    return Case(
        network=network,
        steps=found.steps,
        pixels=list(found.pixels(b)),
        image_mask=found.visible(b),
        rows=found.rows(b),
        head=found.head(b),
        noise=of['noise'][b],
        actions=of['actions'][b],
        image_tokens=list(tokens),
        past={'context': of['head_input'][b : b + 1, network.dims.horizon :]},
    )


_TINY = tiny(8)
VARIANTS = {
    'prompts without padding': replace(_TINY, sees_padding=False),
    'projections of the domain': replace(_TINY, head=replace(_TINY.head, by_domain=True)),
    'no state, no soft prompts': replace(
        _TINY, action_mode='auto', state_dim=0, head=replace(_TINY.head, soft_prompts=0)
    ),
    'scaled words, the other matrix': replace(
        _TINY,
        text=replace(_TINY.text, scaled=True),
        vision=replace(_TINY.vision, input_major=True, qkv_bias=False),
    ),
    'every norm before its convolution': replace(
        _TINY, vision=replace(_TINY.vision, pre_norms=(True,) * 4, blocks=(1, 2, 1, 1))
    ),
}

_ACTION_TOKENS = Xvla.action_tokens
_VIEWS, _CODE = Xvla.views, Xvla.time_conditioning


def rows_first(self: DavitVision) -> Tensor:
    high, wide = self.sizes[-1]
    rows = self.row_positions[:high][:, None].expand(-1, wide, -1)
    columns = self.column_positions[:wide][None].expand(high, -1, -1)
    return torch.cat([rows, columns], dim=2).flatten(0, 1)


def no_time_code(self: DavitVision, x: Tensor) -> Tensor:
    return torch.zeros(x.shape[2], device=x.device)


def mean_last(self: DavitVision, pixels: Tensor) -> Tensor:
    x = networks.as_tokens(pixels)
    for stage, convolution in enumerate(self.convs):
        x = self.stage(convolution(x, self.sizes[stage]), stage)
    x = x + self.positions() + self.time_code(x)
    return self.norm(self.projection(torch.cat([x, x.mean(dim=1, keepdim=True)], dim=1)))


def norm_behind(self: Convolution, x: Tensor, size: tuple[int, int]) -> Tensor:
    x = networks.as_tokens(self.conv(networks.as_map(x, size)))
    return F.layer_norm(x, x.shape[-1:])


def hidden_fill(self: networks.WindowBlock, x: Tensor) -> Tensor:
    """Windows whose fill is not seen."""
    edge = self.window
    tall = x.unflatten(1, self.size)
    rows = [
        [
            attend(*self.attention.project(part.flatten(1, 2)), None).view(part.shape)
            for part in row.split(edge, dim=2)
        ]
        for row in tall.split(edge, dim=1)
    ]
    return torch.cat([torch.cat(row, dim=2) for row in rows], dim=1).flatten(1, 2)


def by_head(self: ChannelBlock, x: Tensor) -> Tensor:
    """Channels scaled by the width of a group."""
    q, k, v = (part.transpose(2, 3) for part in self.attention.project(x))
    return (
        F.scaled_dot_product_attention(q * (q.shape[-1] / q.shape[-2]) ** 0.5, k, v)
        .flatten(1, 2)
        .transpose(1, 2)
    )


def first_camera_last(self: Xvla, image_tokens: Tensor, image_mask: Tensor) -> Tensor:
    return _VIEWS(self, image_tokens.flip(0), image_mask.flip(0))


def from_place_0(self: networks.BartEncoder, image: Tensor, tokens: Tensor) -> Tensor:
    x = torch.cat([image, self.embedding(tokens).float() * self.scale], dim=1)
    return self.norm(x + self.position_embedding[: x.shape[1]])


def places_of_their_own(self: Xvla, length: int, seen: Tensor | None) -> Tensor:
    return self.position_embedding[:, :length]


def grippers_seen(self: Xvla, x: Tensor) -> Tensor:
    return x


def logits(self: Xvla, x: Tensor) -> Tensor:
    return torch.ones(x.shape[-1], dtype=torch.bool, device=x.device)


def flipped(
    self: Xvla, x: Tensor, conditioning: Tensor, batch: int, state: Tensor | None
) -> Tensor:
    return _ACTION_TOKENS(self, x.flip(-1), conditioning, batch, state)


def no_places(
    self: Xvla, x: Tensor, conditioning: Tensor, batch: int, state: Tensor | None
) -> Tensor:
    tokens = _ACTION_TOKENS(self, x, conditioning, batch, state)
    return tokens - self.position_embedding[:, : self.dims.horizon]


def euler(
    x: Tensor, predicted: Tensor, update: Tensor, noise: Tensor, row_weight: Tensor, *plan: Tensor
) -> Tensor:
    """A flow's step with v = (x - predicted) / t, in place of going back to the noise."""
    mixed, after = diffusion_network.mix_rows(predicted, row_weight), update[8]
    before = after + 1 / 3
    return x + (after - before) * (x - mixed) / before


def sines_first(self: Xvla, times: Tensor) -> Tensor:
    code, half = _CODE(self, times), self.dims.head.time_width // 2
    return torch.cat([code[:, half : 2 * half], code[:, :half], code[:, 2 * half :]], dim=1)


def faults() -> Mapping[str, Fault]:
    planted: dict[str, dict[str, Any]] = {
        'vision.onnx': {
            'rows before columns': (DavitVision, 'positions', rows_first),
            'no code of the first frame': (DavitVision, 'time_code', no_time_code),
            'the mean behind the places': (DavitVision, 'forward', mean_last),
            'a norm behind each convolution': (Convolution, 'forward', norm_behind),
            'the fill of windows hidden': (networks.WindowBlock, 'attended', hidden_fill),
            'channels scaled by their number': (ChannelBlock, 'attended', by_head),
        },
        'prefix.onnx': {
            'the last camera first': (Xvla, 'views', first_camera_last),
            'words from place 0': (networks.BartEncoder, 'embed', from_place_0),
            'features at the places of the actions': (Xvla, 'places', places_of_their_own),
            'padding as another word': (networks, 'PADDING', 3),
        },
        'expert.onnx': {
            'grippers seen': (Xvla, 'without_grippers', grippers_seen),
            'grippers as logits': (Xvla, '_is_arm', logits),
            'actions without places': (Xvla, 'action_tokens', no_places),
            'actions in another order': (Xvla, 'action_tokens', flipped),
            "Euler's step": (diffusion_network, 'advance', euler),
        },
        'time table': {'sines before cosines': (Xvla, 'time_conditioning', sines_first)},
    }
    return {
        name: Patched(*of, file, quick=number == 0)  # type: ignore[arg-type]
        for file, of_file in planted.items()
        for number, (name, of) in enumerate(of_file.items())
    }


def folders() -> Mapping[str, Callable[[Path], Folder]]:
    """Folders of the cases as they lie there, and as LeRobot runs them after reading."""
    found: dict[str, Callable[[Path], Folder]] = {}
    for path in find('xvla_*.end_to_end.json'):
        name = path.name.removesuffix('.end_to_end.json')
        found[name] = partial(folder, path, path.with_name(name), False)
        found[f'{name}_read_back'] = partial(folder, path, path.with_name(name), True)
        old = path.with_name(f'{name}_old')
        if old.is_dir():
            found[old.name] = partial(folder, path, old, False)
    return found


def names_of(description: Mapping[str, Any]) -> dict[str, str]:
    """The policy's name of each camera of a folder's case."""
    renamed = description['rename_map']
    return {
        camera: renamed.get(key := f'observation.images.{camera}', key).rpartition('.')[2]
        for camera in description['cameras']
    }


def options_of(path: Path) -> ExportOptions:
    """What completes the folder of a case: names, and the cameras that its robot lacks."""
    description, of = json.loads(path.read_text()), load_file(path.with_suffix('.safetensors'))
    own, present = path.with_name(path.name.removesuffix('.end_to_end.json')), names_of(description)
    inputs = json.loads((own / 'config.json').read_text())['input_features']
    features = [key.rpartition('.')[2] for key, one in inputs.items() if one['type'] == 'VISUAL']
    return ExportOptions(
        state_names=numbered('state', len(of['state_0'])),
        action_names=numbered('action', of['chunk_0'].shape[1]),
        units=('deg',),
        rate_hz=30.0,
        cameras=tuple(
            CameraSpec(name, present=name in present.values())
            for name in features
            if not name.startswith('empty_camera_')
        ),
    )


def folder(path: Path, own: Path, read_back: bool, target: Path) -> Folder:
    """A folder; `read_back`: it states the views that LeRobot runs after reading it."""
    description, of = json.loads(path.read_text()), load_file(path.with_suffix('.safetensors'))
    after, before = (description[f'views_{when}'] for when in ('after_reading', 'before_saving'))
    written = target / 'checkpoint'
    shutil.copytree(own, written, copy_function=shutil.copyfile)
    if read_back:
        edit_config(written, num_image_views=after)
    # Chunks of the views that the folder states.
    ending = '' if read_back or before == after else f'_views_{before}'
    vocabulary = Tokens.from_file(str(own / 'tokenizer.json'))
    statistics = load_file(next(own.glob('policy_postprocessor_step_*.safetensors')))
    modes = json.loads((own / 'config.json').read_text())['normalization_mapping']

    def recorded(i: int, task: str) -> Recorded:
        tokens = of[f'tokens_{i}'][of[f'token_mask_{i}']]
        if bool(of[f'token_mask_{i}'].all()):
            # LeRobot has cut it off, where ours refuses it.
            task = vocabulary.decode(tokens.tolist())
        actions = normalised = of[f'chunk_normalised_{i}{ending}']
        if modes['ACTION'] == 'MEAN_STD':
            actions = normalised * statistics['action.std'] + statistics['action.mean']
        return Recorded(
            seen=Observation(
                {
                    name: of[f'{camera}_{i}'].numpy()
                    for camera, name in names_of(description).items()
                },
                of[f'state_{i}'].numpy(),
                task,
            ),
            noise=of['noise'][0].numpy(),
            normalised=normalised,
            actions=actions if ending else of[f'chunk_{i}'],
            tokens=tokens,
            state=of[f'proprio_{i}'],
        )

    tasks = [entry['task'] for entry in description['observations']]
    return Folder(
        path=written,
        options=options_of(path),
        recorded=[
            recorded(i, task)
            for i, task in enumerate(tasks)
            if f'chunk_normalised_{i}{ending}' in of
        ],
    )


CONTRACTS = (
    FamilyContract(
        family='xvla',
        tiny=tiny,
        case=case,
        template='bart',
        tokenizer='xvla_a.tokenizer.json',
        images=ImageSpec('left_top', 'bilinear', bars=0.0),
        images_normalised=True,
        norms_pass=True,
        parameters={'xvla': 875_769_876},
        past=past,
        variants=VARIANTS,
        refused={
            'vision.blocks': lambda dims: replace(
                dims, vision=replace(dims.vision, blocks=(1, 1, 1))
            ),
            'vision.num_heads': lambda dims: replace(
                dims, vision=replace(dims.vision, num_heads=(3, 3, 2, 3))
            ),
            'vision.groups': lambda dims: replace(
                dims, vision=replace(dims.vision, groups=(4, 5, 4, 3))
            ),
            'vision.window': lambda dims: replace(dims, vision=replace(dims.vision, window=0)),
            'text|num_heads': lambda dims: replace(dims, text=replace(dims.text, num_heads=5)),
            'head|num_heads': lambda dims: replace(dims, head=replace(dims.head, num_heads=5)),
            'image': lambda dims: replace(dims, image=(640, 48)),
            'prompt_length': lambda dims: replace(dims, prompt_length=90),
            'head.positions': lambda dims: replace(dims, horizon=9),
            'action_dim': lambda dims: replace(dims, action_dim=11),
            'state_dim': lambda dims: replace(dims, state_dim=11),
        },
        faults=faults,
        folders=folders,
    ),
)
