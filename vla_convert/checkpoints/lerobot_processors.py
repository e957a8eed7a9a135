"""A LeRobot folder's processors: the steps before and after the network, and their tensors."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from vla_convert.checkpoints.folder_facts import CONFIG_FILE, ExportError, must_agree
from vla_runtime.bundle.schema import STATISTICS, STATISTICS_OF, CameraSpec, NormalisationSpec
from vla_runtime.bundle.statistics import image_group
from vla_runtime.bundle.tensors import TensorsError, read_arrays
from vla_runtime.files.json_file import JsonMapping, read_json
from vla_runtime.files.quotes import join_truncated
from vla_runtime.types import NormaliserKind

PREPROCESSOR_FILE = 'policy_preprocessor.json'
POSTPROCESSOR_FILE = 'policy_postprocessor.json'

# Steps that a release registered under another name: 0.5.1.
_EARLIER_NAMES = {'delta_actions_processor': 'relative_actions_processor'}


@dataclass(frozen=True)
class Pipeline:
    """A processor's JSON: registry name of each step to its configuration and tensors."""

    path: Path
    steps: Mapping[str, JsonMapping]
    state_files: Mapping[str, str]

    def step(self, name: str) -> JsonMapping:
        """A step's configuration, empty where the pipeline has no such step."""
        return self.steps.get(name, JsonMapping(self.path, {}))


def read_pipeline(
    path: Path, known: tuple[str, ...], renamed: Mapping[str, str] | None = None
) -> Pipeline:
    """Read a processor's JSON.

    `known`: registry names of the steps that this runtime does; `renamed`: others to those that
    they are.

    Raises ExportError: a missing file, an unknown step or a repeated one.
    """
    if not os.path.lexists(path):
        raise ExportError(f'{path}: is missing; copy the whole folder')
    steps: dict[str, JsonMapping] = {}
    files: dict[str, str] = {}
    for step in read_json(path).mappings('steps'):
        # A step that was never registered is saved under its Python class.
        name = step.get('registry_name', str, None) or step.get('class', str, 'without a name')
        name = {**_EARLIER_NAMES, **(renamed or {})}.get(name, name)
        if name not in known:
            raise ExportError(
                f"{path}: field {step.field}: the step '{name}' is not supported; known are "
                f'{", ".join(known)}'
            )
        if name in steps and name != 'device_processor':
            raise ExportError(f"{path}: field {step.field}: a second step '{name}'")
        steps[name] = step.mapping('config', optional=True)
        if 'state_file' in step:
            files[name] = step.get('state_file', str)
    return Pipeline(path, steps, files)


def state_file(folder: Path, pipeline: Pipeline, step: str) -> tuple[Path, dict[str, np.ndarray]]:
    """Read a step's file and tensors by name, if it has a file; ExportError: unreadable."""
    name = pipeline.state_files.get(step)
    if name is None:
        return pipeline.path, {}
    path = folder / name
    if Path(name).name != name or not name.endswith('.safetensors'):
        raise ExportError(
            f"{pipeline.path}: field state_file: '{name}' is not the plain name of a safetensors "
            'file'
        )
    try:
        return path, read_arrays(path)
    except TensorsError as error:
        raise ExportError(str(error)) from None


# --- Normaliser of a LeRobot policy, and its statistics


STATE, ENVIRONMENT, ACTION = 'observation.state', 'observation.environment_state', 'action'
_NORMALISERS: Mapping[str, NormaliserKind] = {
    'IDENTITY': 'identity',
    'QUANTILES': 'quantiles_lerobot',
    'MEAN_STD': 'mean_std_lerobot',
    'MIN_MAX': 'min_max',
}
# Statistics with which a kind changes nothing, in the order of `STATISTICS_OF`.
_NO_CHANGE: Mapping[NormaliserKind, tuple[float, float]] = {
    'mean_std_lerobot': (0.0, 1.0),
    'quantiles_lerobot': (-1.0, 1.0),
    'min_max': (-1.0, 1.0),
}
_CHANNELS = 3
_EPSILON = 1e-8


@dataclass(frozen=True)
class StoredStatistics:
    """Statistics of a folder, `action.mean` and so on.

    Attributes:
        before: for observations.
        after: for actions.
        raw: features left unnormalised, to the names of their statistics. LeRobot 0.4 to 0.6.1
            with `--rename_map` looks statistics up by new names and skips what it does not find.
            Later releases rename the statistics too, which are then found and none is raw.
    """

    path: Path
    before: Mapping[str, np.ndarray]
    after_path: Path
    after: Mapping[str, np.ndarray]
    raw: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Features:
    """Features of a policy that statistics are about.

    Attributes:
        state: feature to length: the state, then that of the environment if any.
        action: number of real action dimensions.
        cameras: feature to camera.
    """

    state: Mapping[str, int]
    action: int
    cameras: Mapping[str, str]


