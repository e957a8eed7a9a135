"""What options and data set say of the training: cameras, prompts, rate, horizon and steps."""

from __future__ import annotations

import filecmp
from pathlib import Path
from tempfile import TemporaryDirectory

from vla_convert.checkpoints.draft import Draft
from vla_convert.checkpoints.feature_names import camera_name, plain_camera_name
from vla_convert.checkpoints.folder_facts import CONFIG_FILE, ExportError
from vla_convert.checkpoints.missing_facts import as_option
from vla_runtime.bundle.schema import STEP_TIMES_S, TOKENIZER_SUFFIXES, CameraSpec
from vla_runtime.family.listing import find_family
from vla_runtime.files.input_files import UnreadableFileError, near_path, regular_file
from vla_runtime.files.quotes import one_line


def settle_cameras(draft: Draft) -> None:
    """Settle the cameras in the order the network sees them; contradictions are noted.

    A folder may list a camera of the policy that was fine-tuned. One that `--cameras` calls absent
    is masked or left out, as the policy's own code does when its image is missing.
    """
    given = draft.options.cameras
    if given is not None and given != draft.cameras:
        chosen = _chosen_cameras(given, draft) if draft.is_stated('cameras') else given
        draft.write('--cameras', cameras=chosen)
    # What a family needs cannot be absent.
    if draft.absent_cameras is not None:
        draft.notes += (*_unseen_notes(draft), *_camera_notes(draft))


def _unseen_notes(draft: Draft) -> tuple[str, ...]:
    """Return a note on cameras of a folder without statistics."""
    unseen = draft.unseen_cameras
    if not unseen:
        return ()
    return (
        f'{CONFIG_FILE} lists {", ".join(unseen)}, but only other cameras have statistics: '
        f'if the training lacked it, say --cameras …,{unseen[0]}=absent',
    )


def _chosen_cameras(given: tuple[CameraSpec, ...], draft: Draft) -> tuple[CameraSpec, ...]:
    """Return the folder's cameras without those that are given as absent."""
    stated = [camera.name for camera in draft.cameras if camera.present]
    named = {camera.name: camera for camera in given}
    empty = [camera for camera in draft.cameras if not camera.present]
    unknown = [name for name in named if name not in {camera.name for camera in draft.cameras}]
    unsaid = [name for name in stated if name not in named]
    present = [camera.name for camera in given if camera.present]
    kept = [name for name in stated if name in present]
    absent = [name for name in stated if name in named and name not in present]
    if unknown or unsaid or len(named) != len(given) or present != kept or not kept:
        draft.missing.conflict(
            f'--cameras says {as_option(given)} but the folder says {as_option(draft.cameras)}, '
            'in this order'
            + (f'; say {unsaid[0]}=absent of a camera that it lacks' if unsaid else '')
        )
        return draft.cameras
    if absent and draft.absent_cameras is None:
        draft.missing.conflict(
            f'--cameras says that {", ".join(absent)} {"are" if len(absent) > 1 else "is"} absent, '
            f'but {draft.family} needs all cameras of its folder'
        )
    masked = absent if draft.absent_cameras == 'masked' else []
    cameras = [CameraSpec(name, present=name not in masked) for name in (*kept, *masked)]
    return (*cameras, *empty)


def _camera_notes(draft: Draft) -> tuple[str, ...]:
    """Return a note on cameras of a bundle that the data set of the training lacks."""
    dataset = draft.dataset
    if dataset is None or not dataset.images:
        return ()
    # A data set may have been renamed as it was made, or by the training.
    keys = {*dataset.images, *(draft.rename_map.get(key, key) for key in dataset.images)}
    known = {plain_camera_name(camera_name(key)) for key in keys}
    present = [camera.name for camera in draft.cameras if camera.present]
    lacking = [name for name in present if plain_camera_name(name) not in known]
    if not lacking:
        return ()
    has = ', '.join(camera_name(key) for key in dataset.images)
    note = f'the policy has the camera {", ".join(lacking)}, but the data set only {has}: '
    if lacking == present:
        return (f'{note}is it the one of the training?',)
    kept = ','.join(f'{name}=absent' if name in lacking else name for name in present)
    return (f'{note}if the training lacked it, say --cameras {kept}',)


