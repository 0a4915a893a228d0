"""Who is to blame where ranks wait for too long: not a rank that is awaited, if it waits for another one itself."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from odin_nerfstudio.runtime.status import RankStatus
from odin_nerfstudio.runtime.transport import PeerReport


def who_stalls(
    me: int,
    awaited: Collection[int],
    doing: Mapping[int, RankStatus],
    reports: Mapping[int, PeerReport],
    limit: float,
) -> tuple[int, str] | None:
    """The rank at fault and what is to be said of it, where ranks have kept each other waiting for `limit` seconds.

    Args:
        me: This rank.
        awaited: Ranks that it waits for; empty: any other.
        doing: What the others have just answered, by rank.
        reports: What is known of every peer.

    Returns:
        None: The rank at fault gives no sign of life, which the transport will deal with.
    """
    ends = ends_of_chains(me, set(awaited) - {me} or set(reports), doing)
    if not all(reports[rank].answers for rank in ends):
        return None
    rank = max(ends, key=lambda r: doing[r].seconds if r in doing else 0.0)
    what = f", {doing[rank].what}" if rank in doing else ""
    return rank, (
        f"has not contributed for {limit:g} s, though its process answers (at its step {reports[rank].step}{what})"
    )


def ends_of_chains(me: int, awaited: Collection[int], doing: Mapping[int, RankStatus]) -> list[int]:
    """Ranks at the ends of the chains of waiting ranks that begin with those awaited, ascending.

    A chain that comes back to `me` says nothing new; a rank that has not answered ends one. If all wait for each other:
    the awaited ones.
    """
    seen, ends, chain = {me}, set(), sorted(awaited)
    while chain:
        rank = chain.pop()
        if rank in seen:
            continue
        seen.add(rank)
        status = doing.get(rank)
        following = {r for _, r in status.awaited} if status is not None and status.what == "waiting" else set()
        chain += sorted(following)
        if not following:
            ends.add(rank)
    return sorted(ends or awaited)
