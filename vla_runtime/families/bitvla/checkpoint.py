"""Checkpoints of BitVLA: folders as its fine-tuning on OpenVLA-OFT's ground writes them.

The files hold master weights; the bundle gets what the policy computes with: -1, 0 and 1.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import numpy as np

from vla_runtime.bundle.tensors import StoredTensor, read_array
from vla_runtime.checkpoints.errors import ExportError
from vla_runtime.checkpoints.folder_facts import FolderFacts
from vla_runtime.checkpoints.image_places import count_image_places
from vla_runtime.checkpoints.oft_folder import read_heads
from vla_runtime.checkpoints.options import ExportOptions
from vla_runtime.checkpoints.reader import CheckpointReader, MakeDims, Source
from vla_runtime.checkpoints.tensors import CheckpointError, ComputedTensor
from vla_runtime.checkpoints.unread_keys import TRANSFORMERS_KEYS
from vla_runtime.families.bitvla.declaration import PROMPT, STOP
from vla_runtime.families.bitvla.dimensions import BitVlaDims
from vla_runtime.families.bitvla.folder import read_bitvla_folder, read_model
from vla_runtime.families.bitvla.tensor_names import NAMES, is_ternary, without_later_blocks
from vla_runtime.families.blocks.block_sizes import (
    KnownHeads,
    Shapes,
    check_stated,
    checked_dims,
    decoder_dims,
    image_size_of,
    settle_heads,
    vision_dims,
)
from vla_runtime.families.blocks.ternary_weights import pack, packed_width, scale_of, ternary_of
from vla_runtime.processing.prompt_layout import Piece
from vla_runtime.processing.tokenizer import Tokenizer

# Heads of SigLIP base and So400m by width, and of BitNet b1.58 2B.
_VISION_HEADS = {768: 12, 1152: 16}
_KV_HEADS = {2560: 5}
_MARK = '.self_attn.attn_sub_norm.weight'


@dataclass(frozen=True)
class _OfMaster(ComputedTensor):
    """A tensor that is computed from master weights.

    Attributes:
        master: the master weights.
    """

    master: StoredTensor = field(kw_only=True)

    def read(self) -> np.ndarray:
        """Return the master weights in float32.

        Raises:
            CheckpointError: numbers that are not finite.
        """
        numbers = (
            np.frombuffer(self.master.data(), '<f4').reshape(self.master.shape)
            if isinstance(self.master, ComputedTensor)
            else read_array(self.master)
        )
        if not np.isfinite(numbers).all():
            raise CheckpointError(
                f"{self.path}: tensor '{self.name}' has numbers that are not finite: the training "
                'diverged, or the file is damaged'
            )
        return numbers


class _Packed(_OfMaster):
    def data(self) -> bytes:
        return pack(ternary_of(self.read())).tobytes()


class _Scale(_OfMaster):
    def data(self) -> bytes:
        return np.asarray(scale_of(self.read()), '<f4').tobytes()


class BitVlaReader(CheckpointReader):
    names = NAMES
    known = (
        *TRANSFORMERS_KEYS,
        'image_token_index|image_seq_length|n_action_bins|norm_stats(\\..*)?',
    )
    projects = ('BitVLA',)
    wanted: ClassVar[Mapping[str, str]] = {
        '--horizon': "actions of a chunk (NUM_ACTIONS_CHUNK of the training; LIBERO's have 8)",
        '--tokenizer': "tokenizer.json of the policy, from its fine-tuning's folder",
    }

    def recognises(self, names: Collection[str]) -> bool:
        return any(name.endswith(_MARK) for name in names) and any(
            name.startswith('multi_modal_projector.') for name in names
        )

    def family(self, folder: Path, tensors: Mapping[str, StoredTensor]) -> str:
        return 'bitvla'

    def read_folder(self, folder: Path, family: str, options: ExportOptions) -> FolderFacts:
        return read_bitvla_folder(folder, options.unnorm_key)

    def select(self, source: Source) -> dict[str, StoredTensor]:
        """Add both heads, leave out the blocks that nothing reads, and round master weights."""
        tensors = super().select(source)
        if not any(name.startswith('head.') for name in tensors):
            for theirs, stored in read_heads(source.folder).items():
                tensors[NAMES.ours(theirs) or theirs] = stored
        model = read_model(source.folder)
        depth = Shapes(tensors, 'BitVLA').depth('vision.blocks')
        layer = model.feature_layer
        blocks = layer if layer >= 0 else depth + 1 + layer
        if not 1 <= blocks <= depth:
            raise CheckpointError(
                f'{source.folder}: config.json: field vision_feature_layer: {layer} where a block '
                f'of a tower of {depth} is expected'
            )
        chosen: dict[str, StoredTensor] = {}
        for name, stored in without_later_blocks(tensors, blocks).items():
            if not is_ternary(name, model.ternary_vision):
                chosen[name] = stored
                continue
            if len(stored.shape) != 2 or 0 in stored.shape:
                raise CheckpointError(
                    f"{stored.path}: tensor '{stored.name}' has shape {list(stored.shape)} where "
                    'a matrix is expected'
                )
            layer_name, (outputs, inputs) = name.removesuffix('.weight'), stored.shape
            place = (stored.name, stored.path)
            chosen[f'{layer_name}.packed'] = _Packed(
                *place, 'U8', (outputs, packed_width(inputs)), 0, master=stored
            )
            chosen[f'{layer_name}.weight_scale'] = _Scale(*place, 'F32', (), 0, master=stored)
        return chosen

    def sizes(self, source: Source) -> MakeDims | None:
        folder, tensors, facts, options, missing = source
        shape, model = Shapes(_with_masters(tensors), 'BitVLA'), read_model(folder)
        if options.unnorm_key is not None:
            stated = facts.source['unnorm_key']
            missing.pick('--unnorm-key', options.unnorm_key, stated, 'name of the data set')
        image_size = image_size_of(shape)
        vocabulary, width = shape('language.embedding.weight', 2)
        action_dim, head_width = shape('head.fc2.weight', 2)
        state_dim = shape('state_projection.fc1.weight', 2)[1]
        check_stated(
            missing,
            (facts.image_size_key, facts.image_size, image_size),
            ('action dimensions', facts.action_length, action_dim),
            ('state dimensions', facts.state_length, state_dim),
        )
        known = KnownHeads(
            vision=model.vision_heads
            or _VISION_HEADS.get(shape('vision.blocks.0.norm1.bias', 1)[0]),
            kv=model.kv_heads or _KV_HEADS.get(width),
            vision_example='SigLIP So400m has 16',
            kv_example='BitNet b1.58 2B has 5',
        )
        heads = settle_heads(shape, known, options, missing)
        tokenizer = facts.tokenizer or options.tokenizer
        if heads is None or tokenizer is None or not tokenizer.is_file():
            return None  # The exporter asks for a tokenizer itself.
        language = decoder_dims(shape, 'language', heads.kv)
        blocks = shape.depth('head.blocks') if 'head.blocks.0.norm.weight' in shape else 0

        def make(cameras: int, prompt_length: int, horizon: int) -> BitVlaDims:
            places = count_image_places(tokenizer, PROMPT, cameras, prompt_length)
            return BitVlaDims(
                vision=vision_dims(shape, heads.vision, image_size),
                language=language,
                vocabulary=vocabulary,
                cameras=cameras,
                image_places=places,
                # The state's token follows the last image.
                state_place=places[-1],
                prompt_length=prompt_length,
                stop_token=_stop_token(tokenizer),
                horizon=horizon,
                action_dim=action_dim,
                state_dim=state_dim,
                head_width=head_width,
                head_blocks=blocks,
                ternary_vision=model.ternary_vision,
                rope_base=model.rope_base,
                rms_epsilon=model.rms_epsilon,
            )

        return lambda cameras, prompt_length, horizon: checked_dims(
            lambda: make(cameras, prompt_length, horizon)
        )


def _with_masters(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Tensors with the master weights in place of what is computed from them."""
    shown = dict(tensors)
    for name, stored in tensors.items():
        if isinstance(stored, _Packed):
            shown[f'{name.removesuffix(".packed")}.weight'] = stored.master
    return shown


def _stop_token(tokenizer: Path) -> int:
    """Find the token behind the places of the actions.

    Raises:
        ExportError: the vocabulary has none.
    """
    try:
        (ids,) = Tokenizer.load(tokenizer, bos=False).piece_tokens([Piece(STOP, True)])
    except ValueError as error:
        raise ExportError(str(error)) from None
    if len(ids) != 1:
        raise ExportError(f"{tokenizer}: has no token '{STOP}', which ends this policy's prompts")
    return ids[0]


READER = BitVlaReader()
