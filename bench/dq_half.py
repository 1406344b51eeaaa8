"""Error of a row of dq that is added up in FP16, simulated with NumPy: no card.

  python3 bench/dq_half.py [--keys 4096,16384,32768,131072] [--rows 6]

Uniform attention over N(mean, 1) keys; dP ~ N(0, 1) plus a line over the keys whose standard deviation is `drift`, so
dS = (dP - delta) / keys. dS and K are E4M3, a part of the sum is that of 128 keys, exact, as a tensor core gives it.
Printed are rms errors in % of dq: of dS in E4M3 alone; of parts rounded to FP16 and added in FP16 in the order in which
132 SMs bring them (random, a round of 132 after the other); and added in ascending order, as `deterministic` does.
Parts are scaled to FP16's normal range. docs/hopper.md has the table.
"""
import argparse

import numpy

TILE, SMS, DIM = 128, 132, 64
CASES = ((0, 1), (1, 1), (4, 1))  # mean of keys, drift of dP


def e4m3(x):
    exponent = numpy.maximum(numpy.floor(numpy.log2(numpy.maximum(numpy.abs(x), 1e-30))), -6)
    return numpy.clip(numpy.round(x * 2.0 ** (3 - exponent)) * 2.0 ** (exponent - 3), -448, 448)


def half_sum(parts):
    unit = 2.0**12 / numpy.abs(numpy.cumsum(parts, 0)).max()
    total = numpy.zeros(parts.shape[1], numpy.float16)
    for part in (parts * unit).astype(numpy.float16):
        total += part
    return total.astype(numpy.float64) / unit


def errors(random, keys, mean, drift, rows):
    line = numpy.linspace(-(3**0.5), 3**0.5, keys)
    tiles = keys // TILE
    energy, wrong = 0, numpy.zeros(3)
    for _ in range(rows):
        k = e4m3(4 * (mean + random.standard_normal((keys, DIM))))
        dp = drift * line + random.standard_normal(keys)
        ds = dp - dp.mean()
        ds *= 256 / numpy.abs(ds).max()
        exact, parts = ((d[:, None] * k).reshape(tiles, TILE, DIM).sum(1) for d in (ds, e4m3(ds)))
        order = numpy.concatenate([first + random.permutation(min(SMS, tiles - first)) for first in range(0, tiles, SMS)])
        want = exact.sum(0)
        energy += (want**2).mean()
        for i, got in enumerate((parts.sum(0), half_sum(parts[order]), half_sum(parts))):
            wrong[i] += ((got - want) ** 2).mean()
    return 100 * numpy.sqrt(wrong / energy)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", default="4096,16384,32768,131072")
    parser.add_argument("--rows", type=int, default=6)
    options = parser.parse_args()
    random = numpy.random.default_rng(1)
    print("keys    " + "".join(f"mean {m}, drift {d}: E4M3, rounds, order   " for m, d in CASES))
    for keys in map(int, options.keys.split(",")):
        cells = ["%6.1f %6.1f %6.1f" % tuple(errors(random, keys, *case, options.rows)) for case in CASES]
        print(f"{keys:<8}" + "".join(f"{cell:<43}" for cell in cells))


if __name__ == "__main__":
    main()
