"""How the ranks of one attempt find each other under torchrun.

torchrun keeps its key-value store when it starts all ranks anew, and torch itself would meet under the same keys again:
a rank may read the address that a rank of the attempt before has left there. The number of restarts is no help, since
machines may count differently. So rank 0 gives every attempt a name of its own, and tells it to those who are there.
"""

from __future__ import annotations

import secrets
import time
from datetime import timedelta

from torch.distributed.distributed_c10d import PrefixStore, Store

_POLL = 0.05
"""Seconds between rank 0's looks at who has come."""


def store_of_attempt(store: Store, rank: int, ranks: int, timeout: timedelta) -> PrefixStore:
    """A part of the store that only the ranks of this attempt use.

    Every rank announces itself with a random word; rank 0 answers each word with the attempt's name, again where a word
    that an earlier attempt left is replaced, until all have confirmed the name.

    Raises:
        RuntimeError: not every rank came within the time; rank 0 names those missing.
    """
    end = time.monotonic() + timeout.total_seconds()
    if rank != 0:
        word = secrets.token_hex(8)
        store.set(f"odin/hello/{rank}", word)
        answer = f"odin/answer/{rank}/{word}"
        store.wait([answer], timeout)
        name = store.get(answer).decode()
        store.set(f"odin/{name}/here/{rank}", "")
        return PrefixStore(f"odin/{name}", store)
    name = secrets.token_hex(8)
    answered: dict[int, str] = {}
    missing = set(range(1, ranks))
    while missing:
        for other in sorted(missing):
            if not store.check([f"odin/hello/{other}"]):
                continue
            word = store.get(f"odin/hello/{other}").decode()
            if answered.get(other) != word:
                answered[other] = word
                store.set(f"odin/answer/{other}/{word}", name)
            if store.check([f"odin/{name}/here/{other}"]):
                missing.discard(other)
        if missing and time.monotonic() > end:
            raise RuntimeError(f"ranks {sorted(missing)} did not come within {timeout.total_seconds():g} s")
        time.sleep(_POLL)
    return PrefixStore(f"odin/{name}", store)
