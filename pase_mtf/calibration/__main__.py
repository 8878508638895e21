"""python -m pase_mtf.calibration: measures the kernels of given models ahead of time, and keeps them.

The command is one of the whole: it builds programs, searches, and measures what it finds. So it stands with the other
command that does, in `launch.measuring`, and this package, below all of that, only says where.
"""

import importlib
import sys

if __name__ == "__main__":
    sys.exit(importlib.import_module("pase_mtf.launch.measuring").main())
