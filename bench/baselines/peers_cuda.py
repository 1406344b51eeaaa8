"""Peers of `mxflash bench --device cuda`: PyTorch's attention and norm in BF16, and FlashAttention-3 in BF16 and FP8 where
it is installed; checked, then timed on request.

JSON, one object a line, on stdin and stdout; mxflash times its own launches between two requests.
  {"cmd": "hello"}                                   {"peers": [...], "left_out": {peer: why}, "versions": {...},
                                                      "machine": {"torch_copy_gbps": ..., "bf16_gemm_tflops": ..., ...}}
  {"cmd": "shape", "op": "attention_fwd",            {"peers": {peer: {"error": rms}}, "left_out": {peer: why}}
   "lens_q": [...], "lens_k": [...], "shared_q": false, "num_heads_q": 8, "num_heads_kv": 8, "head_dim": 128,
   "head_dim_v": 128, "causal": false}
  {"cmd": "sample", "peer": ..., "count": 4}         {"samples": [ms of each launch]}, or {"failed": why}
Operands are N(0, 1) of those shapes. "error" is that of a few rows of out, against float64, over their RMS. Times are
those of events around each launch, back to back after a warm-up. Layouts are packed tokens, [batch, tokens, heads, dim]
in memory, as ours. "machine" has ceilings: a copy, and matrix products of 8192^3 in BF16 and in FP8 (E4M3).
"""
import json
import os
import sys

MAX_ERROR = 0.03  # a larger one is not rounding but another problem than ours
MAX_ERROR_FP8 = 0.12
ROWS = 4  # checked of a head
WARM_UPS = 3
GEMM = 8192
SCRATCH_BYTES = 1 << 30


class LeftOut(Exception):
    """Why a peer does not take part."""


