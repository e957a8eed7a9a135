"""From a checkpoint folder to a policy bundle: everything is checked before a byte is written."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from vla_convert.checkpoints.adapters import (
    find_base,
    is_adapter,
    read_adapted,
    refuse_unmerged,
)
from vla_convert.checkpoints.columns import (
    ask_about_units,
    ask_for_targets,
    cut_statistics,
    settle_columns,
)
from vla_convert.checkpoints.draft import Draft
from vla_convert.checkpoints.folder_facts import ExportError
from vla_convert.checkpoints.lerobot_early import read_config
from vla_convert.checkpoints.lerobot_folder import is_lerobot_folder
from vla_convert.checkpoints.missing_facts import MissingFacts
from vla_convert.checkpoints.options import ExportOptions, read_dataset
from vla_convert.checkpoints.pose_options import pose_notes, scale_steps
from vla_convert.checkpoints.reader import (
    CheckpointReader,
    Source,
    beside_adapters,
    find_reader,
    refuse_unserved,
)
from vla_convert.checkpoints.tensors import CheckpointError, copy_tensors, read_tensors
from vla_convert.checkpoints.training import (
    add_tokens,
    settle_cameras,
    settle_prompt,
    settle_schedule,
)
from vla_convert.checkpoints.unread_keys import LEROBOT_KEYS, unread_notes
from vla_runtime import __version__
from vla_runtime.bundle.folder import Bundle, read_bundle
from vla_runtime.bundle.rules import LIMITS, check_spec
from vla_runtime.bundle.schema import (
    WEIGHTS_FILE,
    WORDLESS_TASKS,
    BundleSpec,
    ImageSpec,
)
from vla_runtime.bundle.statistics import check_statistics
from vla_runtime.bundle.tensors import StoredTensor, TensorsError, check_tensors
from vla_runtime.bundle.writer import new_bundle, seal, write_statistics
from vla_runtime.family.declaration import LanguageDims, PolicyDims, image_sizes, language_dims
from vla_runtime.family.dimensions import dim_fields
from vla_runtime.family.listing import find_family
from vla_runtime.files.field_error import FieldError
from vla_runtime.files.json_file import noting_keys
from vla_runtime.files.quotes import size_text
from vla_runtime.processing.prompts import PromptFormat, PromptLayout, prompt_parts
from vla_runtime.processing.tokenizer import Tokenizer

# Share of the text table's rows that a tokenizer of the policy's own has tokens for.
_LEAST_SHARE = 0.9
# No instruction is shorter.
_SHORTEST_TASK = 'a'


@dataclass(frozen=True)
class ExportPlan:
    """A checked bundle that waits to be written.

    `spec` is without files; `tensors` and `files` go by their names in the bundle; `statistics`
    are cut to the named dimensions; `tokenizer` is None without language; `notes` tells people how
    contradictory facts were read; `origins` the place that each field of policy.yaml came from;
    `scratch` keeps a file that was made for the plan.
    """

    spec: BundleSpec
    tensors: Mapping[str, StoredTensor]
    statistics: Mapping[str, np.ndarray]
    tokenizer: Path | None
    notes: tuple[str, ...] = ()
    files: Mapping[str, Path] = field(default_factory=dict)
    origins: Sequence[tuple[str, str]] = ()
    scratch: object = None

    @property
    def weight_bytes(self) -> int:
        return sum(stored.size for stored in self.tensors.values())


def plan_export(checkpoint: Path, options: ExportOptions, *, default_name: str) -> ExportPlan:
    """Gather and check everything that a bundle needs; writes nothing.

    Raises ExportError: all that is missing or contradictory at once, else the first defect;
    JsonError: a JSON file of the checkpoint that cannot be used.
    """
    reader, tensors = _open(checkpoint, options)
    family = reader.family(checkpoint, tensors)
    missing = MissingFacts(checkpoint)
    with noting_keys() as noted:
        dataset = read_dataset(options.dataset)
        draft = Draft(checkpoint, options, missing, dataset, reader.wanted, family=family or '')
        reader.read(draft)
        if family not in (None, draft.family):
            missing.conflict(f'config.json says type {draft.family} but the tensors show {family}')
        source = Source(checkpoint, tensors, draft, options, missing)
        tensors = reader.select(source)
        make_dims = reader.sizes(source._replace(tensors=tensors))
        for step in (settle_columns, settle_cameras, settle_prompt, settle_schedule):
            step(draft)
        scratch = add_tokens(draft)
        missing.refuse_unused(options.reader_options)
        missing.raise_if_any()
        # None is noted in `missing`, which has raised.
        assert make_dims is not None and draft.horizon is not None
        dims = make_dims(len(draft.cameras), draft.prompt_length or 0, draft.horizon)
    # Imports PyTorch, in seconds: nothing above needs it.
    from vla_runtime.models.base.flow_network import weight_shapes

    try:
        check_tensors(tensors, weight_shapes(draft.family, dims))
    except TensorsError as error:
        raise CheckpointError(str(error)) from None
    prompt = _prompt(reader, draft, dims)
    spec = _spec(draft, dims, prompt, options.name or default_name)
    statistics = scale_steps(cut_statistics(draft), draft)
    _check_valid(checkpoint, spec, statistics)
    ask_for_targets(spec, statistics, draft)
    ask_about_units(spec, statistics, draft)
    missing.raise_if_any()
    known = (*LEROBOT_KEYS, *reader.known) if reader.lerobot else reader.known
    unread = unread_notes(checkpoint, noted, known)
    files = reader.files(source)
    _check_answers(draft, dims, files)
    return ExportPlan(
        spec,
        tensors,
        statistics,
        draft.tokenizer,
        (*draft.notes, *pose_notes(spec), *unread),
        files,
        _written(draft.origins(), dims),
        scratch,
    )


def _written(origins: Sequence[tuple[str, str]], dims: PolicyDims) -> list[tuple[str, str]]:
    """Return the origins of fields that policy.yaml has, nested dimensions by their whole name."""
    names = {one.name: one.name for one in dim_fields(type(dims))}
    for one in dim_fields(type(dims)):
        for nested in dim_fields(one.part) if one.part is not None else ():
            names.setdefault(nested.name, f'{one.name}.{nested.name}')
    found = []
    for key, place in origins:
        part, _, name = key.partition('.')
        if part != 'dimensions':
            found.append((key, place))
        elif name in names:
            found.append((f'dimensions.{names[name]}', place))
    return found


def _lerobot_type(folder: Path) -> str | None:
    """Policy type that a LeRobot folder's config.json says; None: another project's folder."""
    if not is_lerobot_folder(folder):
        return None
    found: str = read_config(folder).get('type', str, '')
    return found


def _open(
    checkpoint: Path, options: ExportOptions
) -> tuple[CheckpointReader, Mapping[str, StoredTensor]]:
    """Find the reader of a checkpoint, and its tensors, those of an adapter merged into its base.

    Raises ExportError, JsonError: no policy that is served, or damaged files.
    """
    if not is_adapter(checkpoint):
        reader = find_reader(checkpoint)
        if options.base is not None:
            raise ExportError(f'--base says {options.base}, but {checkpoint} is no adapter (LoRA)')
        if not is_lerobot_folder(checkpoint):
            refuse_unmerged(checkpoint)
        return reader, read_tensors(checkpoint, reader.names)
    refuse_unserved(checkpoint)
    base = find_base(checkpoint, options.base, beside_adapters())
    reader = find_reader(checkpoint, base)
    theirs, own = (_lerobot_type(folder) for folder in (base, checkpoint))
    if own is not None and theirs != own:
        found = 'no LeRobot folder' if theirs is None else f"of type '{theirs}'"
        raise ExportError(
            f"{base}: is {found}, and the adapter in {checkpoint} of type '{own}': give the policy "
            'that it was trained on'
        )
    return reader, read_adapted(checkpoint, base, reader.names)


def _spec(draft: Draft, dims: PolicyDims, prompt: PromptFormat | None, name: str) -> BundleSpec:
    """Return the policy.yaml of a draft with nothing missing."""
    assert draft.step_time_s is not None and draft.denoise_steps is not None
    states = tuple(one.name for one in draft.state)
    angles = tuple(states[first : first + count] for first, count in draft.angle_groups)
    given = {'targets': ', '.join(draft.options.targets)} if draft.options.targets else {}
    return BundleSpec(
        name=name,
        family=draft.family,
        dims=dims,
        cameras=draft.cameras,
        images=_images(draft, dims),
        state=draft.state,
        actions=draft.actions,
        poses=draft.poses,
        step_time_s=draft.step_time_s,
        denoise_steps=draft.denoise_steps,
        prompt=prompt,
        normalisation=replace(draft.normalisation, angles=angles),
        tokenizer=f'tokenizer{draft.tokenizer.suffix}' if draft.tokenizer else None,
        joint_space=draft.joint_space,
        joint_frame=draft.joint_frame,
        trained_delay_steps=draft.trained_delay_steps,
        flow_times=draft.flow_times,
        rename_map=draft.rename_map,
        source={
            **draft.source,
            **given,
            **_wordless(draft),
            'exported_by': f'vla_runtime {__version__}',
        },
    )


def _images(draft: Draft, dims: PolicyDims) -> ImageSpec:
    """Resizing of the images, with their size after a cut where the network's is another one."""
    images = draft.images
    if images.crop is None or images.resample == 'area':
        return images
    (cut,), size = draft.image_sizes, image_sizes(dims)[0]
    return images if cut == size else replace(images, crop=replace(images.crop, size=cut))


