"""Rooms of the package: which room imports which, read from the source and never by importing it.

Imports inside functions count: they run as well, if later.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from paths import ROOT

from vla_runtime.families import family_names

PACKAGE = 'vla_runtime'
TABLETOP = 'vla_tabletop'
# Room to the rooms of the package that it may import; `types` and `files` may be imported by all.
EVERYONE = {'types', 'files', '__version__'}
ROOMS: dict[str, set[str]] = {
    'types': set(),
    'files': set(),
    # A family's checkpoint reader gives the exporter and the bundle what they write.
    'families': {'bundle', 'export', 'processing'},
    'bundle': {'families', 'processing'},
    'processing': set(),
    'inference': {'engines', 'bundle', 'processing', 'families'},
    'engines': {'families', 'bundle'},
    'export': {'families', 'engines', 'bundle', 'processing', 'inference', 'performance'},
    'execution': set(),
    'policy': {'bundle', 'engines', 'inference', 'processing', 'families'},
    'ros': {
        'policy',
        'execution',
        'inference',
        'bundle',
        'engines',
        'processing',
        'recording',
        'processes',
    },
    'processes': set(),
    'recording': set(),
    'replay': {
        'policy',
        'recording',
        'ros',
        'inference',
        'bundle',
        'engines',
        'processes',
    },
    'dataset': {'recording', 'ros'},
    'performance': {'families', 'engines', 'inference', 'bundle', 'processing', 'policy'},
    'selftest': {'policy', 'engines', 'export', 'bundle', 'performance', 'families'},
}
# Rooms that no other imports; they may import everything of the package.
FREE = {'cli', '__main__', '__init__'}
# Room, or folder of one, to packages that it must do without.
WITHOUT = {
    'processing': {'torch', 'rclpy'},
    'execution': {'torch', 'rclpy', 'cv2', 'yaml'},
    'files': {'torch', 'rclpy', 'cv2'},
    'bundle': {'torch', 'rclpy', 'cv2'},
    'inference': {'torch', 'rclpy'},
    'engines/tensorrt': {'torch', 'rclpy'},
    'engines/onnx': {'torch', 'rclpy'},
    'export': {'rclpy'},
    'performance': {'rclpy'},
    'recording': {'torch', 'rclpy', 'cv2'},
    'replay': {'torch', 'rclpy'},
    'dataset': {'torch', 'rclpy'},
    'policy.py': {'torch', 'rclpy'},
    'selftest': {'rclpy'},
    'types.py': {'torch', 'rclpy'},
}
# What names the tabletop's modules without importing them: the lists of verbs and of executables.
NAMING_TABLETOP = {'cli/main.py', 'ros/node_main.py'}
# Words that a family, its projects' checkpoints or its language model is known by.
FAMILY_WORDS = ('pi0', 'smolvla', 'evo1', 'evo-1', 'groot', 'gr00t', 'paligemma')
# The only package that the core that moves the robot may need.
EXECUTION_NEEDS = {'numpy'}


def modules(part: str = '') -> list[Path]:
    """Source files of the package, or of a file or folder of it."""
    path = ROOT / PACKAGE / part
    return [path] if path.is_file() else sorted(path.rglob('*.py'))


def imports(path: Path) -> Iterator[str]:
    """Full names of all modules that a file imports, at its top and in its functions."""
    for node in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f'{path}: relative import'
            # From the package itself a room is imported by name.
            names = [alias.name for alias in node.names] if node.module == PACKAGE else []
            yield from (f'{PACKAGE}.{name}' for name in names)
            if not names:
                yield node.module


def constants(path: Path) -> Iterator[str]:
    """Texts in a file's code."""
    for node in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def room_of(path: Path) -> str:
    return path.relative_to(ROOT / PACKAGE).with_suffix('').parts[0]


def rooms_imported(path: Path) -> set[str]:
    parts = [name.split('.') for name in imports(path)]
    return {names[1] for names in parts if names[0] == PACKAGE and len(names) > 1}


def test_every_room_is_in_the_table() -> None:
    assert {room_of(path) for path in modules()} == {*ROOMS, *FREE}


