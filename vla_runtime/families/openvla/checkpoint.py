"""Checkpoints of OpenVLA: folders as published on the Hugging Face Hub."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import ClassVar

from vla_runtime.bundle.tensors import StoredTensor
from vla_runtime.checkpoints.folder_facts import FolderFacts
from vla_runtime.checkpoints.missing_facts import MissingFacts
from vla_runtime.checkpoints.options import ExportOptions
from vla_runtime.checkpoints.reader import CheckpointReader, MakeDims, Source
from vla_runtime.checkpoints.tensors import CheckpointError
from vla_runtime.families.blocks.block_sizes import (
    Shapes,
    check_stated,
    checked_dims,
    decoder_dims,
)
from vla_runtime.families.blocks.dimensions import VisionDims
from vla_runtime.families.openvla.dimensions import OpenVlaDims
from vla_runtime.families.openvla.folder import (
    read_images,
    read_language,
    read_openvla_folder,
    refuse_oft,
)
from vla_runtime.families.openvla.tensor_names import NAMES, without_last_blocks

# Heads of the published towers by width: DINOv2 ViT-S, ViT-B and ViT-L; SigLIP base and So400m.
_VISION_HEADS = {
    'dino': {384: 6, 768: 12, 1024: 16},
    'siglip': {768: 12, 1152: 16},
}
# Heads of Llama 2 7B and 13B by width.
_LANGUAGE_HEADS = {4096: 32, 5120: 40}


class OpenVlaReader(CheckpointReader):
    names = NAMES
    projects = ('OpenVLA',)
    wanted: ClassVar[Mapping[str, str]] = {
        '--tokenizer': (
            'tokenizer.json or tokenizer.model of the policy, from its folder on the Hugging Face '
            'Hub'
        ),
    }

    def recognises(self, names: Collection[str]) -> bool:
        return any(name.startswith('vision_backbone.featurizer.') for name in names)

    def refuse_unserved(self, folder: Path) -> None:
        if folder.is_dir():
            refuse_oft(folder)

    def family(self, tensors: Mapping[str, StoredTensor]) -> str:
        return 'openvla'

    def read_folder(self, folder: Path, family: str, options: ExportOptions) -> FolderFacts:
        return read_openvla_folder(folder, options.unnorm_key)

    def select(self, source: Source) -> dict[str, StoredTensor]:
        """Leave out the towers' last blocks, which are in the files and nothing reads."""
        kept = without_last_blocks(set(source.tensors))
        return {name: one for name, one in super().select(source).items() if name in kept}

    def sizes(self, source: Source) -> MakeDims | None:
        folder, tensors, facts, options, missing = source
        shape = Shapes(tensors, 'OpenVLA')
        if options.unnorm_key is not None:
            stated = facts.source['unnorm_key']
            missing.pick('--unnorm-key', options.unnorm_key, stated, 'name of the data set')
        towers = {name: _tower(shape, name, options, missing) for name in ('dino', 'siglip')}
        vocabulary, width = shape('language.embedding.weight', 2)
        language = read_language(folder)
        kv_heads = missing.pick(
            '--kv-heads',
            options.kv_heads,
            language.kv_heads or _LANGUAGE_HEADS.get(width),
            "the language model's key/value heads (Llama 2 7B has 32)",
        )
        dino, siglip = towers['dino'], towers['siglip']
        if kv_heads is None or dino is None or siglip is None or facts.action_length is None:
            return None
        check_stated(
            missing,
            (facts.image_size_key, facts.image_size, dino.image_size),
        )
        if options.cameras is not None and len(options.cameras) != 1:
            missing.conflict(
                f'--cameras names {len(options.cameras)} cameras, but the policy reads one image'
            )
        images, actions = read_images(folder), facts.action_length
        return lambda cameras, prompt_length, horizon: checked_dims(
            lambda: OpenVlaDims(
                dino=dino,
                siglip=siglip,
                dino_registers=shape('vision.dino.registers', 3)[1],
                projector_dim=shape('vision.projector.fc1.weight', 2)[0],
                language=decoder_dims(shape, 'language', kv_heads),
                vocabulary=vocabulary,
                used_vocabulary=vocabulary - language.padding,
                action_bins=language.bins,
                prompt_length=prompt_length,
                action_dim=actions,
                dino_mean=images.means[0],
                dino_std=images.stds[0],
                siglip_mean=images.means[1],
                siglip_std=images.stds[1],
                rope_base=language.rope_base,
                rms_epsilon=language.rms_epsilon,
                cameras=cameras,
            )
        )


def _tower(
    shape: Shapes, name: str, options: ExportOptions, missing: MissingFacts
) -> VisionDims | None:
    """Sizes of a tower, with the blocks that are run; None once its heads are asked for."""
    tower = f'vision.{name}'
    width, channels, patch, patch_width = shape(f'{tower}.patch_embedding.weight', 4)
    tokens = shape(f'{tower}.position_embedding', 3)[1]
    side = math.isqrt(tokens)
    if channels != 3 or patch != patch_width or side * side != tokens:
        raise CheckpointError(
            f'the tower {name} has {channels} channels, patches of {patch}x{patch_width} and '
            f'{tokens} positions; expected 3 channels, square patches and a square of them'
        )
    heads = missing.pick(
        f'--heads {name}=N',
        options.heads.get(name),
        _VISION_HEADS[name].get(width),
        f"attention heads of '{name}', {width} numbers wide",
    )
    if heads is None:
        return None
    return VisionDims(
        width=width,
        depth=shape.depth(f'{tower}.blocks'),
        num_heads=heads,
        mlp_dim=shape(f'{tower}.blocks.0.mlp.fc1.weight', 2)[0],
        patch_size=patch,
        image_size=side * patch,
    )


READER = OpenVlaReader()