def _check_valid(checkpoint: Path, spec: BundleSpec, statistics: Mapping[str, np.ndarray]) -> None:
    """Refuse facts that would not make a valid bundle (ExportError)."""
    try:
        check_spec(spec)
        check_statistics(spec, statistics)
    except FieldError as error:
        raise ExportError(f'{checkpoint}: the bundle would not be valid: {error}') from None


def _check_answers(draft: Draft, dims: PolicyDims, files: Mapping[str, Path]) -> None:
    """Refuse files that the answers of a `tokens` head cannot be decoded with (ExportError)."""
    make = find_family(draft.family).answer_decoder
    if make is None or draft.tokenizer is None:
        return
    try:
        make(dims, draft.tokenizer, files)
    except ValueError as error:
        raise ExportError(str(error)) from None


def _prompt(reader: CheckpointReader, draft: Draft, dims: PolicyDims) -> PromptFormat | None:
    """Check the tokenizer, and return the form of the prompts; None without language."""
    if draft.prompt_template is None or draft.tokenizer is None:
        return None
    family = find_family(draft.family)
    rows = language_dims(dims).vocabulary
    form = PromptFormat(
        draft.prompt_template,
        draft.prompt_cleaning,
        draft.prompt_advantage,
        draft.prompt_state_bins if family.templates[draft.prompt_template].has_state else None,
        draft.prompt_state_levels,
        draft.prompt_words or None,
    )
    layout = family.layout(form, dims)
    loaded = _load_tokenizer(draft.tokenizer, layout, rows)
    _check_length(loaded, layout, form, language_dims(dims), len(draft.state))
    draft.notes += _tokenizer_notes(draft.tokenizer, loaded, reader.marks, rows)
    return form


