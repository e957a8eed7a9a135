"""Facts in the pages are those of the code and of the measured results."""

from __future__ import annotations

import ast
import re
import runpy
import signal
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import yaml
from pages import PAGES, blocks, first_cells, prose, text_of
from paths import PACKAGES, ROOT

from vla_runtime.cli import main as program
from vla_runtime.execution.command import ChunkRefusal, Reason
from vla_runtime.files.typed_yaml import key_of
from vla_runtime.processes import supervisor
from vla_runtime.robot.file import load_robot
from vla_runtime.robot.schema import RobotSpec
from vla_tabletop.training.recipes import SHIPPED

MAKE = runpy.run_path(str(ROOT / 'docs' / 'make_parameters.py'))
STATES = runpy.run_path(str(ROOT / 'docs' / 'make_states.py'))
TABLES = MAKE['TABLES']
PACKAGE = ROOT / 'vla_runtime'
TABLETOP = ROOT / 'vla_tabletop'
OF_A_FAMILY = {'dimensions.py', 'time_table.py'}


def quoted(text: str) -> list[str]:
    """Code spans of a text."""
    return re.findall(r'`([^`\n]+)`', text)


# --- commands ---------------------------------------------------------------------------------


def shell_lines(page: str) -> list[str]:
    """Lines of a page's shell blocks, continued ones joined."""
    text = '\n'.join(blocks(page, '', 'bash')).replace('\\\n', ' ')
    return [' '.join(line.split('#')[0].split()) for line in text.splitlines()]


@pytest.mark.parametrize('page', PAGES)
def test_commands_of_the_pages_run_as_they_are_written(page: str) -> None:
    lines = shell_lines(page)
    assert [line for line in lines if re.match(r'vla_runtime |python |.*…', line)] == []
    for _, command, *words in (line.split() for line in lines if line.startswith('./run ')):
        assert command in ('demo', 'test', 'docs', 'exec', 'metaworld', 'setup'), words
        if command == 'demo':
            words = ['vla_runtime', 'demo', *words]
        if words[:1] == ['vla_runtime']:
            program.build_parser(words[1:]).parse_args(words[1:])
        elif words[:1] == ['python']:
            assert (ROOT / words[1]).is_file(), words


def test_the_pages_have_commands_to_run() -> None:
    assert sum(line.startswith('./run ') for page in PAGES for line in shell_lines(page)) > 20


@pytest.mark.parametrize('page', PAGES)
def test_parameters_in_commands_exist(page: str) -> None:
    used = re.findall(r'ros2 param (?:set|get) /(?:\w+/)*(\w+) (\w+)', text_of(page))
    unknown = [(node, name) for node, name in used if name not in names_of(node)]
    assert unknown == []


def names_of(node: str) -> set[str]:
    return {row.name for row in TABLES[node]}


@pytest.mark.parametrize('page', PAGES)
def test_launch_arguments_in_commands_exist(page: str) -> None:
    for line in shell_lines(page):
        found = re.match(r'ros2 launch vla_runtime (\S+)(.*)', line)
        if found:
            given = set(re.findall(r'(\w+):=', found[2]))
            assert given <= launch_arguments(found[1]), line


def launch_arguments(file: str) -> set[str]:
    source = (ROOT / 'launch' / file).read_text(encoding='utf-8')
    (passed_on,) = re.findall(r'^PASSED_ON = \{(.*?)^\}', source, re.MULTILINE | re.DOTALL) or ['']
    declared = re.findall(r"DeclareLaunchArgument\(\s*'(\w+)'", source)
    return {*declared, *re.findall(r"^    '(\w+)':", passed_on, re.MULTILINE)}


def test_every_launch_argument_is_explained() -> None:
    table = prose('docs/howto/launch.md').partition('## Launch arguments\n')[2].partition('## ')[0]
    listed = {quoted(row)[0] for row in re.findall(r'^\| (`.*?`) \|', table, re.MULTILINE)}
    assert listed == launch_arguments('vla.launch.py')


# --- parameters and topics --------------------------------------------------------------------


