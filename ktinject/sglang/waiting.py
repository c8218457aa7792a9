"""Wait for a GPU without a CPU: CUDA's own wait spins, beside a worker on the same core.

The others then wait for what that worker has begun: a layer takes a tenth longer. A sleep comes to an end some tens of
microseconds late, which nobody sees where SGLang has queued the next step by then.
"""

from __future__ import annotations

import time
from typing import Any

_NAP_S = 50e-6


def until(event: Any) -> None:
    """Return when a recorded CUDA event, or what stands for one in SGLang, has happened."""
    while not event.query():
        time.sleep(_NAP_S)
