#!/usr/bin/env bash
# Everything that wants a CUDA card, from the repository's root on a machine with a card of Hopper, or of Blackwell:
#   bench/device.sh [all]       the next three
#   bench/device.sh test        the tests labelled sm90, or blackwell
#   bench/device.sh sanitize    compute-sanitizer: memcheck on those tests and a quick check, racecheck on small cases
#   bench/device.sh bench [ARGUMENTS...]   `mxflash bench` on all shapes of the device, beside PyTorch; about 2 minutes
#   bench/device.sh backward [ARGUMENTS...]   only the tests of attention's backward, its bench and that of training
#                               steps, and the targets that they meet or miss; about 1.5 minutes
# Results go to ${OUT:-build/results}; those of bench/results are copies. SHAPES are those of the bench (default: llm,cuda,recsys), PEERS the Python whose
# PyTorch it compares with (default: python3; or none), REPEAT the launches of each line of `backward` (default: 40).
#
# Programs are those of build/carry if they start, else of build/cuda, which is built if it has none. On a machine
# without a card, where there is a toolkit,
#   [LABEL=blackwell] bench/device.sh pack   builds, and puts what the above need into build/carry, stripped, and into
#                               build/carry.tar.xz, from which the others unpack it if they find nothing else
set -euo pipefail
cd "$(dirname "$0")/.."

out=${OUT:-build/results}
part=${1:-all}
[ $# -gt 0 ] && shift
carry=build/carry
case $(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2> /dev/null | head -n 1) in
  10.*) label=blackwell backends=(sm100) ;;
  *) label=${LABEL:-sm90} backends=(sm90 sm90_bf16) ;;
esac
small=dense_d64,causal_d128,jagged_d64,gqa_8_1_causal_d64,shared_q_d128

# The tests of that label, a line each: NAME, a tab, [VARIABLE=VALUE...] COMMAND. Programs are paths under build/cuda.
list_tests() {
  ctest --test-dir build/cuda -L "$label" --show-only=json-v1 | python3 -c '
import json, os, shlex, sys

for test in json.load(sys.stdin)["tests"]:
    command = test.get("command")
    if not command:  # not built
        sys.exit(test["name"] + " has not been built: cmake --build --preset cuda")
    command[0] = os.path.relpath(command[0], "build/cuda")
    environment = [p["value"] for p in test.get("properties", []) if p["name"] == "ENVIRONMENT"]
    words = [v for value in environment for v in ([value] if isinstance(value, str) else value)] + command
    print(test["name"], shlex.join(words), sep="\t")
'
}

# The command line tool, and the tests of that label, whose targets have their names.
build() {
  local tests
  cmake --preset cuda > /dev/null
  tests=$(ctest --test-dir build/cuda -L "$label" -N | sed -n 's/^ *Test *#[0-9]*: //p' | grep -v '^check_' || true)
  # shellcheck disable=SC2086  # words
  cmake --build --preset cuda --target mxflash_cli $tests
}

# The second column of list_tests as arrays: `variables`, `command`.
split_words() {
  variables=()
  eval "command=($1)"
  while [[ ${command[0]} == *=* ]]; do
    variables+=("${command[0]}")
    command=("${command[@]:1}")
  done
}

pack() {
  local name words program
  build
  rm -rf "$carry"
  mkdir -p "$carry"
  echo "$label" > "$carry/label"
  list_tests > "$carry/tests.txt"
  {
    echo tools/mxflash
    while IFS=$'\t' read -r name words; do
      split_words "$words"
      echo "${command[0]}"
    done < "$carry/tests.txt"
  } | sort -u | while read -r program; do
    mkdir -p "$carry/$(dirname "$program")"
    strip -o "$carry/$program" "build/cuda/$program"
  done
  tar -C "$(dirname "$carry")" -cJf "$carry.tar.xz" "$(basename "$carry")"
  du -sh "$carry" "$carry.tar.xz"
}

# Sets `programs`, the folder that has tools/mxflash, and `tests`, the list of them.
find_programs() {
  programs=$carry
  if [ ! -d "$carry" ] && [ -f "$carry.tar.xz" ]; then
    tar -C "$(dirname "$carry")" -xf "$carry.tar.xz"
  fi
  if ! "$programs/tools/mxflash" --version > /dev/null 2>&1 || [ "$(cat "$carry/label" 2> /dev/null)" != "$label" ]; then
    programs=build/cuda
    "$programs/tools/mxflash" --version > /dev/null 2>&1 || build
    list_tests > build/cuda/tests.txt
  fi
  tests=$programs/tests.txt
  mxflash=$programs/tools/mxflash
}

# each_test PREFIX...: tests whose names match ONLY, but not SKIP, behind that prefix; says which failed.
each_test() {
  local name words failed=0
  while IFS=$'\t' read -r name words; do
    split_words "$words"
    echo "== $name"
    env "${variables[@]}" "$@" "$programs/${command[0]}" "${command[@]:1}" < /dev/null || {
      echo "FAILED: $name ($?)"
      failed=1
    }
  done < <(grep -E "${ONLY:-.}" "$tests" | grep -vE "${SKIP:-^$}")
  return $failed
}

run_tests() {
  each_test
}

# `mxflash check` by itself below: all of it under a sanitizer would take too long.
sanitize() {
  local backend failed=0
  local memcheck=(timeout 200 compute-sanitizer --tool memcheck --error-exitcode 99)
  SKIP='^check_' each_test "${memcheck[@]}" || failed=1
  echo "== memcheck of mxflash check"
  for backend in "${backends[@]}"; do
    "${memcheck[@]}" "$mxflash" check --backend "$backend" --quick || failed=1
  done
  echo "== racecheck of mxflash check"
  timeout 150 compute-sanitizer --tool racecheck --error-exitcode 99 \
    "$mxflash" check --backend "${backends[0]}" --only "$small" || failed=1
  return $failed
}