def _wordless(draft: Draft) -> dict[str, str]:
    """Say in `source` how many of the data set's tasks have no words, `1 of 3`."""
    has_language = find_family(draft.family).has_language
    tasks = draft.dataset.tasks if draft.dataset and has_language else ()
    empty = sum(not task.strip() for task in tasks)
    return {WORDLESS_TASKS: f'{empty} of {len(tasks)}'} if empty else {}


def write_export(
    plan: ExportPlan,
    target: Path,
    *,
    force: bool = False,
    further_bytes: int = 0,
    advance: Callable[[int], object] = lambda count: None,
    finish: Callable[[Path, BundleSpec], object] = lambda folder, spec: None,
) -> Bundle:
    """Write a planned bundle; the target appears complete or not at all.

    Args:
        force: replace an existing bundle.
        advance: gets the bytes of each copied block of weights.
        finish: adds files, such as `onnx/`, before the folder is sealed.

    Raises BundleError: the target exists; ExportError: too little disk, or the checkpoint changed;
    OSError.
    """
    with new_bundle(target, force=force) as folder:
        free = shutil.disk_usage(folder).free
        needed = plan.weight_bytes + further_bytes
        if free < needed:
            of_onnx = f' ({size_text(further_bytes)} of them in ONNX files)'
            raise ExportError(
                f'{target}: {size_text(needed)} of weights{of_onnx if further_bytes else ""} do '
                f'not fit on this disk, which has {size_text(free)} left: make room, name a folder '
                'on another disk with --out, or leave the ONNX files out (--onnx-precision none)'
            )
        copy_tensors(plan.tensors, folder / WEIGHTS_FILE, advance=advance)
        write_statistics(folder, plan.statistics)
        if plan.tokenizer is not None and plan.spec.tokenizer is not None:
            shutil.copyfile(plan.tokenizer, folder / plan.spec.tokenizer)
        for name, path in plan.files.items():
            shutil.copyfile(path, folder / name)
        finish(folder, plan.spec)
        seal(folder, plan.spec)
    return read_bundle(target, verify=False)


