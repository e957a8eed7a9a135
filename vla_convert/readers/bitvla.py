"""Checkpoints of BitVLA: folders as its fine-tuning on OpenVLA-OFT's ground writes them.

The files hold master weights; the bundle gets what the policy computes with: -1, 0 and 1.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import numpy as np

from vla_convert.checkpoints.folder_facts import (
    CONFIG_FILE,
    ExportError,
    FolderFacts,
    count_image_places,
    expect,
)
from vla_convert.checkpoints.norm_stats import read_data_set
from vla_convert.checkpoints.oft_folder import HEAD_NAMES, oft_facts, read_heads
from vla_convert.checkpoints.options import ExportOptions
from vla_convert.checkpoints.reader import CheckpointReader, MakeDims, Source
from vla_convert.checkpoints.tensor_names import DECODER, SIGLIP, TensorNames, rows_under
from vla_convert.checkpoints.tensors import CheckpointError, ComputedTensor
from vla_convert.checkpoints.unread_keys import TRANSFORMERS_KEYS
from vla_convert.readers.block_sizes import (
    KnownHeads,
    Shapes,
    check_stated,
    checked_dims,
    decoder_dims,
    image_size_of,
    resolve_heads,
    vision_dims,
)
from vla_runtime.bundle.tensors import StoredTensor, read_array
from vla_runtime.families.bitvla.declaration import PROMPT, STOP, BitVlaDims
from vla_runtime.families.blocks.ternary_weights import pack, packed_width, scale_of, ternary_of
from vla_runtime.files.json_file import JsonMapping, read_json
from vla_runtime.processing.prompts import Piece
from vla_runtime.processing.tokenizer import Tokenizer

_TOWER = r'vision_tower\.vision_model\.'
_LANGUAGE = r'language_model\.'
NAMES = TensorNames(
    rows=(
        *rows_under(_TOWER, 'vision.', SIGLIP[:-1]),
        (
            re.compile(rf'{_TOWER}embeddings\.position_embedding\.weight'),
            'vision.position_embedding',
        ),
        *rows_under(
            r'multi_modal_projector\.',
            'vision.projector.',
            ((r'linear_(?P<n>[12])', r'fc\g<n>'),),
        ),
        *rows_under(
            rf'{_LANGUAGE}(?:model\.)?',
            'language.',
            (
                *DECODER,
                (
                    r'layers\.(?P<i>\d+)\.self_attn\.attn_sub_norm',
                    r'blocks.\g<i>.attention.norm',
                ),
                (r'layers\.(?P<i>\d+)\.mlp\.ffn_sub_norm', r'blocks.\g<i>.mlp.norm'),
            ),
        ),
        *HEAD_NAMES,
    ),
    # Features are read in front of the tower's norm, and nothing is written as text.
    unused=(
        re.compile(rf'{_TOWER}(?:post_layernorm|head)\..*'),
        re.compile(rf'{_LANGUAGE}lm_head\.weight'),
        re.compile(r'lm_head\.weight'),
        re.compile(rf'{_LANGUAGE}(?:model\.)?layers\.\d+\.self_attn\.rotary_emb\.inv_freq'),
    ),
)
_LAYERS = r'blocks\.\d+\.(?:attention\.(?:q|k|v|out)|mlp\.(?:gate|up|down|fc1|fc2))'
_OF_LANGUAGE = re.compile(rf'language\.(?P<layer>{_LAYERS})\.weight')
_OF_VISION = re.compile(rf'vision\.(?P<layer>{_LAYERS})\.weight')
_VISION_BLOCK = re.compile(r'vision\.blocks\.(?P<i>\d+)\.')


def is_ternary(name: str, ternary_vision: bool) -> bool:
    """Return whether a tensor, by our name, is the master weights of a ternary layer."""
    return bool(_OF_LANGUAGE.fullmatch(name) or (ternary_vision and _OF_VISION.fullmatch(name)))


def without_later_blocks(
    tensors: Mapping[str, StoredTensor], blocks: int
) -> dict[str, StoredTensor]:
    """Leave out the tower's blocks from this one on, which nothing reads."""
    return {
        name: stored
        for name, stored in tensors.items()
        if not (found := _VISION_BLOCK.match(name)) or int(found['i']) < blocks
    }


