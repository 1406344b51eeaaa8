#!/usr/bin/env bash
# Everything that wants a CUDA card, in one go: builds the device tests, runs them, and once more under
# compute-sanitizer. Run from the repository's root on a machine with a Hopper or Blackwell card and the CUDA toolkit.
set -euo pipefail
cd "$(dirname "$0")/.."

nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
cmake --preset cuda -DMXFLASH_WERROR=OFF > /dev/null
cmake --build --preset cuda --target mxflash_device
for test in build/cuda/*_device_test_sm*; do
  "$test"
  compute-sanitizer --error-exitcode 1 "$test"
done
