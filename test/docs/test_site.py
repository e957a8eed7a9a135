"""The site of the pages: what is made for it, and that it builds without a warning."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from paths import ROOT

from vla_runtime.cli.main import main

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
