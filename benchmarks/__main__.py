"""`make benchmark`: everything behind the tables of the README and docs/benchmarks that trains; a row that fails keeps
nothing else from being measured."""

import argparse
import sys

from benchmarks import accuracy, speedup

_BATCHES = ["--models=alexnet", "--meshes=8", "--batches=16,32,64,128", "--name=batches", "--readme="]

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--again", action="store_true", help="rows that this processor has, too")
    again = ["--again"] if parser.parse_args().again else []
    sys.exit(max([speedup.main(again), speedup.main([*_BATCHES, *again]), accuracy.main(again)]))