def _load_tokenizer(path: Path, layout: PromptLayout, vocabulary: int) -> Tokenizer:
    try:
        loaded = Tokenizer.load(path, bos=layout.bos, closing=layout.closing)
        size = loaded.vocabulary_size
    except ValueError as error:
        raise ExportError(str(error)) from None
    if size > vocabulary:
        raise ExportError(
            f"{path}: has {size} tokens but the policy's text table only {vocabulary}; it belongs "
            'to another policy'
        )
    return loaded


def _tokenizer_notes(
    path: Path, loaded: Tokenizer, marks: tuple[str, ...], rows: int
) -> tuple[str, ...]:
    """Return a note on a vocabulary that fits the text table and may be another model's."""
    lost = [f"'{mark}'" for mark in marks if loaded.id_of(mark) is None]
    faults = [f'lacks {", ".join(lost)}'] if lost else []
    # Tables are padded, by less than a hundredth in published policies.
    if loaded.vocabulary_size < _LEAST_SHARE * rows:
        faults.append(f"has {loaded.vocabulary_size} tokens for the text table's {rows} rows")
    if not faults:
        return ()
    return (
        f'{path} {" and ".join(faults)}: is it the tokenizer that the policy was trained with? '
        "With another model's the policy reads other words and acts on them",
    )


def _check_length(
    tokenizer: Tokenizer, layout: PromptLayout, form: PromptFormat, dims: LanguageDims, states: int
) -> None:
    """Refuse a prompt length that not even the shortest instruction fits into (ExportError)."""
    # The state of -1 has the fewest digits.
    parts = prompt_parts(layout, form, _SHORTEST_TASK, np.full(states, -1.0))
    try:
        pieces = layout.pieces(dims.cameras, parts, tokenizer.special)
        _, mask = tokenizer.encode_pieces(pieces, LIMITS['dimensions.prompt_length'])
    except ValueError as error:
        raise ExportError(str(error)) from None
    if (shortest := int(mask.sum())) > dims.prompt_length:
        raise ExportError(
            f'--prompt-length: the policy has {dims.prompt_length} places for the tokens of a '
            f'prompt, but one of the shortest instruction has {shortest} already; give the length '
            'of the training, or mend it in the config.json that says it'
        )
