"""One request of a robot, checked: what every wire's message becomes before a policy sees it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from vla_runtime.bundle.schema import BundleSpec, earlier_name
from vla_runtime.family.declaration import observation_steps
from vla_runtime.family.listing import find_family
from vla_runtime.files.quotes import quoted
from vla_runtime.files.setting_fields import from_values, settings_of, values_of
from vla_runtime.inference.settings import PolicySettings
from vla_runtime.remote.message_pack import MessageError
from vla_runtime.types import Observation
from vla_tools.serve.request_keys import EARLIER, FIELDS, SETTINGS, STAMPS, RequestKeys
from vla_tools.serve.wire_images import read_image

Endpoint = Literal['infer', 'reset']
_RESET_FIELDS = {'endpoint', 'session_id', 'seed'}
_MOST_PLAN = 4096
_MOST_WORDS = 4096
_LONGEST_ID = 128
_ENDPOINTS = ('infer', 'reset')


@dataclass(frozen=True)
class RobotRequest:
    """What a robot asks for.

    Attributes:
        observation: None for a reset.
        session_id: name of the robot's session; None: that of its connection.
        seed: seed of the noise; None: that of the session.
        number: inference number; None: the next one of the session.
        plan: (n, actions) setpoints still to be executed, row 0 due at the observation; None: none.
        executed_steps: rows of the last chunk that were executed by the observation: the rest of it
            is the plan. None: the last chunk is no plan.
        delay_steps: rows of the plan that are executed before the new chunk can take over.
        settings: settings of this inference; None: the server's.
        gives_rtc_mode: the robot says itself how a plan is continued.
        age_s: seconds from the observation to its sending, by the robot's clock; None: not told.
        wants_report: the answer is to have all of the inference's report.
    """

    endpoint: Endpoint
    observation: Observation | None = None
    session_id: str | None = None
    seed: int | None = None
    number: int | None = None
    noise: np.ndarray | None = None
    plan: np.ndarray | None = None
    executed_steps: int | None = None
    delay_steps: int = 0
    settings: PolicySettings | None = None
    gives_rtc_mode: bool = False
    age_s: float | None = None
    wants_report: bool = False


class RequestReader:
    """Read requests to one bundle; every fault is a MessageError that names the key."""

    def __init__(self, spec: BundleSpec, keys: RequestKeys, settings: PolicySettings) -> None:
        self._spec, self._keys = spec, keys
        self._defaults = values_of(settings)
        # A robot may tell the stamps of images that it leaves out, too.
        stamped = (*spec.camera_names, 'state')
        earlier = range(1, observation_steps(spec.dims) or 1)
        self._stamps = {f'{STAMPS}{name}' for name in stamped} | {
            f'{STAMPS}{earlier_name(name, ago)}' for name in stamped for ago in earlier
        }
        self._settings = {row.name for row in settings_of(PolicySettings)}
        self._takes_steps = find_family(spec.family).takes_steps

    def read(self, fields: Mapping[str, Any]) -> RobotRequest:
        """Read a message's values by their keys, which `message_pack.flatten` gives."""
        try:
            return self._read(fields)
        except MemoryError:
            raise MessageError('there is no memory for a request of this size') from None

    def _read(self, fields: Mapping[str, Any]) -> RobotRequest:
        endpoint = fields.get('endpoint', 'infer')
        if not isinstance(endpoint, str) or endpoint not in _ENDPOINTS:
            raise MessageError(f'endpoint: {quoted(endpoint)} is none of {", ".join(_ENDPOINTS)}')
        session_id = _text(fields, 'session_id', _LONGEST_ID)
        seed = _whole(fields, 'seed', 2**63 - 1)
        if endpoint == 'reset':
            if unknown := sorted(set(fields) - _RESET_FIELDS):
                raise MessageError(
                    f'{quoted(unknown[0])}: no field of a reset; it has '
                    f'{", ".join(sorted(_RESET_FIELDS))}'
                )
            return RobotRequest('reset', session_id=session_id, seed=seed)
        observation = self._observation(fields)
        plan, noise = _array(fields, 'plan', 2), _array(fields, 'noise', 3)
        executed = _whole(fields, 'executed_steps', self._spec.real_horizon)
        if plan is not None and executed is not None:
            raise MessageError('plan and executed_steps: two plans; send one of them')
        if not self._takes_steps and (plan is not None or executed is not None):
            raise MessageError('plan, executed_steps: this policy continues no plan')
        if plan is not None and not 0 < len(plan) <= _MOST_PLAN:
            raise MessageError(f'plan: {len(plan)} rows; send 1 to {_MOST_PLAN}, or none')
        settings = self._read_settings(fields)
        if settings is not None and f'{SETTINGS}seed' in fields:
            if seed not in (None, settings.seed):
                raise MessageError('seed and settings/seed: two seeds; send one of them')
            seed = settings.seed
        return RobotRequest(
            endpoint='infer',
            observation=observation,
            session_id=session_id,
            seed=seed,
            number=_whole(fields, 'number', 2**62),
            noise=noise,
            plan=plan,
            executed_steps=executed,
            delay_steps=_whole(fields, 'delay_steps', _MOST_PLAN) or 0,
            settings=settings,
            gives_rtc_mode=f'{SETTINGS}rtc_mode' in fields,
            age_s=_seconds(fields, 'age'),
            wants_report=_truth(fields, 'report'),
        )

    def _observation(self, fields: Mapping[str, Any]) -> Observation:
        keys = self._keys
        images: dict[str, np.ndarray | None] = {}
        named = np.full(len(keys.names), np.nan)
        for key, value in fields.items():
            if key in keys.images:
                camera = keys.images[key]
                if camera in images:
                    raise MessageError(f'{key}: a second image of the camera {camera!r}')
                images[camera] = read_image(key, value)
            elif key in keys.names:
                named[keys.names[key]] = _number(key, value)
            elif not (
                key in FIELDS
                or key in keys.ignored
                or key == EARLIER
                or key in self._stamps
                or key.startswith(SETTINGS)
                or key in keys.instruction
                or any(key in parts for parts in keys.states)
            ):
                keys.refuse(key)
        cameras = {camera.name for camera in self._spec.cameras if camera.present}
        if missing := sorted(cameras - set(images)):
            raise MessageError(
                f'observation/image/{missing[0]}: the image of the camera {missing[0]!r} is missing'
            )
        earlier = _array(fields, EARLIER, 2)
        return Observation(
            images=images,
            state=self._state(fields, named),
            instruction=self._instruction(fields),
            earlier_states=() if earlier is None else tuple(earlier),
            stamps_ns={
                key.removeprefix(STAMPS): _whole(fields, key, 2**63 - 1) or 0
                for key in self._stamps & set(fields)
            },
        )

    def _instruction(self, fields: Mapping[str, Any]) -> str:
        came = [key for key in self._keys.instruction if key in fields]
        if len(came) > 1:
            raise MessageError(f'{came[0]}, {came[1]}: the task came in two ways; send one')
        key = came[0] if came else self._keys.instruction[0]
        words = fields.get(key, '')
        if not isinstance(words, str) or len(words) > _MOST_WORDS:
            raise MessageError(
                f'{key}: expected the task as text of up to {_MOST_WORDS} characters, got '
                f'{quoted(words)}'
            )
        if self._spec.prompt is not None and not words.strip():
            raise MessageError(f'{key}: the task in plain words is missing')
        return words

    def _state(self, fields: Mapping[str, Any], named: np.ndarray) -> np.ndarray:
        names = self._spec.state_names
        came = [parts for parts in self._keys.states if any(key in fields for key in parts)]
        some_named = not np.isnan(named).all()
        if len(came) + some_named > 1:
            raise MessageError(
                f'{came[0][0]}: the state came in two ways; send one array, or each name once'
            )
        if came:
            parts = []
            for key in came[0]:
                part = _array(fields, key, 1)
                if part is None:
                    raise MessageError(f'{key}: is missing, and the state has it')
                parts.append(np.atleast_1d(part))
            state = np.concatenate(parts)
            if len(state) != len(names):
                raise MessageError(
                    f'{" + ".join(came[0])}: {len(state)} numbers, and the state has {len(names)}: '
                    f'{", ".join(names)}'
                )
            return state
        if not names:
            return named
        missing = [name for name, value in zip(names, named, strict=True) if math.isnan(value)]
        if missing:
            raise MessageError(f'observation/state/{missing[0]}: is missing, or no number')
        return named

    def _read_settings(self, fields: Mapping[str, Any]) -> PolicySettings | None:
        given = {
            key.removeprefix(SETTINGS): value
            for key, value in fields.items()
            if key.startswith(SETTINGS)
        }
        if not given:
            return None
        if unknown := sorted(set(given) - self._settings):
            raise MessageError(f'{SETTINGS}{unknown[0][:60]}: no setting of a policy')
        if given.get('pipeline', 'latency') != 'latency':
            raise MessageError(f'{SETTINGS}pipeline: the server decides what runs together')
        values = {
            name: value.item() if isinstance(value, np.generic) else value
            for name, value in given.items()
        }
        try:
            return from_values(PolicySettings, {**self._defaults, **values})
        except (ValueError, TypeError) as error:
            raise MessageError(f'settings: {error}') from None


