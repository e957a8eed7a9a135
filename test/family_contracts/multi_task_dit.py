"""Multi-Task DiT."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from multi_task_dit_cases import (
    MultiTaskDitCase,
    flow_network,
    load_multi_task_dit_case,
)
from multi_task_dit_folders import options_of, write_folder
from reference_cases import find
from sampled_cases import Sampling
from torch import Tensor

from family_contracts.declaration import Case, FamilyContract, Fault, Folder, Patched, Recorded
from family_contracts.robot import CAMERAS, IMAGE_SIZE, JOINTS
from vla_convert.checkpoints.lerobot_folder import with_earlier_frames
from vla_runtime.bundle.schema import BundleSpec, ImageSpec, earlier_name
from vla_runtime.declarations.multi_task_dit import (
    DitDims,
    MultiTaskDitDims,
    MultiTaskDitFlowDims,
    TextDims,
    TransformerDims,
)
from vla_runtime.family.dimensions import VisionDims
from vla_runtime.family.noise_schedule import NoiseScheduler
from vla_runtime.models import multi_task_dit as networks
from vla_runtime.models.base import diffusion_network
from vla_runtime.models.blocks.attention import Rotary
from vla_runtime.models.blocks.transformer import Block
from vla_runtime.types import Observation


def tiny_of_both(horizon: int) -> DitDims:
    """Sizes of a tiny policy, whatever it was trained to denoise."""
    return DitDims(
        vision=VisionDims(width=24, depth=2, num_heads=3, mlp_dim=32, patch_size=8, image_size=40),
        text=TextDims(width=16, depth=2, num_heads=2, mlp_dim=24, positions=80),
        text_width=20,
        transformer=TransformerDims(
            width=32, depth=2, num_heads=4, mlp_dim=48, time_width=12, rotary_base=10000.0
        ),
        image=IMAGE_SIZE,
        crop=(40, 40),
        vocabulary=547,
        prompt_length=64,
        cameras=len(CAMERAS),
        observation_steps=1,
        horizon=horizon,
        real_horizon=horizon,
        action_dim=len(JOINTS),
        state_dim=len(JOINTS),
    )


def tiny(horizon: int) -> MultiTaskDitDims:
    scheduler = NoiseScheduler('ddpm', 20, 'linear', 1e-3, 0.2, clip=4.0)
    return MultiTaskDitDims(**vars(tiny_of_both(horizon)), scheduler=scheduler)


def tiny_flow(horizon: int) -> MultiTaskDitFlowDims:
    return MultiTaskDitFlowDims(**vars(tiny_of_both(horizon)))


def sampling_of(found: MultiTaskDitCase, integrator: str | None) -> Sampling | None:
    """The first chunk of a case that follows a flow so; None: that takes noise away."""

    def is_meant(one: Sampling) -> bool:
        return (one.integrator if one.scheduler is None else None) == integrator

    return next(filter(is_meant, found.samplings), None)


def case(integrator: str | None, path: Path, b: int) -> Case:
    found = load_multi_task_dit_case(path)
    of, sampling = found.tensors, sampling_of(found, integrator)
    steps = found.description['n_obs_steps']
    return Case(
        network=flow_network(found.network, integrator) if integrator else found.network,
        steps=sampling.steps if sampling else 1,
        pixels=list(found.pixels(b)),
        image_mask=found.visible(),
        rows=found.rows(b),
        noise=of['noise'][b],
        actions=of[f'{sampling.prefix}trajectory'][b] if sampling else None,
        image_tokens=[
            of[f'camera_features_{camera}'][b, at][None]
            for at in reversed(range(steps))
            for camera in found.cameras
        ],
    )


_TINY = tiny(8)
_PLAIN = replace(_TINY.transformer, rotary_base=None)
VARIANTS = {
    'three steps': replace(_TINY, cameras=6, observation_steps=3, real_horizon=6),
    'resized, all of it seen': replace(_TINY, resize=(40, 40), crop=None),
    'learned positions': replace(_TINY, transformer=replace(_PLAIN, learned_positions=True)),
    'encoders for each camera': replace(_TINY, separate_encoders=True),
    'ddim on samples': replace(
        _TINY, scheduler=NoiseScheduler('ddim', 9, 'linear', 1e-4, 0.02, 'sample')
    ),
}

_TINY_FLOW = tiny_flow(8)
FLOW_VARIANTS = {
    'Runge-Kutta, three steps': replace(
        _TINY_FLOW, integrator='rk4', cameras=6, observation_steps=3, real_horizon=6
    )
}

_OBSERVATION, _FEATURES = networks.Dit.observation, networks.Dit.image_features
_BLOCK, _SPLIT = Block.forward, networks.ActionBlock.split
_VISION = networks.ClipVision.forward
_CONDITIONING = networks.MultiTaskDitFlow.time_conditioning
_ADVANCE, _TIME_CODE, _ENDING = diffusion_network.advance, networks.time_code, networks.ending


def smooth_gelu(x: Tensor) -> Tensor:
    return torch.nn.functional.gelu(x)


def last_patch(self: networks.ClipVision, pixels: Tensor) -> Tensor:
    first = self.class_embedding
    patches = self.patch_embedding(self.framing(pixels))
    rows = first[None, None].expand(patches.shape[0], -1, -1)
    x = self.norm(torch.cat([rows, patches], dim=1) + self.position_embedding)
    for block in self.blocks:
        x = block(x)
    return x[:, -1:].float()


def sees_what_follows(self: Block, x: Tensor, seen: Tensor | None = None, **more: Any) -> Tensor:
    return _BLOCK(self, x, None, **more)


def one_before(x: Tensor, token_mask: Tensor) -> Tensor:
    return _ENDING(x.roll(1, dims=1), token_mask)


def newest_state_first(self: networks.Dit, features: Tensor, state: Tensor, text: Tensor) -> Tensor:
    return _OBSERVATION(self, features, state.flip(1), text)


def newest_image_first(self: networks.Dit, tokens: Tensor, mask: Tensor) -> Tensor:
    return _FEATURES(self, tokens, mask).flip(0)


def no_positions(self: Block, x: Tensor, *, rotation: Rotary, **more: Any) -> Tensor:
    return _BLOCK(self, x, **more)


def another_order(*order: int) -> Callable[..., Tensor]:
    """A block whose modulation has its six parts in another order."""

    def split(modulation: Tensor) -> Any:
        parts = modulation.chunk(6, dim=2)
        return _SPLIT(torch.cat([parts[part] for part in order], dim=2))

    return staticmethod(split)


def scaled_alone(modulation: Tensor) -> Any:
    return [(scale - 1, shift, gate) for scale, shift, gate in _SPLIT(modulation)]


def updated(*places: int, value: float = 0.0) -> Callable[..., Tensor]:
    """The scheduler's update with other numbers at these places."""

    def advance(x: Tensor, predicted: Tensor, update: Tensor, *rest: Tensor) -> Tensor:
        for place in places:
            before, after = update[:place], update[place + 1 :]
            update = torch.cat([before, torch.full_like(update[:1], value), after])
        return _ADVANCE(x, predicted, update, *rest)

    return advance


