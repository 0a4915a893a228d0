"""What a transport keeps of each peer."""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass, field

from odin_nerfstudio.runtime.pinned import Parcel
from odin_nerfstudio.runtime.transport import Activity


@dataclass(eq=False)
class Peer:
    """One peer: its queue and what was last heard of it."""

    rank: int
    ready: threading.Condition = field(default_factory=threading.Condition)
    """Guards the queue; notified when something is put there or was sent."""
    outgoing: deque[Parcel] = field(default_factory=deque)
    sending: bool = False
    heard: float = field(default_factory=time.monotonic)
    """When it last gave a sign of life (monotonic clock, seconds)."""
    step: int = -1
    activity: Activity = Activity.SETUP
    left: bool = False
    """Nothing can be sent to it any more."""
    said_bye: threading.Event = field(default_factory=threading.Event)
    pid: int = 0
    same_machine: bool = False
