"""Names of videos, and of parts of state and actions, on NVIDIA's wire."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vla_runtime.bundle.schema import BundleSpec
from vla_runtime.files import typed_yaml
from vla_runtime.files.quotes import quoted
from vla_tools.serve.request_keys import KeysFile

_TASK = 'annotation.human.task_description'


@dataclass(frozen=True)
class Modalities:
    """Names under which clients send and get the numbers of a bundle.

    Attributes:
        videos: name to camera.
        state, actions: name to the columns of the bundle's state and actions.
    """

    videos: Mapping[str, str]
    state: Mapping[str, tuple[int, ...]]
    actions: Mapping[str, tuple[int, ...]]

    @classmethod
    def of(cls, spec: BundleSpec, file: KeysFile | None) -> Modalities:
        """Read them off a bundle and a file of keys.

        Without groups in the file all numbers have the names `state` and `action`.

        Raises:
            ValueError: groups that leave out a name, or have one twice or one of nothing; two
                videos of a camera.
        """
        file = file or KeysFile()
        videos = {camera.name: camera.name for camera in spec.cameras if camera.present}
        for key, camera in file.images.items():
            if key.startswith('video/'):
                # A client fills every name that it is told, and a camera has one image.
                if videos.pop(camera, None) is None:
                    raise ValueError(f'images.{key}: a second video of the camera {camera!r}')
                videos[key.removeprefix('video/')] = camera
        groups = _names_of(file.groups, spec)
        return cls(
            videos,
            _columns(groups, spec.state_names, 'state'),
            _columns(groups, spec.action_names, 'action'),
        )

    def config(self) -> dict[str, Any]:
        """Return the reply to `get_modality_config`: names, and the steps of each."""
        named = {'video': self.videos, 'state': self.state, 'action': self.actions}
        found = {
            kind: {'modality_keys': list(names), 'delta_indices': [0]}
            for kind, names in named.items()
        }
        return {**found, 'language': {'modality_keys': [_TASK], 'delta_indices': [0]}}


def _names_of(groups: Mapping[str, str], spec: BundleSpec) -> dict[str, list[str]]:
    """Return the names in each group; ValueError for one that the policy does not have."""
    known = [*spec.state_names, *spec.action_names]
    found = {group: words.replace(',', ' ').split() for group, words in groups.items()}
    for group, names in found.items():
        for name in names:
            if name not in known:
                raise ValueError(
                    f'groups.{group}: the policy has no {quoted(name)}'
                    f'{typed_yaml.did_you_mean(name, known)}'
                )
    return found


def _columns(
    groups: Mapping[str, list[str]], names: tuple[str, ...], whole: str
) -> dict[str, tuple[int, ...]]:
    if not groups:
        return {whole: tuple(range(len(names)))}
    found = {
        group: tuple(names.index(name) for name in members)
        for group, members in groups.items()
        if set(members) <= set(names)
    }
    if sorted(column for columns in found.values() for column in columns) != list(
        range(len(names))
    ):
        raise ValueError(
            f"groups: do not have each of the policy's {whole} names once: {', '.join(names)}"
        )
    return found
