"""Rooms of the package, in one order: a room imports itself and rooms below it, nothing above.

So whatever a room imports, at however many removes, lies below it. Imports inside functions count,
they run as well, if later, and so do those for types.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
from import_graph import ImportGraph, imports
from pages import PAGES, blocks
from paths import PACKAGES, ROOT

from vla_runtime.family.declaration import Head
from vla_runtime.family.listing import family_files, family_names

# A robot needs the last alone.
TABLETOP, TOOLS, CONVERT, ROBOT = PACKAGES
# From top to bottom; the picture in docs/explanation/architecture.md is the same.
ROOMS = (
    TABLETOP,
    f'{TOOLS}/cli',
    f'{TOOLS}/view',
    f'{TOOLS}/serve',
    f'{TOOLS}/selftest',
    f'{TOOLS}/distillation',
    f'{TOOLS}/dataset',
    f'{TOOLS}/replay',
    f'{TOOLS}/performance',
    f'{CONVERT}/export',
    f'{CONVERT}/readers',
    f'{CONVERT}/checkpoints',
    'cli',
    'nodes',
    'sensors',
    'robot',
    'remote',
    'policy',
    'inference',
    'engines',
    'models',
    'bundle',
    'declarations',
    'family',
    'execution',
    'processing',
    'messages',
    'recording',
    'processes',
    'pages',
    'types',
    'files',
)
# Rooms with circles inside, to be mended: the test of one that has none any more fails here.
TO_UNTIE: set[str] = set()
# Room, folder of one or files, to packages that it must do without: neither does any of its modules
# import them, in a function or not, nor does anything that is loaded with it.
WITHOUT = {
    'processing': {'torch', 'rclpy'},
    'execution': {'torch', 'rclpy', 'cv2', 'yaml'},
    'files': {'torch', 'rclpy', 'cv2'},
    'family': {'torch', 'rclpy', 'cv2', 'yaml'},
    'declarations': {'torch', 'rclpy', 'cv2', 'yaml'},
    'bundle': {'torch', 'rclpy', 'cv2'},
    'inference': {'torch', 'rclpy'},
    'engines/tensorrt': {'torch', 'rclpy'},
    'engines/onnx': {'torch', 'rclpy'},
    'sensors': {'torch', 'rclpy'},
    'robot': {'torch', 'rclpy', 'cv2'},
    'remote': {'torch', 'onnxruntime', 'rclpy'},
    'messages': {'torch', 'rclpy'},
    'recording': {'torch', 'rclpy', 'cv2'},
    'policy.py': {'torch', 'rclpy'},
    'types.py': {'torch', 'rclpy'},
    f'{CONVERT}/checkpoints': {'rclpy', 'cv2'},
    f'{CONVERT}/readers': {'torch', 'rclpy'},
    f'{CONVERT}/export': {'rclpy'},
    f'{TOOLS}/performance': {'rclpy'},
    f'{TOOLS}/replay': {'torch', 'rclpy'},
    f'{TOOLS}/dataset': {'torch', 'rclpy'},
    f'{TOOLS}/selftest': {'rclpy'},
    f'{TOOLS}/serve': {'torch', 'rclpy'},
}
# What names modules of the other packages without importing them: the list of executables.
NAMING_OTHERS = {'nodes/node_main.py'}
# Words that a family, its projects' checkpoints or its language model is known by.
FAMILY_WORDS = (
    'pi0',
    'smolvla',
    'evo1',
    'evo-1',
    'groot',
    'gr00t',
    'openvla',
    'bitvla',
    'multi_task_dit',
    'multi-task dit',
    'molmo',
    'xvla',
    'x-vla',
    'florence',
    'vla_jepa',
    'vla-jepa',
    'paligemma',
    'smolvlm',
    'internvl',
    'eagle',
    'qwen',
)
# Rooms whose modules load one package besides Python's own.
NUMPY_ALONE = ('execution', 'declarations', 'family')
# Files that load modules by name, which the order does not see: plug-ins and optional packages.
LOADING_BY_NAME = {
    'cli/main.py',
    'engines/cuda_driver.py',
    'engines/tensorrt/adapter.py',
    'family/listing.py',
    'nodes/executor/controller_watch.py',
    'nodes/node_main.py',
    'nodes/output_types.py',
    f'{CONVERT}/checkpoints/reader.py',
    f'{TABLETOP}/training/recipes/__init__.py',
    f'{TABLETOP}/training/worlds/__init__.py',
}
# Rooms that may name a family; the simulator trains some.
NAMING_FAMILIES = {'declarations', 'models', f'{CONVERT}/readers', TABLETOP}

GRAPH = ImportGraph(ROOT, PACKAGES)


def modules(part: str) -> list[Path]:
    """Source files of a package, or of a file, files or a folder of one (by default a robot's)."""
    base = ROOT if part.split('/')[0] in PACKAGES else ROOT / ROBOT
    found = [
        file
        for path in sorted(base.glob(part))
        for file in ([path] if path.is_file() else sorted(path.rglob('*.py')))
    ]
    assert found, f'{part}: no such file or folder'
    return found


def short(path: Path) -> str:
    """Path of a source file as it is written here."""
    return str(path.relative_to(ROOT)).removeprefix(f'{ROBOT}/')


def loaded_with(part: str) -> set[str]:
    """Packages, other than Python's own, that are loaded with the modules of a part."""
    wanted = set(modules(part))
    loaded = GRAPH.loaded_with(name for name, path in GRAPH.files.items() if path in wanted)
    return {name.split('.')[0] for name in loaded} - set(sys.stdlib_module_names) - {*PACKAGES}


def constants(path: Path) -> Iterator[str]:
    """Texts in a file's code."""
    for node in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def room_of(path: Path) -> str:
    """Room of a file; the tabletop is one, and a package's own first file is none."""
    package, *rest = path.relative_to(ROOT).with_suffix('').parts
    if package == TABLETOP:
        return TABLETOP
    return rest[0] if package == ROBOT else f'{package}/{rest[0]}'


def upward_imports(graph: ImportGraph, order: tuple[str, ...], place: dict[str, str]) -> set[str]:
    """Imports that point up, in words.

    Args:
        graph: the modules.
        order: rooms from top to bottom.
        place: module to its room.
    """
    depth = {room: number for number, room in enumerate(order)}
    return {
        f'{module} -> {name}'
        for module in place
        for name in graph.imported(module)
        if name in place and depth[place[name]] < depth[place[module]]
    }


# Packages' own first files say their version, and what they are for: below all rooms.
ROOM_OF = {
    module: room_of(path)
    for module, path in GRAPH.files.items()
    if module not in PACKAGES and not module.endswith('.__main__')
}


def test_every_room_is_in_the_order_once() -> None:
    assert sorted(ROOMS) == sorted(set(ROOM_OF.values()))


def test_every_import_points_down() -> None:
    assert not upward_imports(GRAPH, ROOMS, ROOM_OF)


@pytest.mark.parametrize(
    'room',
    [
        pytest.param(room, marks=[pytest.mark.xfail(strict=True)] if room in TO_UNTIE else [])
        for room in ROOMS
    ],
)
def test_no_files_of_a_room_import_each_other_in_a_circle(room: str) -> None:
    assert not GRAPH.circles(module for module, its in ROOM_OF.items() if its == room)


def test_a_family_imports_no_other_familys_files() -> None:
    files = set(family_files())
    rooms = {f'{ROBOT}/declarations', f'{ROBOT}/models', f'{CONVERT}/readers'}
    crossing = {
        (str(path.relative_to(ROOT)), name)
        for room in rooms
        for file in files
        for path in [*(ROOT / room).glob(f'{file}.py'), *(ROOT / room / file).glob('*.py')]
        for name in imports(path)
        if len(parts := name.split('.')) > 2
        and '/'.join(parts[:2]) in rooms
        and parts[2] in files - {file}
    }
    assert crossing == set()


def test_the_picture_of_the_architecture_page_is_the_order() -> None:
    (page,) = (page for page in PAGES if page.endswith('architecture.md'))
    (picture,) = (block for block in blocks(page, 'text') if 'declarations' in block)
    # A package, its rooms, two spaces, and what is there.
    drawn, package = [], ''
    for line in picture.splitlines():
        names = line.strip().split('  ')[0].split(', ')
        if not line.startswith(' '):
            (package,) = names
        if package == TABLETOP:
            drawn.append(TABLETOP)
        elif line.startswith(' '):
            prefix = '' if package == ROBOT else f'{package}/'
            drawn += [f'{prefix}{name.removesuffix(".py")}' for name in names]
    assert drawn == list(ROOMS)


def test_modules_are_loaded_by_name_in_known_files_alone() -> None:
    found = {
        short(path)
        for package in PACKAGES
        for path in modules(package)
        if 'import_module(' in path.read_text(encoding='utf-8')
    }
    assert found == LOADING_BY_NAME


def test_only_the_list_of_executables_names_modules_above() -> None:
    above = tuple(f'{package}.' for package in PACKAGES if package != ROBOT)
    naming = {
        short(path)
        for path in modules(ROBOT)
        if any(text.startswith(above) for text in constants(path))
    }
    assert naming == NAMING_OTHERS


def run_alone(
    source: str, missing: tuple[str, ...] = PACKAGES[:-1]
) -> subprocess.CompletedProcess[str]:
    """Run code where packages are missing: by default all but the robot's."""
    hidden = f'import sys\nfor name in {missing}:\n    sys.modules[name] = None\n'
    return subprocess.run(
        [sys.executable, '-c', hidden + source],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_robot_does_without_the_other_packages() -> None:
    """Its nodes and every module of its package are loaded where they are missing."""
    names = sorted(name for name in GRAPH.files if name.split('.')[0] == ROBOT)
    names = [name for name in names if '.triton' not in name and not name.endswith('__main__')]
    done = run_alone(f'import importlib\nfor name in {names}:\n    importlib.import_module(name)\n')
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ('words', 'code', 'says'),
    [
        (['info', str(ROOT / 'engines' / 'demo')], 0, 'policy'),
        (['status', '--help'], 0, 'usage'),
        (['export', 'folder'], 2, TOOLS),
        (['--help'], 0, TOOLS),
    ],
)
def test_the_command_of_a_robot_alone_says_what_is_not_there(
    words: list[str], code: int, says: str
) -> None:
    done = run_alone(f'from vla_runtime.cli.main import main\nsys.exit(main({words}))')
    assert (done.returncode, says in done.stdout + done.stderr) == (code, True), done.stderr


def test_one_package_that_is_missing_is_named() -> None:
    done = run_alone(
        "from vla_runtime.cli.main import main\nsys.exit(main(['export', 'x']))", ('vla_convert',)
    )
    assert (done.returncode, "'vla_convert" in done.stderr) == (2, True), done.stderr


@pytest.mark.parametrize('part', WITHOUT)
def test_a_room_does_without_the_packages_that_are_not_its_own(part: str) -> None:
    found = {name.split('.')[0] for path in modules(part) for name in imports(path)}
    assert not (found | loaded_with(part)) & WITHOUT[part]


@pytest.mark.parametrize('room', NUMPY_ALONE)
def test_a_room_loads_numpy_alone(room: str) -> None:
    assert loaded_with(room) == {'numpy'}


@pytest.mark.parametrize(
    'source',
    [
        'import vla_runtime.execution.executor',
        # Declarations are loaded by name, so that no import of the room's shows what they load.
        'from vla_runtime.family.listing import family_names; assert family_names()',
    ],
)
def test_what_runs_with_numpy_alone_does(source: str) -> None:
    check = "import sys; print(*{'yaml', 'cv2', 'torch', 'rclpy', 'numpy'} & {*sys.modules})"
    done = subprocess.run(
        [sys.executable, '-c', f'{source}; {check}'],
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.split() == ['numpy']


def test_what_moves_the_robot_cannot_tell_whether_it_is_recorded() -> None:
    """Recorders are subscribers alone, so they can cost time but change no chunk and no command."""
    asks = re.compile(r'subscription_count|count_subscribers|subscriptions_info|matched=')
    parts = ('policy.py', 'inference', 'engines', 'execution', 'nodes/policy', 'nodes/executor')
    for path in (file for part in parts for file in modules(part)):
        assert not asks.search(path.read_text(encoding='utf-8')), path
        heard = {'vla_runtime.recording', 'vla_runtime.nodes.recorder'}
        assert not any(name.startswith(tuple(heard)) for name in imports(path)), path


def lines_that_name_a_family(path: Path) -> Iterator[str]:
    """Lines of a source file, comments and help texts included, with a word of a family."""
    # A family whose name is an English word is looked for as a quoted name.
    words = '|'.join(re.escape(word) for word in FAMILY_WORDS)
    # A kind of head that a family is called by is declared under its name.
    kinds = get_args(Head) if path.name == 'declaration.py' else ()
    quoted = '|'.join(re.escape(name) for name in family_names() if name not in kinds)
    naming = re.compile(rf'{words}|[\'"](?:{quoted})[\'"]', re.IGNORECASE)
    for line in path.read_text(encoding='utf-8').splitlines():
        if naming.search(line):
            yield line.strip()


def test_no_room_but_families_and_readers_names_a_family() -> None:
    found = {
        short(path): lines
        for module, room in ROOM_OF.items()
        if room not in NAMING_FAMILIES
        and (lines := tuple(lines_that_name_a_family(path := GRAPH.files[module])))
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


SOURCES = {
    'top.py': 'import numpy.linalg\nfrom typing import TYPE_CHECKING\n'
    'from house import cellar\nif TYPE_CHECKING:\n    from house.attic import Roof\n'
    'def f():\n    from house import attic\n    import torch\n',
    'attic.py': 'import yaml\nimport house.top\n',
    'cellar.py': 'try:\n    from cv2 import resize\nexcept ImportError:\n    resize = None\n',
    '__init__.py': 'import safetensors\n',
}


@pytest.fixture
def house(tmp_path: Path) -> ImportGraph:
    (tmp_path / 'house').mkdir()
    for name, source in SOURCES.items():
        (tmp_path / 'house' / name).write_text(source, encoding='utf-8')
    return ImportGraph(tmp_path, ['house'])


def test_imports_in_functions_and_for_types_are_seen(house: ImportGraph) -> None:
    assert house.imported('house.top') == {'house.attic', 'house.cellar'}
    assert {'torch', 'numpy.linalg', 'house.attic', 'house.cellar'} <= imports(
        house.files['house.top']
    )


def test_what_is_loaded_is_loaded_at_any_remove_and_neither_in_functions_nor_for_types(
    house: ImportGraph,
) -> None:
    loaded = house.loaded_with(['house.top'])
    assert {'numpy.linalg', 'numpy', 'house.cellar', 'cv2', 'house', 'safetensors'} <= loaded
    assert not loaded & {'torch', 'yaml', 'house.attic'}
    assert {'yaml', 'cv2'} <= house.loaded_with(['house.attic'])


def test_an_import_that_points_up_and_a_circle_are_found(house: ImportGraph) -> None:
    place = {module: module for module in house.files}
    order = ('house.attic', 'house.top', 'house.cellar', 'house')
    assert upward_imports(house, order, place) == {'house.top -> house.attic'}
    assert house.circles(house.files) == [{'house.top', 'house.attic'}]
    assert not house.circles(['house.top', 'house.cellar'])