def test_parameter_tables_are_those_of_the_code() -> None:
    page = text_of('docs/reference/parameters.md')
    assert MAKE['with_tables'](page) == page, 'run: ./run exec python docs/make_parameters.py'


def test_states_and_their_picture_are_those_of_the_code() -> None:
    page, again = (
        text_of('docs/explanation/executor.md'),
        'run: ./run exec python docs/make_states.py',
    )
    assert STATES['with_tables'](page) == page, again
    assert (ROOT / 'docs' / 'executor_states.svg').read_text() == STATES['picture'](), again
    assert STATES['PLACES'].keys() == STATES['TRAITS'].keys()


@pytest.mark.parametrize(
    ('node', 'folder'),
    [
        ('vla_policy', PACKAGE / 'nodes/policy'),
        ('vla_executor', PACKAGE / 'nodes/executor'),
        ('tabletop', TABLETOP / 'nodes'),
    ],
)
def test_topics_of_a_node_are_those_of_its_code(node: str, folder: Path) -> None:
    """Names of its own (`~/…`), and the two topics that tie policy and executor."""
    (row,) = re.findall(rf'^\| `{node}` \|.*$', prose('docs/reference/topics.md'), re.MULTILINE)
    code = set(literals(*folder.glob('*.py')))
    named = {text for text in code if re.fullmatch(r'~/\w+|committed_plan|action_chunk', text)}
    assert named and named <= set(quoted(row))
    # The executor makes the names of its services from the words alone.
    assert {text for text in quoted(row) if text.startswith('~/')} <= {
        *named,
        *(f'~/{text}' for text in code),
    }


def literals(*files: Path) -> list[str]:
    """String constants of Python files; values in f-strings are dots."""
    found = []
    for file in files:
        nodes = list(ast.walk(ast.parse(file.read_text(encoding='utf-8'))))
        filled = [node for node in nodes if isinstance(node, ast.JoinedStr)]
        parts = {id(part) for node in filled for part in node.values}
        for node in filled:
            texts = (part.value if isinstance(part, ast.Constant) else '…' for part in node.values)
            found.append(''.join(map(str, texts)))
        found += [
            node.value
            for node in nodes
            if isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in parts
        ]
    return found


# --- tables of words --------------------------------------------------------------------------


def test_every_reason_of_a_stop_is_explained() -> None:
    named = [name for cell in first_cells('docs/howto/why_stopped.md') for name in quoted(cell)]
    moving = {Reason.TRACKING, Reason.OVERRUN, Reason.APPROACHING, Reason.BRAKING}
    assert {reason.value for reason in Reason} - {reason.value for reason in moving} <= set(named)


def test_every_refusal_of_a_chunk_is_explained() -> None:
    page = text_of('docs/howto/why_stopped.md').partition('## Chunks that are refused')[2]
    assert {refusal.value for refusal in ChunkRefusal} <= set(quoted(page))


def keys_of(hint: Any) -> Iterator[str]:
    """Keys of a robot file, at any depth."""
    if is_dataclass(hint):
        hints = get_type_hints(hint)
        for field in fields(hint):
            yield key_of(field)
            yield from keys_of(hints[field.name])
    for inner in get_args(hint):
        yield from keys_of(inner)


@pytest.mark.parametrize('name', sorted({*keys_of(RobotSpec)}))
def test_every_field_of_the_robot_file_is_explained(name: str) -> None:
    assert re.search(rf'`[^`\n]*\b{name}\b[^`\n]*`', prose('docs/reference/robot_file.md')), name


def test_the_robot_file_of_the_readme_is_a_valid_one(tmp_path: Path) -> None:
    (written,) = (block for block in blocks('README.md', 'yaml') if 'joint_states' in block)
    (tmp_path / 'my_arm.yaml').write_text(written, encoding='utf-8')
    assert load_robot(tmp_path / 'my_arm.yaml').name == 'my_arm'