def turned_code(times: Tensor, width: int) -> Tensor:
    return torch.cat(_TIME_CODE(times, width).chunk(2, dim=1)[::-1], dim=1)


def faults() -> Mapping[str, Fault]:
    vision: dict[str, Any] = {
        'the last patch for the class token': (networks.ClipVision, 'forward', last_patch),
    }
    prefix: dict[str, Any] = {
        'a token sees what follows': (Block, 'forward', sees_what_follows),
        'the last word for the end': (networks, 'ending', one_before),
        'newest state first': (networks.Dit, 'observation', newest_state_first),
        'newest image first': (networks.Dit, 'image_features', newest_image_first),
        'the smooth activation': (networks, 'quick_gelu', smooth_gelu),
    }
    expert: dict[str, Any] = {
        'scale before shift': (
            networks.ActionBlock,
            'split',
            another_order(1, 0, 2, 4, 3, 5),
        ),
        'the scale without one': (networks.ActionBlock, 'split', staticmethod(scaled_alone)),
        'no rotary positions': (networks.ActionBlock, 'forward', no_positions),
        'clean actions not clipped': (diffusion_network, 'advance', updated(3, value=1e9)),
        'no noise in a step': (diffusion_network, 'advance', updated(8)),
    }
    files = {'vision.onnx': vision, 'prefix.onnx': prefix, 'expert.onnx': expert}
    # `quick_gelu` is in both of CLIP's networks; the receipt meets the vision network first.
    shared = {'the smooth activation': 'vision.onnx'}
    return {
        name: Patched(*planted, shared.get(name, file), quick=number == 0)  # type: ignore[arg-type]
        for file, of_file in files.items()
        for number, (name, planted) in enumerate(of_file.items())
    } | {
        'cosines before sines': Patched(
            networks, 'time_code', turned_code, 'time table', quick=True
        )
    }


