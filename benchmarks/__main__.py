"""`make benchmark`: everything behind the tables of the README and docs/benchmarks."""

import sys

from benchmarks import accuracy, speedup

if __name__ == "__main__":
    sys.exit(speedup.main([]) or accuracy.main([]))
