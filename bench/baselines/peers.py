"""Peers of `mxflash bench` on a CPU: attention of PyTorch and onnxruntime, verified, then timed on request.

JSON, one object a line, on stdin and stdout; mxflash times its own runs between two requests, so that both see the same
drift of a shared machine.
  {"cmd": "hello", "threads": 2}                     {"peers": [...], "left_out": {peer: why}, "versions": {...}}
  {"cmd": "shape", "backward": false, "folder": ..., {"peers": {peer: {"error": rms}}, "left_out": {peer: why}}
   "lens_q": [...], "lens_k": [...], "shared_q": false, "num_heads_q": 8, "num_heads_kv": 8, "head_dim": 128,
   "head_dim_v": 128, "causal": false}
  {"cmd": "sample", "peer": ..., "least_ms": 20}     {"ms": 1.5}, or {"failed": why}
`folder` holds q, k, v and (backward) dout as packed fp32, [tokens, heads, dim]: what the MXFP8 operands dequantize to.
"error" is that of a few rows of out (backward: of dq), against NumPy in float64, over their RMS.

Every peer gets the layout that suits it, made before the clock starts. Sequences of different lengths run one after the
other: padding them would count work that nobody asked for. With a backward, only .backward() is timed.
"""
import gc
import json
import os
import sys
import time

import numpy as np

MAX_UNFUSED_BYTES = 4 << 30  # of S x S in one direction
BF16_ERROR, F32_ERROR = 0.03, 1e-4  # a larger one is not rounding but another problem than ours
ROWS = 4  # checked of a head


class LeftOut(Exception):
    """Why a peer does not take part."""


