"""From a checkpoint folder to a policy bundle: everything is checked before a byte is written."""

from __future__ import annotations

import filecmp
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from vla_convert.checkpoints.adapters import (
    find_base,
    is_adapter,
    read_adapted,
    refuse_unmerged,
)
from vla_convert.checkpoints.cameras import camera_notes, settle_cameras
from vla_convert.checkpoints.columns import (
    Columns,
    ask_about_units,
    ask_for_targets,
    cut_statistics,
    resolve_columns,
)
from vla_convert.checkpoints.folder_facts import ExportError, FolderFacts
from vla_convert.checkpoints.lerobot_folder import policy_type, read_lerobot_folder
from vla_convert.checkpoints.missing_facts import MissingFacts
from vla_convert.checkpoints.options import DatasetInfo, ExportOptions, read_dataset_info
from vla_convert.checkpoints.pose_options import pose_notes, scale_steps
from vla_convert.checkpoints.reader import (
    CheckpointReader,
    MakeDims,
    Source,
    beside_adapters,
    find_reader,
    refuse_unserved,
)
from vla_convert.checkpoints.tensors import CheckpointError, copy_tensors, read_tensors
from vla_convert.checkpoints.unread_keys import unread_notes
from vla_runtime import __version__
from vla_runtime.bundle.folder import Bundle, read_bundle
from vla_runtime.bundle.rules import LIMITS, check_spec
from vla_runtime.bundle.schema import (
    STEP_TIMES_S,
    TOKENIZER_SUFFIXES,
    WEIGHTS_FILE,
    WORDLESS_TASKS,
    BundleSpec,
    CameraSpec,
    ImageSpec,
)
from vla_runtime.bundle.statistics import check_statistics
from vla_runtime.bundle.tensors import StoredTensor, TensorsError, check_tensors
from vla_runtime.bundle.writer import new_bundle, seal, write_statistics
from vla_runtime.family.declaration import LanguageDims, PolicyDims, image_sizes, language_dims
from vla_runtime.family.listing import find_family
from vla_runtime.files.field_error import FieldError
from vla_runtime.files.input_files import UnreadableFileError, near_path, regular_file
from vla_runtime.files.json_file import JsonError, noting_keys
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
    contradictory facts were read.
    """

    spec: BundleSpec
    tensors: Mapping[str, StoredTensor]
    statistics: Mapping[str, np.ndarray]
    tokenizer: Path | None
    notes: tuple[str, ...] = ()
    files: Mapping[str, Path] = field(default_factory=dict)

    @property
    def weight_bytes(self) -> int:
        return sum(stored.size for stored in self.tensors.values())


def plan_export(checkpoint: Path, options: ExportOptions, *, default_name: str) -> ExportPlan:
    """Gather and check everything that a bundle needs; writes nothing.

    Raises ExportError: all that is missing or contradictory at once, else the first defect;
    JsonError: a JSON file of the checkpoint that cannot be used.
    """
    adapter = is_adapter(checkpoint)
    base = checkpoint
    if adapter:
        refuse_unserved(checkpoint)
        base = find_base(checkpoint, options.base, beside_adapters())
    reader, policy = find_reader(checkpoint, base)
    if not adapter:
        if options.base is not None:
            raise ExportError(f'--base says {options.base}, but {checkpoint} is no adapter (LoRA)')
        if policy is None:
            refuse_unmerged(checkpoint)
        tensors = read_tensors(checkpoint, reader.names)
    else:
        if policy is not None:
            policy_type(base, [policy.type], [policy])
        tensors = read_adapted(checkpoint, base, reader.names)
    shown = reader.family(checkpoint, tensors)
    with noting_keys() as noted:
        if policy is not None:
            facts = read_lerobot_folder(checkpoint, policy, options.lerobot)
        else:
            assert shown is not None, 'a reader of its own folders knows the family by the tensors'
            facts = reader.read_folder(checkpoint, shown, options)
        family = shown or facts.family
        missing = MissingFacts(checkpoint, facts)
        _check_facts(facts, family, missing, options)
        source = Source(checkpoint, tensors, facts, options, missing)
        tensors = reader.select(source)
        make_dims = reader.sizes(source._replace(tensors=tensors))
        if make_dims is not None:
            missing.refuse_unused(options.reader_options)
        settled = _settle(reader, facts, make_dims, options, missing)
        dims = settled.dims
    # Imports PyTorch, in seconds: nothing above needs it.
    from vla_runtime.families.flow_network import weight_shapes

    try:
        check_tensors(tensors, weight_shapes(family, dims))
    except TensorsError as error:
        raise CheckpointError(str(error)) from None
    given = {'targets': ', '.join(options.targets)} if options.targets else {}
    if settled.tasks_without_text is not None:
        given[WORDLESS_TASKS] = settled.tasks_without_text
    prompt, tokenizer_notes = _prompt(reader, settled, facts, dims, options)
    spec = BundleSpec(
        name=options.name or default_name,
        family=family,
        dims=dims,
        cameras=settled.cameras,
        images=_images(facts, dims),
        state=settled.columns.state,
        actions=settled.columns.actions,
        poses=settled.columns.poses,
        step_time_s=1.0 / settled.rate_hz,
        denoise_steps=settled.denoise_steps,
        prompt=prompt,
        normalisation=replace(facts.normalisation, angles=_angles(facts, settled.columns)),
        tokenizer=f'tokenizer{settled.tokenizer.suffix}' if settled.tokenizer else None,
        joint_space=facts.joint_space,
        trained_delay_steps=facts.trained_delay_steps,
        flow_times=facts.flow_times,
        rename_map=facts.renamed,
        source={**facts.source, **given, 'exported_by': f'vla_runtime {__version__}'},
    )
    statistics = scale_steps(
        cut_statistics(facts.statistics, settled.columns),
        facts.normalisation,
        spec.action_names,
        options,
        missing,
    )
    _check_valid(checkpoint, spec, statistics)
    file = facts.statistics_file or checkpoint
    ask_for_targets(spec, statistics, options.targets, facts.deltas, file, missing)
    ask_about_units(spec, statistics, options.units, file, missing)
    missing.raise_if_any()
    unread = unread_notes(checkpoint, noted, reader.known)
    notes = (*facts.notes, *settled.notes, *tokenizer_notes, *pose_notes(spec), *unread)
    files = reader.files(source)
    _check_answers(family, dims, settled.tokenizer, files)
    return ExportPlan(spec, tensors, statistics, settled.tokenizer, notes, files)


def _angles(facts: FolderFacts, columns: Columns) -> tuple[tuple[str, ...], ...]:
    """Names of the groups of the state that go in as sines and cosines."""
    names = tuple(one.name for one in columns.state)
    return tuple(names[first : first + count] for first, count in facts.angles)


def _images(facts: FolderFacts, dims: PolicyDims) -> ImageSpec:
    """Resizing of the images, with their size after a cut where the network's is another one."""
    crop = facts.images.crop
    if crop is None or facts.images.resample == 'area':
        return facts.images
    (cut,), size = facts.image_sizes, image_sizes(dims)[0]
    return facts.images if cut == size else replace(facts.images, crop=replace(crop, size=cut))