def test_the_gripper_of_a_page_goes_with_the_arm_that_it_is_for(tmp_path: Path) -> None:
    snippets = [yaml.safe_load(block) for block in blocks('docs/howto/grippers.md', 'yaml')]
    (added,) = (one for one in snippets if 'outputs' in one)
    robot = yaml.safe_load(text_of('config/robots/ur5e.yaml'))
    for key, items in added.items():
        robot[key] += items
    (tmp_path / 'ur5e_gripper.yaml').write_text(yaml.safe_dump(robot), encoding='utf-8')
    loaded = load_robot(tmp_path / 'ur5e_gripper.yaml')
    assert len(loaded.joints) == 7 and loaded.outputs[-1].is_action


def test_every_robot_file_of_the_package_is_listed() -> None:
    table = prose('docs/reference/robot_file.md').partition('## Robot files of the package')[2]
    named = re.findall(r'^\| `(\w+)` \|', table, re.MULTILINE)
    assert sorted(named) == sorted(file.stem for file in (ROOT / 'config/robots').glob('*.yaml'))


# --- shipped policies -------------------------------------------------------------------------


def test_families_that_can_be_trained_are_those_of_the_demo_page() -> None:
    page = prose('docs/start/demo.md').partition('## Train a policy')[2]
    assert set(re.findall(r'^\| `(\w+)` \|', page, re.MULTILINE)) == set(SHIPPED)


@pytest.mark.parametrize('page', ['docs/start/demo.md', 'engines/README.md'])
def test_a_page_names_every_bundle_of_the_package(page: str) -> None:
    named = {text.rstrip('/').removeprefix('engines/') for text in quoted(prose(page))}
    assert set(SHIPPED.values()) <= named


# --- architecture -----------------------------------------------------------------------------


@pytest.mark.parametrize('page', PAGES)
def test_python_files_that_a_page_names_exist(page: str) -> None:
    named = {text for text in quoted(prose(page)) if re.fullmatch(r'[\w/]+\.py', text)}
    # Of the family that the page adds, not of the package.
    named -= OF_A_FAMILY if page == 'docs/howto/adding_a_family.md' else set()
    files = [f'/{path.relative_to(ROOT)}' for path in source_files()]
    assert {name for name in named if not any(file.endswith(f'/{name}') for file in files)} == set()


def test_files_of_the_architecture_page_are_in_the_rooms_that_it_names() -> None:
    """Cells name a file by its path, or a folder and files in it."""
    table = prose('docs/explanation/architecture.md').partition('## Where is it?')[2]
    rows = re.findall(r'^\| [^|]+ \| (`.*) \|$', table.partition('## ')[0], re.MULTILINE)
    groups = [group for row in rows for group in row.split('; ')]
    paths = []
    for group in groups:
        folder, _, names = group.rpartition(': ')
        paths += [f'{folder.strip("`")}{name}' for name in quoted(names)]
    assert len(paths) > 80
    found = {path for path in paths for package in PACKAGES if (ROOT / package / path).is_file()}
    assert set(paths) - found == set()


def source_files() -> list[Path]:
    folders = (*PACKAGES, 'benchmark', 'docs', 'launch', 'test')
    return [path for folder in folders for path in (ROOT / folder).rglob('*.py')]


# --- shutdown ---------------------------------------------------------------------------------


def test_a_launch_file_of_ones_own_gives_a_node_the_time_that_its_shutdown_may_take() -> None:
    page = text_of('docs/howto/launch.md')
    (longest_s,) = re.findall(r'Shutdown takes (\d+) s at most', page)
    (node,) = (
        block for block in blocks('docs/howto/launch.md', 'python') if 'executor_node' in block
    )
    (given_s,) = re.findall(r"sigterm_timeout='(\d+)'", node)
    assert int(given_s) > int(longest_s)
    for name in ('vla.launch.py', 'demo.launch.py'):
        launched = (ROOT / 'launch' / name).read_text(encoding='utf-8')
        assert set(re.findall(r"sigterm_timeout='(\d+)'", launched)) == {given_s}
    # The demo and live replays start nodes without a launch file.
    assert dict(supervisor._PATIENCE_S)[signal.SIGINT] == int(given_s)