def stepped(*shares: float, places: tuple[int, ...] = (0, 1, 1, 2)) -> Callable[..., Tensor]:
    """A Runge-Kutta step whose velocities have these shares, at these times."""

    def step_velocity(
        self: networks.MultiTaskDitFlow,
        x: Tensor,
        past: Mapping[str, Tensor],
        conditioning: Tensor,
        dt: Tensor,
        **rows: Tensor,
    ) -> Tensor:
        times, found = conditioning.chunk(3, dim=-1), []
        for place, way in zip(places, (0.0, 0.5, 0.5, 1.0), strict=True):
            reached = x + way * dt * found[-1] if found else x
            found.append(self.velocity(reached, past, times[place], **rows))
        parts = [share * velocity for share, velocity in zip(shares, found, strict=True)]
        return torch.stack(parts).sum(dim=0)

    return step_velocity


def from_noise_on(self: networks.MultiTaskDitFlow, times: Tensor) -> Tensor:
    return _CONDITIONING(self, 1 - times)


def flow_faults() -> Mapping[str, Fault]:
    flow, third = networks.MultiTaskDitFlow, 1 / 3
    steps = {
        'four equal shares': stepped(0.25, 0.25, 0.25, 0.25),
        'the first velocity alone': stepped(1.0, 0.0, 0.0, 0.0),
        'the middle at the end': stepped(third / 2, third, third, third / 2, places=(0, 2, 2, 2)),
        'the end in the middle': stepped(third / 2, third, third, third / 2, places=(0, 1, 1, 1)),
    }
    return {
        name: Patched(flow, 'step_velocity', wrong, 'expert.onnx', quick=number == 0)
        for number, (name, wrong) in enumerate(steps.items())
    } | {
        'times count to the noise': Patched(
            flow, 'time_conditioning', from_noise_on, 'time table', quick=True
        ),
        'towards the noise': Patched(flow, 'velocity', networks.Dit.velocity, 'expert.onnx'),
    }


def with_history(spec: BundleSpec) -> BundleSpec:
    """The tiny policy with two steps of the observation."""
    dims = replace(spec.dims, cameras=4, observation_steps=2, real_horizon=7)
    return replace(spec, cameras=with_earlier_frames(spec.cameras, 2), dims=dims)


def with_runge_kutta(spec: BundleSpec) -> BundleSpec:
    return replace(spec, dims=replace(spec.dims, integrator='rk4'))


def folders(*integrators: str | None) -> Mapping[str, Callable[[Path], Folder]]:
    """The first of each case's chunks that follow a flow so; None: that takes noise away."""
    return {
        f'{path.stem}_{sampling.name}_folder': partial(folder, path, sampling)
        for path in find('multi_task_dit_*.json')
        if path.with_suffix('.case.safetensors').exists()
        for integrator in integrators
        if (sampling := sampling_of(load_multi_task_dit_case(path), integrator)) is not None
    }


