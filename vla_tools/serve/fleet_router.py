"""Which replica of a fleet gets a call: the one that it names. Runs where the calls come from.

Ray sends this module by value, so its variables are no other module's.
"""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter

from vla_tools.serve import fleet_placement


class SessionRouter(RequestRouter):
    """Sends a call to the replica of its argument `replica`; to any where that one has gone."""

    async def choose_replicas(
        self, candidate_replicas: list[Any], pending_request: PendingRequest | None = None
    ) -> list[list[Any]]:
        """Return the named replica alone, which is waited for where it is busy."""
        wanted = None if pending_request is None else pending_request.kwargs.get('replica')
        named = [one for one in candidate_replicas if one.replica_id.unique_id == wanted]
        return [named or candidate_replicas]

    def update_replicas(self, replicas: list[Any]) -> None:
        """Note which replicas take calls."""
        super().update_replicas(replicas)
        fleet_placement.running[self.app_name] = tuple(one.replica_id.unique_id for one in replicas)
