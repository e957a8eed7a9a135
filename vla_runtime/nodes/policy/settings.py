"""Settings of an inference, from the node's values and from their texts in a report.

No ROS 2 here: a bag is replayed where none is installed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from vla_runtime.bundle.schema import BundleSpec
from vla_runtime.files.quotes import quoted
from vla_runtime.files.setting_fields import Setting, from_values, settings_of
from vla_runtime.files.typed_yaml import did_you_mean
from vla_runtime.inference.settings import PolicySettings

# The core has one setting for whether and how a chunk is conditioned on the plan; the node has a
# switch and a way, so that the way stays while the switch is off.
RTC_SWITCH = 'real_time_chunking'
_TRUTHS = {'true': True, 'false': False}


def settings_from(values: Mapping[str, Any]) -> PolicySettings:
    """Make the settings of one inference; ValueError where values do not go together."""
    rtc_mode = values['rtc_mode'] if values[RTC_SWITCH] else 'off'
    settings: PolicySettings = from_values(PolicySettings, {**values, 'rtc_mode': rtc_mode})
    return settings


def check_answerable(spec: BundleSpec, settings: PolicySettings) -> None:
    """Refuse settings under which the executor could use no answer of a policy.

    Raises:
        ValueError: packed answers of one row. When such an answer comes, as many others have been
            executed since its observation as there are passes in it, and it has no row for that.
    """
    if settings.pipeline == 'packed' and spec.real_horizon == 1:
        raise ValueError(
            "pipeline is 'packed': a chunk of this policy is one action, whose step is over when "
            'an answer that shared its passes comes, so that the robot could never execute it; '
            "use 'latency' (the executor then asks again after each action)"
        )


@cache
def live_settings() -> Mapping[str, Setting]:
    """Return the live settings of an inference by name, in the order of the node's table."""
    rows: dict[str, Setting] = {}
    for row in settings_of(PolicySettings):
        if row.name == 'rtc_mode':
            rows[RTC_SWITCH] = Setting(
                RTC_SWITCH,
                row.default != 'off',
                "condition each chunk on the executor's committed plan, in the way of rtc_mode",
            )
            ways = tuple(word for word in row.words if word != 'off')
            # Ready for the switch, which is off by default.
            row = replace(row, default=ways[0] if row.default == 'off' else row.default, words=ways)
        rows[row.name] = row
    return rows


def read_value(name: str, text: str) -> Any:
    """Read one setting from its text, as a report or a command line has it.

    Raises:
        ValueError: no such setting, or no such value; names the setting and what it may be.
    """
    row = live_settings().get(name)
    if row is None:
        raise ValueError(f'setting {quoted(name)} is unknown{did_you_mean(name, live_settings())}')
    if isinstance(row.default, bool):
        if text.lower() not in _TRUTHS:
            raise ValueError(f'{name} is {quoted(text)}: it must be true or false')
        return _TRUTHS[text.lower()]
    value = text if isinstance(row.default, str) else _number(row, text)
    if problem := row.problem(value):
        raise ValueError(problem)
    return value


def _number(row: Setting, text: str) -> int | float:
    kind = int if isinstance(row.default, int) else float
    try:
        return kind(text)
    except ValueError:
        what = 'a whole number' if kind is int else 'a number'
        raise ValueError(f'{row.name} is {quoted(text)}: it must be {what}') from None
