"""Names of cameras and of a feature's dimensions, as training projects write them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

# Prefix of a camera's images among the features.
CAMERA_FEATURE = 'observation.images.'


def camera_name(feature: str) -> str:
    """Return the name of a feature's camera, without what LeRobot puts before it."""
    return feature.removeprefix(CAMERA_FEATURE).removeprefix('observation.')


def plain_camera_name(camera: str) -> str:
    """Return a camera's name without dots, which a converter of LeRobot made underscores."""
    return camera.replace('.', '_')


def plain_joint_name(name: str) -> str:
    """Return the name of a joint: LeRobot calls its position 'elbow.pos', robots say 'elbow'."""
    return name.removesuffix('.pos')


def feature_names(written: object, length: int | None) -> tuple[str, ...] | None:
    """Return the names of a feature's dimensions in order; None where there are no usable ones.

    LeRobot's and openpi's data sets write a list, a list in a list, `{"motors": list}`, lists by
    group, a mapping of names to indices or of indices to names.
    """
    found = _flat(written)
    if not found or (length is not None and len(found) != length):
        return None
    if not all(isinstance(name, str) and name.strip() for name in found):
        return None
    names = tuple(str(name) for name in found)
    return names if len(set(names)) == len(names) else None


def _flat(written: object) -> list[object]:
    """Return the names in order, whatever they are nested in."""
    if isinstance(written, Mapping):
        indexed = _indexed(written)
        parts = written.values() if indexed is None else indexed
        if indexed is None and not all(isinstance(one, (Mapping, list)) for one in parts):
            return []
        return [name for part in parts for name in _flat(part)]
    if isinstance(written, Sequence) and not isinstance(written, str):
        return [name for part in written for name in _flat(part)]
    return [] if written is None else [written]


def _indexed(written: Mapping[str, object]) -> list[str] | None:
    """Return the names of a mapping between names and indices; None for another mapping."""
    ordered: dict[int, str] = {}
    for key, value in written.items():
        if isinstance(value, int) and not isinstance(value, bool):
            ordered[value] = key
        elif isinstance(value, str) and key.isdecimal():
            ordered[int(key)] = value
        else:
            return None
    # With gaps it is something else, such as the first and last index of a group.
    if sorted(ordered) != list(range(len(written))):
        return []
    return [ordered[index] for index in range(len(written))]