def folder(path: Path, sampling: Sampling, target: Path) -> Folder:
    found = load_multi_task_dit_case(path)
    of, d, steps = found.tensors, found.description, found.description['n_obs_steps']
    others = (one for one in d['samplers'] if one['name'] == sampling.name)
    changes = {name: value for name, value in next(others, {}).items() if name != 'name'}
    own = write_folder(target / 'checkpoint', path, changes)
    first, last = d['actions_returned']
    least, most = (torch.tensor(d['statistics']['action'][name]) for name in ('min', 'max'))

    def recorded(b: int) -> Recorded:
        noise, chunk = found.noise(sampling, b), of[f'{sampling.prefix}trajectory'][b]
        if (of_steps := found.step_noise(sampling, b)).any():
            # The noise of a chunk, and that of its steps but the last.
            noise = np.concatenate([noise[None], of_steps[:-1]])
        # A case has its own chunk in robot units alone.
        actions = (chunk[first:last] + 1) / 2 * (most - least) + least
        if not sampling.prefix:
            actions = of['actions'][b]
        names = [key.removeprefix('observation.images.') for key in d['camera_keys']]
        return Recorded(
            seen=Observation(
                images={
                    earlier_name(name, ago) if ago else name: of[f'raw_image_{i}'][
                        b, steps - 1 - ago
                    ].numpy()
                    for ago in range(steps)
                    for i, name in enumerate(names)
                },
                state=of['raw_state'][b, steps - 1].numpy(),
                instruction=d['tasks'][b],
                earlier_states=[
                    of['raw_state'][b, steps - 1 - ago].numpy() for ago in range(1, steps)
                ],
            ),
            noise=noise,
            normalised=chunk,
            actions=actions,
            tokens=of['tokens'][b][of['token_mask'][b]],
            state=of['state'][b, -1],
        )

    return Folder(
        path=own, options=options_of(path), recorded=[recorded(b) for b in range(d['batch'])]
    )


CONTRACTS = (
    FamilyContract(
        family='multi_task_dit',
        tiny=tiny,
        case=partial(case, None),
        template='clip',
        tokenizer='multi_task_dit_a.tokenizer.json',
        images=ImageSpec('none', 'none'),
        images_normalised=True,
        norms_pass=True,
        parameters={'multi_task_dit': 248_891_655},
        past=lambda dims: {'modulation': (1, dims.transformer.modulations)},
        variants=VARIANTS,
        refused={
            'real_horizon': lambda dims: replace(dims, real_horizon=9),
            'observation_steps': lambda dims: replace(dims, observation_steps=3),
            'crop': lambda dims: replace(dims, crop=(49, 60)),
            'vision.image_size': lambda dims: replace(dims, crop=(40, 48)),
            'prompt_length': lambda dims: replace(dims, prompt_length=81),
            'text|num_heads': lambda dims: replace(dims, text=replace(dims.text, num_heads=3)),
            'transformer.time_width': lambda dims: replace(
                dims, transformer=replace(dims.transformer, time_width=5)
            ),
            'transformer.rotary_base': lambda dims: replace(
                dims, transformer=replace(dims.transformer, rotary_base=1.0)
            ),
        },
        faults=faults,
        fault_spec=with_history,
        folders=partial(folders, None),
    ),
    FamilyContract(
        family='multi_task_dit_flow',
        tiny=tiny_flow,
        case=partial(case, 'euler'),
        kind='multi_task_dit',
        template='clip',
        tokenizer='multi_task_dit_a.tokenizer.json',
        images=ImageSpec('none', 'none'),
        images_normalised=True,
        norms_pass=True,
        parameters={'multi_task_dit_flow': 248_891_655},
        past=lambda dims: {'modulation': (1, dims.transformer.modulations)},
        variants=FLOW_VARIANTS,
        refused={'real_horizon': lambda dims: replace(dims, real_horizon=9)},
        faults=flow_faults,
        fault_spec=with_runge_kutta,
        folders=partial(folders, 'euler', 'rk4'),
    ),
)