# Tokens around the instruction, and an instruction.
_PROMPT_LENGTH = 96
# Settings of config.json that the networks are written for.
_FIXED = {
    'model_type': 'bitvla',
    'vision_feature_select_strategy': 'full',
    'projector_hidden_act': 'gelu',
    'multimodal_projector_bias': True,
}
_TEXT_FIXED = {'attention_bias': False, 'hidden_act': 'relu2'}
_VISION_FIXED = {
    'hidden_act': 'gelu_pytorch_tanh',
    'vit_weight_quant_method': 'absmean',
    'vit_act_quant_method': 'absmax_per_token',
    'layer_norm_eps': 1e-6,
}
_TERNARY, _FULL = (1, 8), (32, 32)


@dataclass(frozen=True)
class ModelFacts:
    """Facts of config.json that no shape shows; None where it has no number.

    Attributes:
        feature_layer: vision block that the projector reads; negative from the end, 0 its
            input.
        ternary_vision: the tower's linear layers are ternary.
    """

    kv_heads: int | None
    rope_base: float
    rms_epsilon: float
    vision_heads: int | None
    feature_layer: int
    ternary_vision: bool


def read_bitvla_folder(folder: Path, unnorm_key: str | None) -> FolderFacts:
    """Read all facts in a folder; `unnorm_key` is needed where it has several data sets.

    Raises ExportError or JsonError: missing or damaged files.
    """
    image_size = read_json(folder / CONFIG_FILE).mapping('vision_config').count('image_size', None)
    return oft_facts(
        folder,
        read_data_set(folder, unnorm_key),
        kind='BitVLA',
        family='bitvla',
        image_size=image_size,
        image_size_key='vision_config.image_size',
        template='bitvla',
        prompt_length=_PROMPT_LENGTH,
    )


def read_model(folder: Path) -> ModelFacts:
    """Read what config.json says of the networks; JsonError: unsupported settings."""
    config = read_json(folder / CONFIG_FILE)
    for key, value in _FIXED.items():
        expect(config, key, value)
    text, vision = (config.mapping(f'{part}_config', optional=True) for part in ('text', 'vision'))
    for key, value in _TEXT_FIXED.items():
        expect(text, key, value)
    if text.value('rope_scaling') is not None:
        raise text.error('rope_scaling', 'is not supported; expected null')
    for key, value in _VISION_FIXED.items():
        expect(vision, key, value)
    layer = config.get('vision_feature_layer', (int, list), -2)
    if not isinstance(layer, int):
        raise config.error('vision_feature_layer', 'is a list; expected one block')
    return ModelFacts(
        kv_heads=text.count('num_key_value_heads', text.count('num_attention_heads', None)),
        rope_base=float(text.get('rope_theta', (int, float), 5e5)),
        rms_epsilon=float(text.get('rms_norm_eps', (int, float), 1e-5)),
        vision_heads=vision.count('num_attention_heads', None),
        feature_layer=layer,
        ternary_vision=_is_ternary(vision),
    )


def _is_ternary(vision: JsonMapping) -> bool:
    bits = vision.get('vit_weight_bits', int, 32), vision.get('vit_act_bits', int, 32)
    if bits not in (_TERNARY, _FULL):
        raise vision.error(
            'vit_weight_bits',
            f'{bits[0]} with vit_act_bits {bits[1]} is not supported; expected 1 and 8, or 32 and '
            '32',
        )
    return bits == _TERNARY


# Heads of SigLIP base and So400m by width, and of BitNet b1.58 2B.
_VISION_HEADS = {768: 12, 1152: 16}
_KV_HEADS = {2560: 5}
_MARK = '.self_attn.attn_sub_norm.weight'


@dataclass(frozen=True)
class _OfMaster(ComputedTensor):
    master: StoredTensor = field(kw_only=True)

    def read(self) -> np.ndarray:
        """Return the master weights in float32; CheckpointError: not finite."""
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
        heads = resolve_heads(shape, known, options, missing)
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
    """Tensors with the master weights instead of those computed from them."""
    shown = dict(tensors)
    for name, stored in tensors.items():
        if isinstance(stored, _Packed):
            shown[f'{name.removesuffix(".packed")}.weight'] = stored.master
    return shown


def _stop_token(tokenizer: Path) -> int:
    """Find the token after the answer's last action."""
    try:
        (ids,) = Tokenizer.load(tokenizer, bos=False).piece_tokens([Piece(STOP, True)])
    except ValueError as error:
        raise ExportError(str(error)) from None
    if len(ids) != 1:
        raise ExportError(f"{tokenizer}: has no token '{STOP}', which ends this policy's prompts")
    return ids[0]


READER = BitVlaReader()
