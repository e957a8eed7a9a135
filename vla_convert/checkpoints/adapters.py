"""Adapters (LoRA) of PEFT's form, merged into the policy that they were trained on.

A merged weight is W + s * B A with s = alpha / r, or alpha / sqrt(r) (arXiv 2106.09685,
2312.03732), in float32. LeRobot saves `adapter_config.json` and `adapter_model.safetensors` beside
config.json and the processors; other projects may save those two alone.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from vla_convert.checkpoints.folder_facts import CONFIG_FILE, ExportError
from vla_convert.checkpoints.tensor_names import TensorNames
from vla_convert.checkpoints.tensors import CheckpointError, ComputedTensor, cut, read_tensors
from vla_runtime.bundle.schema import WEIGHT_BYTES
from vla_runtime.bundle.tensors import StoredTensor, TensorsError, read_array, read_header
from vla_runtime.files.checkpoint_folders import ADAPTER_FILE, has_tensors
from vla_runtime.files.json_file import JsonMapping, read_json

ADAPTER_CONFIG, ADAPTER_TENSORS = 'adapter_config.json', ADAPTER_FILE
ADAPTER_FILES = (ADAPTER_CONFIG, ADAPTER_TENSORS)
_PREFIX = 'base_model.model.'
_DOWN, _UP = '.lora_A.weight', '.lora_B.weight'
# Numbers checked at once.
_BLOCK = 1 << 22
# Kinds that this merge does not reproduce.
_FIXED: Mapping[str, object] = {
    'peft_type': 'LORA',
    'use_dora': False,
    'fan_in_fan_out': False,
    'lora_bias': False,
}
# PEFT's further options, off where empty.
_OFF = (
    'use_qalora',
    'use_bdlora',
    'alora_invocation_tokens',
    'arrow_config',
    'kasa_config',
    'layer_replication',
    'target_parameters',
    'trainable_token_indices',
)
# Initialisations that also change the base weights.
_INITS_OF_BASE = ('pissa', 'olora', 'loftq', 'corda', 'eva')


@dataclass(frozen=True)
class MergedTensor(ComputedTensor):
    """A weight merged with its adapter when written: `down` is (r, inputs), `up` (outputs, r)."""

    base: StoredTensor = field(kw_only=True)
    down: StoredTensor = field(kw_only=True)
    up: StoredTensor = field(kw_only=True)
    scale: float = field(kw_only=True)

    def data(self) -> bytes:
        """Return the merged weight's bytes."""
        change = read_array(self.up) @ read_array(self.down)
        return (read_array(self.base) + np.float32(self.scale) * change).astype('<f4').tobytes()

    def part(self, index: int) -> StoredTensor:
        raise CheckpointError(
            f"{self.down.path}: adapts tensor '{self.name}', of which one embodiment is cut out; "
            'that is not supported: merge the adapter into its policy first'
        )

    def rows(self, first: int, count: int) -> StoredTensor:
        base, up = self.base.rows(first, count), self.up.rows(first, count)
        return replace(self, shape=base.shape, offset=base.offset, base=base, up=up)


def is_adapter(folder: Path) -> bool:
    """Return whether a folder holds an adapter instead of a policy's weights."""
    return os.path.lexists(folder / ADAPTER_TENSORS) and not has_tensors(folder)


def find_base(folder: Path, given: Path | None, beside: Sequence[str] = ()) -> Path:
    """Return the folder of the policy that an adapter was trained on.

    `beside`: files that a project other than LeRobot needs beside an adapter. Raises ExportError:
    the policy is neither given nor where the adapter says, or the adapter lies alone.
    """
    stated = read_json(folder / ADAPTER_CONFIG).get('base_model_name_or_path', str, '')
    base = given or (Path(stated) if stated and has_tensors(Path(stated)) else None)
    wanted = []
    if not os.path.lexists(folder / CONFIG_FILE):
        listed = '; '.join(('of LeRobot the policy_*processor* files', *beside))
        wanted.append(
            f'copy {CONFIG_FILE} and what else its training wrote into the folder ({listed})'
        )
    if base is None:
        wanted.append('download that policy and give its folder with --base')
    if base is None or wanted:
        named = f", which {ADAPTER_CONFIG} names '{stated}'" if stated else ''
        raise ExportError(
            f'{folder}: is an adapter (LoRA) of another policy{named}; {"; and ".join(wanted)}'
        )
    return base


def refuse_unmerged(folder: Path) -> None:
    """Refuse an adapter beside weights that it may be merged into or not (ExportError)."""
    files = [name for name in ADAPTER_FILES if os.path.lexists(folder / name)]
    if files and has_tensors(folder):
        raise ExportError(
            f'{folder}: has {" and ".join(files)} (LoRA) beside the weights of a policy. Where '
            'they are merged into these weights already, move them out of the folder; where not, '
            f'give them a folder of their own, with {CONFIG_FILE} and what else the training '
            'wrote, and name the folder of the weights with --base'
        )