def read_normalisation(
    config: JsonMapping,
    before: Pipeline,
    after: Pipeline,
    features: Features,
    raw: Collection[str] = (),
    *,
    normalised_images: bool,
) -> NormalisationSpec:
    """Read which normalisers the policy was trained with.

    Args:
        raw: features that training left unnormalised.
        normalised_images: images go in from [0, 1] as `VISUAL` says; else as the policy has them.

    Raises ExportError: files that contradict each other, or normalisers that this runtime lacks.
    """
    stated = config.mapping('normalization_mapping')
    modes = _modes(config, before, after)
    if modes['VISUAL'] != 'IDENTITY' and not normalised_images:
        raise stated.error(
            'VISUAL',
            f'{modes["VISUAL"]} is not supported; expected IDENTITY: the policy prepares images '
            'itself, without statistics',
        )
    only = before.step('normalizer_processor').words('normalize_observation_keys')
    if only is not None:
        if STATE not in only:
            modes['STATE'] = 'IDENTITY'
        normalised = modes['VISUAL'] != 'IDENTITY'
        left_out = [key for key in features.cameras if normalised and key not in only]
        if left_out and len(left_out) < len(features.cameras):
            raise before.step('normalizer_processor').error(
                'normalize_observation_keys', f'only some cameras are normalised: {list(only)}'
            )
        if left_out:
            modes['VISUAL'] = 'IDENTITY'
    if STATE in raw or STATE not in features.state:
        modes['STATE'] = 'IDENTITY'
    if ENVIRONMENT in raw:
        modes['ENV'] = 'IDENTITY'
    state = _normaliser(stated, 'STATE', modes['STATE'])
    if ENVIRONMENT in features.state and modes['ENV'] not in ('IDENTITY', modes['STATE']):
        raise stated.error(
            'ENV', f'{modes["ENV"]} is not supported where STATE is {modes["STATE"]}'
        )
    return NormalisationSpec(
        state=state,
        actions=_normaliser(stated, 'ACTION', modes['ACTION']),
        images=_normaliser(stated, 'VISUAL', modes['VISUAL']) if normalised_images else None,
    )


def _modes(config: JsonMapping, before: Pipeline, after: Pipeline) -> dict[str, str]:
    """Return LeRobot's word for the normaliser of each kind of feature."""
    stated = config.mapping('normalization_mapping')
    observed = ('VISUAL', 'STATE', 'ENV', 'ACTION')
    modes = {group: stated.get(group, str, 'IDENTITY') for group in observed}
    for pipeline, name, groups in (
        (before, 'normalizer_processor', observed),
        (after, 'unnormalizer_processor', ('ACTION',)),
    ):
        if name not in pipeline.steps:
            raise ExportError(f"{pipeline.path}: has no step '{name}'")
        step = pipeline.steps[name]
        used = step.mapping('norm_map', optional=True)
        for group in groups:
            found = used.get(group, str, 'IDENTITY')
            must_agree(stated, f'{stated.field}.{group}', modes[group], used, 'norm_map', found)
        epsilon = step.get('eps', (int, float), _EPSILON)
        if epsilon != _EPSILON:
            raise step.error('eps', f'{epsilon} is not {_EPSILON}')
    return modes


def _normaliser(stated: JsonMapping, group: str, mode: str) -> NormaliserKind:
    if mode not in _NORMALISERS:
        known = ', '.join(_NORMALISERS)
        raise stated.error(group, f"'{mode}' is not supported; expected one of {known}")
    return _NORMALISERS[mode]


