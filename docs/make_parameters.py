"""Writes the tables of parameters.md from the code: ./run exec python docs/make_parameters.py"""

from __future__ import annotations

import re
from pathlib import Path

from vla_runtime.nodes.executor.parameters import EXECUTOR_PARAMETERS
from vla_runtime.nodes.parameter_table import ParameterTable
from vla_runtime.nodes.policy.parameters import POLICY_PARAMETERS
from vla_runtime.nodes.recorder.parameters import RECORDER_PARAMETERS
from vla_tabletop.nodes.parameters import TABLETOP_PARAMETERS

PAGE = Path(__file__).with_name('reference') / 'parameters.md'
TABLES: dict[str, ParameterTable] = {
    'vla_policy': POLICY_PARAMETERS,
    'vla_executor': EXECUTOR_PARAMETERS,
    'vla_recorder': RECORDER_PARAMETERS,
    'tabletop': TABLETOP_PARAMETERS,
}


def markdown(table: ParameterTable) -> str:
    """Write a table's rows as a Markdown table."""
    lines = ['| parameter | default | allowed | live | meaning |', '|---|---|---|---|---|']
    for row in table:
        default = str(row.default).lower() if isinstance(row.default, bool) else row.default
        default = "''" if default == '' else default
        live = 'no' if row.read_only else 'yes'
        lines.append(f'| `{row.name}` | `{default}` | {row.allowed} | {live} | {row.description} |')
    return '\n'.join(lines)


def with_tables(page: str) -> str:
    """Put the code's table below each node's heading.

    Args:
        page: Markdown with a heading `## NODE` for each node of `TABLES`; the first table below it
            is replaced.

    Raises:
        ValueError: a node's heading or its table is missing.
    """
    for node, rows in TABLES.items():
        below = re.compile(rf'(^## {node}$.*?\n\n)\|.*?\|\n(?=\n|\Z)', re.MULTILINE | re.DOTALL)
        page, found = below.subn(lambda match: f'{match[1]}{markdown(rows)}\n', page)  # noqa: B023
        if found != 1:
            raise ValueError(f"{PAGE.name}: no heading '## {node}' with a table below it")
    return page


if __name__ == '__main__':
    PAGE.write_text(with_tables(PAGE.read_text(encoding='utf-8')), encoding='utf-8')
