"""Check a user's parameter file against the nodes' parameters before any node is started.

ROS 2 skips a section that matches no node and a parameter that no node declares without a word.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from vla_runtime.files.field_error import FieldError
from vla_runtime.files.input_files import UnreadableFileError, read_text
from vla_runtime.files.quotes import quoted
from vla_runtime.files.typed_yaml import LARGEST_FILE, loads, number_or_same
from vla_runtime.nodes.node_parameters import NODE_PARAMETERS, names_of, nearest, problem_of
from vla_runtime.nodes.parameter_table import ParameterError, is_of_rclpy

_PARAMETERS = 'ros__parameters'
# What the nodes share, and the launch files compare before anything starts.
_OF_THE_LAUNCH = ('bundle', 'server', 'robot')
# A part of a section's name. rcl reads no other, and refuses the whole file for one.
_PART = re.compile(r'\*{1,2}|[A-Za-z_][A-Za-z0-9_]*')
# A rule on the command line for the name or the namespace of the node, or of one that it names.
_OWN_NAME = re.compile(r'(?:(\w+):)?__(ns|node|name):=(.*)')
# A section of another node may stand in the file; one that is called nearly like ours is ours.
_NEARLY = 0.75
# What a node is mistaken for: its executable, or the package.
_OTHER_NAMES: Mapping[str, tuple[str, ...]] = {
    'policy_node': ('vla_policy',),
    'executor_node': ('vla_executor',),
    'recorder_node': ('vla_recorder',),
    'tabletop_node': ('tabletop',),
    'vla': ('vla_policy', 'vla_executor'),
    'vla_runtime': ('vla_policy', 'vla_executor'),
}


def check_parameter_file(path: Path, namespace: str) -> tuple[str, ...]:
    """Refuse a file with entries for the package's nodes that would have no effect.

    `namespace` is where the package's nodes are started; '' for none.

    Returns:
        Sections that match none of the package's nodes here: those of other nodes, and of the same
        nodes in another namespace.

    Raises:
        ParameterError: the file cannot be read, is no parameter file, has a section that misses the
            node it is called after, a parameter that the section's nodes do not have or that the
            launch sets, or a value that they refuse; with the file, the section and what mends it.
    """
    sections = _read_sections(path)
    try:
        for section, parameters in sections:
            _check_section(section, parameters, namespace.strip('/'))
    except FieldError as error:
        raise ParameterError(f'{path}: {error}') from None
    return tuple(name for name, _ in sections if not _nodes_of(name, namespace.strip('/')))


def check_files_on_command_line(arguments: Sequence[str], node: str) -> list[str]:
    """Refuse a parameter file that rcl would fail to read, or whose section misses this node.

    The node judges the parameters itself.

    Args:
        arguments: a command line, of which `--params-file`, and `-r` for the node's name and
            namespace, are read between `--ros-args` and `--`.
        node: name of the node where the command line gives it none.

    Returns:
        A warning for each file in which nothing is for this node, nor nearly: it may be one file
        for all nodes of a launch.

    Raises:
        ParameterError: a file is missing, not regular, too large or no parameter file, or has a
            section for this node under a wrong name; with the file and what mends it.
    """
    files: list[Path] = []
    remaps: dict[str, str] = {}
    of_ros = False
    for argument, following in pairwise(arguments):
        if argument in ('--ros-args', '--'):
            of_ros = argument == '--ros-args'
        elif of_ros and argument == '--params-file':
            files.append(Path(following))
        elif of_ros and argument in ('-r', '--remap'):
            rule = _OWN_NAME.fullmatch(following)
            if rule and rule[1] in (None, node):
                # ROS 2 takes the first.
                remaps.setdefault(rule[2].replace('node', 'name'), rule[3])
    namespace, name = remaps.get('ns', '').strip('/'), remaps.get('name', node)
    warnings = (_warning_of(path, namespace, name) for path in files)
    return [warning for warning in warnings if warning]


def _warning_of(path: Path, namespace: str, node: str) -> str:
    """Refuse a file with a section that misses a node; say whether nothing in it is for it."""
    sections = [section for section, _ in _read_sections(path)]
    matching = [section for section in sections if _matches(section, namespace, node)]
    # '/**' is for every node: beside it, a section of its own may be meant and missed.
    if not any(section.rpartition('/')[2] == node for section in matching):
        for section in sections:
            if section not in matching and _is_nearly(section, node):
                raise ParameterError(f'{path}: {_missed(section, namespace, node)}')
    if matching:
        return ''
    return (
        f'{path}: no section is for this node, {_full_name(namespace, node)}, but for '
        f"{', '.join(map(quoted, sections))}; '/**/{node}' would be"
    )


def _is_nearly(section: str, node: str) -> bool:
    namespace, _, name = section.rpartition('/')
    if name == node:
        # In a namespace of its own it is of another robot.
        return not namespace.strip('/*')
    if name in NODE_PARAMETERS:
        return False
    meant = _OTHER_NAMES.get(name) or difflib.get_close_matches(name, [node], cutoff=_NEARLY)
    return node in meant


def _read_sections(path: Path) -> list[tuple[str, Mapping[str, Any]]]:
    try:
        document = _load(path)
        sections = list(_sections(document, ())) if isinstance(document, Mapping) else []
        if not sections:
            raise FieldError(
                '', f"no '{_PARAMETERS}' in it; expected sections like '/**/vla_policy'"
            )
        return sections
    except FieldError as error:
        raise ParameterError(f'{path}: {error}') from None


def _load(path: Path) -> Any:
    try:
        return loads(read_text(path, LARGEST_FILE), as_rcl=True)
    except OSError as error:
        raise ParameterError(f'{path}: {error.strerror or error}') from None
    except UnreadableFileError as error:
        raise ParameterError(f'{path}: {error}') from None


def _sections(
    mapping: Mapping[Any, Any], above: tuple[str, ...]
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Keys down to a `ros__parameters`, joined by slashes, and what is below it."""
    for key, value in mapping.items():
        if key == _PARAMETERS:
            where = '.'.join((*above, _PARAMETERS))
            if not isinstance(value, Mapping):
                raise FieldError(where, 'no parameters below it')
            section = '/'.join(above)
            if not section.strip('/') or section.endswith('/'):
                raise FieldError(
                    where, "stands below no node; expected sections like '/**/vla_policy'"
                )
            yield section, value
        elif isinstance(value, Mapping):
            yield from _sections(value, (*above, str(key)))
        else:
            raise FieldError(
                '.'.join((*above, str(key))), f"parameters stand below '{_PARAMETERS}'"
            )