def _check_valid(checkpoint: Path, spec: BundleSpec, statistics: Mapping[str, np.ndarray]) -> None:
    """Refuse facts that would not make a valid bundle (ExportError)."""
    try:
        check_spec(spec)
        check_statistics(spec, statistics)
    except FieldError as error:
        raise ExportError(f'{checkpoint}: the bundle would not be valid: {error}') from None


def _check_answers(
    family: str, dims: PolicyDims, tokenizer: Path | None, files: Mapping[str, Path]
) -> None:
    """Refuse files that the answers of a `tokens` head cannot be decoded with (ExportError)."""
    make = find_family(family).answer_decoder
    if make is None or tokenizer is None:
        return
    try:
        make(dims, tokenizer, files)
    except ValueError as error:
        raise ExportError(str(error)) from None


def _prompt(
    reader: CheckpointReader,
    settled: _Settled,
    facts: FolderFacts,
    dims: PolicyDims,
    options: ExportOptions,
) -> tuple[PromptFormat | None, tuple[str, ...]]:
    """Check the tokenizer; return the form of the prompts, None without language, and notes."""
    if settled.language is None:
        return None, ()
    tokenizer, template, _ = settled.language
    layout = find_family(facts.family).templates[template]
    rows = language_dims(dims).vocabulary
    loaded = _load_tokenizer(tokenizer, layout, rows)
    bins = facts.state_bins if find_family(facts.family).templates[template].has_state else None
    form = PromptFormat(template, facts.cleaning, options.advantage, bins)
    _check_length(loaded, layout, form, language_dims(dims), len(settled.columns.state))
    return form, _tokenizer_notes(tokenizer, loaded, reader.marks, rows)


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


