#!/usr/bin/env bash
# What the cpu backend is judged by: `mxflash bench --shapes cpu` beside its peers, on one thread and on all, about 15
# minutes each. Writes bench/results/cpu_MODEL.jsonl; a line with "machine" precedes the lines of each run.
#   bench/cpu.sh [--no-install] [MODEL [ARGUMENTS...]]    MODEL: the CPU's name; ARGUMENTS: more for mxflash bench
# For figures to publish: an idle machine, and a load average below 0.5 in the "machine" lines to show it.
set -euo pipefail
cd "$(dirname "$0")/.."

install=1
if [ "${1:-}" = --no-install ]; then
  install=0
  shift
fi
field() { sed -n "s/^$1[[:space:]]*: //p" /proc/cpuinfo | head -n 1; }
name=$(field 'model name')
model=${1:-$(echo "${name:-unknown}" | tr '[:upper:]' '[:lower:]' | tr -cs '[:alnum:]\n' _)}
[ $# -gt 0 ] && shift

[ $install = 0 ] || bench/baselines/install.sh
cmake --preset release > /dev/null
cmake --build --preset release --target mxflash_cli
mxflash=build/release/tools/mxflash

results=bench/results/cpu_$model.jsonl
trap 'rm -f "$results.part"' EXIT
: > "$results.part"
for threads in 1 "$(nproc)"; do
  printf '{"machine": {"model": "%s", "family": "%s", "model_number": "%s", "flags": "%s", ' \
    "$name" "$(field 'cpu family')" "$(field model)" "$(field flags)" >> "$results.part"
  printf '"cpus": %s, "threads": %s, "load_average": "%s", "kernel": "%s", "date": "%s", "commit": "%s"}}\n' \
    "$(nproc)" "$threads" "$(cut -d' ' -f1-3 /proc/loadavg)" "$(uname -r)" "$(date -u +%F)" \
    "$(git describe --always --exclude='*' --abbrev=12 --dirty=+dirty)" >> "$results.part"
  $mxflash bench --shapes cpu --threads "$threads" --json "$@" | tee -a "$results.part"
  [ "$(nproc)" -gt 1 ] || break
done
mv "$results.part" "$results"
trap - EXIT
echo "wrote $results"
