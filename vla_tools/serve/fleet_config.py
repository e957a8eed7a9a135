"""The file that deploys a fleet, as Ray's `serve deploy` reads it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Applications: the one that robots connect to, and the bundles' with their numbers.
INGRESS_APP, POLICY_APP = 'robots', 'policy-'
POLICIES, INGRESS = 'vla_tools.serve.fleet_policies:policies', 'vla_tools.serve.fleet:ingress'


def fleet_config(
    policy: Mapping[str, Any], door: Mapping[str, Any], http: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what `serve deploy` reads, of plain types.

    Args:
        policy: arguments of `fleet_policies.policies`.
        door: arguments of `fleet.ingress`.
        http: Ray's `http_options`.
    """
    return {
        'http_options': dict(http),
        'applications': [
            {
                'name': f'{POLICY_APP}1',
                'route_prefix': None,
                'import_path': POLICIES,
                'args': dict(policy),
            },
            {
                'name': INGRESS_APP,
                'route_prefix': '/',
                'import_path': INGRESS,
                'args': dict(door),
            },
        ],
    }