def _check_facts(
    facts: FolderFacts, family: str, missing: MissingFacts, options: ExportOptions
) -> None:
    """Note where the folder's statements contradict its tensors or the options."""
    if facts.family != family:
        missing.conflict(f'config.json says type {facts.family} but the tensors show {family}')
    if facts.kind != 'openpi':
        for option, value in (
            ('--asset-id', options.asset_id),
            ('--statistics', options.statistics),
        ):
            if value is not None:
                missing.conflict(
                    f'{option} says {value} but a {facts.kind} folder has its own statistics'
                )
        if options.adapt_to_pi is not None:
            missing.conflict(f"--adapt-to-pi is openpi's, and this folder is of {facts.kind}")
    if options.lerobot is not None and facts.kind != 'LeRobot':
        missing.conflict(f"--lerobot is LeRobot's, and this folder is of {facts.kind}")
    if options.image_size is not None and facts.images.resample != 'area':
        height, width = options.image_size
        missing.conflict(
            f"--image-size says {height}x{width} but the policy's images have one size, whatever "
            'the cameras have'
        )


@dataclass(frozen=True)
class _Settled:
    """Facts of folder and options combined, none missing.

    `language` is None without language; `tasks_without_text` says how many tasks of the data set
    have no text.
    """

    columns: Columns
    cameras: tuple[CameraSpec, ...]
    make_dims: MakeDims
    language: tuple[Path, str, int] | None
    rate_hz: float
    horizon: int
    denoise_steps: int
    tasks_without_text: str | None
    notes: tuple[str, ...]

    @property
    def tokenizer(self) -> Path | None:
        return None if self.language is None else self.language[0]

    @property
    def dims(self) -> PolicyDims:
        """Sizes of the networks."""
        prompt_length = self.language[2] if self.language else 0
        return self.make_dims(len(self.cameras), prompt_length, self.horizon)


def _settle(
    reader: CheckpointReader,
    facts: FolderFacts,
    make_dims: MakeDims | None,
    options: ExportOptions,
    missing: MissingFacts,
) -> _Settled:
    dataset = _dataset(options)
    columns = resolve_columns(facts, options, dataset, missing)
    rate_hz = _rate(options, dataset, missing)
    has_language = find_family(facts.family).has_language
    tasks_without_text = _wordless(dataset) if has_language else None
    language = _language(reader, facts, options, missing) if has_language else None
    if not has_language:
        _check_no_language(facts, options, missing)
    cameras = settle_cameras(options.cameras, facts, missing)
    horizon, denoise_steps = _numbers(reader, facts, options, missing)
    missing.raise_if_any()
    # Every None is noted in `missing`, which has raised.
    assert columns and cameras and make_dims and (language or not has_language)
    assert rate_hz and horizon and denoise_steps
    return _Settled(
        columns,
        cameras,
        make_dims,
        language,
        rate_hz,
        horizon,
        denoise_steps,
        tasks_without_text,
        camera_notes(cameras, facts, dataset),
    )


def _wordless(dataset: DatasetInfo | None) -> str | None:
    """Return how many of a data set's tasks have no words, `1 of 3`; None: all have some."""
    tasks = dataset.tasks if dataset else ()
    empty = sum(not task.strip() for task in tasks)
    return f'{empty} of {len(tasks)}' if empty else None


