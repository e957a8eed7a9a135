"""Checkpoint folders of every family, and changes of them: what `test_folders` is run over."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import bitvla_folders
import evo1_folders
import groot_n17_folders
import multi_task_dit_folders
import oft_cases
import openvla_folders
from checkpoint_folders import (
    edit_config,
    edit_json,
    edit_tensors,
    joints,
    lerobot_folder,
    openpi_statistics,
    tiny_tensors,
    write_openpi_folder,
)
from family_contracts import diffusion, molmoact2, vla_jepa, xvla
from groot_folders import JOINTS, write_groot_folder
from reference_cases import SHIPPED, shipped
from torch import Tensor

from vla_convert.checkpoints.options import ExportOptions
from vla_convert.export.conversion import ExportPlan, plan_export

SIX = tuple('abcdef')
N16, N17 = shipped('groot_n16_a'), shipped('groot_n17_a')
NAMES = {'--state-names', '--action-names', '--units', '--rate-hz'}


@dataclass(frozen=True)
class Change:
    """What is other than in the folder as its project writes it.

    Attributes:
        folder: changes the written folder.
        settings: further settings that the folder is written with.
        options: other options of the export.
    """

    folder: Callable[[Path], object] = lambda _: None
    settings: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Kind:
    """A form of folder.

    Attributes:
        write: writes the folder, by path and settings; returns the options that complete it.
        asks: options that the export asks for where none is given.
    """

    write: Callable[..., ExportOptions]
    asks: set[str]


def made(kind: str, target: Path, change: Change) -> tuple[Path, ExportOptions]:
    """Write a folder below `target`; return it and what completes it."""
    folder = target / 'policy'
    options = KINDS[kind].write(folder, **change.settings)
    change.folder(folder)
    return folder, replace(options, **change.options)


def planned(kind: str, target: Path, change: Change) -> ExportPlan:
    """The plan of an export of such a folder."""
    folder, options = made(kind, target, change)
    return plan_export(folder, options, default_name='tiny')


# Changes.


def config(**changes: Any) -> Change:
    return Change(lambda f: edit_config(f, **changes))


def json_file(name: str, change: Callable[[dict[str, Any]], object]) -> Change:
    return Change(lambda f: edit_json(f / name, change))


def tensors(change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Change:
    return Change(lambda f: edit_tensors(f, change))


def without(*parts: str) -> Change:
    """Without the tensors whose names have such a part."""
    return tensors(lambda t: {k: v for k, v in t.items() if not any(p in k for p in parts)})


def step(index: int, pipeline: str = 'preprocessor', **changes: Any) -> Change:
    """Other settings of a LeRobot processor's step."""
    return json_file(
        f'policy_{pipeline}.json', lambda d: d['steps'][index]['config'].update(changes)
    )


def backbone(part: str | None = None, **changes: Any) -> Change:
    """Other settings of the backbone that lies beside a GR00T folder, or of a part of them."""
    return json_file('../backbone/config.json', lambda d: (d[part] if part else d).update(changes))


def lost(name: str) -> Change:
    """Without the file."""
    return Change(lambda f: (f / name).unlink())


def added(name: str) -> Change:
    """With an empty file."""
    return Change(lambda f: (f / name).write_bytes(b''))


def given(**options: Any) -> Change:
    return Change(options=options)


def written(**settings: Any) -> Change:
    return Change(settings=settings)


def both(*changes: Change) -> Change:
    """All of them, in this order."""

    def change_all(folder: Path) -> None:
        for change in changes:
            change.folder(folder)

    settings = {k: v for change in changes for k, v in change.settings.items()}
    options = {k: v for change in changes for k, v in change.options.items()}
    return Change(change_all, settings, options)


# Folders as their projects write them.


def _shipped_folder(name: str, unit: str, **further: Any) -> Callable[[Path], ExportOptions]:
    def write(folder: Path) -> ExportOptions:
        shutil.copytree(SHIPPED / name, folder)
        return ExportOptions(
            state_names=SIX, action_names=SIX, units=(unit,), rate_hz=30.0, **further
        )

    return write


def _diffusion(folder: Path) -> ExportOptions:
    recorded = shipped('diffusion_folder.end_to_end')
    shutil.copytree(recorded.with_name('diffusion_folder'), folder)
    return diffusion.folder(recorded, folder.with_name('recorded')).options


def _evo1(folder: Path) -> ExportOptions:
    evo1_folders.write_folder(folder, shipped('evo1_a'), 0)
    return evo1_folders.options_of(shipped('evo1_a'), 0)


def _bitvla(folder: Path) -> ExportOptions:
    bitvla_folders.write_folder(folder, shipped('bitvla_a'))
    return bitvla_folders.options_of(shipped('bitvla_a'))


def _openvla(folder: Path) -> ExportOptions:
    openvla_folders.write_folder(folder, shipped('openvla_full_a'))
    return openvla_folders.options_of(shipped('openvla_full_a'))


def _oft(folder: Path, **settings: Any) -> ExportOptions:
    oft_cases.write_oft_folder(folder, shipped('openvla_full_a'), **settings)
    return oft_cases.oft_options(shipped('openvla_full_a'))


def _multi_task_dit(folder: Path) -> ExportOptions:
    multi_task_dit_folders.write_folder(folder, shipped('multi_task_dit_a'))
    return multi_task_dit_folders.options_of(shipped('multi_task_dit_a'))


