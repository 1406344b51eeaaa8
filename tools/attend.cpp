// mxflash attend: MXFP8 attention on the user's tensors beside exact attention.
#include <iostream>
#include <memory>

#include "kit/device_memory.h"
#include "kit/file_bytes.h"
#include "tools/attention_error.h"
#include "tools/commands.h"
#include "tools/number_text.h"
#include "tools/operands.h"
#include "tools/progress.h"
#include "tools/report.h"

namespace mxflash::tools {
namespace {

using Json = nlohmann::ordered_json;

struct AttendOptions {
  OperandOptions operands;
  ProblemOptions problem;
  Recipe recipe{.rotate_qk = false, .smooth_k = false, .smooth_v = false};
  std::string block = "square32", rule = "rceil", grad_element = "e4m3";
  std::string rotate_seed = std::to_string(kDefaultRotateSeed);
  std::string backend, out, report;
  bool backward = false, no_compare = false, json = false;
  int threads = 0;
};

// Everything that was computed.
struct Attended {
  const AttendOptions& options;
  const kit::FloatProblem& problem;
  std::string backend;
  kit::FloatResult got;
  double exact_ms = 0;
  std::vector<TensorError> errors;  // empty with --no-compare
};

std::string source_name(const AttendOptions& o) {
  const std::string path = o.operands.in.empty() ? o.operands.q : o.operands.in;
  return path.substr(path.rfind('/') + 1);
}

double softmax_scale(const kit::FloatProblem& p) {
  return p.softmax_scale != 0 ? double(p.softmax_scale) : 1 / std::sqrt(double(p.head_dim));
}

Json shape_json(const kit::FloatProblem& p) {
  return {{"total_q", p.total_q()},
          {"total_k", p.total_k()},
          {"batch", p.batch()},
          {"num_heads_q", p.num_heads_q},
          {"num_heads_kv", p.num_heads_kv},
          {"head_dim", p.head_dim},
          {"head_dim_v", p.head_dim_v},
          {"causal", p.mask.causal},
          {"window", {p.mask.window_left, p.mask.window_right}},
          {"shared_q", p.shared_q},
          {"softmax_scale", softmax_scale(p)}};
}

Json metrics_json(const TensorError& e) {
  const size_t worst = e.worst_head();
  return {{"sqnr_db", e.all.sqnr_db},
          {"cosine", e.all.cosine},
          {"max_abs_err", e.all.max_abs_err},
          {"signal_energy", e.all.signal_energy},
          {"error_energy", e.all.error_energy},
          {"nonfinite_mismatch", e.all.nonfinite_mismatch},
          {"worst_head", {{"head", worst}, {"sqnr_db", e.heads[worst].sqnr_db}}}};
}

// Names and statistics of the operands that were quantized.
std::vector<std::pair<const char*, QuantizeStats>> operand_stats(const Attended& a) {
  std::vector<std::pair<const char*, QuantizeStats>> stats{
      {"q", a.got.stats.q}, {"k", a.got.stats.k}, {"v", a.got.stats.v}};
  if (a.options.backward) stats.emplace_back("dout", a.got.stats.dout);
  return stats;
}

void print_json(const Attended& a) {
  Json json{{"source", kit::one_line(source_name(a.options), true)},
            {"version", version()},
            {"backend", a.backend},
            {"recipe", to_json(a.options.recipe)},
            {"shape", shape_json(a.problem)}};
  for (const TensorError& e : a.errors) json["metrics"][e.name] = metrics_json(e);
  for (const auto& [name, stats] : operand_stats(a)) json["quantization"][name] = to_json(stats);
  json["time_ms"]["fwd"] = a.got.fwd_ms;
  if (a.options.backward) json["time_ms"]["bwd"] = a.got.bwd_ms;
  if (!a.errors.empty()) json["time_ms"]["oracle"] = a.exact_ms;
  std::cout << json.dump() << '\n';
}

// printf's width and alignment, for the tables.
std::string column(const std::string& text, int width) {
  const std::string space(size_t(std::max(0, std::abs(width) - int(text.size()))), ' ');
  return width < 0 ? text + space : space + text;
}

void print_table(const Attended& a, const AttentionOperands& x) {
  std::ostream& os = std::cout;
  os << "mxflash attend " << source_name(a.options) << " on " << a.backend << "\n  shape   q "
     << kit::shape_text(x.q.shape()) << "  k " << kit::shape_text(x.k.shape()) << "  v " << kit::shape_text(x.v.shape())
     << "; " << a.problem.batch() << (a.problem.batch() == 1 ? " sequence, " : " sequences, ") << mask_text(a.problem)
     << "\n  recipe  " << recipe_text(a.options.recipe) << "\n\n";
  if (!a.errors.empty()) os << "tensor    SQNR dB    N(0,1)     cosine  max |error|  worst head\n";
  for (const TensorError& e : a.errors) {
    const size_t worst = e.worst_head();
    const std::optional<double> typical = typical_sqnr_db(e.name);
    os << column(e.name, -6) << column(decibels(e.all), 11) << column(typical ? fixed(*typical, 1) : "", 10)
       << column(fixed(e.all.cosine, 6), 11) << column(significant(e.all.max_abs_err, 3), 13) << "  " << worst << " ("
       << decibels(e.heads[worst]) << (std::abs(e.heads[worst].sqnr_db) < kit::kMaxDb ? " dB)\n" : ")\n");
  }
  os << (a.errors.empty() ? "" : "\n") << "operand       amax    saturated  flushed to 0      NaN/Inf     elements\n";
  for (const auto& [name, stats] : operand_stats(a)) {
    os << column(name, -7) << column(significant(double(stats.amax), 4), 11) << column(grouped(stats.saturated), 13)
       << column(grouped(stats.flushed), 14) << column(grouped(stats.nonfinite), 13) << column(grouped(stats.total), 13)
       << '\n';
  }
  os << "\ntime    forward " << fixed(a.got.fwd_ms, 0) << " ms";
  if (a.options.backward) os << ", backward " << fixed(a.got.bwd_ms, 0) << " ms";
  if (!a.errors.empty()) os << ", exact attention " << fixed(a.exact_ms, 0) << " ms";
  os << (a.backend == "ref"                  ? " (ref is the specification, not a fast path)\n"
         : kit::is_device_backend(a.backend) ? " (copying to the card and back included)\n"
                                             : "\n");
  if (a.errors.empty()) return;
  os << '\n' << verdict(a.errors, a.got.stats);
  if (a.options.report.empty()) os << " (--report FILE.html shows what other recipes would change)";
  os << '\n';
}

kit::HostTensor host_tensor(const std::vector<float>& x, std::vector<int64_t> shape) {
  const auto bytes = std::as_bytes(std::span(x));
  return {.dtype = kit::FileDtype::f32, .shape = std::move(shape), .bytes = {bytes.begin(), bytes.end()}};
}

void write_results(const Attended& a) {
  const kit::FloatProblem& p = a.problem;
  std::vector<kit::NamedTensor> tensors{{"out", host_tensor(a.got.out, {p.total_out(), p.num_heads_q, p.head_dim_v})},
                                        {"lse", host_tensor(a.got.lse, {p.num_heads_q, p.total_out()})}};
  if (a.options.backward) {
    tensors.push_back({"dq", host_tensor(a.got.dq, {p.total_q(), p.num_heads_q, p.head_dim})});
    tensors.push_back({"dk", host_tensor(a.got.dk, {p.total_k(), p.num_heads_kv, p.head_dim})});
    tensors.push_back({"dv", host_tensor(a.got.dv, {p.total_k(), p.num_heads_kv, p.head_dim_v})});
  }
  kit::write_safetensors(a.options.out, tensors,
                         {{"about", "MXFP8 attention of the caller's q, k, v; lse is the natural logarithm"},
                          {"mxflash", version()},
                          {"source", kit::one_line(source_name(a.options), true)},
                          {"backend", a.backend},
                          {"recipe", to_json(a.options.recipe).dump()},
                          {"shape", shape_json(p).dump()}});
}

// The input files and one other output.
std::vector<std::string> files_in_use(const AttendOptions& o, const std::string& other_output) {
  std::vector<std::string> files{o.operands.in, other_output};
  for (const std::string& name : {o.operands.q, o.operands.k, o.operands.v, o.operands.dout}) {
    if (is_npy(name)) files.push_back(name);
  }
  return files;
}

void run_attend(AttendOptions& o) {
  set_recipe_block(o.recipe, o.block);
  o.recipe.rule = parse_rule(o.rule);
  o.recipe.grad_element = parse_element(o.grad_element);
  o.recipe.rotate_seed = parse_rotate_seed(o.rotate_seed);
  if (!o.report.empty() && o.no_compare) {
    throw UsageError("--report needs the comparison with exact attention; leave out --no-compare or --report");
  }
  set_num_threads(o.threads);

  Progress progress;
  progress.phase("reading the operands");
  const AttentionOperands operands = read_operands(o.operands, o.backward);
  const kit::FloatProblem problem = make_problem(operands, o.problem);
  if (!o.out.empty()) require_writable(o.out, files_in_use(o, o.report));
  if (!o.report.empty()) require_writable(o.report, files_in_use(o, o.out));

  Attended a{.options = o,
             .problem = problem,
             .backend = backend_in_use(Operation::attention_fwd, o.backend),
             .got = {},
             .exact_ms = 0,
             .errors = {}};
  progress.phase(std::string("MXFP8 attention, forward") + (o.backward ? " and backward" : "") + ", on " + a.backend);
  const kit::RunOptions run{
      .recipe = o.recipe, .backend = o.backend.empty() ? nullptr : o.backend.c_str(), .backward = o.backward};
  a.got = kit::run_operator(problem, run);
  if (!o.out.empty()) write_results(a);
  if (!o.no_compare) {
    progress.phase("exact attention (float64)");
    const ExactAttention exact = exact_attention(problem, o.threads);
    a.exact_ms = exact.ms;
    a.errors = compare_all(problem, exact.result, a.got);
    if (!o.report.empty()) {
      const std::string page = report_page({.title = source_name(o),
                                            .backend = a.backend,
                                            .operands = operands,
                                            .problem = problem,
                                            .run = run,
                                            .got = a.got,
                                            .exact = exact,
                                            .errors = a.errors},
                                           progress);
      kit::OutputFile file(o.report);
      file.write(std::as_bytes(std::span(page)));
      file.commit();
    }
  }
  if (o.json) {
    print_json(a);
  } else {
    print_table(a, operands);
    if (!o.report.empty()) std::cout << "report: " << o.report << '\n';
  }
}

}  // namespace

void add_attend(CLI::App& app) {
  CLI::App* cmd =
      app.add_subcommand("attend", "Run MXFP8 attention on q, k, v of a file and compare it with exact attention");
  const auto options = std::make_shared<AttendOptions>();
  AttendOptions& o = *options;
  cmd->add_option("IN", o.operands.in,
                  "A .safetensors file; tensors are [tokens, heads, head_dim] in F32, F16 or BF16");
  cmd->add_option("--q", o.operands.q, "Name of the tensor in IN, or a .npy file")->capture_default_str();
  cmd->add_option("--k", o.operands.k, "Likewise")->capture_default_str();
  cmd->add_option("--v", o.operands.v, "Likewise")->capture_default_str();
  cmd->add_option("--dout", o.operands.dout, "Likewise: gradient of out, for --backward")->capture_default_str();
  cmd->add_flag("--causal", o.problem.causal, "Query i sees keys up to i + Sk - Sq");
  cmd->add_option("--window", o.problem.window,
                  "LEFT,RIGHT: keys that a query sees on either side, inclusive; -1 is open");
  cmd->add_option("--cu-seqlens", o.problem.cu_seqlens,
                  "0,5,...: where the sequences begin and end, of queries and keys alike");
  cmd->add_option("--cu-seqlens-q", o.problem.cu_seqlens_q, "0,5,...: where the query sequences begin and end");
  cmd->add_option("--cu-seqlens-k", o.problem.cu_seqlens_k, "Likewise for keys");
  cmd->add_flag("--shared-q", o.problem.shared_q, "One query sequence attends to every key sequence");
  cmd->add_option("--softmax-scale", o.problem.softmax_scale, "Default: 1/sqrt(head_dim)");
  cmd->add_flag("--backward", o.backward, "Also compute dq, dk, dv");
  cmd->add_option("--block", o.block, "Blocks that share a scale")
      ->check(CLI::IsMember(kRecipeBlockNames))
      ->capture_default_str();
  cmd->add_option("--rule", o.rule, "How a block's largest value becomes its scale")
      ->check(CLI::IsMember(kRuleNames))
      ->capture_default_str();
  cmd->add_option("--grad-element", o.grad_element, "Element of dout")
      ->check(CLI::IsMember(kElementNames))
      ->capture_default_str();
  cmd->add_flag("--rotate-qk", o.recipe.rotate_qk, "Random-sign Hadamard rotation of q and k");
  cmd->add_option("--rotate-seed", o.rotate_seed, "Which signs --rotate-qk draws")->capture_default_str();
  cmd->add_flag("--smooth-k", o.recipe.smooth_k, "Subtract from k its mean over the sequence");
  cmd->add_flag("--smooth-v", o.recipe.smooth_v, "Likewise for v; added back to out");
  cmd->add_option("--backend", o.backend, "Force a backend (mxflash info lists them)");
  cmd->add_option("--threads", o.threads, "Default: all")->check(CLI::Range(1, 256));
  cmd->add_flag("--no-compare", o.no_compare, "Skip exact attention");
  cmd->add_option("-o,--output", o.out, "Write out, lse, dq, dk, dv as F32 .safetensors")->check(kNotEmpty);
  cmd->add_option("--report", o.report, "Write a self-contained HTML page")->check(kNotEmpty);
  cmd->add_flag("--json", o.json, "Print one JSON object");
  cmd->footer(
      "The recipe's options are off unless given; the library's operator has --rotate-qk --smooth-k --smooth-v on.\n"
      "The column N(0,1) is what the plain recipe reaches on normal random operands (512 tokens, 128 channels, no "
      "mask).\n"
      "JSON: sqnr_db is 999 where there is no error, -999 where NaN or Inf differ (nonfinite_mismatch counts them).");
  cmd->callback([options] { run_attend(*options); });
}

}  // namespace mxflash::tools
