"""Pages: commands run as shown, links lead somewhere, tables are the code's, the site builds."""

from __future__ import annotations

import argparse
import re
import runpy
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import get_args

import pytest
import yaml
from pages import PAGES, anchors, blocks, first_cells, links, prose, text_of
from paths import PACKAGES, ROOT

from vla_runtime.cli import main as program
from vla_runtime.cli.main import main
from vla_runtime.execution.command import ChunkRefusal, Reason
from vla_runtime.execution.stopping import StopActions
from vla_runtime.family.listing import family_files
from vla_runtime.nodes import output_types
from vla_runtime.nodes.executor import outputs
from vla_runtime.robot.file import load_robot
from vla_runtime.robot.schema import ACTION_KINDS, OutputKind
from vla_tools.cli.export import add_arguments
from vla_tools.dataset import bag_contents
from vla_tools.dataset.bag_facts import COMMAND_KINDS

MAKE = runpy.run_path(str(ROOT / 'docs' / 'make_parameters.py'))
STATES = runpy.run_path(str(ROOT / 'docs' / 'make_states.py'))
TABLES = MAKE['TABLES']


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
            is_shown = any(code.startswith(f'# {words[1]}\n') for code in blocks(page, 'python'))
            assert is_shown or (ROOT / words[1]).is_file(), words


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


# --- tables of words --------------------------------------------------------------------------


def test_every_reason_of_a_stop_is_explained() -> None:
    named = [name for cell in first_cells('docs/howto/why_stopped.md') for name in quoted(cell)]
    moving = ('tracking', 'overrun', 'approaching', 'leading', 'braking')
    assert {reason.value for reason in Reason} - set(moving) <= set(named)


def test_every_refusal_of_a_chunk_is_explained() -> None:
    page = text_of('docs/howto/why_stopped.md').partition('## Chunks that are refused')[2]
    assert {refusal.value for refusal in ChunkRefusal} <= set(quoted(page))


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


# --- files -----------------------------------------------------------------------------


@pytest.mark.parametrize('page', PAGES)
def test_python_files_that_a_page_names_exist(page: str) -> None:
    named = {text for text in quoted(prose(page)) if re.fullmatch(r'[\w/]+\.py', text)}
    files = [f'/{path.relative_to(ROOT)}' for path in source_files()]
    assert {name for name in named if not any(file.endswith(f'/{name}') for file in files)} == set()


def source_files() -> list[Path]:
    folders = (*PACKAGES, 'benchmark', 'docs', 'launch', 'test')
    return [path for folder in folders for path in (ROOT / folder).rglob('*.py')]


def test_the_architecture_page_names_files_where_they_are() -> None:
    """Cells name a file by its path, or a folder and files in it."""
    table = prose('docs/explanation/architecture.md').partition('## Where is it?')[2]
    rows = re.findall(r'^\| [^|]+ \| (`.*) \|$', table.partition('\n## ')[0], re.MULTILINE)
    paths = set()
    for group in (group for row in rows for group in row.split('; ')):
        folder, _, names = group.rpartition(': ')
        paths |= {f'{folder.strip("`")}{name}' for name in quoted(names)}
    found = {path for path in paths for package in PACKAGES if (ROOT / package / path).is_file()}
    assert len(paths) > 80 and paths == found


# Reasons that are no stop of a moving robot, or always freeze.
WITHOUT_ACTION = {
    Reason.TRACKING,
    Reason.OVERRUN,
    Reason.APPROACHING,
    Reason.LEADING,
    Reason.BRAKING,
    Reason.NOT_STARTED,
    Reason.WAITING_FOR_CHUNK,
    Reason.SYNCHRONOUS_WAIT,
    Reason.SPEED_SCALED_TO_ZERO,
    Reason.STARVED,
    Reason.CLOCK_STOPPED,
    Reason.CLOCK_INVALID,
}


def test_every_reason_of_a_stop_has_an_action_and_stands_in_the_robot_files_page() -> None:
    actions = {field.name for field in fields(StopActions)}
    assert actions == {reason.value for reason in Reason} - {r.value for r in WITHOUT_ACTION}
    (listed,) = re.findall(
        r'in `/diagnostics`:\n(.*?)\. \[Some', text_of('docs/reference/robot_file.md'), re.DOTALL
    )
    assert set(quoted(listed)) == actions


def test_every_kind_of_output_is_in_every_table_of_kinds() -> None:
    kinds = set(get_args(OutputKind))
    assert output_types._TYPES.keys() | output_types._ELSEWHERE.keys() == kinds
    filled = outputs._FILLERS.keys() | set(ACTION_KINDS) | {'joint_trajectory'}
    assert filled == kinds == COMMAND_KINDS.keys() == bag_contents._READERS.keys()