# Sets `peers`, a Python with torch or none, and `file`, $out/<the card's name>$1.jsonl, and begins $file.part.
begin_results() {
  peers=${PEERS:-python3}
  if [ "$peers" != none ] && ! "$peers" -c 'import torch' 2> /dev/null; then
    echo "no peers: $peers has no torch (PEERS names another Python)"
    peers=none
  fi
  file=$(nvidia-smi --query-gpu=name --format=csv,noheader | head -n 1)
  file=$out/$(echo "$file" | tr '[:upper:]' '[:lower:]' | tr -cs '[:alnum:]\n' _)$1.jsonl
  printf '{"machine": {"gpu": "%s", "date": "%s"}}\n' \
    "$(nvidia-smi --query-gpu=name,driver_version,clocks.sm,power.limit --format=csv,noheader | head -n 1)" \
    "$(date -u +%F)" > "$file.part"
}

# Publishes $file and prints it.
end_results() {
  mv "$file.part" "$file"
  python3 - "$file" << 'PYTHON'
import json, sys

for line in open(sys.argv[1]):
    row = json.loads(line)
    if "op" not in row:
        continue
    s = row["shape"]
    heads = f"{s['num_heads_q']}/{s['num_heads_kv']}" if s["num_heads_q"] != s["num_heads_kv"] else s["num_heads_q"]
    flags = [k for k in ("causal", "jagged", "shared_q") if s.get(k)]
    shape = f"b{s['batch']} h{heads} {s['seqlen_q']}x{s['seqlen_k']} d{s['head_dim']} {' '.join(flags)}"
    rate = f"{row['tflops']:8.1f} TFLOP/s" if row["tflops"] else f"{row['gbps']:8.0f} GB/s   "
    ratios = ", ".join(f"{v:.2f} {k}" for k, v in row["ratio"].items() if v)
    spread = 100 * (row["spread"] or 0)
    print(f"{row['op']:16} {shape:42} {row['mode']:12} {1e3 * row['median_ms']:9.1f} us +-{spread:4.1f}% {rate}  {ratios}")
PYTHON
  echo "wrote $file"
  python3 bench/acceptance.py "$file"
}

# bench_wide OPERATION [ARGUMENTS...]: head dimensions beyond those of the shapes above, on Hopper with exact operands; to
# $file.part.
bench_wide() {
  local failed=0 backend=${backends[-1]}
  cat > "$file.shapes" << 'SHAPES'
{"batch": 4, "seqlen_q": 4096, "num_heads_q": 16, "head_dim": 128}
{"batch": 4, "seqlen_q": 4096, "num_heads_q": 16, "head_dim": 128, "causal": true}
{"batch": 4, "seqlen_q": 4096, "num_heads_q": 16, "head_dim": 192, "head_dim_v": 128, "causal": true}
{"batch": 4, "seqlen_q": 4096, "num_heads_q": 8, "head_dim": 256}
SHAPES
  "$mxflash" bench --backend "$backend" --op "$1" --shapes "$file.shapes" --peers "$peers" --json "${@:2}" >> "$file.part" || failed=1
  rm "$file.shapes"
  return $failed
}

bench() {
  local file peers failed=0
  begin_results ""
  "$mxflash" bench --device cuda --shapes "${SHAPES:-llm,cuda,recsys}" --peers "$peers" --json "$@" >> "$file.part" || failed=1
  bench_wide attention_fwd --cuda-modes from_mxfp8,from_bf16 "$@" || failed=1
  end_results
  return $failed
}

backward() {
  local file peers failed=0
  ONLY='^(attention_bwd|operator)' each_test > "$out/${label}_backward_tests.log" 2>&1 || failed=1
  grep -E '^== |FAILED|PASSED|ran\.' "$out/${label}_backward_tests.log" || true
  begin_results _backward
  # Many launches: under load the card's clock falls by a tenth, for us and for peers.
  "$mxflash" bench --device cuda --op attention_bwd,training_step --shapes "${SHAPES:-backward}" --repeat "${REPEAT:-40}" \
    --peers "$peers" --json "$@" >> "$file.part" || failed=1
  bench_wide attention_bwd "$@" || failed=1
  end_results
  return $failed
}

case $part in
  pack) pack; exit ;;
  all | test | sanitize | bench | backward) ;;
  *) sed -n 's/^# \{0,1\}//p' "$0" | sed -n 2,15p >&2; exit 2 ;;
esac
if ! nvidia-smi > /dev/null 2>&1; then
  echo "bench/device.sh $part needs a CUDA card (nvidia-smi finds none); without one: bench/device.sh pack" >&2
  exit 2
fi
mkdir -p "$out"
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
find_programs
failed=0
case $part in
  test) run_tests 2>&1 | tee "$out/${label}_tests.log" || failed=1 ;;
  sanitize) sanitize 2>&1 | tee "$out/${label}_sanitize.log" || failed=1 ;;
  bench) bench "$@" || failed=1 ;;
  backward) backward "$@" || failed=1 ;;
  all)
    run_tests 2>&1 | tee "$out/${label}_tests.log" || failed=1
    sanitize 2>&1 | tee "$out/${label}_sanitize.log" || failed=1
    bench "$@" || failed=1
    ;;
esac
exit $failed
