"""A person's parameter file, compared with what the nodes know before any of them is started.

ROS 2 skips a section that matches no node and a parameter that no node declares without a word.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vla_runtime.ros.node_parameters import NODE_PARAMETERS, names_of, owners
from vla_runtime.ros.parameters import ParameterError, is_of_rclpy
from vla_runtime.typed_yaml import FieldError, did_you_mean, loads

_PARAMETERS = 'ros__parameters'
# A section of another node may stand in the file; one that is called nearly like ours is ours.
_NEARLY = 0.75


def check_parameter_file(path: Path, namespace: str) -> None:
    """Refuse a file of which a part would do nothing.

    Args:
        path: the file.
        namespace: that the package's nodes are started in; '' for none.

    Raises:
        ParameterError: the file cannot be read, is no parameter file, has a section that misses the
            node it is called after, or a parameter that the section's nodes do not have; with the
            file, the section and what mends it.
    """
    try:
        document = loads(path.read_text(encoding='utf-8'))
        if not isinstance(document, Mapping):
            raise FieldError(
                '', f"no '{_PARAMETERS}' in it; expected sections like '/**/vla_policy'"
            )
        for section, parameters in _sections(document, ()):
            _check_section(section, parameters, namespace.strip('/'))
    except OSError as error:
        raise ParameterError(f'{path}: {error.strerror or error}') from None
    except UnicodeDecodeError as error:
        raise ParameterError(f'{path}: not text in UTF-8 ({error.reason})') from None
    except FieldError as error:
        raise ParameterError(f'{path}: {error}') from None


def _sections(
    mapping: Mapping[Any, Any], above: tuple[str, ...]
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Keys down to a `ros__parameters`, joined by slashes, and what is below it."""
    for key, value in mapping.items():
        if key == _PARAMETERS:
            if not isinstance(value, Mapping):
                raise FieldError('.'.join((*above, _PARAMETERS)), 'no parameters below it')
            yield '/'.join(above), value
        elif isinstance(value, Mapping):
            yield from _sections(value, (*above, str(key)))
        else:
            raise FieldError(
                '.'.join((*above, str(key))), f"parameters stand below '{_PARAMETERS}'"
            )


def _check_section(section: str, parameters: Mapping[str, Any], namespace: str) -> None:
    nodes = [name for name in NODE_PARAMETERS if _matches(section, namespace, name)]
    if not nodes:
        _require_foreign(section, namespace)
        return
    # One for every node may have what only one of them knows.
    known = names_of(*nodes)
    for name in _names(parameters, ''):
        if name in known or is_of_rclpy(name):
            continue
        mend = _mend(name, known)
        raise FieldError(
            f'{section}.{_PARAMETERS}.{name}', f'no parameter of {" or ".join(nodes)}{mend}'
        )


def _mend(name: str, known: tuple[str, ...]) -> str:
    """What to write in place of a parameter that is not among those known here."""
    close = difflib.get_close_matches(name, known, n=1)
    elsewhere = difflib.get_close_matches(name, names_of(*NODE_PARAMETERS), n=1)
    if close or not elsewhere:
        return did_you_mean(name, known)
    node = owners(elsewhere[0])[0]
    return f"; did you mean '{elsewhere[0]}' of {node}? That belongs in a section '/**/{node}'"


def _matches(section: str, namespace: str, node: str) -> bool:
    """Whether ROS gives a section's parameters to a node: `*` is one name, `**` any number."""
    words = {'**': r'(?:/\w+)*', '*': r'/\w+'}
    tokens = [token for token in section.split('/') if token]
    pattern = ''.join(words.get(token, '/' + re.escape(token)) for token in tokens)
    full_name = f'/{namespace}/{node}' if namespace else f'/{node}'
    return re.fullmatch(pattern, full_name) is not None


def _require_foreign(section: str, namespace: str) -> None:
    """Refuse a section that is called like one of the nodes and matches none."""
    name = section.rpartition('/')[2]
    close = difflib.get_close_matches(name, NODE_PARAMETERS, n=1, cutoff=_NEARLY)
    if not close:
        return
    node = close[0]
    full_name = f'/{namespace}/{node}' if namespace else f'/{node}'
    raise FieldError(
        section, f"matches no node: {node} is {full_name} here; write '/**/{node}' for it"
    )


def _names(parameters: Mapping[str, Any], above: str) -> Iterator[str]:
    """Full names of parameters, where nested mappings are joined by dots."""
    for key, value in parameters.items():
        name = f'{above}.{key}' if above else str(key)
        if isinstance(value, Mapping):
            yield from _names(value, name)
        else:
            yield name
