"""Run the doctor as a person types it, beside drivers that are processes of their own."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from graph import RELIABLE, Graph
from paths import ROOT
from rclpy.node import Node
from std_msgs.msg import Float64MultiArray


def doctor(
    *arguments: str, environment: dict[str, str] | None = None, before: str = ''
) -> tuple[int, list[dict[str, Any]], str]:
    """Exit code, findings, and what went to standard error.

    Args:
        before: shell commands that go before, in a mount namespace of its own.
    """
    words = [sys.executable, '-m', 'vla_runtime', 'doctor', '--json', *arguments]
    if before:
        words = ['unshare', '--mount', 'sh', '-c', f'{before} && exec {shlex.join(words)}']
    done = subprocess.run(
        words,
        cwd=ROOT,
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=120,
    )
    if not done.stdout:
        return done.returncode, [], done.stderr
    document = json.loads(done.stdout)
    assert document['exit_code'] == done.returncode
    return done.returncode, document['findings'], done.stderr


def problems(findings: Sequence[dict[str, Any]], what: str) -> list[str]:
    """Texts of the problems of one thing, each with its remedy."""
    found = [one for one in findings if one['level'] == 'problem' and one['what'] == what]
    assert all(one['mend'] for one in found)
    return [f'{one["text"]} -> {one["mend"]}' for one in found]


def start_driver(made: Graph, namespace: str, name: str, **given: Any) -> None:
    """Start a process that publishes in a namespace."""
    for kind in ('images', 'joints'):
        for one in given.get(kind, ()):
            one['topic'] = f'{namespace}/{one["topic"]}'
    text = json.dumps({'name': name, **given})
    made.start('driver_process', text, name=name)
    topics = [one['topic'] for kind in ('images', 'joints') for one in given.get(kind, ())]
    made.wait_for(
        lambda: all(made.node.count_publishers(topic) for topic in topics), f'{name} to publish'
    )


class Controller:
    """`arm` as a node that takes commands and says its joints."""

    def __init__(self, made: Graph, namespace: str, joints: list[str]) -> None:
        node = Node('arm', namespace=namespace, context=made.node.context)
        node.declare_parameter('joints', joints)
        node.declare_parameter('interface_name', 'position')
        node.create_subscription(
            Float64MultiArray, f'{namespace}/arm/commands', lambda _: None, RELIABLE
        )
        made._executor.add_node(node)
