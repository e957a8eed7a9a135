"""Keys of a request: which camera, state or word each one of a client's keys is for.

A key is taken where its name fits a camera of the bundle. The names that openpi's robots use stand
here; every other client's come from a file (`--keys`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from vla_runtime.bundle.schema import BundleSpec
from vla_runtime.files import typed_yaml
from vla_runtime.files.quotes import quoted
from vla_runtime.remote.message_pack import MessageError

IMAGE, STATE = 'observation/image', 'observation/state'
INSTRUCTION = ('prompt', 'instruction')
EARLIER = 'observation/earlier_states'
SETTINGS = 'settings/'
# Stamps of camera frames and states, nanoseconds: ages in the prefix cache are between them.
STAMPS = 'stamps/'
# Keys beside those of the observation.
FIELDS = (
    'endpoint',
    'session_id',
    'seed',
    'number',
    'noise',
    'plan',
    'executed_steps',
    'delay_steps',
    'age',
    'report',
)
# What openpi's robots call a camera, and what a policy of theirs may call it, the likeliest first.
# The last names are those of openpi's own network.
_CAMERAS: Mapping[str, tuple[str, ...]] = {
    # DROID
    'observation/exterior_image_1_left': (
        'exterior_image_1_left',
        'exterior_1_left',
        'exterior_image_1',
        'base_0_rgb',
    ),
    'observation/exterior_image_2_left': (
        'exterior_image_2_left',
        'exterior_2_left',
        'exterior_image_2',
    ),
    'observation/wrist_image_left': (
        'wrist_image_left',
        'wrist_left',
        'wrist_image',
        'left_wrist_0_rgb',
    ),
    # LIBERO; LeRobot calls its second camera `image2`.
    IMAGE: ('image', 'base_0_rgb'),
    'observation/wrist_image': ('wrist_image', 'image2', 'left_wrist_0_rgb'),
    # ALOHA
    'images/cam_high': ('cam_high', 'base_0_rgb'),
    'images/cam_low': ('cam_low',),
    'images/cam_left_wrist': ('cam_left_wrist', 'left_wrist_0_rgb'),
    'images/cam_right_wrist': ('cam_right_wrist', 'right_wrist_0_rgb'),
}
# Keys that together are the state, in its order.
_STATES = ((STATE,), ('state',), ('observation/joint_position', 'observation/gripper_position'))


@dataclass(frozen=True)
class KeysFile:
    """Contents of a file of keys, which go beside the usual ones.

    Attributes:
        images: key of the client to camera of the bundle.
        state: keys whose numbers, one behind the other, are the state. A usual key among them is
            the usual one no more.
        instruction: key of the task in words.
        ignore: keys that are sent and not read, the usual ones of state and task too.
        groups: names of parts of state and actions on NVIDIA's wire, each with the names of its
            numbers in one text.
    """

    images: Mapping[str, str] = field(default_factory=dict)
    state: tuple[str, ...] = ()
    instruction: str = ''
    ignore: tuple[str, ...] = ()
    groups: Mapping[str, str] = field(default_factory=dict)


def read_key_mapping(path: Path) -> KeysFile:
    """Read a file of keys (ValueError: names the file and its field)."""
    try:
        return typed_yaml.parse(KeysFile, typed_yaml.loads(path.read_text(encoding='utf-8')))
    except (ValueError, OSError) as error:
        why = (error.strerror or '') if isinstance(error, OSError) else str(error)
        raise ValueError(f'{path}: {why}') from None


class RequestKeys:
    """The keys of one bundle.

    Attributes:
        images: key to camera.
        unfit: key that is known to this module, and why the bundle has no use for it.
        states: sets of keys that are a whole state.
        names: key to index in the state.
        instruction: keys of the task.
        ignored: keys that are not read.

    Raises:
        ValueError: the file names a camera that the bundle does not have, or one of `FIELDS`.
    """

    def __init__(self, spec: BundleSpec, file: KeysFile | None = None) -> None:
        file = file or KeysFile()
        cameras = [camera.name for camera in spec.cameras if camera.present]
        self.unfit: dict[str, str] = {}
        self.images = {f'{IMAGE}/{name}': name for name in cameras}
        self.images |= {f'images/{name}': name for name in cameras}
        for key, names in _CAMERAS.items():
            camera = next((name for name in names if name in cameras), None)
            if camera is None:
                known = ', '.join(cameras)
                self.unfit[key] = f'this policy has no camera of that name; its cameras: {known}'
            else:
                self.images[key] = camera
        for key in (*file.images, *file.state, file.instruction, *file.ignore):
            if key in FIELDS or key.startswith((SETTINGS, STAMPS)):
                raise ValueError(f'{quoted(key)}: is a field of every request, no key of a client')
        for key, camera in file.images.items():
            if camera not in cameras:
                raise ValueError(
                    f'images.{key}: the policy has no camera {quoted(camera)}'
                    f'{typed_yaml.did_you_mean(camera, cameras)}'
                )
            self.images[key] = camera
            self.unfit.pop(key, None)
        self.ignored = frozenset(file.ignore)
        self.images = {key: name for key, name in self.images.items() if key not in self.ignored}
        taken = {*file.state, *file.ignore}
        usual = tuple(keys for keys in _STATES if taken.isdisjoint(keys))
        self.states = (file.state, *usual) if file.state else usual
        self.names = {f'{STATE}/{name}': i for i, name in enumerate(spec.state_names)}
        words = dict.fromkeys(filter(None, (file.instruction, *INSTRUCTION)))
        self.instruction = tuple(key for key in words if key not in self.ignored)

    def known(self) -> Iterator[str]:
        """Keys of observations that are taken, for a message."""
        yield from self.images
        for keys in self.states:
            yield from keys
        yield from self.names
        yield from self.instruction
        yield from FIELDS

    def refuse(self, key: str) -> NoReturn:
        """Refuse a key that is of no field (MessageError): says why, and what mends it."""
        if key in self.unfit:
            raise MessageError(f'{key}: {self.unfit[key]}; map it with --keys')
        raise MessageError(
            f'{quoted(key)}: no field of a request{typed_yaml.did_you_mean(key, self.known())}; '
            'keys of another client are mapped with --keys'
        )
