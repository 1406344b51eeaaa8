#!/usr/bin/env python3
"""Counts the instructions of a kernel's main loops in its SASS: input of `mxflash model`, and a check of what was compiled.

  sass_counts.py OBJECT ...                                counts, as JSON on stdout
  sass_counts.py OBJECT ... --check tools/model_counts.json  the counts still are those that the model rests on
  sass_counts.py OBJECT ... --update tools/model_counts.json write them

The loops of a kernel that are counted: those that issue the block-scaled MMAs, one for each warp that does ("mmas" of the
file says how many a pass has), and the one that the softmax (in the backward: compute) warps run. What is counted is one
pass through a loop: of all paths from its head back to it, the one that moves the most columns of tensor memory (of
compute; and of those, waits at the most barriers) or issues the most MMAs, and has the fewest instructions then: a tile
without a mask, not the first of its item. Passes are cut at their waits, into the pieces that run between two hand-overs.
Needs cuobjdump (CUDA toolkit, or PyPI nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm): --cuobjdump, $CUOBJDUMP, or on PATH.
"""
import argparse
import collections
import json
import os
import re
import shutil
import subprocess
import sys

INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][A-Za-z0-9_.]*)\s*([^;]*);")
FUNCTION = re.compile(r"^\s*Function : (\S+)")
TARGET = re.compile(r"0x([0-9a-f]+)\s*$")
STOP = {"EXIT", "RET", "BRX", "JMX", "BPT"}
MMA = "UTCQMMA"  # every 8-bit tcgen05.mma; the block-scaled ones name their scales: idesc[..], tmem[..]
BLOCK_SCALED = re.compile(r"idesc\[\w+\], tmem\[")
WAIT = "SYNCS.PHASECHK"
DRIFT = 0.1  # of the instructions of a loop

Instruction = collections.namedtuple("Instruction", "address predicate opcode operands")


def disassemble(tool, path):
    """{kernel name: [Instruction]} of an object, for sm_100a."""
    run = subprocess.run([tool, "-sass", path], capture_output=True, text=True)
    if run.returncode:
        sys.exit(f"sass_counts: {tool} -sass {path}: {run.stderr.strip()}")
    kernels, current, wanted = {}, None, True
    for line in run.stdout.splitlines():
        if "code for sm_" in line:
            wanted = "sm_100a" in line
        elif m := FUNCTION.match(line):
            current = kernels.setdefault(m[1], []) if wanted else None
        elif current is not None and (m := INSTRUCTION.match(line)):
            current.append(Instruction(int(m[1], 16), m[2], m[3], m[4].strip()))
    return kernels


