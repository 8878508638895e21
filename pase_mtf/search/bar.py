"""A progress bar for long searches."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tqdm import tqdm

__all__ = ["ProgressBar"]


class ProgressBar:
    """A progress bar on stderr that only appears once a search has taken a second. A context manager."""

    def __init__(self) -> None:
        self._bar: tqdm | None = None
        self._last = 0.0

    def __call__(self, seconds: float, cost: float, lower_bound: float) -> None:
        """Shows what is known (see registry.Progress), five times a second at most."""
        if seconds < 1 or seconds - self._last < 0.2:
            return
        self._last = seconds
        if self._bar is None:
            from tqdm import tqdm  # loaded only by searches that take a second
            self._bar = tqdm(bar_format="searching {elapsed}: {postfix}", file=sys.stderr)
        known = math.isfinite(lower_bound)
        # Rounded up: what nobody has proven is not nothing.
        share = 1e4 * (cost - lower_bound) / abs(cost) if known and math.isfinite(cost) and cost else math.inf
        gap = f", gap {math.ceil(share - 1e-6) / 100:.2f}%" if math.isfinite(share) else ""
        self._bar.set_postfix_str(f"cost {cost:.6g}" + (f", bound {lower_bound:.6g}" if known else "") + gap)
        self._bar.update()

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
