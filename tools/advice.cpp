#include "tools/advice.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "tools/number_text.h"
#include "tools/operands.h"

namespace mxflash::tools {
namespace {

// Differences below this are printed as "nothing to gain".
constexpr double kNoiseDb = 0.2;
// Smaller effects on other tensors are not worth a word.
constexpr double kShownDb = 0.05;
constexpr const char* kNoBreakSpace = "\xC2\xA0";
// Nine of ten seeds of the rotation keep every tensor this close to the median seed (docs/numerics.md): a smaller
// effect may be the seed's, not the rotation's.
constexpr double kRotationNoiseDb = 0.7;

struct Change {
  std::string change;               // what the alternative does: "smooth_k off"
  std::string subject;              // what the sentence is about: "smooth_k"
  std::string if_better, if_worse;  // what to do if the alternative is
  bool subject_in_use = false;      // the alternative takes the subject away
  double noise_db = kNoiseDb;
  Recipe recipe;
};

Change toggle(const Recipe& recipe, bool Recipe::*option, const std::string& name, const std::string& flag) {
  Change c{.change = name + (recipe.*option ? " off" : " on"),
           .subject = name,
           .if_better = {},
           .if_worse = {},
           .subject_in_use = recipe.*option,
           .noise_db = option == &Recipe::rotate_qk ? kRotationNoiseDb : kNoiseDb,
           .recipe = recipe};
  c.if_better = (recipe.*option ? "drop `" : "add `") + flag + "`";
  c.if_worse = recipe.*option ? "keep it" : "leave it off";
  c.recipe.*option = !(recipe.*option);
  return c;
}

std::vector<Change> changes_of(const Recipe& r, bool backward) {
  std::vector<Change> changes{toggle(r, &Recipe::rotate_qk, "rotate_qk", "--rotate-qk"),
                              toggle(r, &Recipe::smooth_k, "smooth_k", "--smooth-k"),
                              toggle(r, &Recipe::smooth_v, "smooth_v", "--smooth-v")};
  if (int(r.rotate_qk) + int(r.smooth_k) + int(r.smooth_v) < 2) {
    Change all{.change = "all three on",
               .subject = "rotate_qk, smooth_k and smooth_v together",
               .if_better = "add `--rotate-qk` `--smooth-k` `--smooth-v`",
               .if_worse = "leave them as they are",
               .noise_db = kRotationNoiseDb,
               .recipe = r};
    all.recipe.rotate_qk = all.recipe.smooth_k = all.recipe.smooth_v = true;
    changes.push_back(all);
  }
  const auto add_choice = [&](const std::string& what, const std::string& flag, const std::string& now,
                              const std::string& other, const std::function<void(Recipe&)>& apply) {
    Change c{.change = what + " " + other,
             .subject = what + " " + other,
             .if_better = "use `" + flag + " " + other + "`",
             .if_worse = "keep " + now,
             .recipe = r};
    apply(c.recipe);
    changes.push_back(c);
  };
  const MxRule other_rule = r.rule == MxRule::floor ? MxRule::rceil : MxRule::floor;
  add_choice("rule", "--rule", rule_name(r.rule), rule_name(other_rule), [&](Recipe& x) { x.rule = other_rule; });
  if (backward) {
    const Dtype other = r.grad_element == Dtype::e5m2 ? Dtype::e4m3 : Dtype::e5m2;
    add_choice("gradient element", "--grad-element", dtype_name(r.grad_element), dtype_name(other),
               [&](Recipe& x) { x.grad_element = other; });
  }
  const std::string other_block = recipe_block_name(r) == "square32" ? "row32+col32" : "square32";
  add_choice("block", "--block", recipe_block_name(r), other_block,
             [&](Recipe& x) { set_recipe_block(x, other_block); });
  return changes;
}

double judged_db(const TensorError& e) {
  const bool defined = std::abs(e.all.sqnr_db) < kit::kMaxDb;
  return defined ? e.all.sqnr_db : std::numeric_limits<double>::quiet_NaN();
}

// The rule decides what saturates, so its sentence names the operand that suffers most.
std::string saturation_text(const OperatorStats& stats, bool backward) {
  double worst = 0;
  const char* name = "";
  const auto see = [&](const char* operand, const QuantizeStats& s) {
    const double share = s.total > 0 ? double(s.saturated) / double(s.total) : 0;
    if (share > worst) worst = share, name = operand;
  };
  see("q", stats.q);
  see("k", stats.k);
  see("v", stats.v);
  if (backward) see("dout", stats.dout);
  return worst > 0 ? "saturates " + percent(worst) + " of " + name : "saturates nothing";
}

// " (out +0.6, dk -0.1)": the visible effects beside the one that the sentence names.
std::string others_text(const std::vector<std::string>& names, const std::vector<double>& effects, size_t named) {
  std::string text;
  for (size_t i = 0; i < names.size(); ++i) {
    if (i == named || !(std::abs(effects[i]) >= kShownDb)) continue;
    text += text.empty() ? " (" : ", ";
    text += names[i] + kNoBreakSpace + signed_fixed(effects[i], 1);
  }
  return text.empty() ? text : text + ")";
}

std::string sentence(const Change& c, const std::vector<std::string>& names, const std::vector<double>& gains,
                     const std::string& saturation) {
  // The effect of the subject, which is the opposite of the gain where the alternative takes it away.
  std::vector<double> effects = gains;
  if (c.subject_in_use) std::transform(gains.begin(), gains.end(), effects.begin(), std::negate<>());
  size_t best = names.size(), worst = names.size();
  for (size_t i = 0; i < effects.size(); ++i) {
    if (std::isnan(effects[i])) continue;
    if (best == names.size() || effects[i] > effects[best]) best = i;
    if (worst == names.size() || effects[i] < effects[worst]) worst = i;
  }
  // "rule floor saturates 1% of k and would lose ...", "rule floor saturates 1% of k: rule rceil would gain ..."
  std::string lead = c.subject, neutral = c.subject;
  if (!saturation.empty() && saturation.starts_with(c.subject)) {
    lead = saturation + " and";
    neutral = saturation;
  } else if (!saturation.empty()) {
    lead = neutral = saturation + ": " + c.subject;
  }
  if (best == names.size()) return lead + " cannot be judged: no error is defined for these operands.";
  const bool gains_something = effects[best] >= c.noise_db, loses_something = effects[worst] <= -c.noise_db;
  const std::string gain = fixed(effects[best], 1) + " dB on " + names[best];
  const std::string loss = fixed(-effects[worst], 1) + " dB on " + names[worst];
  if (gains_something && loses_something) {
    return lead + " gains " + gain + " but loses " + loss + others_text(names, effects, best) +
           ": choose by the tensor that matters to you.";
  }
  if (gains_something) {
    return lead + (c.subject_in_use ? " gains " : " would gain ") + gain + others_text(names, effects, best) + ": " +
           (c.subject_in_use ? c.if_worse : c.if_better) + ".";
  }
  if (loses_something) {
    return lead + (c.subject_in_use ? " loses " : " would lose ") + loss + others_text(names, effects, worst) + ": " +
           (c.subject_in_use ? c.if_better : c.if_worse) + ".";
  }
  const size_t largest = effects[best] > -effects[worst] ? best : worst;
  const std::string most = std::abs(effects[largest]) < 0.005
                               ? " (no change)."
                               : " (at most " + signed_fixed(effects[largest], 2) + " dB, on " + names[largest] + ").";
  return neutral + (c.subject_in_use ? ": nothing gained by it here" : ": nothing to gain here") + most;
}

}  // namespace

std::vector<std::string> judged_tensors(const std::vector<TensorError>& errors) {
  std::vector<std::string> names;
  for (const TensorError& e : errors)
    if (e.name != "lse") names.push_back(e.name);
  return names;
}

std::vector<Alternative> try_alternatives(const kit::FloatProblem& problem, const kit::RunOptions& run,
                                          const kit::FloatResult& got, const ExactAttention& exact,
                                          const std::vector<TensorError>& errors, Progress& progress) {
  const std::vector<std::string> names = judged_tensors(errors);
  const bool backward = names.size() > 1;
  std::vector<Alternative> result;
  for (const Change& change : changes_of(run.recipe, backward)) {
    progress.phase("trying " + change.change);
    kit::RunOptions other = run;
    other.recipe = change.recipe;
    const kit::FloatResult tried = kit::run_operator(problem, other);
    const std::vector<TensorError> tried_errors = compare_all(problem, exact.result, tried);
    Alternative a{.change = change.change, .gain_db = {}, .advice = {}};
    for (const std::string& name : names) {
      a.gain_db.push_back(judged_db(*find_error(tried_errors, name)) - judged_db(*find_error(errors, name)));
    }
    std::string saturation;
    if (change.recipe.rule != run.recipe.rule) {
      const OperatorStats& floor_stats = run.recipe.rule == MxRule::floor ? got.stats : tried.stats;
      saturation = "rule floor " + saturation_text(floor_stats, backward);
    }
    a.advice = sentence(change, names, a.gain_db, saturation);
    const auto gains = [&](double db) { return db >= change.noise_db; };
    const auto loses = [&](double db) { return db <= -change.noise_db; };
    a.better = std::any_of(a.gain_db.begin(), a.gain_db.end(), gains) &&
               std::none_of(a.gain_db.begin(), a.gain_db.end(), loses);
    result.push_back(a);
  }
  return result;
}

}  // namespace mxflash::tools
