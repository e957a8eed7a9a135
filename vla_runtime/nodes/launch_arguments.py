"""Launch arguments that would have no effect, refused before any node is started.

`launch` drops arguments that no launch file declares without a word, even `dry_run:=true`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from difflib import get_close_matches
from pathlib import Path

from vla_runtime.nodes.node_parameters import is_live, owners

# A name as near as this to an argument is a slip of the pen.
_NEARLY = 0.83
# Both have the same arguments, but for `robot`.
_LAUNCH_FILES = ('vla.launch.py', 'demo.launch.py')

_OF_ANOTHER_FILE = (
    '. An argument of this name that is for other nodes of your own launch file is kept from here '
    'by GroupAction(..., forwarding=False) around the include'
)


def starts_here(command_line: Sequence[str]) -> bool:
    """Return whether a command line starts one of the package's launch files itself.

    Only then every argument is known to be meant for it: a person's own launch file has others.
    """
    return any(Path(word).name in _LAUNCH_FILES for word in command_line)


def check_arguments(
    given: Collection[str], known: Collection[str], namespace: str, *, all_are_meant: bool
) -> list[str]:
    """Refuse launch arguments that no file declares.

    Args:
        namespace: of the nodes, with a leading slash; '' for none.
        all_are_meant: see `starts_here`. Else only a parameter of the nodes is refused.

    Returns:
        Warnings of arguments that are nearly one of `known`, where not all are meant.

    Raises:
        ValueError: such an argument, with the way to set it.
    """
    warnings = []
    for name in sorted(set(given) - set(known)):
        meant = get_close_matches(name, known, n=1, cutoff=_NEARLY)
        hint = f"; did you mean '{meant[0]}'?" if meant else ''
        if nodes := owners(name):
            own = '' if all_are_meant else _OF_ANOTHER_FILE
            raise ValueError(
                f'launch argument {name} is none of vla.launch.py{hint}; it is a parameter of '
                f'{" and ".join(nodes)}: {_how_to_set(name, nodes, namespace)}{own}'
            )
        if all_are_meant:
            declared = ', '.join(sorted(known))
            raise ValueError(
                f'launch argument {name} is unknown, and no node of vla_runtime has such a '
                f'parameter{hint or f"; expected one of {declared}"}'
            )
        if meant:
            warnings.append(f"argument '{name}' is none of vla.launch.py and has no effect{hint}")
    return warnings


def _how_to_set(name: str, nodes: Sequence[str], namespace: str) -> str:
    sections = ' or '.join(f"'/**/{node}'" for node in nodes)
    way = f'give it in a parameter file, params_file:=FILE, in section {sections}'
    live = [node for node in nodes if is_live(node, name)]
    if live:
        way += f', or while it runs: ros2 param set {namespace}/{live[0]} {name} VALUE'
    return way
