"""Folders of BitVLA as its fine-tuning writes them, made of network cases."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
import torch
from safetensors.torch import load_file, save_file

from vla_convert.checkpoints.options import ExportOptions
from vla_runtime.bundle.schema import CameraSpec
from vla_runtime.declarations.bitvla import PROMPT, STOP

STATE = ('x', 'y', 'z', 'rx', 'ry', 'rz', 'left', 'right')
ACTIONS = ('dx', 'dy', 'dz', 'drx', 'dry', 'drz', 'grip')
DATA_SET = 'libero_spatial_no_noops'
HEADS = ('action_head', 'proprio_projector')
_FREE = 20


def special_tokens(d: Mapping[str, Any]) -> dict[str, int]:
    """Special tokens of a case's small vocabulary."""
    begin, end, state, _ = PROMPT.special
    return {
        begin: 2,
        end: 3,
        '<|image_pad|>': d['image_token'],
        state: d['proprio_token'],
        STOP: d['stop_token'],
    }


def make_tokenizer(d: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """A vocabulary of words, with the special tokens of BitVLA's."""
    words = {word: number for number, word in enumerate(d['words'])}
    prompt = PROMPT.text
    for mark in (*PROMPT.special, '{images}', '{task}'):
        prompt = prompt.replace(mark, ' ')
    for word in sorted({*prompt.split()} - {*words}):
        words[word] = _FREE + len(words) - len(d['words'])
    assert max(words.values()) < d['image_token']
    special = special_tokens(d)
    taken = {*special.values()}
    words = {word: number for word, number in words.items() if number not in taken} | special
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token='<pad>'))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens([tokenizers.AddedToken(text, special=True) for text in special])
    return made


def norm_stats(d: Mapping[str, Any]) -> dict[str, Any]:
    """Statistics of one data set, as OFT writes them."""
    stats = json.loads(json.dumps(d['norm_stats']))
    for numbers in stats.values():
        numbers |= {'min': numbers['q01'], 'max': numbers['q99']}
    return {DATA_SET: {**stats, 'num_trajectories': 3, 'num_transitions': 10}}


def config_of(d: Mapping[str, Any]) -> dict[str, Any]:
    """config.json, with its defaults left out as transformers leaves them out."""
    return {
        'architectures': ['BitVLAForActionPrediction'],
        'auto_map': {'AutoConfig': 'configuration_bit_vla.Bitvla_Config'},
        'image_token_index': d['image_token'],
        'model_type': 'bitvla',
        'n_action_bins': 256,
        'norm_stats': None,
        'text_config': {
            'hidden_size': d['width'],
            'intermediate_size': d['mlp_dim'],
            'model_type': 'BitNet',
            'num_attention_heads': d['num_heads'],
            'num_hidden_layers': d['depth'],
            'num_key_value_heads': d['num_kv_heads'],
            'rms_norm_eps': d['rms_eps'],
            'rope_theta': d['rope_theta'],
            'vocab_size': d['vocab'],
        },
        'torch_dtype': 'bfloat16',
        'vision_config': {
            'hidden_size': d['v_hidden'],
            'image_size': d['image'],
            'model_type': 'siglip_vision_model',
            'num_attention_heads': d['v_heads'],
            'patch_size': d['patch'],
            'vit_act_bits': 8,
            'vit_act_quant_method': 'absmax_per_token',
            'vit_weight_bits': 1,
            'vit_weight_quant_method': 'absmean',
        },
        'vision_feature_layer': d['v_feature_layers'] - d['v_layers'] - 1,
        'vision_feature_select_strategy': 'full',
        'vocab_size': d['vocab'],
    }


def write_folder(
    target: Path, path: Path, dtype: torch.dtype = torch.float32, parallel: bool = True
) -> Path:
    """Write a folder: weights, heads in `torch.save`'s files, statistics, tokenizer.

    Args:
        target: the folder.
        path: path of the case.
        dtype: dtype of all weights.
        parallel: the heads were trained with DistributedDataParallel.
    """
    target.mkdir(parents=True)
    d = json.loads(path.read_text())
    tensors = {
        name: tensor.to(dtype)
        for name, tensor in load_file(path.with_suffix('.weights.safetensors')).items()
    }
    for head in HEADS:
        wrapped = 'module.' if parallel else ''
        state = OrderedDict(
            (f'{wrapped}{name.removeprefix(f"{head}.")}', tensors.pop(name))
            for name in sorted(tensors)
            if name.startswith(f'{head}.')
        )
        torch.save(state, target / f'{head}--20_checkpoint.pt')
    save_file(tensors, target / 'model.safetensors', {'format': 'pt'})
    (target / 'config.json').write_text(json.dumps(config_of(d)))
    (target / 'dataset_statistics.json').write_text(json.dumps(norm_stats(d)))
    make_tokenizer(d).save(str(target / 'tokenizer.json'))
    # Anybody who runs it notices.
    code = "raise SystemExit('the folder was executed')\n"
    (target / 'configuration_bit_vla.py').write_text(code)
    return target


def options_of(path: Path, **further: Any) -> ExportOptions:
    """What the folder of a case does not say."""
    d = json.loads(path.read_text())
    states = STATE[: d['proprio_dim']] + tuple(f's{i}' for i in range(8, d['proprio_dim']))
    actions = ACTIONS[: d['action_dim']] + tuple(f'a{i}' for i in range(7, d['action_dim']))
    cameras = tuple(CameraSpec(f'camera_{i}') for i in range(d['cameras']))
    given = {
        'state_names': states,
        'action_names': actions,
        'units': ('1',),
        'rate_hz': 10.0,
        'deltas': (),
        'horizon': d['chunk'],
        'cameras': cameras,
    }
    return ExportOptions(**{**given, **further})
