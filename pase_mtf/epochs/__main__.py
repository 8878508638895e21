"""python -m pase_mtf.epochs: epochs to a target by global batch, and the best mix of workers and strategies.

The command is one of the whole: it trains models, and prices strategies of their graphs. So it stands with the
launcher, in `launch.epochs.command`, and this package, below all of that, only says where.
"""

import importlib
import sys

if __name__ == "__main__":
    sys.exit(importlib.import_module("pase_mtf.launch.epochs.command").main())
