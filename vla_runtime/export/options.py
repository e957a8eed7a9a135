"""What the user adds to a checkpoint folder, and the LeRobot data set that can say it for them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vla_runtime.bundle import CameraSpec
from vla_runtime.export.errors import ExportError
from vla_runtime.export.folder import field_of, read_json
from vla_runtime.types import AdvantageTemplate, PromptTemplate


@dataclass(frozen=True)
class ExportOptions:
    """Everything is optional: what the folder lacks is asked for.

    Attributes:
        name: of the policy, for people.
        tokenizer: `*.json` or `*.model`.
        statistics: openpi's norm_stats.json.
        asset_id: which statistics of an openpi folder.
        dataset: a LeRobot data set, whose meta/info.json names dimensions and rate.
        state_names: in the order the policy was trained with.
        action_names: likewise.
        units: a unit for all dimensions and `name=unit` for single ones.
        rate_hz: actions a second.
        cameras: in the order the network sees them.
        deltas: names of the actions that are relative to the state; () says none is.
        velocities: names of the actions that are velocities.
        horizon: actions of a chunk.
        denoise_steps: Euler steps.
        prompt_length: tokens of the padded prompt.
        prompt_template: how the policy was prompted in training.
        advantage: where the advantage tag goes; None for a policy trained without one.
        vision_heads: attention heads of the vision tower.
        kv_heads: key/value heads of the language model.
    """

    name: str | None = None
    tokenizer: Path | None = None
    statistics: Path | None = None
    asset_id: str | None = None
    dataset: Path | None = None
    state_names: tuple[str, ...] | None = None
    action_names: tuple[str, ...] | None = None
    units: tuple[str, ...] | None = None
    rate_hz: float | None = None
    cameras: tuple[CameraSpec, ...] | None = None
    deltas: tuple[str, ...] | None = None
    velocities: tuple[str, ...] = ()
    horizon: int | None = None
    denoise_steps: int | None = None
    prompt_length: int | None = None
    prompt_template: PromptTemplate | None = None
    advantage: AdvantageTemplate | None = None
    vision_heads: int | None = None
    kv_heads: int | None = None


@dataclass(frozen=True)
class DatasetInfo:
    """What a LeRobot data set's meta/info.json says; None where it does not."""

    path: Path
    state_names: tuple[str, ...] | None
    action_names: tuple[str, ...] | None
    rate_hz: float | None


def read_dataset_info(path: Path) -> DatasetInfo:
    """Read names and rate from a LeRobot data set.

    Args:
        path: the data set's folder, or its meta/info.json.

    Raises:
        ExportError: no such file, or not of that form.
    """
    info = path / 'meta' / 'info.json' if path.is_dir() else path
    document = read_json(info)
    features = field_of(document, info, 'features', dict)
    return DatasetInfo(
        path=info,
        state_names=_names(features, 'observation.state', info),
        action_names=_names(features, 'action', info),
        rate_hz=float(field_of(document, info, 'fps', (int, float))) if 'fps' in document else None,
    )


def _names(features: dict[str, Any], key: str, info: Path) -> tuple[str, ...] | None:
    names = (features.get(key) or {}).get('names')
    # Some data sets wrap the list once: {"motors": [...]}.
    if isinstance(names, dict) and len(names) == 1:
        names = next(iter(names.values()))
    if names is None:
        return None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ExportError(f'{info}: field features.{key}.names: is not a list of names')
    return tuple(names)