class Problem:
    """One attention call: `parts` are (q, k, v, dout), each [batch, heads, tokens, dim] float32, dout perhaps None."""

    def __init__(self, request):
        self.heads_q, self.heads_kv = request["num_heads_q"], request["num_heads_kv"]
        self.group = self.heads_q // self.heads_kv
        self.dim, self.dim_v = request["head_dim"], request["head_dim_v"]
        self.scale = self.dim**-0.5
        self.backward = request["backward"]
        lens_k = request["lens_k"]
        lens_q = request["lens_q"] * (len(lens_k) if request["shared_q"] else 1)
        # Aligned at the bottom right, one query sees all keys.
        self.causal = request["causal"] and max(lens_q) > 1
        self.square = lens_q == lens_k

        def read(name, heads, dim):
            return np.fromfile(os.path.join(request["folder"], name), np.float32).reshape(-1, heads, dim)

        q, k = read("q", self.heads_q, self.dim), read("k", self.heads_kv, self.dim)
        v = read("v", self.heads_kv, self.dim_v)
        dout = read("dout", self.heads_q, self.dim_v) if self.backward else None

        def split(x, lens, batch):
            if batch > 1:
                return [np.ascontiguousarray(x.reshape(batch, lens[0], *x.shape[1:]).swapaxes(1, 2))]
            ends = np.cumsum(lens)
            return [np.ascontiguousarray(x[None, end - n : end].swapaxes(1, 2)) for n, end in zip(lens, ends)]

        equal = len(set(lens_q)) == 1 and len(set(lens_k)) == 1 and not request["shared_q"]
        batch = len(lens_k) if equal else 1
        self.shared_q = request["shared_q"]
        qs = split(q, request["lens_q"], batch) * (len(lens_k) if self.shared_q else 1)
        ks, vs = split(k, lens_k, batch), split(v, lens_k, batch)
        douts = split(dout, lens_q, batch) if self.backward else [None] * len(ks)
        parts = zip(qs, ks, vs, douts)
        self.parts = [part for part in parts if part[0].shape[2] > 0 and part[1].shape[2] > 0]
        if not self.parts:
            raise LeftOut("no sequence has both queries and keys")
        self.pairs = max(part[0].shape[2] * part[1].shape[2] * part[0].shape[0] for part in self.parts)
        self.rows = self._exact_rows()

    def _exact_rows(self):
        """[(part, head, row, out, dq)] of the first head of the first part and the last head of the last, in float64.

        dq is None without a backward, and with a shared query, whose dq is a sum over all sequences.
        """
        rows = []
        for index, head in ((0, 0), (len(self.parts) - 1, self.heads_q - 1)):
            q, k, v, dout = self.parts[index]
            keys, values = (x[-1, head // self.group].astype(np.float64) for x in (k, v))
            for row in np.linspace(0, q.shape[2] - 1, min(ROWS, q.shape[2])).astype(int):
                s = keys @ q[-1, head, row].astype(np.float64) * self.scale
                if self.causal:
                    s[row + 1 + k.shape[2] - q.shape[2] :] = -np.inf
                p = np.exp(s - s.max()) if np.isfinite(s).any() else np.zeros_like(s)
                p /= max(p.sum(), 1e-300)
                out, dq = p @ values, None
                if dout is not None and not self.shared_q:
                    dp = values @ dout[-1, head, row].astype(np.float64)
                    dq = (p * (dp - p @ dp)) @ keys * self.scale
                rows.append((index, head, row, out, dq))
        return rows

    def error(self, outs, dqs):
        """Relative RMS error of the checked rows: of dq if there is a backward, else of out."""
        squares = [0.0, 0.0]
        for index, head, row, out, dq in self.rows:
            exact, results = (dq, dqs) if dq is not None else (out, outs)
            got = results[index].reshape(results[index].shape[0], self.heads_q, -1, len(exact))[-1, head, row]
            squares[0] += np.square(got - exact).sum()
            squares[1] += np.square(exact).sum()
        return float(np.sqrt(squares[0] / max(squares[1], 1e-300)))


class Torch:
    """scaled_dot_product_attention by its flash kernel.

    Without a mask the query heads of a group become rows of one head, which is faster than enable_gqa.
    """

    def __init__(self, dtype):
        import torch

        self.torch, self.dtype = torch, getattr(torch, dtype)
        self.max_error = F32_ERROR if dtype == "float32" else BF16_ERROR

    def attention(self, q, k, v, problem):
        from torch.nn.attention import SDPBackend, sdpa_kernel

        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return self.torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=problem.causal, enable_gqa=q.shape[1] != k.shape[1]
            )

    def check(self, problem):
        if problem.causal and not problem.square:
            raise LeftOut("is_causal aligns at the top left")

    def prepare(self, problem):
        self.check(problem)
        torch, known = self.torch, {}

        def tensor(x, fold):
            if id(x) not in known:  # a shared query stays one tensor, so that its dq is a sum
                if fold:
                    x_folded = x.reshape(x.shape[0], problem.heads_kv, -1, x.shape[3])
                    known[id(x)] = torch.from_numpy(x_folded).to(self.dtype)
                else:
                    known[id(x)] = torch.from_numpy(x).to(self.dtype)
                known[id(x)].requires_grad_(problem.backward)
            return known[id(x)]

        fold = not problem.causal and problem.group > 1
        self.parts = [
            (tensor(q, fold), tensor(k, False), tensor(v, False)) for q, k, v, _ in problem.parts
        ]
        self.problem = problem
        if not problem.backward:
            return
        outs = self.forward()
        self.outs = outs
        self.douts = [
            torch.from_numpy(part[3]).to(self.dtype).reshape(out.shape) for part, out in zip(problem.parts, outs)
        ]
        self.inputs = list({id(x): x for part in self.parts for x in part}.values())

    def forward(self):
        return [self.attention(q, k, v, self.problem) for q, k, v in self.parts]

    def run(self):
        if self.problem.backward:
            return self.torch.autograd.grad(self.outs, self.inputs, self.douts, retain_graph=True)
        with self.torch.no_grad():
            return self.forward()

    def error(self):
        def arrays(tensors):
            return [x.detach().to(self.torch.float64).numpy() for x in tensors]

        if not self.problem.backward:
            return self.problem.error(arrays(self.run()), None)
        gradients = {id(x): grad for x, grad in zip(self.inputs, self.run())}
        return self.problem.error(arrays(self.outs), arrays(gradients[id(part[0])] for part in self.parts))


class TorchUnfused(Torch):
    """softmax(q k^T) v as three calls, S x S in memory and rounded to bf16: on a CPU with bf16 dot products its two matrix
    products are the fastest there are."""

    def check(self, problem):
        size = 2 * problem.heads_q * problem.pairs * (3 if problem.backward else 2)
        if size > MAX_UNFUSED_BYTES:
            raise LeftOut(f"S x S would take {size * 1e-9:.1f} GB")

    def attention(self, q, k, v, problem):
        if q.shape[1] != k.shape[1]:
            q = q.reshape(q.shape[0], k.shape[1], -1, q.shape[3])
        s = (q * problem.scale) @ k.transpose(-1, -2)
        if problem.causal:
            rows, keys = s.shape[2] // (problem.heads_q // s.shape[1]), s.shape[3]
            mask = self.torch.full((rows, keys), -np.inf, dtype=self.dtype).triu_(keys - rows + 1)
            s = (s.view(s.shape[0], problem.heads_q, rows, keys) + mask).view(s.shape)
        return self.torch.softmax(s, -1) @ v


class Onnxruntime:
    """MultiHeadAttention, a contrib operator: packed [batch, tokens, heads * dim], forward only."""

    max_error = F32_ERROR

    def __init__(self, threads):
        import onnx
        import onnxruntime

        self.onnx, self.ort, self.threads = onnx, onnxruntime, threads

    def prepare(self, problem):
        if problem.backward:
            raise LeftOut("has no backward")
        if problem.group > 1:
            raise LeftOut("has no grouped heads")
        if problem.causal and not problem.square:
            raise LeftOut("unidirectional is tried with equal lengths only")
        self.problem = problem
        helper = self.onnx.helper
        attributes = {"num_heads": problem.heads_q, "unidirectional": int(problem.causal)}
        node = helper.make_node("MultiHeadAttention", ["q", "k", "v"], ["out"], domain="com.microsoft", **attributes)

        def value(name, tokens, dim):
            extents = ["batch", tokens, problem.heads_q * dim]
            return helper.make_tensor_value_info(name, self.onnx.TensorProto.FLOAT, extents)

        inputs = [value("q", "sq", problem.dim), value("k", "sk", problem.dim), value("v", "sk", problem.dim_v)]
        graph = helper.make_graph([node], "attention", inputs, [value("out", "sq", problem.dim_v)])
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=9)
        options = self.ort.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = self.threads, 1
        # Else its idle threads would run beside the next peer.
        options.add_session_config_entry("session.force_spinning_stop", "1")
        self.session = self.ort.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )

        def packed(x):
            return np.ascontiguousarray(x.swapaxes(1, 2)).reshape(x.shape[0], x.shape[2], -1)

        self.feeds = [dict(zip("qkv", map(packed, part[:3]))) for part in problem.parts]

    def run(self):
        return [self.session.run(None, feed)[0] for feed in self.feeds]

    def error(self):
        heads = self.problem.heads_q
        outs = [x.reshape(*x.shape[:2], heads, -1).swapaxes(1, 2) for x in self.run()]
        return self.problem.error(outs, None)


