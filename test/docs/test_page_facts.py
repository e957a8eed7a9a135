"""Facts in the pages are those of the code and of the measured results."""

from __future__ import annotations

import ast
import functools
import json
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
from paths import ROOT

from vla_runtime.cli import main as program
from vla_runtime.execution.command import ChunkRefusal, Reason
from vla_runtime.execution.handover import HandoverMode
from vla_runtime.family.listing import family_names, find_family
from vla_runtime.files.typed_yaml import key_of
from vla_runtime.nodes.executor.gripper_goals import GoalState
from vla_runtime.processes import supervisor
from vla_runtime.robot.file import load_robot
from vla_runtime.robot.schema import RobotSpec
from vla_tabletop.study.catalogue import STUDIES

MAKE = runpy.run_path(str(ROOT / 'docs' / 'make_parameters.py'))
TABLES = MAKE['TABLES']
PACKAGE = ROOT / 'vla_runtime'
TABLETOP = ROOT / 'vla_tabletop'
OF_A_FAMILY = {'dimensions.py', 'time_table.py'}
# Messages of NumPy and ROS 2, which are not in our code, and one that is an example of its form.
FOREIGN = {
    'A module that was compiled using NumPy 1.x',
    "expected 'Type.DOUBLE' got",
    'FILE.yaml: field joints[2].upper',
}


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
        assert command in ('demo', 'test', 'docs', 'exec', 'setup'), words
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


@pytest.mark.parametrize('folder', ['messages', 'nodes/policy', 'nodes/executor'])
def test_tags_are_explained(folder: str) -> None:
    page = text_of('docs/reference/topics.md')
    for text in literals(*(PACKAGE / folder).glob('*.py')):
        for name in re.findall(r'\b(episode|certain|request|number|tied)=', text):
            assert f'{name}=' in page


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


def test_every_hand_over_is_explained() -> None:
    assert {f'`{mode}`' for mode in get_args(HandoverMode)} <= set(
        first_cells('docs/explanation/executor.md')
    )


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


@pytest.mark.parametrize('page', ['README.md', 'docs/reference/robot_file.md'])
def test_the_robot_file_of_a_page_is_a_valid_one(page: str, tmp_path: Path) -> None:
    (written,) = (block for block in blocks(page, 'yaml') if 'joint_states' in block)
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


def test_the_joint_of_the_grippers_page_is_that_of_aloha() -> None:
    snippets = [yaml.safe_load(block) for block in blocks('docs/howto/grippers.md', 'yaml')]
    (joint,) = (one['joints'][0] for one in snippets if 'outputs' not in one)
    aloha = yaml.safe_load(text_of('config/robots/aloha.yaml'))
    (left,) = (one for one in aloha['joints'] if one['name'] == 'left_gripper')
    assert joint == {**left, 'name': 'gripper'}


def test_every_state_of_a_gripper_is_explained() -> None:
    rows = re.findall(
        r'^\| ((?:`\w+`(?:, )?)+) \| (?:OK|WARN|ERROR)', prose('docs/howto/grippers.md'), re.M
    )
    named = [name for row in rows for name in quoted(row)]
    assert sorted(named) == sorted(state.value for state in GoalState)


def test_every_robot_file_of_the_package_is_listed() -> None:
    table = prose('docs/reference/robot_file.md').partition('## Robot files of the package')[2]
    named = re.findall(r'^\| `(\w+)` \|', table, re.MULTILINE)
    assert sorted(named) == sorted(file.stem for file in (ROOT / 'config/robots').glob('*.yaml'))


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
    assert [path for path in paths if not (PACKAGE / path).is_file()] == []


def source_files() -> list[Path]:
    folders = ('vla_runtime', 'vla_tabletop', 'benchmark', 'docs', 'launch', 'test')
    return [path for folder in folders for path in (ROOT / folder).rglob('*.py')]


# --- families, messages, figures --------------------------------------------------------------


@pytest.mark.parametrize('name', family_names())
def test_every_family_is_named_in_the_readme(name: str) -> None:
    title = find_family(name).title.partition(' (')[0]
    assert title in text_of('README.md')