class Graph:
    """Basic blocks of a kernel, and its natural loops."""

    def __init__(self, code):
        index = {i.address: n for n, i in enumerate(code)}
        leaders = {0}
        for n, i in enumerate(code):
            if i.opcode.split(".")[0] in STOP | {"BRA"}:
                leaders.add(n + 1)
            if (to := self.target(i)) is not None:
                leaders.add(index[to])
        starts = sorted(n for n in leaders if n < len(code))
        self.blocks = [code[a:b] for a, b in zip(starts, starts[1:] + [len(code)])]
        at = {s: b for b, s in enumerate(starts)}
        self.next = []
        for b, block in enumerate(self.blocks):
            last, to = block[-1], []
            base = last.opcode.split(".")[0]
            if (target := self.target(last)) is not None:
                to.append(at[index[target]])
            conditional = last.predicate is not None or (base == "BRA" and "," in last.operands)
            if (base not in STOP | {"BRA"} or conditional) and b + 1 < len(self.blocks):
                to.append(b + 1)
            self.next.append(list(dict.fromkeys(to)))
        self.previous = [[] for _ in self.blocks]
        for b, to in enumerate(self.next):
            for t in to:
                self.previous[t].append(b)
        self.loops = self.natural_loops()

    @staticmethod
    def target(i):
        if i.opcode.split(".")[0] != "BRA":
            return None
        return int(m[1], 16) if (m := TARGET.search(i.operands)) else None

    def natural_loops(self):
        """{head: blocks}; a block that only an indirect branch reaches counts as an entry."""
        n = len(self.blocks)
        entries = {0} | {b for b in range(n) if not self.previous[b]}
        dominators = [{b} if b in entries else set(range(n)) for b in range(n)]
        changed = True
        while changed:
            changed = False
            for b in range(n):
                if b in entries:
                    continue
                new = {b} | set.intersection(*(dominators[p] for p in self.previous[b]))
                if new != dominators[b]:
                    dominators[b], changed = new, True
        loops = {}
        for b in range(n):
            for head in self.next[b]:
                if head in dominators[b]:
                    body = loops.setdefault(head, {head})
                    stack = [b]
                    while stack:
                        if (x := stack.pop()) not in body:
                            body.add(x)
                            stack += self.previous[x]
        return loops

    def is_retry(self, head):
        """A wait that spins out of line: its first try stands before the branch to it."""
        body = self.loops[head]
        outside = [p for p in self.previous[head] if p not in body]
        return len(body) <= 2 and bool(outside) and all(
            any(i.opcode.startswith(WAIT) for i in self.blocks[p]) for p in outside)

    def best_pass(self, head, weight, with_waits):
        """Instructions of the pass through a loop that is best by (weight, waits if `with_waits`, -length)."""
        body = self.loops[head]
        inner = [h for h in self.loops if h in body and h != head]
        retries = {h for h in inner if self.is_retry(h)}
        inside = {b: {h for h in inner if b in self.loops[h]} for b in body}

        def edges(b):
            return [t for t in self.next[b] if t in body and t != head and t not in retries and t not in inside[b]]

        def worth(b):
            block = self.blocks[b]
            waits = sum(i.opcode.startswith(WAIT) for i in block) if with_waits else 0
            return sum(map(weight, block)), waits, -len(block)

        memo = {}

        def best(b):  # the best way from b to the end of a pass
            if b not in memo:
                memo[b] = None
                ways = [way for t in edges(b) if (way := best(t))]
                if head in self.next[b]:
                    ways.append(((0, 0, 0), []))
                if ways:
                    value, way = max(ways, key=lambda w: w[0])
                    memo[b] = (tuple(map(sum, zip(worth(b), value))), [b] + way)
            return memo[b]

        found = best(head)
        return found and [i for b in found[1] for i in self.blocks[b]]

    def best_passes(self, weight, among=None, with_waits=False):
        """Of each loop with weight that has no other such loop inside, the best pass; the most weight first."""
        def heavy(blocks):
            return sum(weight(i) for b in blocks for i in self.blocks[b])

        loops = {head: body for head, body in self.loops.items()
                 if heavy(body) and (among is None or head in among)}
        innermost = [head for head, body in loops.items() if not any(h in body for h in loops if h != head)]
        innermost.sort(key=lambda h: -heavy(loops[h]))
        return [self.best_pass(head, weight, with_waits) for head in innermost]


def columns(i):
    """Columns of tensor memory that an instruction moves."""
    if i.opcode.split(".")[0] not in ("LDTM", "STTM"):
        return 0
    m = re.search(r"\.x(\d+)", i.opcode)
    return int(m[1]) if m else 1


def is_mma(i):
    return i.opcode.split(".")[0] == MMA and bool(BLOCK_SCALED.search(i.operands))


def counts(instructions):
    """{opcode: how many}; LDTM and STTM also in columns, LDS and STS in bytes a lane."""
    c = collections.Counter(i.opcode.split(".")[0] for i in instructions)
    for name in ("LDTM", "STTM"):
        if c[name]:
            c[name + ".columns"] = sum(columns(i) for i in instructions if i.opcode.startswith(name))
    for name in ("LDS", "STS"):
        if c[name]:
            c[name + ".bytes"] = sum(width(i.opcode) for i in instructions if i.opcode.split(".")[0] == name)
    return dict(sorted(c.items()))


def width(opcode):
    for bits in (128, 64, 16, 8):
        if f".{bits}" in opcode or f"U{bits}" in opcode or f"S{bits}" in opcode:
            return bits // 8
    return 4


def pieces(instructions):
    """A pass, cut before each wait; the first piece may be empty."""
    cuts = [[]]
    for i in instructions:
        if i.opcode.startswith(WAIT):
            cuts.append([])
        cuts[-1].append(i)
    return [counts(c) for c in cuts]