def read_statistics(
    config: JsonMapping,
    stored: StoredStatistics,
    normalisation: NormalisationSpec,
    features: Features,
    padded: Mapping[str, int],
) -> dict[str, np.ndarray]:
    """Choose the statistics that this runtime knows.

    `padded`: feature to padded length; statistics of that length are cut. Raises ExportError:
    statistics missing or of a wrong length.
    """
    path, found, other = stored.path, stored.before, stored.after
    statistics: dict[str, np.ndarray] = {}
    groups = [
        (ACTION, 'actions', features.action, normalisation.actions),
    ]
    if STATE in features.state:
        groups.insert(0, (STATE, 'state', features.state[STATE], normalisation.state))
    if normalisation.images is not None:
        groups += [
            (feature, image_group(camera), _CHANNELS, normalisation.images)
            for feature, camera in features.cameras.items()
        ]
    for feature, group, length, kind in groups:
        padded_length = padded.get(feature, length)
        of_group = (
            _unchanged(length, kind)
            if feature in stored.raw
            else _of_feature(path, found, feature, length, kind, padded_length)
        )
        statistics |= {f'{group}.{name}': values for name, values in of_group.items()}
    for key, values in found.items():
        if key.startswith(f'{ACTION}.') and key in other and not np.array_equal(values, other[key]):
            raise ExportError(
                f"{path} and {stored.after_path} differ in '{key}'; they must agree, or actions "
                'are decoded with statistics they were not trained with'
            )
    if ENVIRONMENT in features.state:
        untouched = config.mapping('normalization_mapping').get('ENV', str, 'IDENTITY')
        length, kind = features.state[ENVIRONMENT], normalisation.state
        added = (
            _unchanged(length, kind)
            if untouched == 'IDENTITY' or ENVIRONMENT in stored.raw
            else _of_feature(path, found, ENVIRONMENT, length, kind)
        )
        joined = {
            name: np.concatenate([statistics[f'state.{name}'], added[name]])
            for name in STATISTICS_OF[kind]
        }
        statistics = {k: v for k, v in statistics.items() if not k.startswith('state.')}
        statistics |= {f'state.{name}': values for name, values in joined.items()}
    return statistics


def left_raw(found: Mapping[str, np.ndarray], renamed: Mapping[str, str]) -> dict[str, str]:
    """Return the renamed features whose statistics have the data set's name: see `raw`."""
    return {
        ours: theirs
        for theirs, ours in renamed.items()
        if has_statistics(found, theirs) and not has_statistics(found, ours)
    }


def stored_length(found: Mapping[str, np.ndarray], feature: str) -> int | None:
    """Return the length of a feature's statistics; None where there are none."""
    lengths = {
        found[key].shape[0]
        for name in STATISTICS
        if (key := f'{feature}.{name}') in found and found[key].ndim == 1
    }
    return lengths.pop() if len(lengths) == 1 else None


def has_statistics(found: Mapping[str, np.ndarray], feature: str) -> bool:
    """Return whether there are any statistics of a feature."""
    return any(_stored_name(found, feature, name) in found for name in STATISTICS)


def _stored_name(found: Mapping[str, np.ndarray], feature: str, name: str) -> str:
    """Return a statistic's key. LeRobot's migration of old folders writes `.` for `_` in names."""
    key = f'{feature}.{name}'
    converted = f'{feature.replace("_", ".")}.{name}'
    return converted if key not in found and converted in found else key


def _of_feature(
    path: Path,
    found: Mapping[str, np.ndarray],
    feature: str,
    length: int,
    kind: NormaliserKind,
    padded: int | None = None,
) -> dict[str, np.ndarray]:
    """Return a feature's known statistics by name, one row of numbers each."""
    statistics: dict[str, np.ndarray] = {}
    for name in STATISTICS:
        key = _stored_name(found, feature, name)
        if key not in found:
            continue
        values = found[key]
        # LeRobot writes those of colour channels as (3, 1, 1).
        if padded is not None and values.shape == (padded,):
            values = values[:length]
        if values.shape not in ((length,), (length, 1, 1)):
            raise ExportError(
                f"{path}: tensor '{key}' has shape {list(values.shape)} but {CONFIG_FILE} "
                f'says {length} dimensions'
            )
        statistics[name] = values.reshape(length)
    for name in STATISTICS_OF[kind]:
        if name not in statistics:
            raise ExportError(f"{path}: has no '{feature}.{name}'; {_why_missing(found, feature)}")
    return statistics


def _why_missing(found: Mapping[str, np.ndarray], feature: str) -> str:
    others = sorted({key.rpartition('.')[0] for key in found})
    if not others or has_statistics(found, feature):
        return (
            'a policy that was never trained on a data set (a base model) has none and cannot '
            'drive a robot yet'
        )
    return (
        f'it has those of {join_truncated(others, ", ")}: are features named otherwise than in the '
        f'training? {CONFIG_FILE}, rename_map of the preprocessor and this file belong together'
    )


def camera_statistics(
    cameras: Sequence[CameraSpec], mean: Sequence[float], std: Sequence[float]
) -> dict[str, np.ndarray]:
    """Return the same statistics of the colour channels for every camera, absent ones too."""
    return {
        f'{image_group(camera.name)}.{name}': np.array(values, dtype=np.float32)
        for camera in cameras
        for name, values in (('mean', mean), ('std', std))
    }


def _unchanged(length: int, kind: NormaliserKind) -> dict[str, np.ndarray]:
    """Return statistics under which a normaliser is the identity."""
    names = STATISTICS_OF[kind]
    return {
        name: np.full(length, value, dtype=np.float32)
        for name, value in zip(names, _NO_CHANGE.get(kind, ()), strict=True)
    }