def resolves(page: str, link: str) -> bool:
    name, _, anchor = link.partition('#')
    target = (ROOT / page).parent / name if name else ROOT / page
    inside = ROOT in (target.resolve(), *target.resolve().parents)
    return inside and target.exists() and (not anchor or anchor in anchors(target))


@pytest.mark.parametrize('page', PAGES)
def test_relative_links_and_anchors_resolve(page: str) -> None:
    assert [link for link in links(page) if '://' not in link and not resolves(page, link)] == []


def listed_pages(page: str) -> list[str]:
    """Pages in a page's tables of contents, by their path in the repository."""
    toctrees = re.findall(r'^```\{toctree\}\n(.*?)^```$', text_of(page), re.MULTILINE | re.DOTALL)
    names = [line for tree in toctrees for line in tree.splitlines() if re.match(r'\w', line)]
    return [str(Path(page).parent / f'{name}.md') for name in names]


def test_the_site_lists_every_page_once() -> None:
    listed, left = [], ['docs/index.md']
    while left:
        page = left.pop()
        listed.append(page)
        left += listed_pages(page)
    assert sorted(listed) == [page for page in PAGES if page.startswith('docs/')]


FOLDERS = sorted(family_files())


def test_every_family_folder_has_its_page() -> None:
    pages = (ROOT / 'docs' / 'reference' / 'families').glob('*.md')
    assert sorted(path.stem for path in pages) == FOLDERS


@pytest.mark.parametrize('page', ['families', *(f'families/{name}' for name in FOLDERS)])
def test_options_of_a_familys_page_are_those_of_export(page: str) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    spans = re.findall(r'`([^`\n]+)`', prose(f'docs/reference/{page}.md'))
    # Options of other verbs stand behind the verb.
    options = ' '.join(span for span in spans if span.startswith('--'))
    named = set(re.findall(r'--[a-z-]+', options))
    assert named <= set(parser._option_string_actions)


SITE = runpy.run_path(str(ROOT / 'docs' / 'site_pages.py'))
VERBS = re.findall(r'^## (\S+)$', SITE['command_line'](), re.MULTILINE)


def section(verb: str) -> str:
    """A verb's section of the command line's page."""
    page = SITE['command_line']() + '\n## '
    return page.partition(f'## {verb}\n')[2].partition('\n## ')[0]


def test_the_command_lines_page_has_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(['--help']) == 0
    listed = re.findall(r'^    ([a-z-]+)(?: |$)', capsys.readouterr().out, re.MULTILINE)
    assert len(listed) > 8 and sorted(VERBS) == sorted(listed)


@pytest.mark.parametrize('verb', VERBS)
def test_a_verbs_section_has_every_option(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb, '--help']) == 0
    options = re.findall(r'^  (--[a-z0-9-]+)', capsys.readouterr().out, re.MULTILINE)
    assert [name for name in options if f'`{name}' not in section(verb)] == []


@pytest.mark.parametrize(
    ('link', 'of_the_site'),
    [
        ('../../engines/README.md#poses', 'bundle.md#poses'),
        ('../../benchmark/README.md', '../appendix/measurements.md'),
        ('../howto/launch.md#shutdown', '../howto/launch.md#shutdown'),
        ('../../benchmark/results/gpu.json', '../../benchmark/results/gpu.json'),
        ('https://arxiv.org/abs/2304.13705', 'https://arxiv.org/abs/2304.13705'),
        # Left as it is, so that the build fails.
        ('nowhere.md', 'nowhere.md'),
    ],
)
def test_links_of_the_repository_become_links_of_the_site(link: str, of_the_site: str) -> None:
    name = 'reference/topics'
    made = SITE['relinked'](f'see [this]({link})', f'docs/{name}.md', name)
    assert made == f'see [this]({of_the_site})'


def built(docs: Path, out: Path) -> subprocess.CompletedProcess[str]:
    options = ('-q', '-W', '--keep-going', '-d', str(out / 'doctrees'), '-b', 'html')
    return subprocess.run(
        [sys.executable, '-m', 'sphinx', *options, '-c', str(ROOT / 'docs'), str(docs), str(out)],
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_the_site_builds_and_a_link_that_leads_nowhere_ends_the_build(tmp_path: Path) -> None:
    for name in ('sphinx', 'myst_parser', 'sphinx_rtd_theme'):
        pytest.importorskip(name, reason='./run docs brings what builds the site')
    done = built(ROOT / 'docs', tmp_path / 'site')
    assert done.returncode == 0, done.stderr
    assert (tmp_path / 'site' / 'index.html').is_file()
    broken = tmp_path / 'broken'
    broken.mkdir()
    (broken / 'index.md').write_text('# Page\n\n[nowhere](nowhere.md)\n', encoding='utf-8')
    done = built(broken, tmp_path / 'broken_site')
    assert done.returncode != 0 and 'nowhere' in done.stderr