def _plain(value: Any) -> Any:
    """Return a NumPy scalar, or an array of one number without axes, as Python's own."""
    is_one = isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.ndim == 0)
    return value.item() if is_one else value


def _number(key: str, value: Any) -> float:
    value = _plain(value)
    if isinstance(value, np.ndarray) and value.shape == (1,) and value.dtype.kind in 'fiu':
        value = value[0].item()
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise MessageError(f'{key}: expected a number, got {quoted(value)}')
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise MessageError(f'{key}: {value} is no usable number')
    return number


def _whole(fields: Mapping[str, Any], key: str, most: int) -> int | None:
    value = _plain(fields.get(key))
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        raise MessageError(f'{key}: expected a whole number from 0 to {most}, got {quoted(value)}')
    return value


def _truth(fields: Mapping[str, Any], key: str) -> bool:
    value = _plain(fields.get(key, False))
    if not isinstance(value, bool):
        raise MessageError(f'{key}: expected true or false, got {quoted(value)}')
    return value


def _seconds(fields: Mapping[str, Any], key: str) -> float | None:
    if fields.get(key) is None:
        return None
    value = _number(key, fields[key])
    if not 0.0 <= value < 1e6:
        raise MessageError(f'{key}: {value:g} s; expected 0 to 1e6 seconds')
    return value


def _text(fields: Mapping[str, Any], key: str, longest: int) -> str | None:
    value = fields.get(key)
    if value is None:
        return None
    if not isinstance(value, str) or not 0 < len(value) <= longest or not value.isprintable():
        raise MessageError(f'{key}: expected a text of 1 to {longest} printable characters')
    return value


def _array(fields: Mapping[str, Any], key: str, axes: int) -> np.ndarray | None:
    """Return finite numbers as float64 with at most so many axes; None where they did not come."""
    value = fields.get(key)
    if value is None:
        return None
    try:
        array = np.asarray(value)
    except ValueError:
        array = np.asarray('')
    if array.dtype.kind not in 'fiu' or array.ndim > axes:
        raise MessageError(f'{key}: expected numbers in an array of up to {axes} axes')
    # Of a big-endian client, too.
    array = array.astype(np.float64)
    # The networks compute in float32.
    usable = np.abs(array) <= np.finfo(np.float32).max
    if not usable.all():
        where = np.argwhere(~np.atleast_1d(usable))[0].tolist()
        raise MessageError(f'{key}: the number at {where} is not finite, or too large')
    return array
