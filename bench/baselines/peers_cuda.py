"""Peers of `mxflash bench --device cuda`: PyTorch's attention and norm in BF16, and FlashAttention-3 in BF16 and FP8 where
it is installed; checked, then timed on request.

JSON, one object a line, on stdin and stdout; mxflash times its own launches between two requests.
  {"cmd": "hello"}                                   {"peers": [...], "left_out": {peer: why}, "versions": {...},
                                                      "machine": {"torch_copy_gbps": ..., "bf16_gemm_tflops": ..., ...}}
  {"cmd": "shape", "op": "attention_fwd",            {"peers": {peer: {"error": rms, "saved_bytes": ...}},
   "lens_q": [...], "lens_k": [...],                  "left_out": {peer: why}}
   "shared_q": false, "num_heads_q": 8,
   "num_heads_kv": 8, "head_dim": 128,
   "head_dim_v": 128, "causal": false}
  {"cmd": "sample", "peer": ..., "count": 4}         {"samples": [ms of each launch]}, or {"failed": why}
Operands are N(0, 1) of those shapes. Times are those of events around each launch, back to back after a warm-up: of
attention_bwd the gradients alone, from a forward outside of the time; of training_step both. Autograd puts no kernels
of its own between the events, and while the device works on what came before the host is ahead. Layouts are packed
tokens, [batch, tokens, heads, dim] in memory, as ours. "error" is that of a few rows of out (a few of dq, and dk and dv
of a head, whichever is worst) against float64, over their RMS; "saved_bytes", with gradients, is what autograd keeps
for them, "workspace_bytes" of attention_bwd what the call allocates beside them. "machine" has ceilings: a copy, and matrix products of 8192^3 in BF16 and in FP8 (E4M3).
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
CHUNK = 1 << 25  # float64 scores at a time
ATTENTION = ("attention_fwd", "attention_bwd", "training_step")


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
        self.dout = operand(len(self.q), self.heads_q, self.dim_v) if request["op"] != "attention_fwd" else None

    def equal_lengths(self):
        return len(set(self.lens_q)) == 1 and len(set(self.lens_k)) == 1

    def cu_seqlens(self):
        """Of q and of k, and the longest of both."""
        starts = [self.torch.tensor([0] + lens).cumsum(0).int().cuda() for lens in (self.lens_q, self.lens_k)]
        return *starts, max(self.lens_q), max(self.lens_k)

    def sequences(self):
        """What is checked, in float64: the first head of the first sequence, and the last of the last one."""
        for b, head in ((0, 0), (len(self.lens_k) - 1, self.heads_q - 1)):
            if self.lens_q[b] and self.lens_k[b]:
                q_start, k_start = sum(self.lens_q[:b]), sum(self.lens_k[:b])
                yield slice(q_start, q_start + self.lens_q[b]), slice(k_start, k_start + self.lens_k[b]), head

    def scores(self, q, k, rows):
        """Of these rows of a sequence."""
        torch = self.torch
        scores = q[rows] @ k.T * self.scale
        if self.causal:
            last = rows[:, None] + len(k) - len(q)
            scores.masked_fill_(torch.arange(len(k), device="cuda") > last, float("-inf"))
        return scores

    def some(self, n):
        return self.torch.tensor(sorted({round(i * (n - 1) / (ROWS - 1)) for i in range(ROWS)}), device="cuda")

    def error(self, out):
        """Relative RMS error of some rows."""
        squares = [0.0, 0.0]
        for tokens, keys, head in self.sequences():
            group_head = head // (self.heads_q // self.heads_kv)
            q, k, v = (x.double() for x in (self.q[tokens, head], self.k[keys, group_head], self.v[keys, group_head]))
            rows = self.some(len(q))
            want = self.torch.softmax(self.scores(q, k, rows), 1) @ v
            seen = want.isfinite().all(1)
            squares[0] += float((out[tokens, head][rows].double() - want)[seen].square().sum())
            squares[1] += float(want[seen].square().sum())
        return (squares[0] / max(squares[1], 1e-300)) ** 0.5

    def gradient_error(self, dq, dk, dv):
        """That of some rows of dq, and of dk and dv of the key head: the largest of the three."""
        torch, group = self.torch, self.heads_q // self.heads_kv
        squares = [[0.0, 0.0] for _ in range(3)]
        for tokens, keys, head in self.sequences():
            key_head = head // group
            k, v = self.k[keys, key_head].double(), self.v[keys, key_head].double()
            want_dk, want_dv = torch.zeros_like(k), torch.zeros_like(v)
            pairs = []
            for h in range(key_head * group, (key_head + 1) * group):
                q, dout = self.q[tokens, h].double(), self.dout[tokens, h].double()
                want_dq = torch.zeros_like(q)
                for rows in torch.arange(len(q), device="cuda").split(max(1, CHUNK // len(k))):
                    p = torch.softmax(self.scores(q, k, rows), 1).nan_to_num_()
                    want_dv += p.T @ dout[rows]
                    ds = dout[rows] @ v.T
                    ds -= (p * ds).sum(1, keepdim=True)
                    ds *= p
                    want_dk += self.scale * (ds.T @ q[rows])
                    want_dq[rows] = self.scale * (ds @ k)
                if h == head:
                    rows = self.some(len(q))
                    pairs.append((dq[tokens, h][rows], want_dq[rows]))
            pairs += [(dk[keys, key_head], want_dk), (dv[keys, key_head], want_dv)]
            for sums, (got, want) in zip(squares, pairs):
                sums[0] += float((got.double() - want).square().sum())
                sums[1] += float(want.square().sum())
        errors = [(error / max(size, 1e-300)) ** 0.5 for error, size in squares]
        return max(errors) if all(e == e for e in errors) else float("nan")


class Attention:
    """A peer: what it calls. prepare_forward sets `operands`, those of the problem in the layout of its call, and
    `forward`, the call; its results and gradients are brought back to packed tokens by `packed`."""

    max_error = MAX_ERROR

    def prepare(self, problem):
        torch, op = self.torch, problem.request["op"]
        self.prepare_forward(problem)
        packed = lambda x: x if x.dim() == 3 else self.packed(x)
        if op == "attention_fwd":
            self.run = self.forward
            return {"error": problem.error(packed(self.run()))}
        self.operands = [x.detach().requires_grad_() for x in self.operands]
        storages = {}

        def keep(x):
            storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            out = self.forward()
        error = problem.error(packed(out.detach()))
        if not error <= self.max_error:
            raise LeftOut(f"is wrong: relative error {error:.2g} of out")
        dout = self.unpacked(problem.dout)

        def backward(out=out):
            return torch.autograd.grad(out, self.operands, dout, retain_graph=op == "attention_bwd")

        self.run = backward if op == "attention_bwd" else lambda: backward(self.forward())
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        gradients = self.run()
        workspace = torch.cuda.max_memory_allocated() - before - sum(x.nbytes for x in gradients)
        facts = {"error": problem.gradient_error(*map(packed, gradients)), "saved_bytes": sum(storages.values())}
        return facts | ({"workspace_bytes": workspace} if op == "attention_bwd" else {})


class Sdpa(Attention):
    """scaled_dot_product_attention by one of its kernels; flash takes packed sequences of any lengths, too."""

    def __init__(self, torch, backend):
        self.torch, self.backend = torch, backend

    def prepare_forward(self, problem):
        torch = self.torch
        if problem.causal and problem.lens_q != problem.lens_k:
            raise LeftOut("is_causal is tried with equal lengths only")
        if problem.equal_lengths():
            from torch.nn.attention import SDPBackend, sdpa_kernel

            batch = len(problem.lens_k)
            self.unpacked = lambda x: x.view(batch, -1, *x.shape[1:]).transpose(1, 2)
            self.packed = lambda x: x.transpose(1, 2).flatten(0, 1)
            kernel = getattr(SDPBackend, self.backend)
            gqa = problem.heads_q != problem.heads_kv

            def forward():
                with sdpa_kernel(kernel):
                    return torch.nn.functional.scaled_dot_product_attention(
                        *self.operands, is_causal=problem.causal, enable_gqa=gqa
                    )

        elif self.backend == "FLASH_ATTENTION":
            self.unpacked = lambda x: x
            lengths = problem.cu_seqlens()

            def forward():
                return torch.ops.aten._flash_attention_forward(
                    *self.operands, *lengths, 0.0, problem.causal, False, scale=problem.scale
                )[0]

        else:
            raise LeftOut("sequences of different lengths")
        self.operands = [self.unpacked(x) for x in (problem.q, problem.k, problem.v)]
        self.forward = forward


class Flash3(Attention):
    """FlashAttention-3, of any lengths: as its authors' package has it, or as `pip install fa3-fwd`, the forward alone.

    FP8: operands rounded to E4M3 as they are, with scales of 1, so that only the kernel is timed."""

    def __init__(self, torch, fp8):
        try:
            import flash_attn_interface as interface
        except ImportError:
            import fa3_fwd_interface as interface
        self.torch, self.fp8, self.interface = torch, fp8, interface
        self.max_error = MAX_ERROR_FP8 if fp8 else MAX_ERROR

    def prepare_forward(self, problem):
        if problem.request["op"] != "attention_fwd":
            if self.fp8:
                raise LeftOut("has no backward in FP8")
            if self.interface.__name__ == "fa3_fwd_interface":
                raise LeftOut("the package fa3-fwd has no backward")
        torch = self.torch
        q, k, v = problem.q, problem.k, problem.v
        options = {"causal": problem.causal, "softmax_scale": problem.scale}
        if self.fp8:
            q, k, v = (x.to(torch.float8_e4m3fn) for x in (q, k, v))
            ones = torch.ones(len(problem.lens_k), problem.heads_kv, device="cuda")
            options |= {name: ones for name in ("q_descale", "k_descale", "v_descale")}
        if problem.equal_lengths():
            self.unpacked = lambda x: x.view(len(problem.lens_k), -1, *x.shape[1:])
            self.packed = lambda x: x.flatten(0, 1)
            call = lambda: self.interface.flash_attn_func(*self.operands, **options)
        else:
            self.unpacked = lambda x: x
            lengths = problem.cu_seqlens()
            call = lambda: self.interface.flash_attn_varlen_func(*self.operands, *lengths, **options)

        def forward():
            out = call()
            return out[0] if isinstance(out, tuple) else out

        self.operands = [self.unpacked(x) for x in (q, k, v)]
        self.forward = forward


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
        return {"error": float((self.run()[:ROWS].double() - want).norm() / want.norm())}


class Server:
    def __init__(self):
        self.makers, self.ready = {}, {}

    def hello(self, _request):
        import torch

        if not torch.cuda.is_available():
            raise RuntimeError("this PyTorch sees no CUDA device")
        self.torch, self.timer = torch, Timer(torch)
        torch.manual_seed(1)
        attention = {
            "torch_sdpa_cudnn_bf16": lambda: Sdpa(torch, "CUDNN_ATTENTION"),
            "torch_sdpa_flash_bf16": lambda: Sdpa(torch, "FLASH_ATTENTION"),
            "flash3_bf16": lambda: Flash3(torch, fp8=False),
            "flash3_fp8": lambda: Flash3(torch, fp8=True),
        }
        self.makers = {
            **{op: attention for op in ATTENTION},
            "rmsnorm_quantize": {"torch_rms_norm_bf16": lambda: RmsNorm(torch)},
        }
        machine, left_out = ceilings(torch, self.timer)
        versions = {
            "python": sys.version.split()[0],
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
        }
        names = list({name: None for makers in self.makers.values() for name in makers})
        return {"peers": names, "left_out": left_out, "versions": versions, "machine": machine}

    def shape(self, request):
        self.ready = {}
        self.torch.cuda.empty_cache()
        peers, left_out = {}, {}
        makers = self.makers.get(request["op"], {})
        try:
            problem = Problem(self.torch, request) if request["op"] in ATTENTION else request
        except Exception as why:
            return {"peers": {}, "left_out": {name: one_line(why) for name in makers}}
        for name, make in makers.items():
            try:
                peer = make()
                with self.torch.set_grad_enabled(needs_gradients(request["op"])):
                    facts = peer.prepare(problem)
                if not facts["error"] <= getattr(peer, "max_error", MAX_ERROR):
                    raise LeftOut(f"is wrong: relative error {facts['error']:.2g}")
                self.ready[name], peers[name] = peer, facts
            except Exception as why:
                left_out[name] = one_line(why)
        self.op = request["op"]
        return {"peers": peers, "left_out": left_out}

    def sample(self, request):
        with self.torch.set_grad_enabled(needs_gradients(self.op)):
            return {"samples": self.timer.samples(self.ready[request["peer"]].run, max(request["count"], 1))}


def needs_gradients(op):
    return op in ("attention_bwd", "training_step")


def one_line(error):
    return " ".join((str(error) or type(error).__name__).split())[:300]


def check():
    """`peers_cuda.py --check`: small shapes of every kind; prints each peer's error, and fails if one is missing."""
    server = Server()
    print(server.hello({}))
    for op in ATTENTION:
        for lens_q, lens_k, heads_kv, causal, shared_q, expected in (
            ([96], [96], 4, False, False, 2),
            ([96, 96], [96, 96], 4, True, False, 2),
            ([80, 80], [80, 80], 2, True, False, 2),
            ([5, 64, 33], [5, 64, 33], 4, True, False, 1),
            ([24], [40, 7], 4, False, True, 1),
        ):
            shape = {"lens_q": lens_q, "lens_k": lens_k, "shared_q": shared_q, "causal": causal}
            heads = {"num_heads_q": 4, "num_heads_kv": heads_kv, "head_dim": 64, "head_dim_v": 64}
            answer = server.shape({"op": op, **shape, **heads})
            print(op, shape, answer, flush=True)
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