def _language(
    reader: CheckpointReader, facts: FolderFacts, options: ExportOptions, missing: MissingFacts
) -> tuple[Path, str, int] | None:
    """Return tokenizer, template and tokens of a prompt; None once one is noted missing."""
    tokenizer = _tokenizer(reader, facts, options, missing)
    template: str | None = missing.pick(
        '--prompt-template',
        options.prompt_template,
        facts.template,
        reader.wanted.get('--prompt-template', 'layout of the prompt in training'),
    )
    names = find_family(facts.family).templates
    if template is not None and template not in names:
        missing.conflict(
            f'--prompt-template says {template}, but the prompts of {facts.family} are '
            f'{", ".join(names)}'
        )
    length = missing.pick(
        '--prompt-length',
        options.prompt_length,
        facts.prompt_length,
        'tokens of the padded prompt',
        default=facts.usual_prompt_length,
    )
    return (tokenizer, template, length) if tokenizer and template and length else None


def _check_no_language(facts: FolderFacts, options: ExportOptions, missing: MissingFacts) -> None:
    """Note options about a prompt, for a policy that reads none."""
    for option, value in (
        ('--tokenizer', options.tokenizer),
        ('--prompt-template', options.prompt_template),
        ('--prompt-length', options.prompt_length),
        ('--advantage', options.advantage),
    ):
        if value is not None:
            missing.conflict(f'{option} says {value}, but {facts.family} has no language')


def _numbers(
    reader: CheckpointReader, facts: FolderFacts, options: ExportOptions, missing: MissingFacts
) -> tuple[int | None, int | None]:
    """Return horizon and denoise steps."""
    return (
        missing.pick(
            '--horizon',
            options.horizon,
            facts.horizon,
            reader.wanted.get('--horizon', 'actions of a chunk'),
            default=facts.usual_horizon,
        ),
        missing.pick(
            '--denoise-steps',
            options.denoise_steps,
            facts.denoise_steps,
            'Euler steps',
            default=find_family(facts.family).denoise_steps,
        ),
    )


def _dataset(options: ExportOptions) -> DatasetInfo | None:
    if options.dataset is None:
        return None
    if not options.dataset.exists():
        raise ExportError(f'--dataset says {options.dataset}, but there is no such folder')
    try:
        return read_dataset_info(options.dataset)
    except (ExportError, JsonError) as error:
        raise ExportError(f'--dataset: {error}') from None


def _rate(
    options: ExportOptions, dataset: DatasetInfo | None, missing: MissingFacts
) -> float | None:
    slowest_hz, fastest_hz = (1.0 / step_time_s for step_time_s in reversed(STEP_TIMES_S))
    if options.rate_hz is not None and not slowest_hz <= options.rate_hz <= fastest_hz:
        missing.conflict(
            f'--rate-hz says {options.rate_hz:g}; expected {slowest_hz:.2g} to {fastest_hz:g}, '
            'actions a second'
        )
    stated = dataset.rate_hz if dataset else None
    if options.rate_hz is not None and stated is not None and options.rate_hz != stated:
        missing.conflict(f'--rate-hz says {options.rate_hz} but --dataset says fps {stated}')
    rate = options.rate_hz if options.rate_hz is not None else stated
    if rate is None:
        missing.ask('--rate-hz', 'actions a second in training (the frame rate of the data set)')
    return rate


def _tokenizer(
    reader: CheckpointReader, facts: FolderFacts, options: ExportOptions, missing: MissingFacts
) -> Path | None:
    given, stated = options.tokenizer, facts.tokenizer
    if given is not None and (why := _why_no_tokenizer(given)):
        missing.unusable(f'--tokenizer {given}: {why}')
        return None
    if given and stated and not filecmp.cmp(given, stated, shallow=False):
        missing.conflict(f'--tokenizer says {given} but the folder has another {stated.name}')
    chosen = stated or given
    if chosen is None:
        missing.ask(
            '--tokenizer',
            reader.wanted.get(
                '--tokenizer', 'tokenizer.json or tokenizer.model that the policy was trained with'
            ),
        )
    return chosen


def _why_no_tokenizer(path: Path) -> str:
    """Return why a path is no file of a tokenizer; '' where it may be one."""
    try:
        regular_file(path)
    except FileNotFoundError:
        hint = near_path(path, lambda one: one.suffix in TOKENIZER_SUFFIXES)
        return f'there is no such file{hint}'
    except UnreadableFileError as error:
        return str(error)
    except OSError as error:
        return f'cannot be read ({error.strerror})'
    if path.suffix not in TOKENIZER_SUFFIXES:
        return 'is no tokenizer by its name; expected tokenizer.json or tokenizer.model'
    return ''


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