def _check_section(section: str, parameters: Mapping[str, Any], namespace: str) -> None:
    for part in section.removeprefix('/').split('/'):
        if not _PART.fullmatch(part):
            raise FieldError(
                section,
                f'ROS 2 reads no file with the part {quoted(part)} in the name of a node: it must '
                "be '*', '**', or letters, digits and '_' that begin with no digit",
            )
    nodes = _nodes_of(section, namespace) or _nodes_elsewhere(section)
    if not nodes:
        _require_foreign(section, namespace)
        return
    # One for every node may have what only one of them knows.
    known = names_of(*nodes)
    # `ros2 param dump` writes every parameter of one node; the launch's arguments win over it.
    dumped = len(nodes) == 1 and set(known) <= {name for name, _ in _values(parameters, '')}
    for name, value in _values(parameters, ''):
        if value is None:
            raise FieldError(f'{section}.{_PARAMETERS}.{name}', 'has no value')
        where = f'{section}.{_PARAMETERS}.{name}'
        if name not in known and not is_of_rclpy(name):
            mend = nearest(name, known, in_file=True)
            raise FieldError(where, f'no parameter of {" or ".join(nodes)}{mend}')
        if name in _OF_THE_LAUNCH and not dumped:
            raise FieldError(
                where, f'is set by the launch for all nodes: give the launch argument {name}:=...'
            )
        if problem := problem_of(name, _as_ros_reads(value), *nodes):
            raise FieldError(where, problem)


def _as_ros_reads(value: Any) -> Any:
    """Return a value as rcl's parser does: 1e3 is a number, a date is text."""
    value = number_or_same(value)
    return value if isinstance(value, (bool, int, float, str, list)) else str(value)


def _nodes_of(section: str, namespace: str) -> list[str]:
    return [name for name in NODE_PARAMETERS if _matches(section, namespace, name)]


def _nodes_elsewhere(section: str) -> list[str]:
    """The node that a section with a namespace names: one file may be for several robots."""
    namespace, _, name = section.strip('/').rpartition('/')
    return [name] if namespace.strip('/*') and name in NODE_PARAMETERS else []


def _matches(section: str, namespace: str, node: str) -> bool:
    """Return whether a section applies to a node: `*` is one name, `**` any number of names."""
    words = {'**': r'(?:/\w+)*', '*': r'/\w+'}
    tokens = [token for token in section.split('/') if token]
    # `**/**` matches what `**` does, and many of them would backtrack for minutes.
    tokens = [word for word, after in pairwise([*tokens, '']) if not word == after == '**']
    pattern = ''.join(words.get(token, '/' + re.escape(token)) for token in tokens)
    return re.fullmatch(pattern, _full_name(namespace, node)) is not None


def _full_name(namespace: str, node: str) -> str:
    return f'/{namespace}/{node}' if namespace else f'/{node}'


def _require_foreign(section: str, namespace: str) -> None:
    """Refuse a section that is called like one of the nodes and matches none."""
    name = section.rpartition('/')[2]
    if nodes := _OTHER_NAMES.get(name):
        keys = ' or '.join(f"'/**/{node}'" for node in nodes)
        raise FieldError(section, f'matches no node: none is called {quoted(name)}; write {keys}')
    close = difflib.get_close_matches(name, NODE_PARAMETERS, n=1, cutoff=_NEARLY)
    if close:
        raise _missed(section, namespace, close[0])


def _missed(section: str, namespace: str, node: str) -> FieldError:
    full_name = _full_name(namespace, node)
    return FieldError(
        section, f"matches no node: {node} is {full_name} here; write '/**/{node}' for it"
    )


def _values(parameters: Mapping[str, Any], above: str) -> Iterator[tuple[str, Any]]:
    """Full names of parameters, where nested mappings are joined by dots, and their values."""
    for key, value in parameters.items():
        name = f'{above}.{key}' if above else str(key)
        if isinstance(value, Mapping):
            yield from _values(value, name)
        else:
            yield name, value