def read_adapted(folder: Path, base: Path, names: TensorNames) -> dict[str, StoredTensor]:
    """Find the tensors of a policy (in `base`) with its adapter, by our names.

    Raises CheckpointError and JsonError as `read_tensors`, and for an adapter that is not
    supported or does not fit.
    """
    tensors, config = read_tensors(base, names), read_json(folder / ADAPTER_CONFIG)
    _check(config)
    path = folder / ADAPTER_TENSORS
    try:
        found = {stored.name.removeprefix(_PREFIX): stored for stored in read_header(path)}
        for stored in found.values():
            _check_finite(stored)
    except TensorsError as error:
        raise CheckpointError(str(error)) from None
    if not any('lora_' in name for name in found):
        raise CheckpointError(
            f"{path}: has no adapter, a tensor '…{_DOWN}' and its '…{_UP}': is it whole?"
        )
    for name, stored in found.items():
        if name.endswith(_UP):
            if name.removesuffix(_UP) + _DOWN not in found:
                raise CheckpointError(
                    f"{path}: has tensor '{stored.name}' without its '…{_DOWN}': is it whole?"
                )
            continue
        module = name.removesuffix(_DOWN)
        if _serves_nothing(f'{module}.weight' if module != name else name, names):
            continue
        if module != name:
            up = found.get(module + _UP)
            parts = _ours(f'{module}.weight', stored, names, tensors)
            # Several of ours may be stacked in the weight that was adapted; all read the same A.
            ups = [(parts[0], up)] if up is None else cut(up, parts)
            for ours, of_part in ups:
                tensors[ours] = _merged(config, module, tensors[ours], stored, of_part)
        elif 'lora_' in name:
            raise CheckpointError(
                f"{path}: tensor '{stored.name}' is of an adapter that this runtime does not "
                'merge; merge it with PEFT (merge_and_unload) and save the policy'
            )
        else:
            # Trained in full beside the adapters.
            tensors |= cut(stored, _ours(name, stored, names, tensors))
    return tensors


def _serves_nothing(name: str, names: TensorNames) -> bool:
    """Return whether a weight, and so its adapter, plays no part in inference."""
    return names.is_unused(name) or any(ours in names.tied for ours in names.parts(name))


def _check_finite(stored: StoredTensor) -> None:
    """Refuse a tensor with a non-finite number, read piece by piece."""
    count, width = math.prod(stored.shape), WEIGHT_BYTES[stored.dtype]
    for start in range(0, count, _BLOCK):
        shape = (min(_BLOCK, count - start),)
        part = replace(stored, shape=shape, offset=stored.offset + start * width)
        if not np.isfinite(read_array(part)).all():
            raise CheckpointError(
                f"{stored.path}: tensor '{stored.name}' has numbers that are not finite: the "
                'training diverged, or the file is damaged'
            )


def _check(config: JsonMapping) -> None:
    for key, expected in _FIXED.items():
        found = config.get(key, (bool, str), expected)
        if found != expected:
            raise config.error(
                key, f'{found!r} is not merged here; merge it with PEFT (merge_and_unload) first'
            )
    for key in _OFF:
        if config.value(key):
            raise config.error(
                key, 'is given, which is not merged here; merge with PEFT (merge_and_unload) first'
            )
    init = str(config.values.get('init_lora_weights', True)).lower()
    if init.startswith(_INITS_OF_BASE):
        raise config.error(
            'init_lora_weights',
            f"'{init}' changes the policy below too; merge it with PEFT (merge_and_unload) first",
        )


def _ours(
    name: str, stored: StoredTensor, names: TensorNames, tensors: Mapping[str, StoredTensor]
) -> tuple[str, ...]:
    ours = names.parts(name)
    if not ours or not tensors.keys() >= set(ours):
        raise CheckpointError(
            f"{stored.path}: adapts '{name}', which the policy below does not have: is --base the "
            'policy that the adapter was trained on?'
        )
    return ours


def _merged(
    config: JsonMapping,
    module: str,
    base: StoredTensor,
    down: StoredTensor,
    up: StoredTensor | None,
) -> MergedTensor:
    rank = down.shape[0] if len(down.shape) == 2 else 0
    if up is None or not rank or (*up.shape[:1], *down.shape[1:]) != base.shape:
        raise CheckpointError(
            f"{down.path}: the adapter of '{module}' is {list(down.shape)} and "
            f'{list(up.shape) if up else "nothing"}, which does not fit the weight '
            f'{list(base.shape)} of {base.path}'
        )
    alpha = _alpha(config, module)
    scale = alpha / (math.sqrt(rank) if config.get('use_rslora', bool, False) else rank)
    place = (base.name, base.path, 'F32', base.shape, base.offset)
    return MergedTensor(*place, base=base, down=down, up=up, scale=scale)


def _alpha(config: JsonMapping, module: str) -> float:
    """Return alpha of a module: of the first pattern that it ends with, else the general one."""
    patterns = config.mapping('alpha_pattern', optional=True)
    for pattern in patterns.values:
        try:
            found = re.match(rf'(.*\.)?({pattern})$', module)
        except re.error as error:
            raise patterns.error(pattern, f'is no regular expression: {error}') from None
        if found:
            return _scale_of(patterns, pattern)
    return _scale_of(config, 'lora_alpha')


def _scale_of(config: JsonMapping, key: str) -> float:
    alpha = config.get(key, (int, float))
    if not 0.0 < abs(alpha) <= float(np.finfo(np.float32).max):
        raise config.error(key, f'{alpha} is no scale of an adapter')
    return float(alpha)