def _xvla(folder: Path) -> ExportOptions:
    recorded = shipped('xvla_folder.end_to_end')
    shutil.copytree(recorded.with_name('xvla_folder'), folder)
    return xvla.options_of(recorded)


def _vla_jepa(folder: Path) -> ExportOptions:
    recorded = shipped('vla_jepa_folder.end_to_end')
    shutil.copytree(recorded.with_name('vla_jepa_folder'), folder)
    return vla_jepa.options_of(recorded)


def _molmoact2(folder: Path) -> ExportOptions:
    recorded = shipped('molmoact2_folder.end_to_end')
    molmoact2.copied(recorded, folder.parent).rename(folder)
    return molmoact2.options_of(recorded)


def _groot_n15(folder: Path, tag: str = 'so100') -> ExportOptions:
    write_groot_folder(folder, tag)
    return ExportOptions(
        state_names=JOINTS,
        action_names=JOINTS[:7],
        units=('rad',),
        rate_hz=30.0,
        vision_heads=4,
        heads={'context': 4, 'dit': 4},
        horizon=8,
        prompt_length=220,
    )


def _later_groot(
    write: Callable[..., Path], case: Path, **further: Any
) -> Callable[..., ExportOptions]:
    def made_of(folder: Path, **settings: Any) -> ExportOptions:
        write(folder, case, **settings)
        return ExportOptions(
            tokenizer=groot_n17_folders.write_backbone(folder.with_name('backbone'), case),
            state_names=groot_n17_folders.joints_of(case),
            action_names=groot_n17_folders.joints_of(case, 'action'),
            units=('deg',),
            rate_hz=30.0,
            **further,
        )

    return made_of


def _n16() -> Callable[..., ExportOptions]:
    d = json.loads(N16.read_text())
    kinds = [kind for _, width, _, kind in d['groups'] for _ in range(width)]
    names = groot_n17_folders.joints_of(N16, 'action')
    return _later_groot(
        groot_n17_folders.write_nvidia_folder,
        N16,
        targets=tuple(name for name, kind in zip(names, kinds, strict=True) if kind == 'absolute'),
        heads={'dit': d['dit_heads']},
        # Text tokens of the prompt: N1.6's own has more around the images than the cases'.
        prompt_length=60,
        image_size=(d['raw_height'], d['raw_width']),
    )


def _n17(write: Callable[..., Path]) -> Callable[..., ExportOptions]:
    d = json.loads(N17.read_text())
    heads = {'dit': d['dit_heads'], 'context': d['vlsa_heads']}
    return _later_groot(write, N17, heads=heads, prompt_length=40)


def _openpi(folder: Path) -> ExportOptions:
    write_openpi_folder(folder, tiny_tensors(), openpi_statistics())
    names = tuple(joints().split(','))
    return ExportOptions(
        state_names=names,
        action_names=names,
        units=('rad',),
        rate_hz=30.0,
        vision_heads=4,
        deltas=(),
        tokenizer=lerobot_folder() / 'tokenizer.json',
        prompt_template='pi05_state',
    )


def n17_modality(group: str, **changes: Any) -> dict[str, Any]:
    """`modality_config` of N1.7's case with its cameras, and with changes of one group."""
    d = json.loads(N17.read_text())
    video = {'modality_keys': d['camera_order'], 'delta_indices': [0]}
    whole: dict[str, Any] = {**d['modality_config'], 'video': video}
    return {**whole, group: {**whole[group], **changes}}


def n17_action(index: int, **changes: Any) -> dict[str, Any]:
    """`modality_config` of N1.7's case with changes of one of its action groups."""
    configs = n17_modality('action')['action']['action_configs']
    configs[index].update(changes)
    return n17_modality('action', action_configs=configs)


KINDS: dict[str, Kind] = {
    'act': Kind(_shipped_folder('act_folder', 'deg'), NAMES),
    'bitvla': Kind(_bitvla, NAMES | {'--delta', '--horizon'}),
    'diffusion': Kind(_diffusion, NAMES),
    'evo1': Kind(_evo1, NAMES | {'--vision-heads', '--kv-heads'}),
    'groot_n15': Kind(_groot_n15, NAMES | {'--horizon', '--vision-heads', '--heads'}),
    'groot_n16': Kind(_n16(), NAMES | {'--heads', '--image-size'}),
    'groot_n17 of LeRobot': Kind(_n17(groot_n17_folders.write_lerobot_folder), NAMES | {'--heads'}),
    'groot_n17 of NVIDIA': Kind(_n17(groot_n17_folders.write_nvidia_folder), NAMES | {'--heads'}),
    'multi_task_dit': Kind(_multi_task_dit, NAMES | {'--vision-heads', '--kv-heads'}),
    'openvla': Kind(_openvla, NAMES | {'--delta', '--heads', '--unnorm-key'}),
    'openvla_oft': Kind(_oft, NAMES | {'--delta', '--heads'}),
    'pi05 of openpi': Kind(
        _openpi, NAMES | {'--delta', '--vision-heads', '--tokenizer', '--prompt-template'}
    ),
    'vla_jepa': Kind(_vla_jepa, NAMES | {'--tokenizer'}),
    'molmoact2': Kind(_molmoact2, NAMES),
    'xvla': Kind(_xvla, NAMES),
    'smolvla': Kind(
        _shipped_folder('smolvla_folder', 'deg', vision_heads=4, kv_heads=2),
        NAMES | {'--vision-heads', '--kv-heads'},
    ),
}
