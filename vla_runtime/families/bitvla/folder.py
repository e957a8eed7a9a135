"""BitVLA's folders, as its fine-tuning writes them; nothing in them is executed.

`config.json` and safetensors are a LLaVA of SigLIP and BitNet, master weights; the rest is as
`oft_folder` reads it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from vla_runtime.checkpoints.folder_facts import CONFIG_FILE, FolderFacts, expect
from vla_runtime.checkpoints.norm_stats import read_data_set
from vla_runtime.checkpoints.oft_folder import oft_facts
from vla_runtime.files.json_file import JsonMapping, read_json

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
        kv_heads: key and value heads of the language model.
        rope_base: base of its rotary positions.
        rms_epsilon: epsilon of its norms.
        vision_heads: heads of the tower.
        feature_layer: block of the tower whose output the projector reads, counted from the end
            where it is negative; 0 is what goes into the first.
        ternary_vision: the tower's linear layers are ternary.
    """

    kv_heads: int | None
    rope_base: float
    rms_epsilon: float
    vision_heads: int | None
    feature_layer: int
    ternary_vision: bool


def read_bitvla_folder(folder: Path, unnorm_key: str | None) -> FolderFacts:
    """Read all facts in a folder.

    Args:
        folder: folder of the checkpoint.
        unnorm_key: data set whose statistics state and actions are in; needed where the folder has
            those of several.

    Raises:
        ExportError, JsonError: missing or damaged files.
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
    """Read what config.json says of the networks.

    Raises:
        JsonError: settings that the networks are not written for.
    """
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