class Server:
    def __init__(self):
        self.makers, self.ready, self.seconds, self.threads = {}, {}, {}, 1

    def hello(self, request):
        self.threads = threads = request["threads"]
        os.environ["OMP_NUM_THREADS"] = str(threads)  # before torch is loaded, which reads it then
        makers = {
            "torch_sdpa_f32": lambda: Torch("float32"),
            "torch_sdpa_bf16": lambda: Torch("bfloat16"),
            "torch_unfused_bf16": lambda: TorchUnfused("bfloat16"),
            "ort_mha_f32": lambda: Onnxruntime(threads),
        }
        versions, left_out = {"python": sys.version.split()[0], "numpy": np.__version__}, {}
        for name, make in makers.items():
            try:
                peer = make()
            except Exception as error:  # not installed, or broken: the others can still run
                left_out[name] = one_line(error)
                continue
            self.makers[name] = make
            if isinstance(peer, Torch):
                peer.torch.set_num_threads(threads)
                versions["torch"] = peer.torch.__version__
                versions["torch_cpu_capability"] = peer.torch.backends.cpu.get_cpu_capability()
                versions["torch_mkldnn"] = peer.torch.backends.mkldnn.is_available()
            else:
                versions["onnxruntime"] = peer.ort.__version__
        return {"peers": list(self.makers), "left_out": left_out, "versions": versions}

    def shape(self, request):
        self.ready, self.seconds = {}, {}
        gc.collect()
        peers, left_out = {}, {}
        try:
            problem = Problem(request)
        except LeftOut as why:
            return {"peers": {}, "left_out": {name: str(why) for name in self.makers}}
        for name, make in self.makers.items():
            try:
                peer = make()
                peer.prepare(problem)
                error = peer.error()
                if not error <= peer.max_error:
                    raise LeftOut(f"is wrong: relative error {error:.2g}")
                start = time.perf_counter()
                peer.run()
                self.seconds[name] = time.perf_counter() - start
                self.ready[name], peers[name] = peer, {"error": error}
            except Exception as why:
                left_out[name] = one_line(why)
        return {"peers": peers, "left_out": left_out}

    def sample(self, request):
        """Mean of as many runs as take least_ms; one more before them if a single one is shorter than that."""
        name = request["peer"]
        run, least = self.ready[name].run, 1e-3 * request["least_ms"]
        if self.seconds[name] < least:
            run()
        runs = max(1, round(least / max(self.seconds[name], 1e-6)))
        start = time.perf_counter()
        for _ in range(runs):
            run()
        mean = (time.perf_counter() - start) / runs
        self.seconds[name] = min(mean, self.seconds[name])
        if self.threads > 1:
            time.sleep(0.01)  # until OpenMP's idle threads have stopped to spin
        return {"ms": 1e3 * mean}


