"""Checkpoints of BitVLA: folders as its fine-tuning on OpenVLA-OFT's ground writes them.

The files hold master weights; the bundle gets what the policy computes with: -1, 0 and 1.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from vla_convert.checkpoints.dims import Heads, MakeDims, Shapes
from vla_convert.checkpoints.draft import USUAL, Draft
from vla_convert.checkpoints.folder_facts import CONFIG_FILE, ExportError, expect
from vla_convert.checkpoints.norm_stats import read_data_set
from vla_convert.checkpoints.oft_folder import HEAD_NAMES, fill_oft, read_heads
from vla_convert.checkpoints.reader import CheckpointReader, Source
from vla_convert.checkpoints.tensor_names import DECODER, SIGLIP, Rows, TensorNames, under
from vla_convert.checkpoints.tensors import CheckpointError, ComputedTensor
from vla_convert.checkpoints.unread_keys import TRANSFORMERS_KEYS
from vla_runtime.bundle.tensors import StoredTensor, read_array
from vla_runtime.declarations.bitvla import STOP
from vla_runtime.family.ternary_weights import pack, packed_width, scale_of, ternary_of
from vla_runtime.files.json_file import JsonMapping, read_json
from vla_runtime.processing.prompts import Piece
from vla_runtime.processing.tokenizer import Tokenizer

_TOWER = 'vision_tower.vision_model.'
_BITNET: Rows = {
    **DECODER,
    'layers.{i}.self_attn.attn_sub_norm.*': 'blocks.{i}.attention.norm.*',
    'layers.{i}.mlp.ffn_sub_norm.*': 'blocks.{i}.mlp.norm.*',
}
NAMES = TensorNames(
    rows={
        **under(_TOWER, 'vision.', SIGLIP),
        'multi_modal_projector.linear_{1|2}.*': 'vision.projector.fc{1|2}.*',
        **under('language_model.(model.)', 'language.', _BITNET),
        **HEAD_NAMES,
    },
    # Features are read in front of the tower's norm, and nothing is written as text.
    unused=(
        f'{_TOWER}{{post_layernorm|head}}.*',
        '(language_model.)lm_head.weight',
        'language_model.(model.)layers.{i}.self_attn.rotary_emb.inv_freq',
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


def read_model(config: JsonMapping) -> dict[str, Any]:
    """Read the dimensions that no shape shows; JsonError: unsupported settings."""
    for key, value in _FIXED.items():
        expect(config, key, value)
    text, vision = (config.mapping(f'{part}_config', optional=True) for part in ('text', 'vision'))
    for key, value in _TEXT_FIXED.items():
        expect(text, key, value)
    if text.value('rope_scaling') is not None:
        raise text.error('rope_scaling', 'is not supported; expected null')
    for key, value in _VISION_FIXED.items():
        expect(vision, key, value)
    kv_heads = text.count('num_key_value_heads', text.count('num_attention_heads', None))
    return {
        'vision.num_heads': vision.count('num_attention_heads', None),
        'language.num_kv_heads': kv_heads,
        'rope_base': float(text.get('rope_theta', (int, float), 5e5)),
        'rms_epsilon': float(text.get('rms_norm_eps', (int, float), 1e-5)),
        'ternary_vision': _is_ternary(vision),
    }


def _blocks_read(config: JsonMapping, depth: int) -> int:
    """Return how many blocks of the tower the projector's features go through (JsonError)."""
    # Negative from the end; 0 is the first block's input.
    layer = config.get('vision_feature_layer', (int, list), -2)
    if not isinstance(layer, int):
        raise config.error('vision_feature_layer', 'is a list; expected one block')
    blocks = layer if layer >= 0 else depth + 1 + layer
    if not 1 <= blocks <= depth:
        raise config.error(
            'vision_feature_layer', f'{layer} where a block of a tower of {depth} is expected'
        )
    return blocks


def _is_ternary(vision: JsonMapping) -> bool:
    bits = vision.get('vit_weight_bits', int, 32), vision.get('vit_act_bits', int, 32)
    if bits not in (_TERNARY, _FULL):
        raise vision.error(
            'vit_weight_bits',
            f'{bits[0]} with vit_act_bits {bits[1]} is not supported; expected 1 and 8, or 32 and '
            '32',
        )
    return bits == _TERNARY


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
    # SigLIP base and So400m; BitNet b1.58 2B.
    heads: ClassVar[Mapping[str, Heads]] = {
        'vision.num_heads': Heads({768: 12, 1152: 16}, 'SigLIP So400m has 16'),
        'language.num_kv_heads': Heads({2560: 5}, 'BitNet b1.58 2B has 5'),
    }
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

    def read(self, draft: Draft) -> None:
        draft.is_of('BitVLA', 'bitvla')
        draft.source = {'checkpoint': draft.kind}
        vision = draft.config.mapping('vision_config')
        draft.image_size_key = 'vision_config.image_size'
        draft.write(vision.place('image_size'), image_size=vision.count('image_size', None))
        draft.write('BitVLA itself', prompt_template='bitvla')
        draft.assume(USUAL, prompt_length=_PROMPT_LENGTH)
        fill_oft(draft, read_data_set(draft))

    def select(self, source: Source) -> dict[str, StoredTensor]:
        """Add both heads, leave out the blocks that nothing reads, and round master weights."""
        tensors = super().select(source)
        if not any(name.startswith('head.') for name in tensors):
            for theirs, stored in read_heads(source.folder).items():
                tensors[NAMES.ours(theirs) or theirs] = stored
        config = read_json(source.folder / CONFIG_FILE)
        ternary_vision = read_model(config)['ternary_vision']
        blocks = _blocks_read(config, Shapes(tensors).depth('vision.blocks'))
        chosen: dict[str, StoredTensor] = {}
        for name, stored in without_later_blocks(tensors, blocks).items():
            if not is_ternary(name, ternary_vision):
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
        facts, options = source.facts, source.options
        if options.unnorm_key is not None:
            stated = facts.source['unnorm_key']
            source.missing.pick('--unnorm-key', options.unnorm_key, stated, 'name of the data set')
        tokenizer = facts.tokenizer or options.tokenizer
        given = {
            **read_model(read_json(source.folder / CONFIG_FILE)),
            # The state's token follows the last image.
            'state_place': lambda values: values['image_places'][-1],
            'stop_token': lambda values: _stop_token(tokenizer),
        }
        return self.dims(source._replace(tensors=_with_masters(source.tensors)), given)


def _with_masters(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Tensors with the master weights instead of those computed from them."""
    shown = dict(tensors)
    for name, stored in tensors.items():
        if isinstance(stored, _Packed):
            shown[f'{name.removesuffix(".packed")}.weight'] = stored.master
    return shown


def _stop_token(tokenizer: Path | None) -> int:
    """Find the token after the answer's last action."""
    assert tokenizer is not None, 'image places are counted with it first'
    try:
        (ids,) = Tokenizer.load(tokenizer, bos=False).piece_tokens([Piece(STOP, True)])
    except ValueError as error:
        raise ExportError(str(error)) from None
    if len(ids) != 1:
        raise ExportError(f"{tokenizer}: has no token '{STOP}', which ends this policy's prompts")
    return ids[0]


READER = BitVlaReader()
