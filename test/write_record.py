"""Writes `test/record_of_results.json` anew, where a change of results is wanted.

    ./run exec python test/write_record.py [PART ...]

It prints every entry that changes. The commit's message says why each change is right.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

# First: threads and scratch folders are those of tests.
import conftest  # noqa: F401
from record_of_results import difference, entries_of, machine, parts

RECORD = Path(__file__).with_name('record_of_results.json')


def main() -> int:
    parser = argparse.ArgumentParser(
        description='Write test/record_of_results.json anew; print what changes.',
        epilog='The commit message says why each change is right.',
    )
    parser.add_argument(
        'parts', nargs='*', metavar='PART', help='begin of names, such as case/pi05; default: all'
    )
    wanted = tuple(parser.parse_args().parts)
    recorded = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    here, there = machine(), recorded.pop('machine', machine())
    # The bytes of graphs are those of these two releases, on every machine.
    graphs_alone = all(one.startswith('onnx/') for one in wanted)
    releases = {'torch', 'onnx'} if graphs_alone else {*here, *there}
    if wanted and any(here.get(one) != there.get(one) for one in releases):
        parser.error('this machine computes otherwise than that of the record: write all of it')
    found = {}
    for part, make in sorted(parts().items()):
        if part.startswith(wanted or ''):
            print(part, file=sys.stderr)
            with tempfile.TemporaryDirectory() as folder:
                found |= entries_of(part, make, Path(folder))
    kept = {name: one for name, one in recorded.items() if not name.startswith(wanted or '')}
    for name in sorted({*found, *recorded} - {*kept}):
        if text := difference(found.get(name), recorded.get(name), here, there):
            print(f'{name}: {text}')
    write(there if wanted else here, kept | found)
    return 0


def write(machine: dict, entries: dict) -> None:
    """Write one line an entry, sorted."""
    lines = [
        f'{json.dumps(name)}: {json.dumps(entry, sort_keys=True)}'
        for name, entry in sorted({**entries, 'machine': machine}.items())
    ]
    RECORD.write_text('{\n' + ',\n'.join(lines) + '\n}\n')


if __name__ == '__main__':
    sys.exit(main())
