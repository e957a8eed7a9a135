"""From a checkpoint folder to a policy bundle: gather, check, then write.

Everything is known and checked before the first byte is written.
"""

from __future__ import annotations

import filecmp
import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vla_runtime import __version__
from vla_runtime.bundle.folder import Bundle, new_bundle, read_bundle, seal, write_statistics
from vla_runtime.bundle.rules import check_spec
from vla_runtime.bundle.schema import (
    TOKENIZER_SUFFIXES,
    WEIGHTS_FILE,
    BundleSpec,
    CameraSpec,
    PromptSpec,
)
from vla_runtime.bundle.statistics import check_statistics
from vla_runtime.export.checkpoint import StoredTensor, check_tensors, copy_tensors, read_tensors
from vla_runtime.export.columns import Columns, cut_statistics, resolve_columns
from vla_runtime.export.errors import ExportError
from vla_runtime.export.folder import FolderFacts
from vla_runtime.export.lerobot_folder import (
    is_lerobot_folder,
    lerobot_family,
    read_lerobot_folder,
)
from vla_runtime.export.missing_facts import Gaps
from vla_runtime.export.openpi_folder import read_openpi_folder, usual_prompt_length
from vla_runtime.export.options import DatasetInfo, ExportOptions, read_dataset_info
from vla_runtime.export.tensor_dims import (
    HeadCounts,
    dims_of,
    family_of,
    fitting_kv_heads,
    fitting_vision_heads,
    image_size_of,
    kv_heads_of,
    vision_heads_of,
)
from vla_runtime.families.pi.weight_shapes import network_shapes
from vla_runtime.files.typed_yaml import FieldError
from vla_runtime.processing.tokenizer import Tokenizer
from vla_runtime.types import Family, PromptTemplate

# Both projects' own default; a policy's answer hardly changes with more.
_DENOISE_STEPS = 10


@dataclass(frozen=True)
class ExportPlan:
    """A checked bundle that only waits to be written.

    Attributes:
        spec: without files.
        tensors: our names to where the bytes lie.
        statistics: cut to the names.
        tokenizer: the file to copy.
    """

    spec: BundleSpec
    tensors: Mapping[str, StoredTensor]
    statistics: Mapping[str, np.ndarray]
    tokenizer: Path

    @property
    def weight_bytes(self) -> int:
        return sum(stored.size for stored in self.tensors.values())


def plan_export(checkpoint: Path, options: ExportOptions, *, default_name: str) -> ExportPlan:
    """Gather and check everything that a bundle needs; writes nothing.

    Args:
        checkpoint: a LeRobot or an openpi PyTorch folder.
        options: what the folder lacks.
        default_name: of the policy, where the options have none.

    Raises:
        ExportError: all that is missing or contradictory at once, else the first defect.
    """
    from_lerobot = is_lerobot_folder(checkpoint)
    if from_lerobot:
        # Of another family's tensors there is nothing to say.
        lerobot_family(checkpoint)
    tensors = read_tensors(checkpoint)
    family = family_of(tensors)
    if from_lerobot:
        facts = read_lerobot_folder(checkpoint)
    else:
        facts = read_openpi_folder(
            checkpoint,
            family,
            asset_id=options.asset_id,
            statistics_file=options.statistics,
        )
    gaps = Gaps(checkpoint, facts)
    _check_facts(facts, family, tensors, gaps, options)
    settled = _settle(tensors, facts, options, gaps)
    dims = dims_of(
        tensors,
        settled.heads,
        cameras=len(settled.cameras),
        prompt_length=settled.prompt_length,
        horizon=settled.horizon,
    )
    check_tensors(tensors, network_shapes(family, dims))
    _check_tokenizer(settled.tokenizer, dims.vocabulary)
    spec = BundleSpec(
        name=options.name or default_name,
        family=family,
        dims=dims,
        cameras=settled.cameras,
        images=facts.images,
        state=settled.columns.state,
        actions=settled.columns.actions,
        step_time_s=1.0 / settled.rate_hz,
        denoise_steps=settled.denoise_steps,
        prompt=PromptSpec(settled.template, facts.cleaning, options.advantage),
        normalisation=facts.normalisation,
        tokenizer=f'tokenizer{settled.tokenizer.suffix}',
        trained_delay_steps=facts.trained_delay_steps,
        source={**facts.source, 'exported_by': f'vla_runtime {__version__}'},
    )
    statistics = cut_statistics(facts.statistics, settled.columns)
    try:
        check_spec(spec)
        check_statistics(spec, statistics)
    except FieldError as error:
        raise ExportError(f'{checkpoint}: the bundle would not be valid: {error}') from None
    return ExportPlan(spec, tensors, statistics, settled.tokenizer)


