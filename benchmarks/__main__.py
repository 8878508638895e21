"""`make benchmark`: everything behind the tables of the README and docs/benchmarks that trains."""

import argparse
import sys

from benchmarks import accuracy, speedup

_BATCHES = ["--models=alexnet", "--meshes=8", "--batches=16,32,64,128", "--name=batches", "--readme="]

if __name__ == "__main__":
    argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__).parse_args()
    sys.exit(speedup.main([]) or speedup.main(_BATCHES) or accuracy.main([]))
