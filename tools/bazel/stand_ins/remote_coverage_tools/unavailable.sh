#!/bin/sh
echo "bazel coverage is not set up here: see tools/bazel/stand_ins" >&2
exit 1