def write_export(
    plan: ExportPlan,
    target: Path,
    *,
    force: bool = False,
    advance: Callable[[int], object] = lambda count: None,
    finish: Callable[[Path, BundleSpec], object] = lambda folder, spec: None,
) -> Bundle:
    """Write a planned bundle; the target appears complete or not at all.

    Args:
        plan: from `plan_export`.
        target: the bundle's folder.
        force: replace a bundle that lies there.
        advance: told the bytes of weights copied, as they are.
        finish: adds further files to the folder before it is sealed, such as `onnx/`.

    Raises:
        BundleError: the target exists.
        ExportError: the disk has not enough room, or the checkpoint changed meanwhile.
        OSError: a file cannot be read or written.
    """
    with new_bundle(target, force=force) as folder:
        free = shutil.disk_usage(folder).free
        if free < plan.weight_bytes:
            raise ExportError(
                f'{target}: {plan.weight_bytes / 1e9:.1f} GB of weights do not fit on this disk, '
                f'which has {free / 1e9:.1f} GB left'
            )
        copy_tensors(plan.tensors, folder / WEIGHTS_FILE, advance=advance)
        write_statistics(folder, plan.statistics)
        shutil.copyfile(plan.tokenizer, folder / plan.spec.tokenizer)
        finish(folder, plan.spec)
        seal(folder, plan.spec)
    return read_bundle(target, verify=False)


def _check_facts(
    facts: FolderFacts,
    family: Family,
    tensors: Mapping[str, StoredTensor],
    gaps: Gaps,
    options: ExportOptions,
) -> None:
    """What the folder states must be what its tensors show."""
    action_dim = tensors['action_in.weight'].shape[-1] if 'action_in.weight' in tensors else None
    projection = tensors.get('state_projection.weight')
    shown = {
        'type': (facts.family, family),
        'image_resolution': (facts.image_size, image_size_of(tensors)),
        'action dimensions': (facts.action_dim, action_dim),
        'state dimensions': (facts.state_dim, projection.shape[-1] if projection else 0),
    }
    for name, (stated, found) in shown.items():
        if stated is not None and stated != found:
            gaps.conflict(f'config.json says {name} {stated} but the tensors show {found}')
    if facts.kind == 'LeRobot':
        for option, value in (
            ('--asset-id', options.asset_id),
            ('--statistics', options.statistics),
        ):
            if value is not None:
                gaps.conflict(f'{option} says {value} but a LeRobot folder has its own statistics')


@dataclass(frozen=True)
class _Settled:
    """What folder and options say together, nothing missing."""

    columns: Columns
    cameras: tuple[CameraSpec, ...]
    heads: HeadCounts
    tokenizer: Path
    template: PromptTemplate
    rate_hz: float
    horizon: int
    prompt_length: int
    denoise_steps: int


def _settle(
    tensors: Mapping[str, StoredTensor], facts: FolderFacts, options: ExportOptions, gaps: Gaps
) -> _Settled:
    """
    Raises:
        ExportError: everything that is missing or contradictory, at once.
    """
    dataset = _dataset(options)
    columns = resolve_columns(facts, options, dataset, gaps)
    rate_hz = _rate(options, dataset, gaps)
    tokenizer = _tokenizer(facts, options, gaps)
    heads = _heads(tensors, facts, options, gaps)
    template: PromptTemplate | None = gaps.pick(
        '--prompt-template',
        options.prompt_template,
        facts.template,
        'pi05_state, or pi0 for a policy trained without state in the prompt '
        '(openpi: discrete_state_input=False, e.g. pi05_libero)',
    )
    horizon = gaps.pick(
        '--horizon', options.horizon, facts.horizon, 'actions of a chunk (openpi: action_horizon)'
    )
    cameras = gaps.pick(
        '--cameras',
        options.cameras,
        facts.cameras if facts.cameras_stated else None,
        'camera names in the order the network sees them',
        default=facts.cameras,
    )
    prompt_length = gaps.pick(
        '--prompt-length',
        options.prompt_length,
        facts.prompt_length,
        'tokens of the padded prompt',
        default=usual_prompt_length(facts.family),
    )
    denoise_steps = gaps.pick(
        '--denoise-steps',
        options.denoise_steps,
        facts.denoise_steps,
        'Euler steps',
        default=_DENOISE_STEPS,
    )
    gaps.raise_if_any()
    # None goes together with a noted gap, so nothing is None any more.
    assert columns and cameras and heads and tokenizer and template
    assert rate_hz and horizon and prompt_length and denoise_steps
    return _Settled(
        columns,
        cameras,
        heads,
        tokenizer,
        template,
        rate_hz,
        horizon,
        prompt_length,
        denoise_steps,
    )


