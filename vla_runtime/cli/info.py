"""Check a policy bundle and show what it says.

Every file is compared with its SHA-256 in policy.yaml; --no-verify leaves that out, for a quick
look at a large bundle.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument('bundle', type=Path, metavar='BUNDLE', help='the folder to read')
    parser.add_argument('--no-verify', action='store_true', help='do not hash the files')


def main(arguments: argparse.Namespace) -> int:
    """Read and print; 2 where the bundle is not what it says."""
    from vla_runtime.bundle import BundleError, read_bundle
    from vla_runtime.bundle_summary import describe, line

    try:
        bundle = read_bundle(arguments.bundle, verify=not arguments.no_verify)
    except BundleError as error:
        print(f'error: {error}', file=sys.stderr)
        return 2
    print(describe(bundle.spec))
    checked = 'names only' if arguments.no_verify else 'SHA-256 of each agrees'
    print(line('files', f'{len(bundle.spec.files)}, {checked}'))
    for engine in sorted(bundle.engines_folder.glob('*')):
        print(line('engine', engine.name))
    return 0