@pytest.mark.parametrize('room', ROOMS)
def test_a_room_imports_only_the_rooms_of_its_row(room: str) -> None:
    allowed = ROOMS[room] | EVERYONE | {room}
    wrong = {
        str(path.relative_to(ROOT)): sorted(found)
        for path in modules()
        if room_of(path) == room and (found := rooms_imported(path) - allowed)
    }
    assert not wrong


def test_nothing_of_the_package_imports_the_tabletop_or_a_benchmark() -> None:
    for path in modules():
        assert not {name.split('.')[0] for name in imports(path)} & {TABLETOP, 'benchmark'}, path


def test_only_the_lists_of_verbs_and_executables_name_the_tabletops_modules() -> None:
    naming = {
        str(path.relative_to(ROOT / PACKAGE))
        for path in modules()
        if any(text.startswith(f'{TABLETOP}.') for text in constants(path))
    }
    assert naming == NAMING_TABLETOP


def test_a_robot_does_without_the_tabletop() -> None:
    """Its nodes start where the package is missing."""
    source = (
        'import sys\n'
        f'sys.modules[{TABLETOP!r}] = None\n'
        'import vla_runtime.ros.policy.node, vla_runtime.ros.executor.node\n'
        'import vla_runtime.ros.recorder.node\n'
    )
    subprocess.run([sys.executable, '-c', source], check=True, timeout=120)


@pytest.mark.parametrize('part', WITHOUT)
def test_a_room_does_without_the_packages_that_are_not_its_own(part: str) -> None:
    found = {name.split('.')[0] for path in modules(part) for name in imports(path)}
    assert not found & WITHOUT[part]


def test_the_core_that_moves_the_robot_needs_numpy_alone() -> None:
    found = {name.split('.')[0] for path in modules('execution') for name in imports(path)}
    assert found - set(sys.stdlib_module_names) - {PACKAGE} == EXECUTION_NEEDS


def test_what_moves_the_robot_cannot_tell_whether_it_is_recorded() -> None:
    """Recorders are subscribers alone, so they can cost time but change no chunk and no command."""
    asks = re.compile(r'subscription_count|count_subscribers|subscriptions_info|matched=')
    parts = ('policy.py', 'inference', 'engines', 'execution', 'ros/policy', 'ros/executor')
    for path in (file for part in parts for file in modules(part)):
        assert not asks.search(path.read_text(encoding='utf-8')), path
        heard = {'vla_runtime.recording', 'vla_runtime.ros.recorder'}
        assert not any(name.startswith(tuple(heard)) for name in imports(path)), path


def lines_that_name_a_family(path: Path) -> Iterator[str]:
    """Lines of a source file, comments and help texts included, with a word of a family."""
    # A family whose name is an English word is looked for as a quoted name.
    words = '|'.join(re.escape(word) for word in FAMILY_WORDS)
    quoted = '|'.join(re.escape(name) for name in family_names())
    naming = re.compile(rf'{words}|[\'"](?:{quoted})[\'"]', re.IGNORECASE)
    for line in path.read_text(encoding='utf-8').splitlines():
        if naming.search(line):
            yield line.strip()


def test_no_room_but_families_names_a_family() -> None:
    found = {
        str(path.relative_to(ROOT / PACKAGE)): lines
        for path in modules()
        if room_of(path) != 'families' and (lines := tuple(lines_that_name_a_family(path)))
    }
    assert found == {}


def test_a_family_named_in_a_comment_or_as_a_key_is_seen(tmp_path: Path) -> None:
    path = tmp_path / 'module.py'
    source = "# as GR00T does\nfrom x import act\nTIMES = {'act': 1}\nact = 'pi05'\n"
    path.write_text(source, encoding='utf-8')
    assert list(lines_that_name_a_family(path)) == [
        '# as GR00T does',
        "TIMES = {'act': 1}",
        "act = 'pi05'",
    ]


def test_imports_in_functions_are_seen(tmp_path: Path) -> None:
    source = (
        'import numpy.linalg\n\ndef f():\n    from vla_runtime import policy\n    import torch\n'
    )
    path = tmp_path / 'module.py'
    path.write_text(source, encoding='utf-8')
    assert set(imports(path)) == {'numpy.linalg', 'vla_runtime.policy', 'torch'}