def one_line(error):
    return " ".join((str(error) or type(error).__name__).split())[:300]


def check():
    """`peers.py --check`: small shapes of every kind; prints each peer's error, and fails if one does not take part."""
    import tempfile

    expected = {"torch_sdpa_f32", "torch_sdpa_bf16", "torch_unfused_bf16", "ort_mha_f32"}
    random = np.random.default_rng(1)
    server = Server()
    print(server.hello({"threads": 2}))
    for backward in (False, True):
        for lens_q, lens_k, heads_kv, causal, shared_q in (
            ([96], [96], 4, False, False),
            ([96, 96], [96, 96], 4, True, False),
            ([80], [80], 2, False, False),
            ([80, 80], [80, 80], 2, True, False),
            ([5, 64, 33], [5, 64, 33], 4, True, False),
            ([5, 64, 33], [9, 0, 40], 2, False, False),
            ([24], [40, 7], 4, False, True),
            ([1], [300], 1, True, False),
        ):
            with tempfile.TemporaryDirectory() as folder:
                tokens_out = sum(lens_q) * (len(lens_k) if shared_q else 1)
                for name, tokens, heads, dim in (
                    ("q", sum(lens_q), 4, 64),
                    ("k", sum(lens_k), heads_kv, 64),
                    ("v", sum(lens_k), heads_kv, 64),
                    ("dout", tokens_out, 4, 64),
                ):
                    random.standard_normal((tokens, heads, dim), np.float32).tofile(os.path.join(folder, name))
                shape = {"lens_q": lens_q, "lens_k": lens_k, "shared_q": shared_q, "causal": causal}
                heads = {"num_heads_q": 4, "num_heads_kv": heads_kv, "head_dim": 64, "head_dim_v": 64}
                answer = server.shape({"backward": backward, "folder": folder, **shape, **heads})
            print("backward" if backward else "forward", shape, answer)
            missing = expected - set(answer["peers"]) - ({"ort_mha_f32"} if backward or heads_kv < 4 else set())
            if missing:
                sys.exit("peers are missing: " + ", ".join(sorted(missing)))
            for name in answer["peers"]:
                if server.sample({"peer": name, "least_ms": 1})["ms"] <= 0:
                    sys.exit(name + " took no time")


def main():
    if sys.argv[1:] == ["--check"]:
        check()
        return
    # Whatever a library prints must not get between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    server = Server()
    gc.disable()
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"hello": server.hello, "shape": server.shape, "sample": server.sample}[request["cmd"]](request)
        except Exception as error:
            answer = {"failed": one_line(error)}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