def _dataset(options: ExportOptions) -> DatasetInfo | None:
    """
    Raises:
        ExportError: at once, because without it everything it says would be asked for.
    """
    if options.dataset is None:
        return None
    if not options.dataset.exists():
        raise ExportError(f'--dataset says {options.dataset}, but there is no such folder')
    try:
        return read_dataset_info(options.dataset)
    except ExportError as error:
        raise ExportError(f'--dataset says {options.dataset}, but {error}') from None


def _rate(options: ExportOptions, dataset: DatasetInfo | None, gaps: Gaps) -> float | None:
    if options.rate_hz is not None and not (0 < options.rate_hz < math.inf):
        gaps.conflict(f'--rate-hz says {options.rate_hz}; expected a number above 0')
    stated = dataset.rate_hz if dataset else None
    if options.rate_hz is not None and stated is not None and options.rate_hz != stated:
        gaps.conflict(f'--rate-hz says {options.rate_hz} but --dataset says fps {stated}')
    rate = options.rate_hz if options.rate_hz is not None else stated
    if rate is None:
        gaps.ask('--rate-hz', 'actions a second in training (the frame rate of the data set)')
    return rate


def _tokenizer(facts: FolderFacts, options: ExportOptions, gaps: Gaps) -> Path | None:
    given, stated = options.tokenizer, facts.tokenizer
    if given is not None and not given.is_file():
        gaps.conflict(f'--tokenizer says {given}, but there is no such file')
        return None
    if given is not None and given.suffix not in TOKENIZER_SUFFIXES:
        gaps.conflict(f'--tokenizer says {given}; expected a *.json or *.model file')
        return None
    if given and stated and not filecmp.cmp(given, stated, shallow=False):
        gaps.conflict(f'--tokenizer says {given} but the folder has another {stated.name}')
    chosen = stated or given
    if chosen is None:
        gaps.ask(
            '--tokenizer',
            "PaliGemma's tokenizer.json or tokenizer.model: openpi takes it from "
            'https://storage.googleapis.com/big_vision/paligemma_tokenizer.model, LeRobot from '
            'google/paligemma-3b-pt-224 on the Hugging Face Hub',
        )
    return chosen


def _heads(
    tensors: Mapping[str, StoredTensor], facts: FolderFacts, options: ExportOptions, gaps: Gaps
) -> HeadCounts | None:
    kv = gaps.pick(
        '--kv-heads',
        options.kv_heads,
        kv_heads_of(tensors, facts.variant),
        "the language model's key/value heads (Gemma 2B has 1)",
    )
    vision = gaps.pick(
        '--vision-heads',
        options.vision_heads,
        vision_heads_of(tensors),
        "the vision tower's attention heads (SigLIP So400m has 16)",
    )
    for option, given, fitting, what in (
        ('--vision-heads', options.vision_heads, fitting_vision_heads, 'the vision tower'),
        ('--kv-heads', options.kv_heads, fitting_kv_heads, "the language model's attention"),
    ):
        if given is not None and (fits := fitting(tensors)) and given not in fits:
            gaps.conflict(
                f'{option} says {given}, but {what} only divides into '
                f'{", ".join(map(str, fits))} heads'
            )
    if vision is None or kv is None:
        return None
    return HeadCounts(vision, kv)


def _check_tokenizer(path: Path, vocabulary: int) -> None:
    try:
        size = Tokenizer.load(path).vocabulary_size
    except ValueError as error:
        raise ExportError(str(error)) from None
    if size > vocabulary:
        raise ExportError(
            f"{path}: has {size} tokens but the policy's text table only {vocabulary}; it belongs "
            'to another policy'
        )
