"""The cameras of a policy, from the folder and the options."""

from __future__ import annotations

from vla_convert.checkpoints.feature_names import camera_name, plain_camera_name
from vla_convert.checkpoints.folder_facts import FolderFacts
from vla_convert.checkpoints.missing_facts import MissingFacts, as_option
from vla_convert.checkpoints.options import DatasetInfo
from vla_runtime.bundle.schema import CameraSpec


def settle_cameras(
    given: tuple[CameraSpec, ...] | None, facts: FolderFacts, missing: MissingFacts
) -> tuple[CameraSpec, ...]:
    """Return the cameras in the order the network sees them; contradictions are noted.

    A folder may list a camera of the policy that was fine-tuned. One that `given` calls absent is
    masked or left out, as the policy's own code does when its image is missing.
    """
    if given is None or given == facts.cameras:
        return facts.cameras
    if not facts.cameras_stated:
        return given
    stated = [camera.name for camera in facts.cameras if camera.present]
    named = {camera.name: camera for camera in given}
    empty = [camera for camera in facts.cameras if not camera.present]
    unknown = [name for name in named if name not in {camera.name for camera in facts.cameras}]
    unsaid = [name for name in stated if name not in named]
    present = [camera.name for camera in given if camera.present]
    kept = [name for name in stated if name in present]
    absent = [name for name in stated if name in named and name not in present]
    if unknown or unsaid or len(named) != len(given) or present != kept or not kept:
        missing.conflict(
            f'--cameras says {as_option(given)} but the folder says {as_option(facts.cameras)}, '
            'in this order'
            + (f'; say {unsaid[0]}=absent of a camera that it lacks' if unsaid else '')
        )
    elif absent and facts.absent_cameras is None:
        missing.conflict(
            f'--cameras says that {", ".join(absent)} {"are" if len(absent) > 1 else "is"} absent, '
            f'but {facts.family} needs all cameras of its folder'
        )
    else:
        cameras = [CameraSpec(name) for name in kept]
        if facts.absent_cameras == 'masked':
            cameras += [CameraSpec(name, present=False) for name in absent]
        return (*cameras, *empty)
    return facts.cameras


def camera_notes(
    cameras: tuple[CameraSpec, ...], facts: FolderFacts, dataset: DatasetInfo | None
) -> tuple[str, ...]:
    """Return a note on cameras of a bundle that the data set of the training lacks."""
    if dataset is None or not dataset.images or facts.absent_cameras is None:
        return ()
    # A data set may have been renamed as it was made, or by the training.
    keys = {*dataset.images, *(facts.renamed.get(key, key) for key in dataset.images)}
    known = {plain_camera_name(camera_name(key)) for key in keys}
    present = [camera.name for camera in cameras if camera.present]
    lacking = [name for name in present if plain_camera_name(name) not in known]
    if not lacking:
        return ()
    has = ', '.join(camera_name(key) for key in dataset.images)
    note = f'the policy has the camera {", ".join(lacking)}, but the data set only {has}: '
    if lacking == present:
        return (f'{note}is it the one of the training?',)
    kept = ','.join(f'{name}=absent' if name in lacking else name for name in present)
    return (f'{note}if the training lacked it, say --cameras {kept}',)
