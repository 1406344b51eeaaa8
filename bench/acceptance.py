"""What was aimed at, and what `mxflash bench --json` got.

  python3 bench/acceptance.py RESULTS.jsonl... [--targets bench/targets.jsonl]

A target names an op, parts of a shape (what it leaves out must be as in a plain dense shape), a mode or several, and a
metric with the least value that meets it:
  tflops, gbps    of the line
  ratio           times as fast as the best peer of the same run, or as the one named by "peer"
  of_mode         rate over that of another mode of the same shape, "other"
"earlier" are TFLOP/s of a peer that was measured on such a card once, in another run: shown, never judged. Where
results hold a line twice, the last one counts. A miss is a finding, not an error: the exit code says nothing of it.
"""
import argparse
import json
import pathlib
import sys

PLAIN = {"num_heads_kv": None, "causal": False, "jagged": False, "shared_q": False, "window_left": -1, "window_right": -1}
METRICS = {"tflops": "TFLOP/s", "gbps": "GB/s", "ratio": "x", "of_mode": "of"}


def lines_of(paths):
    lines = {}
    for path in paths:
        for text in open(path):
            line = json.loads(text)
            if "op" in line:
                lines[line["op"], line["backend"], line["mode"], json.dumps(line["shape"], sort_keys=True)] = line
    return list(lines.values())


def fits(line, target):
    shape = line["shape"]
    for key, plain in PLAIN.items():
        got = shape.get(key, plain)
        if got != target["shape"].get(key, shape["num_heads_q"] if key == "num_heads_kv" else plain):
            return False
    square = {"seqlen_k": shape["seqlen_q"], "head_dim_v": shape["head_dim"]}
    if any(shape.get(key, value) != target["shape"].get(key, value) for key, value in square.items()):
        return False
    return (
        line["op"] == target["op"]
        and line["backend"] == target.get("backend", "sm90")
        and all(shape.get(key) == value for key, value in target["shape"].items())
    )


def value_of(line, target, lines):
    """(value or None, what it is compared with)."""
    metric = target["metric"]
    if metric in ("tflops", "gbps"):
        return line[metric], ""
    if metric == "ratio":
        peer = target.get("peer", line.get("best_peer"))
        return line["ratio"].get(peer), peer or "a peer"
    others = [x for x in lines if fits(x, target) and x["mode"] == target["other"]]
    return (others[0]["median_ms"] / line["median_ms"] if others else None), target["other"]


def shape_text(line):
    s = line["shape"]
    heads = f"{s['num_heads_q']}/{s['num_heads_kv']}" if s["num_heads_q"] != s["num_heads_kv"] else s["num_heads_q"]
    flags = [key for key in ("causal", "jagged", "shared_q") if s.get(key)]
    return " ".join([f"b{s['batch']} h{heads} {s['seqlen_q']}x{s['seqlen_k']} d{s['head_dim']}", *flags])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("results", nargs="+")
    parser.add_argument("--targets", default=pathlib.Path(__file__).with_name("targets.jsonl"))
    args = parser.parse_args()
    lines = lines_of(args.results)
    absent = missed = judged = 0
    print(f"{'op':16} {'shape':38} {'mode':13} {'target':>8} {'got':>8} {'':7} {'got/target':>10}")
    for text in open(args.targets):
        target = json.loads(text)
        modes = target["mode"] if isinstance(target["mode"], list) else [target["mode"]]
        found = [x for mode in modes for x in lines if fits(x, target) and x["mode"] == mode]
        if not found:
            absent += 1
            print(f"{target['op']:16} {'/'.join(modes)} of {json.dumps(target['shape'])}: no line")
        for line in found:
            value, beside = value_of(line, target, lines)
            note = f"{METRICS[target['metric']]:7} "
            if value is None:
                verdict = f"{'-':>8} {note} not measured: {beside}"
            else:
                judged += 1
                missed += value < target["least"]
                rate = value / target["least"]
                digits = 0 if value >= 100 else 2
                verdict = f"{value:8.{digits}f} {note} {rate:9.2f} {'ok  ' if rate >= 1 else 'miss'} {beside}"
            for peer, earlier in target.get("earlier", {}).items():
                verdict += f" ({line['tflops'] / earlier:.2f} x {peer} measured earlier, {earlier})"
            print(f"{line['op']:16} {shape_text(line):38} {line['mode']:13} {target['least']:8g} {verdict}".rstrip())
    print(f"{judged - missed} of {judged} met; for {absent} targets the results have no line")


if __name__ == "__main__":
    sys.exit(main())