def settle_prompt(draft: Draft) -> None:
    """Settle tokenizer, template and length of the prompts, for a family with language."""
    family, options, missing = find_family(draft.family), draft.options, draft.missing
    if not family.has_language:
        return
    missing.use('--advantage')
    draft.write('--advantage', prompt_advantage=options.advantage)
    _settle_tokenizer(draft)
    draft.settle('prompt_template', '--prompt-template', 'layout of the prompt in training')
    if draft.prompt_template is not None and draft.prompt_template not in family.templates:
        missing.conflict(
            f'--prompt-template says {draft.prompt_template}, but the prompts of {draft.family} '
            f'are {", ".join(family.templates)}'
        )
    draft.settle('prompt_length', '--prompt-length', 'tokens of the padded prompt')


def settle_schedule(draft: Draft) -> None:
    """Settle the rate, the actions of a chunk, and the steps that denoise them."""
    _settle_rate(draft)
    draft.settle('horizon', '--horizon', 'actions of a chunk')
    usual = find_family(draft.family).denoise_steps
    draft.settle('denoise_steps', '--denoise-steps', 'Euler steps', usual=usual)


def _settle_rate(draft: Draft) -> None:
    slowest_hz, fastest_hz = (1.0 / step_time_s for step_time_s in reversed(STEP_TIMES_S))
    given, missing = draft.options.rate_hz, draft.missing
    if given is not None and not slowest_hz <= given <= fastest_hz:
        missing.conflict(
            f'--rate-hz says {given:g}; expected {slowest_hz:.2g} to {fastest_hz:g}, actions a '
            'second'
        )
    stated = draft.dataset.rate_hz if draft.dataset else None
    if given is not None and stated is not None and given != stated:
        missing.conflict(f'--rate-hz says {given} but --dataset says fps {stated}')
    rate_hz = stated if given is None else given
    if rate_hz is None:
        missing.ask('--rate-hz', 'actions a second in training (the frame rate of the data set)')
    elif rate_hz > 0:
        draft.write('--dataset, fps' if given is None else '--rate-hz', step_time_s=1.0 / rate_hz)


def _settle_tokenizer(draft: Draft) -> None:
    given, stated, missing = draft.options.tokenizer, draft.tokenizer, draft.missing
    missing.use('--tokenizer')
    if given is not None and (why := _why_no_tokenizer(given)):
        missing.unusable(f'--tokenizer {given}: {why}')
        return
    if given and stated and not filecmp.cmp(given, stated, shallow=False):
        missing.conflict(
            f'--tokenizer says {given} but the folder has another {stated.name}; leave the option '
            f'out to take {stated}'
        )
    if stated is not None:
        return
    if given is not None:
        draft.write('--tokenizer', tokenizer=given)
        return
    usual = 'tokenizer.json or tokenizer.model that the policy was trained with'
    missing.ask('--tokenizer', draft.wanted.get('--tokenizer', usual))


def add_tokens(draft: Draft) -> TemporaryDirectory[str] | None:
    """Append the tokens of the training to the draft's tokenizer, in a file of its own.

    Returns the folder of the file, which lives as long as this is held; None: nothing is added.
    Raises ExportError: an unreadable tokenizer, or a kind to which none can be added.
    """
    path = draft.tokenizer
    if path is None or not draft.added_tokens:
        return None
    import tokenizers

    try:
        vocabulary = tokenizers.Tokenizer.from_file(str(path))
    # The library raises bare Exception for whatever it cannot parse.
    except Exception as error:
        raise ExportError(
            f'{path}: is no tokenizer.json: {one_line(str(error), 300)}; give the one of the '
            'model that the policy was trained from (--tokenizer)'
        ) from None
    for token in draft.added_tokens:
        vocabulary.add_special_tokens([tokenizers.AddedToken(token, special=True)])
    scratch = TemporaryDirectory(prefix='vla_runtime_')
    made = Path(scratch.name) / 'tokenizer.json'
    made.write_text(vocabulary.to_str(), encoding='utf-8')
    draft.write(f'{draft.places["tokenizer"]}, with the tokens of the training', tokenizer=made)
    return scratch


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
