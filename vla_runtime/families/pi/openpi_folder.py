"""An openpi PyTorch folder: converted from JAX (`config.json`) or trained (`model.safetensors`).

openpi keeps most of a policy in its Python training configurations, so the folder states little:
sizes, and the statistics under `assets/`. The rest is openpi's default, or asked for with options.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from vla_runtime.bundle.schema import STATISTICS, CameraSpec, ImageSpec, NormalisationSpec
from vla_runtime.checkpoints.errors import ExportError
from vla_runtime.checkpoints.folder_facts import CONFIG_FILE, FolderFacts, Question, find_tokenizer
from vla_runtime.files.json_file import JsonMapping, read_json
from vla_runtime.types import NormaliserKind

STATISTICS_JSON = 'norm_stats.json'
# The camera slots that every openpi pi0 and pi0.5 policy is trained with, in their order.
CAMERAS = ('base_0_rgb', 'left_wrist_0_rgb', 'right_wrist_0_rgb')
# `max_token_len` where a training configuration does not set another.
_PROMPT_LENGTH: Mapping[str, int] = {'pi05': 200, 'pi0': 48}
# ALOHA's two arms of six joints and a gripper, and perhaps a base after them.
_ALOHA_COLUMNS = 14
_ADAPT_TO_PI = Question(
    '--adapt-to-pi',
    'yes for ALOHA as openpi trains it (LeRobotAlohaDataConfig) unless told otherwise: joints turn '
    'the other way, and grippers are motor angles; no for another robot, or for one trained with '
    'adapt_to_pi=False',
)
_NORMALISER: Mapping[str, NormaliserKind] = {
    'pi05': 'quantiles_openpi',
    'pi0': 'mean_std_openpi',
}


def read_openpi_folder(
    folder: Path,
    family: str,
    *,
    asset_id: str | None = None,
    statistics_file: Path | None = None,
    adapt_to_pi: bool | None = None,
    actions: int | None = None,
) -> FolderFacts:
    """Read all facts in an openpi folder.

    Args:
        folder: folder of the checkpoint, with or without config.json.
        family: found from the tensors; the folder does not state it.
        asset_id: id of the statistics to use, where the folder has several.
        statistics_file: a norm_stats.json to use where the folder has none.
        adapt_to_pi: True where ALOHA's joints were trained on in pi's own convention.
        actions: number of action dimensions, where it is known.

    Raises:
        ExportError: missing, ambiguous or damaged statistics or configuration.
    """
    path = folder / CONFIG_FILE
    config = read_json(path) if os.path.lexists(path) else JsonMapping(path, {})
    for key in ('paligemma_variant', 'action_expert_variant'):
        if config.get(key, str, '').endswith('_lora'):
            raise config.error(
                key,
                "openpi's converter leaves LoRA weights out, so these are not the trained ones; "
                'merge them before converting',
            )
    statistics_path, questions = _find_statistics(folder, asset_id, statistics_file)
    statistics = _statistics(statistics_path) if statistics_path else None
    if adapt_to_pi is None and _may_be_aloha(actions, statistics):
        questions = (*questions, _ADAPT_TO_PI)
    return FolderFacts(
        kind='openpi',
        family=family,
        cameras=tuple(CameraSpec(name) for name in CAMERAS),
        cameras_stated=False,
        images=ImageSpec(padding='centre', resample='antialias'),
        normalisation=NormalisationSpec(_NORMALISER[family], _NORMALISER[family]),
        statistics=statistics,
        statistics_file=statistics_path,
        cleaning='openpi',
        joint_space='openpi_aloha' if adapt_to_pi else None,
        template='pi0' if family == 'pi0' else None,
        usual_prompt_length=_PROMPT_LENGTH[family],
        horizon=config.count('action_horizon', None),
        action_dim=config.count('action_dim', None),
        variant=config.get('paligemma_variant', str, None),
        tokenizer=find_tokenizer(folder),
        source=_source(folder, family, statistics_path),
        questions=questions,
    )


def _find_statistics(
    folder: Path, asset_id: str | None, given: Path | None
) -> tuple[Path | None, tuple[Question, ...]]:
    assets = folder / 'assets'
    found = {
        path.parent.relative_to(assets).as_posix(): path
        for path in sorted(assets.rglob(STATISTICS_JSON))
    }
    if given is not None:
        if found:
            raise ExportError(
                f'--statistics says {given} but the folder has its own ({", ".join(found)} under '
                f'{assets}); choose among those with --asset-id'
            )
        return given, ()
    if asset_id is not None:
        if asset_id not in found:
            raise ExportError(
                f"--asset-id says '{asset_id}' but {assets} has {', '.join(found) or 'none'}"
            )
        return found[asset_id], ()
    if len(found) > 1:
        wanted = f'which statistics under {assets} are meant: one of {", ".join(found)}'
        return None, (Question('--asset-id', wanted),)
    if not found:
        wanted = f'a {STATISTICS_JSON}; openpi writes one to assets/<id>/ beside the weights'
        return None, (Question('--statistics', wanted),)
    return next(iter(found.values())), ()


def _statistics(path: Path) -> dict[str, np.ndarray]:
    document = read_json(path)
    # openpi writes the outer key; hand-made files are seen without it.
    groups = document.mapping('norm_stats') if 'norm_stats' in document else document
    statistics: dict[str, np.ndarray] = {}
    for group in ('state', 'actions'):
        numbers = groups.mapping(group)
        for name in STATISTICS:
            values = numbers.get(name, list, None)
            if values is None:
                continue
            try:
                array = np.asarray(values, dtype=np.float64)
            except (TypeError, ValueError):
                raise numbers.error(name, 'is not a list of numbers') from None
            if array.ndim != 1 or not array.size:
                raise numbers.error(name, 'is not a list of numbers')
            statistics[f'{group}.{name}'] = array
    return statistics


def _may_be_aloha(actions: int | None, statistics: Mapping[str, np.ndarray] | None) -> bool:
    """Return whether there are as many actions as ALOHA has, or more.

    Where their number is not known, it is that of the columns before the padding, whose statistics
    are all zero; so are those of a gripper that never moved.
    """
    if actions is not None:
        return actions >= _ALOHA_COLUMNS
    if statistics is None:
        return False
    of_actions = [values for key, values in statistics.items() if key.startswith('actions.')]
    used = [np.flatnonzero(values) for values in of_actions]
    columns = max((int(found[-1]) + 1 for found in used if found.size), default=0)
    return columns >= _ALOHA_COLUMNS - 1


def _source(folder: Path, family: str, statistics_path: Path | None) -> dict[str, str]:
    source = {'checkpoint': f'openpi {family}'}
    assets = folder / 'assets'
    if statistics_path is not None and assets in statistics_path.parents:
        source['asset_id'] = statistics_path.parent.relative_to(assets).as_posix()
    return source
