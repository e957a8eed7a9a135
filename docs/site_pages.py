"""Sources of the site that differ from the files in docs/.

- Pages that live elsewhere in the repository, beside what they describe, are pages of the site too.
- The command line's page is written from argparse.
"""

from __future__ import annotations

import argparse
import posixpath
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# A page of the repository to its name on the site, where a stub in docs/ holds its place.
ELSEWHERE = {
    'engines/README.md': 'reference/bundle',
    'benchmark/README.md': 'appendix/measurements',
    'README.md': 'index',
}
COMMAND_LINE = 'reference/command_line'
_LINK = re.compile(r'\]\(([^()\s#]+)(#[^()\s]*)?\)')


def source_of(name: str, source: str) -> str:
    """Return the source of a page of the site.

    Args:
        name: the page's path below docs/, without `.md`.
        source: what the file of this name holds.
    """
    if name == COMMAND_LINE:
        return f'{source}\n{command_line()}'
    for page, stub in ELSEWHERE.items():
        if name == stub and page != 'README.md':
            return relinked((ROOT / page).read_text(encoding='utf-8'), page, name)
    return relinked(source, f'docs/{name}.md', name)


def relinked(source: str, page: str, name: str) -> str:
    """Turn links between files of the repository into links between pages of the site.

    A file that is no page is offered for download; a folder, or a page that is not of the site,
    keeps its name alone.

    Args:
        source: Markdown of `page`.
        page: path below the repository's root, from which the links lead.
        name: the page's name on the site.
    """

    def link(match: re.Match[str]) -> str:
        target, anchor = match[1], match[2] or ''
        if '://' in target:
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(page), target))
        if not (ROOT / path).exists():
            # Left for the builder to complain about.
            return match[0]
        if path in ELSEWHERE:
            place = f'docs/{ELSEWHERE[path]}.md'
        elif (ROOT / path).is_dir() or (path.endswith('.md') and not path.startswith('docs/')):
            return ']()'
        else:
            place = path
        return f']({posixpath.relpath(place, posixpath.dirname(f"docs/{name}"))}{anchor})'

    # A link whose target is empty is no link: its text stays.
    return re.sub(r'\[([^\]]*)\]\(\)', r'\1', _LINK.sub(link, source))


def command_line() -> str:
    """Every verb of `vla_runtime` with its options, as Markdown."""
    from vla_runtime.cli.main import build_parser

    (verbs,) = (
        action
        for action in build_parser([])._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    return '\n'.join(verb(name, parser) for name, parser in verbs.choices.items())


def verb(name: str, parser: argparse.ArgumentParser) -> str:
    """One verb: what it does, its usage, its options, its examples."""
    lines = [f'## {name}', '', parser.description or '', '']
    lines += ['```text', parser.format_usage().removeprefix('usage: ').rstrip(), '```', '']
    formatter = parser._get_formatter()
    for action in parser._actions:
        if action.help in (None, argparse.SUPPRESS) or isinstance(action, argparse._HelpAction):
            continue
        shown = formatter._format_action_invocation(action)
        lines += [f'`{shown}`', f': {escaped(formatter._expand_help(action))}', '']
    if parser.epilog:
        lines += ['```text', parser.epilog, '```', '']
    return '\n'.join(lines)


def escaped(text: str) -> str:
    """Keep Markdown's signs in a help text as they are."""
    return re.sub(r'([\\`*_<>\[\]$|])', r'\\\1', ' '.join(text.split()))
