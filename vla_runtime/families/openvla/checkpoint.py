"""Checkpoints of OpenVLA and OpenVLA-OFT: folders as published on the Hugging Face Hub."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, ClassVar

from vla_runtime.bundle.tensors import StoredTensor
from vla_runtime.checkpoints.adapters import is_adapter
from vla_runtime.checkpoints.errors import ExportError
from vla_runtime.checkpoints.folder_facts import FolderFacts
from vla_runtime.checkpoints.missing_facts import MissingFacts
from vla_runtime.checkpoints.norm_stats import STATISTICS_JSON
from vla_runtime.checkpoints.oft_folder import read_heads
from vla_runtime.checkpoints.options import ExportOptions
from vla_runtime.checkpoints.reader import CheckpointReader, MakeDims, Source
from vla_runtime.checkpoints.tensors import CheckpointError
from vla_runtime.checkpoints.unread_keys import TRANSFORMERS_KEYS
from vla_runtime.families.blocks.block_sizes import (
    Shapes,
    check_stated,
    checked_dims,
    decoder_dims,
)
from vla_runtime.families.blocks.dimensions import VisionDims
from vla_runtime.families.openvla.dimensions import OpenVlaDims, OpenVlaOftDims
from vla_runtime.families.openvla.folder import read_images, read_language, read_openvla_folder
from vla_runtime.families.openvla.oft_folder import is_oft, read_oft_folder, refuse_unserved_oft
from vla_runtime.families.openvla.tensor_names import NAMES, without_last_blocks

_OFT = 'openvla_oft'
# Heads of the published towers by width: DINOv2 ViT-S, ViT-B and ViT-L; SigLIP base and So400m.
_VISION_HEADS = {
    'dino': {384: 6, 768: 12, 1024: 16},
    'siglip': {768: 12, 1152: 16},
}
# Heads of Llama 2 7B and 13B by width.
_LANGUAGE_HEADS = {4096: 32, 5120: 40}


class OpenVlaReader(CheckpointReader):
    names = NAMES
    known = (
        *TRANSFORMERS_KEYS,
        'vision_backbone_id|llm_(backbone_id|max_length)|hf_llm_id|image_sizes|timm_model_ids',
        r'norm_stats(\..*)?',
    )
    projects = ('OpenVLA', 'OpenVLA-OFT')
    beside_adapter = (
        'of OpenVLA dataset_statistics.json of the run folder (run_root_dir), and config.json, '
        'preprocessor_config.json and the tokenizer of the policy below; its training also merges '
        'the adapter into that run folder, which is exported without --base'
    )
    wanted: ClassVar[Mapping[str, str]] = {
        '--horizon': 'actions of a chunk (NUM_ACTIONS_CHUNK of the training)',
        '--tokenizer': (
            'tokenizer.json or tokenizer.model of the policy, from its folder on the Hugging Face '
            'Hub'
        ),
    }

    def recognises(self, names: Collection[str]) -> bool:
        return any(name.startswith('vision_backbone.featurizer.') for name in names)

    def refuse_unserved(self, folder: Path) -> None:
        if folder.is_dir():
            refuse_unserved_oft(folder)

    def family(self, folder: Path, tensors: Mapping[str, StoredTensor]) -> str:
        return _OFT if is_oft(folder) else 'openvla'

    def read_folder(self, folder: Path, family: str, options: ExportOptions) -> FolderFacts:
        if is_adapter(folder) and not (folder / STATISTICS_JSON).is_file():
            # Those in config.json are of the policy below.
            raise ExportError(
                f'{folder}: is an adapter (LoRA) without {STATISTICS_JSON}, which its training '
                'wrote into the run folder (run_root_dir): copy it from there'
            )
        read = read_oft_folder if family == _OFT else read_openvla_folder
        return read(folder, options.unnorm_key)

    def select(self, source: Source) -> dict[str, StoredTensor]:
        """Leave out what nothing reads, and add OFT's heads."""
        tensors = super().select(source)
        if source.facts.family == _OFT:
            tensors.pop('token_head.weight', None)
            for theirs, stored in read_heads(source.folder).items():
                tensors[NAMES.ours(theirs) or theirs] = stored
        kept = without_last_blocks(set(tensors))
        return {name: one for name, one in tensors.items() if name in kept}

    def sizes(self, source: Source) -> MakeDims | None:
        folder, tensors, facts, options, missing = source
        shape, of_oft = Shapes(tensors, facts.kind), facts.family == _OFT
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
        check_stated(missing, (facts.image_size_key, facts.image_size, dino.image_size))
        images = read_images(folder)
        backbone: dict[str, Any] = {
            'dino': dino,
            'siglip': siglip,
            'dino_registers': shape('vision.dino.registers', 3)[1],
            'projector_dim': shape('vision.projector.fc1.weight', 2)[0],
            'language': decoder_dims(shape, 'language', kv_heads),
            'vocabulary': vocabulary,
            'dino_mean': images.means[0],
            'dino_std': images.stds[0],
            'siglip_mean': images.means[1],
            'siglip_std': images.stds[1],
            'rope_base': language.rope_base,
            'rms_epsilon': language.rms_epsilon,
        }
        if of_oft:
            return _oft_dims(shape, facts, missing, backbone)
        if options.cameras is not None and len(options.cameras) != 1:
            missing.conflict(
                f'--cameras names {len(options.cameras)} cameras, but the policy reads one image'
            )
        actions = facts.action_length
        return lambda cameras, prompt_length, horizon: checked_dims(
            lambda: OpenVlaDims(
                **backbone,
                used_vocabulary=vocabulary - language.padding,
                action_bins=language.bins,
                prompt_length=prompt_length,
                action_dim=actions,
                cameras=cameras,
            )
        )


def _oft_dims(
    shape: Shapes, facts: FolderFacts, missing: MissingFacts, backbone: Mapping[str, Any]
) -> MakeDims:
    action_dim, head_width = shape('head.fc2.weight', 2)
    state_dim = shape('state_projection.fc1.weight', 2)[1]
    check_stated(
        missing,
        ('action dimensions', facts.action_length, action_dim),
        ('state dimensions', facts.state_length, state_dim),
    )
    return lambda cameras, prompt_length, horizon: checked_dims(
        lambda: OpenVlaOftDims(
            **backbone,
            prompt_length=prompt_length,
            action_dim=action_dim,
            cameras=cameras,
            horizon=horizon,
            state_dim=state_dim,
            head_width=head_width,
            head_blocks=shape.depth('head.blocks') if 'head.blocks.0.norm.weight' in shape else 0,
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