@functools.cache
def sources() -> str:
    folders = (PACKAGE, TABLETOP, ROOT / 'launch')
    python = '\n'.join(literals(*(path for folder in folders for path in folder.rglob('*.py'))))
    return f'{python}\n{text_of("run")}'


def messages() -> list[str]:
    """Messages of the troubleshooting page."""
    return [text for cell in first_cells('docs/reference/messages.md') for text in quoted(cell)]


@pytest.mark.parametrize('message', messages())
def test_messages_of_the_troubleshooting_page_are_those_of_the_code(message: str) -> None:
    if any(text in message for text in FOREIGN):
        pytest.skip('not in our code')
    # Names and numbers in a message differ, and its parts may come from different places.
    parts = [part.split() for part in re.split("…|: |'", message)]
    most = max(map(len, parts))
    words = [part for part in parts if len(part) >= min(3, most)]
    runs = [' '.join(part[i : i + 3]) for part in words for i in range(max(1, len(part) - 2))]
    assert any(run in sources() for run in runs)


def figures(name: str) -> Any:
    return json.loads(text_of(f'benchmark/results/{name}.json'))


def row_of(text: str, page: str = 'README.md') -> str:
    (row,) = re.findall(rf'^\|.*{re.escape(text)}.*$', text_of(page), re.MULTILINE)
    return row


def test_the_nodes_overhead_is_as_measured() -> None:
    measured = figures('node_overhead')['figures']['in_node_ms']
    assert f'{measured["median"]:.2f} ms median, {measured["p95"]:.2f} ms p95' in row_of(
        'results/node_overhead.json'
    )


def test_the_image_loss_is_as_measured() -> None:
    measured = figures('image_loss')['figures']
    shipped = measured['shipped']
    published, received = (sum(shipped[what].values()) for what in ('published', 'received'))
    assert f'{published - received} of {published} with the shipped' in row_of(
        'results/image_loss.json'
    )
    assert f'{measured["default"]["lost_percent"]:.0f}% with' in row_of('results/image_loss.json')


def test_the_chunk_on_a_gpu_is_as_measured() -> None:
    row = row_of('results/gpu.json')
    (measured,) = (
        one['milliseconds']
        for one in figures('gpu')['figures']['latency']
        if (one['views'], one['rows'], one['mode']) == (3, 1, 'triton, graph')
    )
    miss, hit = (measured[what]['median'] for what in ('miss', 'hit'))
    assert f'{miss:.1f} ms from new images, {hit:.1f} ms from cached ones' in row
    beside = figures('realtime_vla')['figures']['sides']['ours, Triton']['of_theirs']['median']
    assert f"[{beside:.2f} of realtime-vla's time]" in row


def test_the_success_is_as_measured() -> None:
    conditions = figures('study_success')['conditions']
    (plain,) = (c for c in conditions if c['label'] == {'wording': 'plain'})
    success = plain['groups']['all']['success']
    low, high = (100 * success[end] for end in ('low', 'high'))
    assert (
        f'{success["count"]} of {plain["groups"]["all"]["episodes"]} '
        f'(95%: {low:.1f} to {high:.0f}%)' in row_of('results/study_success.json')
    )


def test_the_studies_page_has_every_measured_study() -> None:
    results = (ROOT / 'benchmark' / 'results').glob('study_*.json')
    measured = {path.stem.removeprefix('study_') for path in results}
    page = set(re.findall(r'\w+', text_of('docs/appendix/studies.md').replace('study_', '')))
    # The replan intervals on still blocks had no part in the choice of the default.
    assert measured & set(STUDIES) - {'replan'} <= page


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


def test_the_page_gives_the_time_after_which_a_node_ends_its_own_teardown() -> None:
    node_runner = pytest.importorskip('vla_runtime.nodes.node_runner')
    (longest_s,) = re.findall(r'Shutdown takes (\d+) s at most', text_of('docs/howto/launch.md'))
    assert int(longest_s) == node_runner._TEARDOWN_S + node_runner._LAST_WAY_OUT_S
