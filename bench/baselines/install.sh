#!/usr/bin/env bash
# Installs the peers of `mxflash bench` (CPU PyTorch, onnxruntime) into build/baselines, a virtual environment that git
# ignores: 4 GB, about a minute on a fast line. Does nothing if they are there. PYTHON names another interpreter.
set -euo pipefail
cd "$(dirname "$0")/../.."

venv=build/baselines
requirements=bench/baselines/requirements.txt
if cmp -s $requirements $venv/installed.txt; then
  echo "$venv is up to date"
  exit 0
fi
"${PYTHON:-python3}" -m venv $venv || {
  echo "error: no virtual environment; on Debian: apt-get install python3-venv" >&2
  exit 1
}
$venv/bin/python -m pip install --quiet --no-deps --requirement $requirements
# A peer that cannot run should say so now.
$venv/bin/python bench/baselines/peers.py --check
cp $requirements $venv/installed.txt
