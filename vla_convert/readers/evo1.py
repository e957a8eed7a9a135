"""Checkpoints of Evo-1: LeRobot's folders.

The folder lacks head counts (looked up by width) and tokenizer of its vision-language model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from vla_convert.checkpoints.dims import Heads, MakeDims, Shapes, check_stated
from vla_convert.checkpoints.draft import USUAL, Draft
from vla_convert.checkpoints.folder_facts import CONFIG_FILE, ExportError
from vla_convert.checkpoints.lerobot_folder import LeRobotPolicy
from vla_convert.checkpoints.lerobot_processors import POSTPROCESSOR_FILE, camera_statistics
from vla_convert.checkpoints.missing_facts import MissingFacts
from vla_convert.checkpoints.reader import VLM_TOKENIZER, CheckpointReader, Source
from vla_convert.checkpoints.tensor_names import DECODER, TensorNames, under
from vla_convert.checkpoints.tensors import CheckpointError
from vla_runtime.bundle.schema import CameraSpec, ImageSpec
from vla_runtime.bundle.tensors import StoredTensor
from vla_runtime.files.json_file import JsonMapping, read_json

_VLM = 'embedder.model.'
_TOWER = {
    'embeddings.cls_token': 'class_token',
    'embeddings.position_embeddings': 'position_embedding',
    'embeddings.patch_embeddings.projection.*': 'patch_embedding.*',
    **under(
        'encoder.layer.{i}.',
        'blocks.{i}.',
        {
            'lambda_{1|2}': 'scale{1|2}',
            'layernorm_before.*': 'norm1.*',
            'layernorm_after.*': 'norm2.*',
            'attention.{q|k|v}_proj.*': 'attention.{q|k|v}.*',
            'attention.projection_layer.*': 'attention.out.*',
            'mlp.{fc1|fc2}.*': 'mlp.{fc1|fc2}.*',
        },
    ),
}
_BLOCK = {
    'norm{1|2}.*': 'norm{1|2}.*',
    'attn.in_proj_{weight|bias}': 'attention.{q,k,v}.{weight|bias}',
    'attn.out_proj.*': 'attention.out.*',
    'ff.0.*': 'mlp.fc1.*',
    'ff.2.*': 'mlp.fc2.*',
}
_HEAD = {
    'action_encoder.pos_encoding.pe': 'action_positions',
    'time_pos_enc.pe': 'time_rows',
    'norm_out.*': 'norm.*',
    'seq_pool_proj.*': 'pool.*',
    # With one embodiment each of these is a layer, with several a stack of matrices.
    'state_encoder.{fc1|fc2}(.linear).*': 'state_encoder.{fc1|fc2}.*',
    'action_encoder.W{1|2|3}(.linear).*': 'action_encoder.fc{1|2|3}.*',
    'mlp_head.{fc1|fc2}(.linear).*': 'velocity_head.{fc1|fc2}.*',
    **under('transformer_blocks.{i}.', 'blocks.{i}.', _BLOCK),
}
NAMES = TensorNames(
    rows={
        **under(f'{_VLM}vision_tower.', 'vision.', _TOWER),
        f'{_VLM}multi_modal_projector.layer_norm.*': 'vision.projector.norm.*',
        f'{_VLM}multi_modal_projector.linear_{{1|2}}.*': 'vision.projector.fc{1|2}.*',
        **under(f'{_VLM}language_model.', 'language.', DECODER),
        **under('action_head.', '', _HEAD),
    },
)
# Layers with a matrix for each embodiment.
_EMBODIMENT = re.compile(r'(state_encoder|action_encoder|velocity_head)\.fc[123]\.(weight|bias)')
# Text tokens of a prompt: those around three images, 20, and an instruction; LeRobot pads to the
# longest of a batch.
_PROMPT_LENGTH = 68
# ImageNet's, of the channels in [0, 1]: the network normalises images itself.
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_ACTION_STEP = 'evo1_action_processor'


class Evo1Reader(CheckpointReader):
    names = NAMES
    # InternViT-300M; Qwen2.5 0.5B and 1.5B.
    heads: ClassVar[Mapping[str, Heads]] = {
        'vision.num_heads': Heads({1024: 16}, 'InternVL3-1B has 16'),
        'language.num_kv_heads': Heads({896: 2, 1536: 2}, 'InternVL3-1B has 2'),
    }
    known = (
        'training_stage|apply_training_stage_defaults|enable_gradient_checkpointing',
        'gradient_checkpointing_use_reentrant|enable_vlm_gradient_checkpointing',
        'finetune_(vlm|language_model|vision_model|action_head)',
        'max_text_length|vlm_(model_name|num_layers|dtype)|use_flash_attn',
        'embed_dim|hidden_dim|state_hidden_dim|num_layers|num_categories',
        'task_field|embodiment_id_field',
        # Of binarize_gripper, which is refused.
        r'(steps\[\d+\]\.config\.)?gripper_(index|threshold)',
        r'(steps\[\d+\]\.config\.)?gripper_(below|above)_threshold_value',
    )
    lerobot = (
        LeRobotPolicy(
            type='evo1',
            template='after_images',
            images=ImageSpec(padding='stretch', resample='bicubic'),
            steps=('evo1_pad_state_processor', 'evo1_pad_action_processor', _ACTION_STEP),
            fixed={
                'action_head': 'flowmatching',
                'return_cls_only': False,
                'binarize_gripper': False,
            },
            keys={
                'image_size': 'image_resolution',
                'denoise_steps': 'num_inference_timesteps',
                'action_dim': 'max_action_dim',
                'state_dim': 'max_state_dim',
            },
            source=('vlm_model_name', 'default_embodiment_id'),
        ),
    )
    wanted = VLM_TOKENIZER

    def refuse_unserved(self, folder: Path) -> None:
        path = folder / CONFIG_FILE
        if not path.is_file():
            return
        config = read_json(path)
        if 'type' not in config and 'vlm_name' in config and 'per_action_dim' in config:
            raise ExportError(
                f"{path}: is of Evo-1's authors, who keep weights and statistics in another form; "
                "served are LeRobot's folders (0.6 and later, type evo1): train or fine-tune the "
                'policy with LeRobot'
            )

    def read(self, draft: Draft) -> None:
        super().read(draft)
        views = _views(draft.config, draft.cameras)
        draft.write(draft.config.place('max_views'), cameras=views)
        draft.assume(USUAL, prompt_length=_PROMPT_LENGTH)
        draft.normalisation = replace(draft.normalisation, images='mean_std_lerobot')
        draft.statistics = {
            **(draft.statistics or {}),
            **camera_statistics(draft.cameras, _MEAN, _STD),
        }

    def select(self, source: Source) -> dict[str, StoredTensor]:
        """Keep the matrices of the embodiment that config.json names (`default_embodiment_id`)."""
        stated = read_json(source.folder / CONFIG_FILE).get('default_embodiment_id', int, 0)
        source.missing.pick(
            '--embodiment', source.options.embodiment, str(stated), 'number of the embodiment'
        )
        return of_embodiment(source.tensors, stated)

    def sizes(self, source: Source) -> MakeDims | None:
        folder, tensors, facts, _, missing = source
        config, shape = read_json(folder / CONFIG_FILE), Shapes(tensors)
        _check_action_step(folder, config, facts, missing)
        # Of a checkpoint for several embodiments: its matrices are no layers.
        input_major = not tensors['state_encoder.fc1.weight'].name.endswith('.linear.weight')
        action_dim, state_dim = (
            shape(f'{encoder}_encoder.fc1.weight', 2)[0 if input_major else 1]
            for encoder in ('action', 'state')
        )
        check_stated(missing, 'action dimensions', facts.action_dim, action_dim)
        check_stated(missing, 'state dimensions', facts.state_dim, state_dim)
        given = {
            'head.num_heads': config.count('num_heads'),
            'action_dim': action_dim,
            'real_actions': facts.action_length or action_dim,
            'state_dim': state_dim,
            'input_major': input_major,
        }
        return self.dims(source, given)


def _views(config: JsonMapping, cameras: tuple[CameraSpec, ...]) -> tuple[CameraSpec, ...]:
    """Fill the views of the network up with cameras that are always masked."""
    views, present = config.count('max_views'), [one for one in cameras if one.present]
    if len(present) > views:
        raise config.error('max_views', f'{views}, but input_features has {len(present)} cameras')
    empty = range(views - len(present))
    return (*present, *(CameraSpec(f'empty_camera_{n}', present=False) for n in empty))


def of_embodiment(tensors: Mapping[str, StoredTensor], embodiment: int) -> dict[str, StoredTensor]:
    """Cut one embodiment's matrices out of those of all; CheckpointError: no such embodiment."""
    chosen = dict(tensors)
    for name, stored in tensors.items():
        axes = 3 if name.endswith('weight') else 2
        if not _EMBODIMENT.fullmatch(name) or len(stored.shape) != axes:
            continue
        matrices = stored.shape[0]
        if not 0 <= embodiment < matrices:
            raise CheckpointError(
                f"{stored.path}: tensor '{stored.name}' has matrices of {matrices} embodiments, "
                f'but default_embodiment_id in {CONFIG_FILE} is {embodiment}; set it to 0 to '
                f'{matrices - 1}'
            )
        chosen[name] = stored.part(embodiment)
    return chosen


def _check_action_step(
    folder: Path, config: JsonMapping, facts: Draft, missing: MissingFacts
) -> None:
    """Note a step behind the network that cuts or switches actions otherwise than this runtime."""
    if config.value('postprocess_action_dim') not in (None, facts.action_length):
        missing.conflict(
            f'config.json says postprocess_action_dim {config.values["postprocess_action_dim"]} '
            f'but {facts.action_length} action dimensions; only equal ones are supported'
        )
    for step in read_json(folder / POSTPROCESSOR_FILE).mappings('steps'):
        if step.get('registry_name', str, None) != _ACTION_STEP:
            continue
        found = step.mapping('config', optional=True)
        if found.get('binarize_gripper', bool, False):
            raise found.error(
                'binarize_gripper', 'True is not supported; this runtime does not switch actions'
            )
        kept = found.count('action_dim', facts.action_length)
        if kept != facts.action_length:
            raise found.error(
                'action_dim', f'{kept} where the {facts.action_length} of {CONFIG_FILE} is expected'
            )


READER = Evo1Reader()
