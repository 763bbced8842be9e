"""What ends a worker from outside: a Spot notice, a planned end, its hours, its money."""

from __future__ import annotations

import threading

from batch_gen.config import Settings
from batch_gen.drain import Drain
from batch_gen.environment import metadata_endpoint
from batch_gen.interruption import SpotWatch, drain_at
from batch_gen.job import Workshop
from batch_gen.stop import stop_run


def watch_for_interruptions(settings: Settings, drain: Drain) -> None:
    """Look out for a Spot notice and for the planned end."""
    endpoint = metadata_endpoint()
    if endpoint is not None:
        SpotWatch(endpoint, drain).start()
    if settings.drain_at is not None:
        drain_at(settings.drain_at, drain)


def cap_timer(settings: Settings, shop: Workshop) -> threading.Timer | None:
    """Stops the whole run when this start of a worker has used up its hours or its money."""
    caps = [(settings.max_hours, "time", f"--max-hours {settings.max_hours}")]
    if settings.max_cost is not None and settings.price_per_hour is not None:
        caps.append((settings.max_cost / settings.price_per_hour, "cost", f"--max-cost {settings.max_cost}"))
    wanted = [(hours, reason, text) for hours, reason, text in caps if hours is not None]
    if not wanted:
        return None
    hours, reason, text = min(wanted)
    message = f"{text} reached by {shop.facts.worker}"
    timer = threading.Timer(hours * 3600.0, stop_run, args=(shop.store, reason, message, shop.facts.worker))
    timer.daemon = True
    timer.start()
    return timer