class Timer:
    def __init__(self, torch):
        self.torch = torch
        self.scratch = torch.empty(SCRATCH_BYTES, dtype=torch.uint8, device="cuda")

    def samples(self, run, count):
        """Milliseconds of each of `count` launches. While the device fills the scratch, the host gets ahead."""
        torch = self.torch
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(count)] for _ in range(2)]
        for _ in range(4):
            self.scratch.fill_(17)
        for _ in range(WARM_UPS):
            run()
        for start, end in zip(*events):
            start.record()
            run()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in zip(*events)]

    def median(self, run, count=11):
        return sorted(self.samples(run, count))[count // 2]


def ceilings(torch, timer):
    """What this card does at best, in calls of PyTorch."""
    machine, left_out = {}, {}

    def measure(name, make):
        try:
            amount, run = make()
            machine[name] = amount / (1e-3 * timer.median(run))
        except Exception as error:  # not in this build: the others count
            left_out[name] = one_line(error)

    def copy():
        half = SCRATCH_BYTES // 2
        source, target = timer.scratch[:half], torch.empty(half, dtype=torch.uint8, device="cuda")
        return 2e-9 * half, lambda: target.copy_(source)

    def matrices():
        return [torch.randn(GEMM, GEMM, device="cuda", dtype=torch.bfloat16) for _ in range(2)]

    def bf16():
        a, b = matrices()
        return 2e-12 * GEMM**3, lambda: a @ b.T

    def fp8():
        a, b = (x.to(torch.float8_e4m3fn) for x in matrices())
        one = torch.ones((), device="cuda")

        def run():
            torch._scaled_mm(a, b.T, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True)

        return 2e-12 * GEMM**3, run

    measure("torch_copy_gbps", copy)
    measure("bf16_gemm_tflops", bf16)
    measure("fp8_gemm_tflops", fp8)
    torch.cuda.empty_cache()
    return machine, left_out


class Problem:
    """One attention call: q, k, v as packed tokens, [tokens, heads, dim]."""

    def __init__(self, torch, request):
        self.torch, self.request = torch, request
        self.heads_q, self.heads_kv = request["num_heads_q"], request["num_heads_kv"]
        self.dim, self.dim_v, self.causal = request["head_dim"], request["head_dim_v"], request["causal"]
        self.scale = self.dim**-0.5
        self.lens_k = request["lens_k"]
        self.shared_q = request["shared_q"]
        self.lens_q = request["lens_q"] * (len(self.lens_k) if self.shared_q else 1)
        if not sum(self.lens_q) or not sum(self.lens_k):
            raise LeftOut("has no queries or no keys")

        def operand(tokens, heads, dim):
            return torch.randn(tokens, heads, dim, device="cuda", dtype=torch.bfloat16)

        self.q = operand(sum(request["lens_q"]), self.heads_q, self.dim)
        if self.shared_q:  # no peer has it, so that theirs is a copy for every sequence
            self.q = self.q.repeat(len(self.lens_k), 1, 1)
        self.k = operand(sum(self.lens_k), self.heads_kv, self.dim)
        self.v = operand(sum(self.lens_k), self.heads_kv, self.dim_v)

    def equal_lengths(self):
        return len(set(self.lens_q)) == 1 and len(set(self.lens_k)) == 1

    def dense(self):
        """q, k, v as [batch, heads, tokens, dim] views."""
        batch = len(self.lens_k)
        return [x.view(batch, -1, *x.shape[1:]).transpose(1, 2) for x in (self.q, self.k, self.v)]

    def error(self, out):
        """Relative RMS error of rows of the first head of the first sequence and the last head of the last."""
        torch = self.torch
        squares = [0.0, 0.0]
        for b, head in ((0, 0), (len(self.lens_k) - 1, self.heads_q - 1)):
            q_start, k_start = sum(self.lens_q[:b]), sum(self.lens_k[:b])
            n, keys = self.lens_q[b], self.lens_k[b]
            if n == 0 or keys == 0:
                continue
            group_head = head // (self.heads_q // self.heads_kv)
            k = self.k[k_start : k_start + keys, group_head].double()
            v = self.v[k_start : k_start + keys, group_head].double()
            for row in sorted({round(i * (n - 1) / (ROWS - 1)) for i in range(ROWS)}):
                scores = k @ self.q[q_start + row, head].double() * self.scale
                if self.causal:
                    scores[row + 1 + keys - n :] = float("-inf")
                want = torch.softmax(scores, 0) @ v
                if not bool(want.isfinite().all()):
                    continue
                squares[0] += float(((out[q_start + row, head].double() - want) ** 2).sum())
                squares[1] += float((want**2).sum())
        return (squares[0] / max(squares[1], 1e-300)) ** 0.5


class Sdpa:
    """scaled_dot_product_attention by one of its kernels; flash takes packed sequences of any lengths, too."""

    def __init__(self, torch, backend):
        self.torch, self.backend = torch, backend

    def prepare(self, problem):
        torch = self.torch
        if problem.causal and problem.lens_q != problem.lens_k:
            raise LeftOut("is_causal is tried with equal lengths only")
        if problem.equal_lengths():
            from torch.nn.attention import SDPBackend, sdpa_kernel

            q, k, v = problem.dense()
            kernel = getattr(SDPBackend, self.backend)
            gqa = problem.heads_q != problem.heads_kv

            def run():
                with sdpa_kernel(kernel):
                    return torch.nn.functional.scaled_dot_product_attention(
                        q, k, v, is_causal=problem.causal, enable_gqa=gqa
                    )

            self.run = run
            out = run().transpose(1, 2).reshape(-1, problem.heads_q, problem.dim_v)
        elif self.backend == "FLASH_ATTENTION":
            cu = [
                torch.tensor([0] + lens, device="cuda").cumsum(0).to(torch.int32)
                for lens in (problem.lens_q, problem.lens_k)
            ]
            longest = [max(problem.lens_q), max(problem.lens_k)]

            def run():
                return torch.ops.aten._flash_attention_forward(
                    problem.q, problem.k, problem.v, *cu, *longest, 0.0, problem.causal, False, scale=problem.scale
                )[0]

            self.run = run
            out = run()
        else:
            raise LeftOut("sequences of different lengths")
        return problem.error(out)


class Flash3:
    """FlashAttention-3, of any lengths: as its authors' package has it, or as `pip install fa3-fwd`, the forward alone.

    FP8: operands rounded to E4M3 as they are, with scales of 1, so that only the kernel is timed."""

    def __init__(self, torch, fp8):
        try:
            import flash_attn_interface as interface
        except ImportError:
            import fa3_fwd_interface as interface
        self.torch, self.fp8, self.interface = torch, fp8, interface
        self.max_error = MAX_ERROR_FP8 if fp8 else MAX_ERROR

    def prepare(self, problem):
        torch = self.torch
        q, k, v = problem.q, problem.k, problem.v
        options = {"causal": problem.causal, "softmax_scale": problem.scale}
        if self.fp8:
            q, k, v = (x.to(torch.float8_e4m3fn) for x in (q, k, v))
            ones = torch.ones(len(problem.lens_k), problem.heads_kv, device="cuda")
            options |= {name: ones for name in ("q_descale", "k_descale", "v_descale")}
        if problem.equal_lengths():
            q, k, v = (x.view(len(problem.lens_k), -1, *x.shape[1:]) for x in (q, k, v))
            call = lambda: self.interface.flash_attn_func(q, k, v, **options)
        else:
            cu = [
                torch.tensor([0] + lens, device="cuda").cumsum(0).to(torch.int32)
                for lens in (problem.lens_q, problem.lens_k)
            ]
            longest = [max(problem.lens_q), max(problem.lens_k)]
            call = lambda: self.interface.flash_attn_varlen_func(q, k, v, *cu, *longest, **options)

        def run():
            out = call()
            return out[0] if isinstance(out, tuple) else out

        self.run = run
        return problem.error(run().reshape(-1, problem.heads_q, problem.dim_v))


class RmsNorm:
    """The norm alone, BF16 in and out: a lower bound for norm and quantizer in two calls."""

    def __init__(self, torch):
        self.torch = torch

    def prepare(self, request):
        torch = self.torch
        hidden = request["num_heads_q"] * request["head_dim"]
        x = torch.randn(sum(request["lens_q"]), hidden, device="cuda", dtype=torch.bfloat16)
        weight = torch.randn(hidden, device="cuda", dtype=torch.bfloat16)
        self.run = lambda: torch.nn.functional.rms_norm(x, (hidden,), weight, 1e-6)
        want = x[:ROWS].double()
        want = want / (want.square().mean(1, keepdim=True) + 1e-6).sqrt() * weight.double()
        return float((self.run()[:ROWS].double() - want).norm() / want.norm())


class Server:
    def __init__(self):
        self.makers, self.ready = {}, {}

    def hello(self, _request):
        import torch

        if not torch.cuda.is_available():
            raise RuntimeError("this PyTorch sees no CUDA device")
        self.torch, self.timer = torch, Timer(torch)
        torch.manual_seed(1)
        self.makers = {
            "attention_fwd": {
                "torch_sdpa_cudnn_bf16": lambda: Sdpa(torch, "CUDNN_ATTENTION"),
                "torch_sdpa_flash_bf16": lambda: Sdpa(torch, "FLASH_ATTENTION"),
                "flash3_bf16": lambda: Flash3(torch, fp8=False),
                "flash3_fp8": lambda: Flash3(torch, fp8=True),
            },
            "rmsnorm_quantize": {"torch_rms_norm_bf16": lambda: RmsNorm(torch)},
        }
        machine, left_out = ceilings(torch, self.timer)
        versions = {
            "python": sys.version.split()[0],
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
        }
        names = [name for makers in self.makers.values() for name in makers]
        return {"peers": names, "left_out": left_out, "versions": versions, "machine": machine}

    def shape(self, request):
        self.ready = {}
        self.torch.cuda.empty_cache()
        peers, left_out = {}, {}
        makers = self.makers.get(request["op"], {})
        try:
            with self.torch.no_grad():
                problem = Problem(self.torch, request) if request["op"] == "attention_fwd" else request
        except Exception as why:
            return {"peers": {}, "left_out": {name: one_line(why) for name in makers}}
        for name, make in makers.items():
            try:
                peer = make()
                with self.torch.no_grad():
                    error = peer.prepare(problem)
                if not error <= getattr(peer, "max_error", MAX_ERROR):
                    raise LeftOut(f"is wrong: relative error {error:.2g}")
                self.ready[name], peers[name] = peer, {"error": error}
            except Exception as why:
                left_out[name] = one_line(why)
        return {"peers": peers, "left_out": left_out}

    def sample(self, request):
        with self.torch.no_grad():
            return {"samples": self.timer.samples(self.ready[request["peer"]].run, max(request["count"], 1))}


def one_line(error):
    return " ".join((str(error) or type(error).__name__).split())[:300]


def check():
    """`peers_cuda.py --check`: small shapes of every kind; prints each peer's error, and fails if one is missing."""
    server = Server()
    print(server.hello({}))
    for lens_q, lens_k, heads_kv, causal, shared_q, expected in (
        ([96], [96], 4, False, False, 2),
        ([96, 96], [96, 96], 4, True, False, 2),
        ([80, 80], [80, 80], 2, True, False, 2),
        ([5, 64, 33], [5, 64, 33], 4, True, False, 1),
        ([24], [40, 7], 4, False, True, 1),
    ):
        shape = {"lens_q": lens_q, "lens_k": lens_k, "shared_q": shared_q, "causal": causal}
        heads = {"num_heads_q": 4, "num_heads_kv": heads_kv, "head_dim": 64, "head_dim_v": 64}
        answer = server.shape({"op": "attention_fwd", **shape, **heads})
        print(shape, answer, flush=True)
        if len(answer["peers"]) < expected:
            sys.exit("peers are missing")
        for name in answer["peers"]:
            if min(server.sample({"peer": name, "count": 3})["samples"]) <= 0:
                sys.exit(name + " took no time")


def main():
    if sys.argv[1:] == ["--check"]:
        check()
        return
    # Whatever a library prints must not get between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    server = Server()
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"hello": server.hello, "shape": server.shape, "sample": server.sample}[request["cmd"]](request)
        except Exception as error:
            answer = {"failed": one_line(error)}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