def loops_of(code):
    """{"mma": loops, "compute": loops} of a kernel; a loop is the pieces of a pass."""
    graph = Graph(code)
    # Rescaling and draining move columns, too, but have no exponentials.
    with_exponentials = [h for h, body in graph.loops.items()
                         if sum(i.opcode.startswith("MUFU.EX2") for b in body for i in graph.blocks[b]) >= 16]
    return {"mma": [pieces(p) for p in graph.best_passes(is_mma) if p],
            "compute": [pieces(p) for p in graph.best_passes(columns, with_exponentials, with_waits=True) if p]}


def issued(piece):
    return sum(n for opcode, n in piece.items() if "." not in opcode)


def of(piece_list, opcode):
    return sum(piece.get(opcode, 0) for piece in piece_list)


def counted(entry, found):
    """What of a kernel the file has: the MMA loop of each warp that issues, the loop that computes."""
    return {"mma": found["mma"][:len(entry["mmas"])], "compute": (found["compute"] or [[]])[0]}


def failures(name, entry, kernel):
    """What is wrong with a kernel, beside what the model rests on."""
    loops = kernel["mma"] + [kernel["compute"]]
    if local := sum(of(loop, opcode) for loop in loops for opcode in ("LDL", "STL")):
        yield f"{name}: {local} instructions of its loops keep registers in local memory"
    if (mmas := [of(loop, MMA) for loop in kernel["mma"]]) != entry["mmas"]:
        yield f"{name}: {mmas} block-scaled MMAs in a pass, must be {entry['mmas']}"
    if len(kernel["compute"]) != len(entry["waits"]) + 1:
        yield f"{name}: {len(kernel['compute']) - 1} waits in a pass of compute, the model knows {', '.join(entry['waits'])}"


def drift(name, entry, kernel):
    """Counts that are no longer those of the file: the model then is that of another kernel."""
    for loop, now, then in [*((f"mma loop {n}", a, b) for n, (a, b) in enumerate(zip(kernel["mma"], entry["mma"]))),
                            ("compute", kernel["compute"], entry["compute"])]:
        now, then = sum(map(issued, now)), sum(map(issued, then))
        if abs(now - then) > DRIFT * then:
            yield f"{name}: {now} instructions in a pass of {loop}, the file has {then}: --update it"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("objects", nargs="+", metavar="OBJECT")
    parser.add_argument("--cuobjdump", default=os.environ.get("CUOBJDUMP") or shutil.which("cuobjdump"))
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--check", metavar="FILE")
    group.add_argument("--update", metavar="FILE")
    args = parser.parse_args()
    if not args.cuobjdump:
        sys.exit("sass_counts: no cuobjdump; install nvidia-cuda-cuobjdump or name one with --cuobjdump")
    sys.setrecursionlimit(100000)
    kernels = {name: code for path in args.objects for name, code in disassemble(args.cuobjdump, path).items()
               if any(map(is_mma, code))}
    found = {name: loops_of(code) for name, code in kernels.items()}
    file = args.check or args.update
    if not file:
        json.dump(found, sys.stdout, indent=1)
        return
    with open(file) as f:
        entries = json.load(f)
    problems = []
    for name, entry in entries.items():
        symbols = [s for s in found if re.search(entry["symbol"], s)]
        if len(symbols) != 1:
            problems.append(f"{name}: {len(symbols)} kernels match {entry['symbol']}")
            continue
        kernel = counted(entry, found[symbols[0]])
        problems += failures(name, entry, kernel)
        if args.check:
            problems += drift(name, entry, kernel)
        else:
            entry.update(kernel)
        mma = " + ".join(f"{of(loop, MMA)} block-scaled MMAs in {sum(map(issued, loop))}" for loop in kernel["mma"])
        print(f"{name}: {mma} instructions; compute {sum(map(issued, kernel['compute']))} instructions")
    if problems:
        sys.exit("\n".join(["sass_counts:"] + problems))
    if args.update:
        with open(file, "w") as f:
            f.write(text_of(entries))


def text_of(entries):
    """JSON with a line for every piece."""
    def loop(pieces, indent):
        return "[\n" + ",\n".join(indent + " " + json.dumps(p) for p in pieces) + "\n" + indent + "]"

    lines = []
    for name, entry in entries.items():
        fields = [f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in entry.items() if k not in ("mma", "compute")]
        fields.append('  "mma": [' + ", ".join(loop(pieces, "  ") for pieces in entry["mma"]) + "]")
        fields.append('  "compute": ' + loop(entry["compute"], "  "))
        lines.append(f" {json.dumps(name)}: {{\n" + ",\n".join(fields) + "\n }")
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    main()
