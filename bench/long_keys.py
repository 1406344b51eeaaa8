"""Error of out against the number of keys, on a CUDA card: mxflash beside FlashAttention-3 FP8.

  python3 bench/long_keys.py MXFLASH [--keys 4096,16384,65536,262144] [--backends sm90,ref]

MXFLASH is the command line tool. One head of 128 channels, 64 queries; q, k ~ N(0, 1) and several kinds of v, all rounded
to E4M3 first, which MXFP8 holds exactly: every kernel gets the same numbers, and what is measured is its arithmetic.
Errors are relative (Frobenius) to float64. "p_rounded" is what rounding P to E4M3 costs by itself, all sums exact: the
least that a kernel with an E4M3 P can do. One JSON object a line. FlashAttention-3 is left out where neither
flash_attn_interface nor fa3_fwd_interface can be imported.
"""
import argparse
import json
import pathlib
import struct
import subprocess
import sys
import tempfile

import numpy
import torch

QUERIES, DIM = 64, 128
KINDS = {
    "N(0,1)": lambda x, at: x,
    "N(0.5,1)": lambda x, at: x + 0.5,
    "N(4,1)": lambda x, at: x + 4,
    "drifting -2..2": lambda x, at: x + 4 * at - 2,
    "1": lambda x, at: torch.ones_like(x),
}


def operands(keys, kind):
    generator = torch.Generator(device="cuda").manual_seed(keys)

    def normal(rows):
        return torch.randn(rows, DIM, device="cuda", generator=generator)

    q, k, v = normal(QUERIES), normal(keys), normal(keys)
    v = KINDS[kind](v, torch.arange(keys, device="cuda")[:, None] / keys)
    return [x.to(torch.float8_e4m3fn) for x in (q, k, v)]


def exact(q, k, v):
    """out in float64, and out with P rounded to E4M3 against the row's maximum."""
    q, k, v = (x.double() for x in (q, k, v))
    scores = q @ k.T * DIM**-0.5 / torch.log(torch.tensor(2.0, device="cuda", dtype=torch.float64))
    p = torch.exp2(scores - scores.max(1, keepdim=True).values + 8)
    rounded = p.float().to(torch.float8_e4m3fn).double()
    return p @ v / p.sum(1, keepdim=True), rounded @ v / rounded.sum(1, keepdim=True)


def flash3(q, k, v):
    try:
        import flash_attn_interface as interface
    except ImportError:
        import fa3_fwd_interface as interface
    one = torch.ones(1, 1, device="cuda")
    out = interface.flash_attn_func(
        *(x[None, :, None] for x in (q, k, v)), softmax_scale=DIM**-0.5, q_descale=one, k_descale=one, v_descale=one
    )
    return (out[0] if isinstance(out, tuple) else out)[0, :, 0]


def read_tensor(path, name):
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    entry = json.loads(data[8 : 8 + size])[name]
    first, end = (8 + size + offset for offset in entry["data_offsets"])
    return torch.from_numpy(numpy.frombuffer(data[first:end], numpy.float32).reshape(entry["shape"]).copy())


def mxflash(tool, backend, q, k, v):
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        names = []
        for name, x in zip("qkv", (q, k, v)):
            numpy.save(folder / f"{name}.npy", x.float().cpu().numpy()[:, None])
            names += [f"--{name}", folder / f"{name}.npy"]
        output = folder / "out.safetensors"
        subprocess.run(
            [tool, "attend", *names, "--backend", backend, "--no-compare", "-o", output],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        return read_tensor(output, "out")[:, 0].cuda()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tool", metavar="MXFLASH")
    parser.add_argument("--keys", default="4096,16384,65536,262144")
    parser.add_argument("--backends", default="sm90")
    args = parser.parse_args()
    kernels = {f"mxflash {b}": lambda *x, b=b: mxflash(args.tool, b, *x) for b in args.backends.split(",")}
    try:
        flash3(*operands(256, "N(0,1)"))
        kernels["flash3_fp8"] = flash3
    except Exception as why:
        print(f"FlashAttention-3 is left out: {why}", file=sys.stderr)
    for kind in KINDS:
        for keys in map(int, args.keys.split(",")):
            x = operands(keys, kind)
            want, rounded = exact(*x)

            def error(out):
                return float(f"{float((out.double() - want).norm() / want.norm()):.3g}")

            row = {"v": kind, "keys": keys, "p_rounded": error(rounded)}
            row |= {name: error(kernel(*x)) for name, kernel in kernels.items()}
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
