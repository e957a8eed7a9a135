"""Checkpoints of MolmoAct2: LeRobot's folders, and the folder of the model that they name.

LeRobot keeps sizes, image processor and tokenizer in the folder that config.json names as
checkpoint_path, such as allenai/MolmoAct2 on the Hugging Face Hub.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from vla_convert.checkpoints.dims import MakeDims, check_stated
from vla_convert.checkpoints.draft import USUAL, Draft
from vla_convert.checkpoints.feature_names import camera_name
from vla_convert.checkpoints.folder_facts import CONFIG_FILE, ExportError, expect, must_agree
from vla_convert.checkpoints.lerobot_folder import LeRobotPolicy, feature_image
from vla_convert.checkpoints.lerobot_processors import (
    ACTION,
    POSTPROCESSOR_FILE,
    PREPROCESSOR_FILE,
    STATE,
)
from vla_convert.checkpoints.missing_facts import MissingFacts
from vla_convert.checkpoints.options import ExportOptions
from vla_convert.checkpoints.reader import CheckpointReader, Source
from vla_convert.checkpoints.tensor_names import TensorNames, under
from vla_convert.checkpoints.tensors import CheckpointError, joined
from vla_runtime.bundle.schema import CameraSpec, ImageSpec
from vla_runtime.bundle.tensors import StoredTensor, read_arrays
from vla_runtime.declarations.molmoact2 import END, PROMPT, ImageIds
from vla_runtime.files.free_text import FreeText
from vla_runtime.files.json_file import JsonMapping, read_json
from vla_runtime.processing.joint_spaces import JointFrame
from vla_runtime.processing.prompts import Piece
from vla_runtime.processing.tiles import choose_tiling
from vla_runtime.processing.tokenizer import Tokenizer

_TOWER_BLOCK = {
    'attention_norm.*': 'norm1.*',
    'attention.w{q|k|v}.*': 'attention.{q|k|v}.*',
    'attention.wo.*': 'attention.out.*',
    'ffn_norm.*': 'norm2.*',
    'feed_forward.w1.*': 'mlp.fc1.*',
    'feed_forward.w2.*': 'mlp.fc2.*',
}
_TOWER = {
    'image_vit.patch_embedding.*': 'patch_embedding.*',
    'image_vit.positional_embedding': 'position_embedding',
    **under('image_vit.transformer.resblocks.{i}.', 'blocks.{i}.', _TOWER_BLOCK),
    'image_pooling_2d.w{q|k|v}.*': 'pooling.{q|k|v}.*',
    'image_pooling_2d.wo.*': 'pooling.out.*',
    'image_projector.w1.*': 'projector.gate.*',
    'image_projector.w2.*': 'projector.down.*',
    'image_projector.w3.*': 'projector.up.*',
}
_DECODER_BLOCK = {
    'attn_norm.*': 'input_norm.*',
    # Queries, keys and values of several lengths, which `select` cuts apart.
    'self_attn.att_proj.*': 'attention.qkv.*',
    'self_attn.attn_out.*': 'attention.out.*',
    'self_attn.{q|k}_norm.*': 'attention.{q|k}_norm.*',
    'ff_norm.*': 'post_norm.*',
    'mlp.ff_proj.*': 'mlp.{up,gate}.*',
    'mlp.ff_out.*': 'mlp.down.*',
}
_EXPERT_BLOCK = {
    'self_attn.qkv.*': 'attention.{q,k,v}.*',
    'self_attn.out_proj.*': 'attention.out.*',
    'cross_attn.q_proj.*': 'cross.q.*',
    'cross_attn.out_proj.*': 'cross.out.*',
    'mlp.{gate|up|down}_proj.*': 'mlp.{gate|up|down}.*',
    'modulation.linear.*': 'modulation.*',
}
_EXPERT = {
    'action_embed.*': 'action_in.*',
    'time_embed.1.*': 'time_in.*',
    'time_embed.3.*': 'time_out.*',
    'context_{k|v}_proj.*': 'context_{k|v}.*',
    **under('blocks.{i}.', 'blocks.{i}.', _EXPERT_BLOCK),
    'final_layer.modulation.linear.*': 'out_modulation.*',
    'final_layer.linear.*': 'out.*',
}
NAMES = TensorNames(
    rows={
        **under('(model.)vision_backbone.', 'vision.', _TOWER),
        '(model.)transformer.wte.embedding': 'language.embedding.weight',
        '(model.)transformer.wte.new_embedding': 'added_embedding.weight',
        **under('(model.)transformer.blocks.{i}.', 'language.blocks.{i}.', _DECODER_BLOCK),
        **under('(model.)action_expert.', 'expert.', _EXPERT),
    },
    # Of answers in tokens, and angles that are computed.
    unused=('(model.)lm_head.*', '(model.)transformer.ln_f.*', '(model.)transformer.rotary_emb.*'),
)
# Layer of the language model with queries, keys and values.
PACKED = '.qkv.'
# The text table, and its further rows.
TABLES = 'language.embedding.weight', 'added_embedding.weight'


def parts_of(length: int, num_heads: int, kv_heads: int) -> list[tuple[str, int, int]]:
    """Name, first row and rows of queries, keys and values in a layer of so many rows."""
    head = length // (num_heads + 2 * kv_heads)
    counts = {'q': num_heads * head, 'k': kv_heads * head, 'v': kv_heads * head}
    found, first = [], 0
    for name, count in counts.items():
        found.append((name, first, count))
        first += count
    return found


_PACK, _NORMALISER = 'molmoact2_pack_inputs', 'molmoact2_masked_normalizer'
_STATE_FRAME, _ACTION_FRAME = 'molmoact2_state_frame_transform', 'molmoact2_action_frame_transform'
_PROCESSOR, _TAGS = 'processor_config.json', 'norm_stats.json'
_WANTED = (
    'folder of the model that config.json names as checkpoint_path, such as allenai/MolmoAct2 on '
    'the Hugging Face Hub: config.json, processor_config.json, tokenizer.json and '
    'tokenizer_config.json, its weights are not needed'
)
# In config.json after LeRobot 0.6.1.
_LATER_KEY = 'train_mode_vlm'
# In names of adapters that were saved among the weights.
_ADAPTED = '.lora_A.'
# Text that LeRobot leaves room for, without images and state, and to what it rounds a prompt up.
_ROOM, _ROOM_STEP, _IMAGE_ROOM = 144, 64, 196
_HEAD_NORMS: Mapping[str, Literal['each', 'together']] = {'qwen3': 'each', 'olmo': 'together'}


class MolmoAct2Reader(CheckpointReader):
    names = NAMES
    known = (
        r'checkpoint_(path|revision|force_download)|trust_remote_code|norm_tag',
        r'discrete_(action_tokenizer|generation_max_steps|loss_token_weighting)',
        r'num_flow_timesteps|flow_matching_(cutoff|time_offset|time_scale|beta_alpha|beta_beta)',
        r'enable_(lora_vlm|lora_action_expert|knowledge_insulation|inference_cuda_graph)',
        r'per_episode_seed|eval_seed|lora_(rank|alpha|dropout|bias)',
        r'model_dtype|softmax_auxiliary_loss(_scale)?|optimizer_(vit|connector|action_expert)_lr',
        r'train_action_expert_only|freeze_embedding|dataset_feature_names(\..*)?|action_mode',
        r'train_mode_vlm|llm_residual_dropout|norm_stats_path',
        # What the steps of the preprocessor say again.
        r'image_keys|setup_type|control_mode|add_(setup|control)_tokens|normalize_(language|gripper)',
        r'num_state_tokens|max_sequence_length|joint_(signs|offsets)',
        r'steps\[\d+\]\.config\.(checkpoint_\w+|trust_remote_code|action_mode|discrete_\w+|eps)',
        r'steps\[\d+\]\.config\.(chunk_size|env_action_dim)',
        # The masks of the statistics again.
        r'steps\[\d+\]\.config\.normalization_masks(\..*)?',
    )
    lerobot = (
        LeRobotPolicy(
            type='molmoact2',
            template='setup_and_state',
            images=ImageSpec(padding='stretch', resample='bilinear_points'),
            steps=(
                *(_PACK, _STATE_FRAME, _ACTION_FRAME),
                *('molmoact2_clamp_normalized', 'molmoact2_clamp_action'),
            ),
            renamed_steps={
                _NORMALISER: 'normalizer_processor',
                'molmoact2_masked_unnormalizer': 'unnormalizer_processor',
            },
            fixed={'mask_action_dim_padding': True},
            keys={'action_dim': 'expected_max_action_dim'},
            source=('checkpoint_path', 'norm_tag'),
        ),
    )
    wanted: ClassVar[Mapping[str, str]] = {'--tokenizer': _WANTED}

    def policy(self, config: JsonMapping) -> LeRobotPolicy | None:
        found = super().policy(config)
        if found is not None:
            _refuse_discrete(config)
        return found

    def read(self, draft: Draft) -> None:
        super().read(draft)
        config, pack = draft.config, _step(draft.folder, PREPROCESSOR_FILE, _PACK)
        _write_normalisers(draft)
        _write_frame(draft)
        _write_cameras(draft, pack)
        _write_prompt(draft, pack)
        base = _base(draft.folder, config, draft.options, draft.missing)
        if base is None:
            return
        model = read_json(base / CONFIG_FILE)
        draft.write(config.place('checkpoint_path'), tokenizer=base / 'tokenizer.json')
        bos = _first_token(base)
        draft.prompt_words = {**draft.prompt_words, 'bos': FreeText(bos)}
        steps = config.count('num_inference_steps', None)
        place = config.place('num_inference_steps')
        if steps is None:
            steps, place = (
                model.count('flow_matching_num_steps', 10),
                'the model of checkpoint_path',
            )
        draft.write(place, denoise_steps=steps)
        if tag := config.get('norm_tag', str, '').strip():
            entry = _tags(base, model).mapping(tag)
            if (horizon := entry.count('action_horizon', None)) is not None:
                draft.write(entry.place('action_horizon'), horizon=horizon)

    def select(self, source: Source) -> dict[str, StoredTensor]:
        """Cut queries, keys and values of the language model apart, and join its text tables."""
        found: dict[str, StoredTensor] = {}
        _refuse_adapted(source)
        base = _base(source.folder, source.facts.config, source.options, source.missing)
        if base is None:
            return dict(source.tensors)
        text = read_json(base / CONFIG_FILE).mapping('text_config')
        heads = text.count('num_attention_heads'), text.count('num_key_value_heads')
        for name, stored in source.tensors.items():
            if PACKED not in name:
                found[name] = stored
                continue
            if stored.shape[0] % (heads[0] + 2 * heads[1]):
                raise CheckpointError(
                    f"{stored.path}: tensor '{stored.name}' of shape {list(stored.shape)} does not "
                    f'divide into {heads[0]} heads of queries and {heads[1]} of keys and values '
                    f'({base / CONFIG_FILE}, text_config)'
                )
            for part, first, count in parts_of(stored.shape[0], *heads):
                found[name.replace(PACKED, f'.{part}.')] = stored.rows(first, count)
        if all(name in found for name in TABLES):
            found[TABLES[0]] = joined(found[TABLES[0]], found.pop(TABLES[1]))
        return found

    def sizes(self, source: Source) -> MakeDims | None:
        config, facts = source.facts.config, source.facts
        base = _base(source.folder, config, source.options, source.missing)
        if base is None:
            return None
        model, processor = read_json(base / CONFIG_FILE), read_json(base / _PROCESSOR)
        own_start = processor.get('use_single_crop_start_token', bool, True)
        low = 'low_res_image_start_token_id' if own_start else 'image_start_token_id'
        given = {
            **_tower(model),
            **_decoder(model),
            **_expert(model),
            **_images(processor, config, facts.cameras),
            'image_ids': ImageIds(
                patch=model.count('image_patch_id'),
                start=model.count('image_start_token_id'),
                end=model.count('image_end_token_id'),
                column=model.count('image_col_id'),
                low_start=model.count(low),
            ),
            **_hidden(config, model, base / 'tokenizer.json', facts.prompt_words),
            'real_actions': facts.action_length,
        }
        if (most := model.count('max_action_horizon', None)) and (facts.horizon or 0) > most:
            raise config.error(
                'chunk_size', f'{facts.horizon} where the model has at most {most} actions'
            )
        check_stated(
            source.missing, 'max_action_dim', model.count('max_action_dim'), facts.action_dim
        )
        return self.dims(source._replace(facts=facts), given)


def _refuse_discrete(config: JsonMapping) -> None:
    """Refuse policies whose actions are tokens (JsonError)."""
    mode = config.get('action_mode', str, 'both')
    if mode not in ('continuous', 'both'):
        raise config.error(
            'action_mode',
            f"'{mode}': the policy has no trained expert, and actions in tokens are not served; "
            'train it with action_mode both or continuous',
        )
    used = config.get('inference_action_mode', str, None)
    if used not in (None, 'continuous'):
        raise config.error(
            'inference_action_mode',
            f"'{used}' is not served; action_mode {mode} has an expert too: set it to continuous",
        )


def _refuse_adapted(source: Source) -> None:
    """Refuse weights with their adapters beside them in one file (CheckpointError)."""
    adapted = next((stored for name, stored in source.tensors.items() if _ADAPTED in name), None)
    if adapted is None:
        return
    key = _LATER_KEY if _LATER_KEY in source.facts.config else 'enable_lora_vlm'
    raise CheckpointError(
        f"{adapted.path}: tensor '{adapted.name}' is of an adapter (LoRA, {key} of {CONFIG_FILE}) "
        'that is not merged. Merge it where LeRobot is installed: policy = MolmoAct2Policy.'
        'from_pretrained(FOLDER); policy.model = policy.model.merge_and_unload(); '
        'policy.save_pretrained(NEW); then copy the policy_*processor* files into NEW'
    )


def _base(
    folder: Path, config: JsonMapping, options: ExportOptions, missing: MissingFacts
) -> Path | None:
    """Folder of the model; None once it is asked for (ExportError: one without its files)."""
    named = config.get('checkpoint_path', str, '')
    place = Path(os.path.expanduser(named))
    stated = [folder / place, folder.parent / place, place] if named else []
    found = next((one for one in stated if (one / CONFIG_FILE).is_file() and one != folder), None)
    given = None if options.tokenizer is None else options.tokenizer.parent
    if given is not None:
        missing.use('--tokenizer')
    base = given or found
    if base is None:
        missing.ask('--tokenizer', _WANTED)
        return None
    for name in (CONFIG_FILE, _PROCESSOR, 'tokenizer.json'):
        if not (base / name).is_file():
            raise ExportError(f'{base}: has no {name}; --tokenizer: {_WANTED}')
    return base


def _step(folder: Path, file: str, name: str) -> JsonMapping:
    """Settings of a step; ExportError: there is none of this name."""
    for step in read_json(folder / file).mappings('steps'):
        if step.get('registry_name', str, None) == name:
            return step.mapping('config', optional=True)
    raise ExportError(f"{folder / file}: has no step '{name}': take the processors of the training")


def _write_normalisers(draft: Draft) -> None:
    """Write quantiles that are clipped, and leave grippers as they are where the training did."""
    found = draft.normalisation
    if (found.state, found.actions) != ('quantiles_lerobot', 'quantiles_lerobot'):
        raise draft.config.error(
            'normalization_mapping', 'only QUANTILES of STATE and ACTION are supported'
        )
    draft.normalisation = replace(found, state='quantiles_clipped', actions='quantiles_clipped')
    assert draft.statistics_file is not None
    stored, statistics = read_arrays(draft.statistics_file), dict(draft.statistics or {})
    for feature, group in ((STATE, 'state'), (ACTION, 'actions')):
        mask = stored.get(f'{feature}.mask')
        if mask is None or bool(np.all(mask)):
            continue
        raw = np.asarray(mask) == 0
        low, high = (np.array(statistics[f'{group}.{name}']) for name in ('q01', 'q99'))
        if raw.shape != low.shape:
            raise ExportError(
                f"{draft.statistics_file}: tensor '{feature}.mask' has shape {list(raw.shape)} "
                f'where {list(low.shape)} is expected'
            )
        beyond = np.flatnonzero(raw & ((low < -1.0) | (high > 1.0)))
        if beyond.size:
            one = int(beyond[0])
            raise draft.config.error(
                'normalize_gripper',
                f'false leaves number {one} of {feature} as it is, which goes from {low[one]:g} to '
                f'{high[one]:g} ({draft.statistics_file.name}) where -1 to 1 is expected, and '
                'LeRobot refuses it: train with --policy.normalize_gripper=true',
            )
        # Statistics under which nothing changes.
        statistics[f'{group}.q01'] = np.where(raw, np.float32(-1.0), low)
        statistics[f'{group}.q99'] = np.where(raw, np.float32(1.0), high)
    draft.statistics = statistics


def _write_frame(draft: Draft) -> None:
    """Write signs and zeros of the joints in training (ExportError: files that differ)."""
    config, frames = draft.config, []
    for file, name in ((PREPROCESSOR_FILE, _STATE_FRAME), (POSTPROCESSOR_FILE, _ACTION_FRAME)):
        steps = read_json(draft.folder / file).mappings('steps')
        found = [one for one in steps if one.get('registry_name', str, None) == name]
        step = found[0].mapping('config', optional=True) if found else config
        frames.append((step, _frame(step)))
    (before, first), (after, second) = frames
    must_agree(before, 'joint frame', first, after, 'joint frame', second)
    length = draft.state_length or 0
    if first is not None and len(first.signs) == len(first.offsets) < length:
        raise before.error(
            'joint_signs',
            f'{len(first.signs)} numbers where the state has {length}: LeRobot leaves the others '
            'as they are; write 1 for each of them (joint_offsets: 0), in both processors',
        )
    draft.write(before.place('joint_signs'), joint_frame=first)


def _frame(step: JsonMapping) -> JointFrame | None:
    """Signs and offsets; None without either, where LeRobot leaves joints as they are."""
    signs, offsets = (step.get(key, list, None) for key in ('joint_signs', 'joint_offsets'))
    if signs is None or offsets is None:
        return None
    for key, numbers in (('joint_signs', signs), ('joint_offsets', offsets)):
        if not all(type(one) in (int, float) for one in numbers):
            raise step.error(key, f'{numbers} where a list of numbers is expected')
    return JointFrame(tuple(map(float, signs)), tuple(map(float, offsets)))


def _write_cameras(draft: Draft, pack: JsonMapping) -> None:
    """Write the cameras in the order of the step that puts them into the prompt."""
    keys = pack.words('image_keys') or ()
    cameras = {camera.name: camera for camera in draft.cameras}
    # Without keys LeRobot takes the images of an observation by their names.
    names = [camera_name(key) for key in keys] or sorted(cameras)
    if unknown := [name for name in names if name not in cameras]:
        raise pack.error(
            'image_keys', f'{", ".join(unknown)}, which input_features of {CONFIG_FILE} lacks'
        )
    _refuse_other_cameras(draft, pack, names)
    draft.write(pack.place('image_keys'), cameras=tuple(cameras[name] for name in names))


def _refuse_other_cameras(draft: Draft, pack: JsonMapping, names: Sequence[str]) -> None:
    """Refuse cameras in whose place LeRobot took those of the training by name (JsonError)."""
    keys = pack.words('image_keys')
    if keys and not pack.get('allow_image_key_fallback', bool, False):
        return
    assert draft.statistics_file is not None
    features = {key.rpartition('.')[0] for key in read_arrays(draft.statistics_file)}
    renamed = {draft.rename_map.get(one, one) for one in features}
    seen = sorted(one for one in renamed if one.startswith('observation.image'))
    found = {camera_name(one) for one in seen}
    if seen and not (set(names) <= found if keys else set(names) == found):
        raise pack.error(
            'image_keys',
            f'the cameras are {", ".join(names)}, but the statistics are of {", ".join(seen)}, and '
            'LeRobot took the images of the training by these names, in this order: write them '
            f'here, and as the cameras of input_features into {CONFIG_FILE}',
        )


def _write_prompt(draft: Draft, pack: JsonMapping) -> None:
    """Write the checkpoint's words, the bins of the state, and the room for text."""
    words = {}
    for name, key in (('setup', 'setup_type'), ('control', 'control_mode')):
        text, first, last = pack.get(key, str, ''), f'<{name}_start>', f'<{name}_end>'
        marked = text.startswith(first) and text.endswith(last)
        if pack.get(f'add_{name}_tokens', bool, True) and not marked and text:
            text = f'{first}{text}{last}'
        # LeRobot's own is no text, and so is the layout's.
        if text:
            words[name] = FreeText(text)
    draft.write(pack.place('setup_type'), prompt_words=words)
    levels = pack.count('num_state_tokens', 256)
    draft.write(pack.place('num_state_tokens'), prompt_state_levels=levels)
    if not pack.get('normalize_language', bool, True):
        draft.write(pack.place('normalize_language'), prompt_cleaning='unchanged')
    images = len(draft.cameras) * (_IMAGE_ROOM + 2)
    longest = pack.count('max_sequence_length', None)
    if longest is not None:
        draft.write(pack.place('max_sequence_length'), prompt_length=longest)
        return
    room = len(draft.cameras) * _IMAGE_ROOM + _ROOM + (draft.state_length or 0)
    draft.assume(USUAL, prompt_length=-(-room // _ROOM_STEP) * _ROOM_STEP - images)


def _tags(base: Path, model: JsonMapping) -> JsonMapping:
    """What the model's folder says of each robot that it was trained on."""
    path = base / model.get('norm_stats_filename', str, _TAGS)
    if not path.is_file():
        raise ExportError(
            f'{path}: is missing, which says how many actions a chunk has (norm_tag of '
            f"{CONFIG_FILE}): copy it from the model's folder, or set norm_tag to null where "
            'chunk_size holds'
        )
    return read_json(path).mapping('metadata_by_tag')


def _first_token(base: Path) -> str:
    """Token that prompts begin with: BOS, or the end of a sentence where there is no BOS."""
    path = base / 'tokenizer_config.json'
    if not path.is_file():
        raise ExportError(f'{base}: has no {path.name}; --tokenizer: {_WANTED}')
    found = read_json(path)
    for key in ('bos_token', 'eos_token'):
        token = found.value(key)
        token = token.get('content') if isinstance(token, Mapping) else token
        if isinstance(token, str) and token:
            return token
    raise found.error('eos_token', 'is missing, with which every prompt begins')


def _hidden(
    config: JsonMapping, model: JsonMapping, tokenizer: Path, words: Mapping[str, str]
) -> dict[str, Any]:
    """Places that the expert does not see: ends of sentences, if trained beside tokens.

    LeRobot 0.6 asks the model below, later releases the policy's own config.json.
    """
    asked = config if _LATER_KEY in config else model
    if asked.get('action_mode', str, 'both') != 'both':
        return {}
    found = model.value('eos_token_id')
    tokens = found if isinstance(found, list) else [found]
    if not all(type(one) is int and one > 0 for one in tokens):
        raise model.error('eos_token_id', f'{found} where the number of a token is expected')
    try:
        vocabulary = Tokenizer.load(tokenizer, bos=False)
        closing = PROMPT.text[PROMPT.text.rindex(END) :]
        (ids,) = vocabulary.piece_tokens([Piece(closing, True)])
    except ValueError as error:
        raise ExportError(str(error)) from None
    return {
        'hides_first': vocabulary.id_of(words['bos']) in tokens,
        'hidden_end': len(ids) if ids[0] in tokens else 0,
    }


def _stated(part: JsonMapping, key: str, kind: type | tuple[type, ...]) -> Any:
    """Return a setting that LeRobot's classes assume to be otherwise than the models have it."""
    if part.value(key) is None:
        raise part.error(
            key, f"is missing, which the tensors do not show: copy the model's {CONFIG_FILE} again"
        )
    return part.get(key, kind)


def _tower(model: JsonMapping) -> dict[str, Any]:
    vision, adapter = model.mapping('vit_config'), model.mapping('adapter_config')
    expect(vision, 'hidden_act', 'gelu_pytorch_tanh')
    expect(vision, 'layer_norm_eps', 1e-6)
    expect(adapter, 'hidden_act', 'silu')
    depth, layers = vision.count('num_hidden_layers'), adapter.get('vit_layers', list)
    if not layers or not all(type(one) is int and -depth <= one < depth for one in layers):
        raise adapter.error(
            'vit_layers', f'{layers} where numbers of the {depth} layers are needed'
        )
    return {
        'vision.num_kv_heads': vision.count('num_key_value_heads'),
        'vision.layers': tuple(one % depth + 1 for one in layers),
        'pooling.num_kv_heads': adapter.count('num_key_value_heads'),
        'pooling.masked': _stated(adapter, 'pooling_attention_mask', bool),
    }


def _decoder(model: JsonMapping) -> dict[str, Any]:
    text = model.mapping('text_config')
    expect(text, 'hidden_act', 'silu')
    if text.value('rope_scaling_layers') is not None or text.value('rope_scaling') is not None:
        raise text.error('rope_scaling', 'is not supported')
    used, norm = _stated(text, 'use_qk_norm', bool), _stated(text, 'qk_norm_type', str)
    if norm not in _HEAD_NORMS:
        raise text.error('qk_norm_type', f"'{norm}'; expected one of {', '.join(_HEAD_NORMS)}")
    # LeRobot 0.6 reads the first alone; transformers 5 writes both.
    base, rope = (
        _stated(text, 'rope_theta', (int, float)),
        text.mapping('rope_parameters', optional=True),
    )
    expect(rope, 'rope_type', 'default')
    again = rope.get('rope_theta', (int, float), base)
    must_agree(text, 'rope_theta', base, rope, 'rope_parameters.rope_theta', again)
    return {
        'language.num_kv_heads': text.count('num_key_value_heads'),
        'language.head_norm': _HEAD_NORMS[norm] if used else 'none',
        'language.norm_after': text.get('norm_after', bool, False),
        'rope_base': float(base),
        'rms_epsilon': float(text.get('layer_norm_eps', (int, float), 1e-6)),
    }


def _expert(model: JsonMapping) -> dict[str, Any]:
    expert = model.mapping('action_expert_config')
    for key in ('action_expert_depth_gate', 'action_expert_depth_gate_per_layer'):
        expect(model, key, False)
    expect(expert, 'causal_attn', False)
    expect(expert, 'rope', True)
    expect(expert, 'qk_norm_eps', 1e-6)
    return {
        'expert.num_heads': expert.count('num_heads'),
        'expert.context_norm': expert.get('context_layer_norm', bool, True),
        'expert.head_norm': expert.get('qk_norm', bool, True),
    }


def _images(
    processor: JsonMapping, config: JsonMapping, cameras: tuple[CameraSpec, ...]
) -> dict[str, Any]:
    """What the image processor does (JsonError: something that is not served)."""
    images = processor.mapping('image_processor')
    expect(images, 'resample', 2)
    for key in ('image_mean', 'image_std'):
        if (scale := images.get(key, list, [0.5] * 3)) != [0.5] * 3:
            raise images.error(key, f'{scale} where [0.5, 0.5, 0.5] is expected')
    size, patch = images.mapping('size'), images.count('patch_size', 14)
    edge = size.count('height')
    if size.count('width') != edge:
        raise size.error('width', f'is not the height, {edge}; only squares are supported')
    window = images.get('pooling_size', list, [2, 2])
    low = processor.value('use_single_crop_col_tokens')
    columns = processor.get('image_use_col_tokens', bool, True)
    found: dict[str, Any] = {
        'vision.image_size': edge,
        'pooling.window': _pair(images, 'pooling_size', window),
        'columns': columns,
        'low_columns': columns if low is None else bool(low),
    }
    mode = images.get('crop_mode', str, 'overlap-and-resize-c2')
    if mode == 'resize':
        return found
    if mode not in ('overlap-and-resize-c2', 'overlap-and-resize'):
        raise images.error('crop_mode', f"'{mode}' is not supported")
    margins = _pair(images, 'overlap_margins', images.get('overlap_margins', list, [4, 4]))
    overlap, most = sum(margins) * patch, images.count('max_crops', 8)
    inputs = config.mapping('input_features')
    keys = {camera_name(key): key for key in inputs.values}
    sizes = [feature_image(config, keys[camera.name]) for camera in cameras]
    return {
        **found,
        'tilings': tuple(choose_tiling(one, edge - overlap, overlap, most) for one in sizes),
        'most_tiles': most,
        'margins': margins,
    }


def _pair(images: JsonMapping, key: str, found: list[Any]) -> tuple[int, int]:
    if len(found) != 2 or not all(type(one) is int and one > 0 for one in found):
        raise images.error(key, f'{found} where two numbers above 0 are expected')
    return found[0], found[1]


READER = MolmoAct2Reader()
