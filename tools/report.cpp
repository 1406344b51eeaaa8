#include "tools/report.h"

#include <algorithm>
#include <cmath>

#include "tools/advice.h"
#include "tools/number_text.h"
#include "tools/report_charts.h"
#include "tools/report_data.h"
#include "tools/report_style.h"

namespace mxflash::tools {
namespace {

constexpr double kUndefined = std::numeric_limits<double>::quiet_NaN();

std::string paragraph(const char* css_class, const std::string& text) {
  return std::string("<p class=\"") + css_class + "\">" + html_text(text) + "</p>\n";
}

std::string section(const std::string& heading, const std::string& finding, const std::string& content) {
  return "<section>\n<h2>" + html_text(heading) + "</h2>\n" + (finding.empty() ? "" : paragraph("finding", finding)) +
         content + "</section>\n";
}

std::string cell(const std::string& text, const char* css_class = "") {
  return std::string("<td") + (*css_class ? std::string(" class=\"") + css_class + "\"" : "") + ">" + html_text(text) +
         "</td>";
}

std::string table(const std::vector<std::string>& columns, const std::string& rows) {
  std::string head;
  for (const std::string& column : columns) {
    head += std::string("<th scope=\"col\"") + (column == "Advice" ? " class=\"text\">" : ">") + html_text(column) +
            "</th>";
  }
  return "<div class=\"scroll\"><table><thead><tr>" + head + "</tr></thead>\n<tbody>\n" + rows +
         "</tbody></table></div>\n";
}

std::string row(const std::string& name, const std::string& cells, const char* css_class = "") {
  return std::string("<tr") + (*css_class ? std::string(" class=\"") + css_class + "\"" : "") + "><th scope=\"row\">" +
         html_text(name) + "</th>" + cells + "</tr>\n";
}

std::string unit_db(const kit::Metrics& m) { return decibels(m) + (std::abs(m.sqnr_db) < kit::kMaxDb ? " dB" : ""); }

std::string relative_text(const kit::Metrics& m) {
  return m.sqnr_db <= -kit::kMaxDb ? "undefined" : percent(relative_error(m.sqnr_db));
}

std::string fact(const std::string& name, const std::string& text) {
  return "<div><dt>" + html_text(name) + "</dt><dd>" + html_text(text) + "</dd></div>\n";
}

std::string header(const ReportInput& in) {
  const AttentionOperands& x = in.operands;
  const int64_t batch = in.problem.batch();
  std::string time = "forward " + fixed(in.got.fwd_ms, 0) + " ms";
  if (in.got.bwd_ms > 0) time += ", backward " + fixed(in.got.bwd_ms, 0) + " ms";
  return "<header>\n" + paragraph("kicker", "mxflash attend: MXFP8 attention against exact attention") + "<h1>" +
         html_text(in.title) + "</h1>\n" + paragraph("verdict", verdict(in.errors, in.got.stats)) +
         "<dl class=\"facts\">\n" +
         fact("Shape", "q " + kit::shape_text(x.q.shape()) + ", k " + kit::shape_text(x.k.shape()) + ", v " +
                           kit::shape_text(x.v.shape()) + "; " + grouped(batch) +
                           (batch == 1 ? " sequence" : " sequences")) +
         fact("Mask", mask_text(in.problem)) + fact("Recipe", recipe_text(in.run.recipe)) +
         fact("Backend", in.backend + ": " + time) + "</dl>\n</header>\n";
}

std::string tiles(const ReportInput& in) {
  std::string html;
  for (const TensorError& e : in.errors) {
    if (e.name == "lse") continue;
    const bool number = std::abs(e.all.sqnr_db) < kit::kMaxDb;
    html += "<div class=\"tile tone-" + e.name + "\"><h2>" + e.name + "</h2><p class=\"big\">" +
            (number ? fixed(e.all.sqnr_db, 1) + " <small>dB SQNR</small>" : decibels(e.all)) + "</p><p>RMS error " +
            relative_text(e.all) + "</p></div>\n";
  }
  return "<div class=\"tiles\">\n" + html + "</div>\n";
}

std::string metrics_section(const ReportInput& in) {
  std::string rows;
  for (const TensorError& e : in.errors) {
    const size_t worst = e.worst_head();
    rows += row(e.name, cell(decibels(e.all)) + cell(relative_text(e.all)) + cell(fixed(e.all.cosine, 6)) +
                            cell(significant(e.all.max_abs_err, 3)) +
                            cell(std::to_string(worst) + " (" + unit_db(e.heads[worst]) + ")"));
  }
  return section("Error of each result", "",
                 table({"Tensor", "SQNR (dB)", "RMS error", "Cosine", "Largest error", "Worst head"}, rows) +
                     paragraph("note",
                               "SQNR is 10 log10 of signal energy over error energy, against attention computed "
                               "densely in float64; 6 dB halve the RMS error. lse is the logarithm of the "
                               "softmax denominator."));
}

// `text` as <code>.
std::string with_code(std::string_view text) {
  std::string html;
  bool code = false;
  for (size_t tick; (tick = text.find('`')) != text.npos; text.remove_prefix(tick + 1)) {
    html += html_text(text.substr(0, tick));
    html += code ? "</code>" : "<code>";
    code = !code;
  }
  return html + html_text(text);
}

// The gains that are defined, least first.
std::vector<double> sorted_gains(const Alternative& a) {
  std::vector<double> gains;
  std::copy_if(a.gain_db.begin(), a.gain_db.end(), std::back_inserter(gains), [](double x) { return !std::isnan(x); });
  std::sort(gains.begin(), gains.end());
  return gains;
}

// The alternative that helps the tensor it helps least the most, of those that are better.
std::string best_text(const std::vector<Alternative>& tried) {
  const Alternative* best = nullptr;
  for (const Alternative& a : tried) {
    if (a.better && (!best || sorted_gains(a).front() > sorted_gains(*best).front())) best = &a;
  }
  if (!best) return "Nothing that was tried is better throughout: keep the recipe in use.";
  const std::vector<double> gains = sorted_gains(*best);
  const std::string least = fixed(gains.front(), 1), most = fixed(gains.back(), 1);
  std::string text = "Best of what was tried: " + best->change + ", which gains ";
  if (gains.front() < 0.05) {
    text += "up to " + most + " dB and loses " +
            (gains.front() > -0.05 ? "nothing." : "at most " + fixed(-gains.front(), 1) + " dB.");
  } else {
    text += (least == most ? most : least + " to " + most) + " dB.";
  }
  return text;
}

std::string advice_section(const ReportInput& in, Progress& progress) {
  const std::vector<Alternative> tried = try_alternatives(in.problem, in.run, in.got, in.exact, in.errors, progress);
  std::vector<std::string> names = judged_tensors(in.errors), columns{"Instead"};
  for (const std::string& name : names) columns.push_back(name + " (dB)");
  columns.push_back("Advice");
  std::string rows;
  for (const Alternative& a : tried) {
    std::string cells;
    for (const double gain : a.gain_db) {
      const char* css_class = std::abs(gain) < 0.05 ? "same" : gain > 0 ? "gain" : "loss";
      cells += std::isnan(gain) ? cell("n/a", "same") : cell(signed_fixed(gain, 2), css_class);
    }
    rows += row(a.change, cells + "<td class=\"text\">" + with_code(a.advice) + "</td>", a.better ? "better" : "");
  }
  return section("What another recipe would change", best_text(tried),
                 table(columns, rows) +
                     paragraph("note",
                               "Each line ran the whole operator again on these operands with one thing changed "
                               "and shows the change of SQNR: + is better. A triangle marks what gains on some "
                               "tensor and loses on none."));
}

std::string heads_section(const ReportInput& in) {
  std::string panels;
  double top = 0;
  const auto height = [](const kit::Metrics& m) {
    return std::abs(m.sqnr_db) < kit::kMaxDb ? std::max(m.sqnr_db, 0.0) : kUndefined;
  };
  for (const TensorError& e : in.errors) {
    if (e.name == "lse") continue;
    for (const kit::Metrics& m : e.heads) top = std::fmax(top, height(m));
  }
  for (const TensorError& e : in.errors) {
    if (e.name == "lse") continue;
    BarChart chart{.title = e.name,
                   .caption = "all heads together " + unit_db(e.all) + (std::isnan(height(e.all)) ? "" : " (dashed)"),
                   .description = "Bar chart: SQNR of " + e.name + " for each head",
                   .css_class = "tone-" + e.name,
                   .x_label = "head",
                   .y_label = "SQNR (dB)",
                   .bars = {},
                   .y_max = axis_end(top),
                   .reference = height(e.all)};
    for (size_t head = 0; head < e.heads.size(); ++head) {
      const kit::Metrics& m = e.heads[head];
      const bool number = std::abs(m.sqnr_db) < kit::kMaxDb;
      chart.bars.push_back({std::to_string(head), height(m), number ? fixed(m.sqnr_db, 1) : decibels(m)});
    }
    panels += bar_chart(chart);
  }
  return section("Accuracy by head", heads_finding(in.errors), "<div class=\"panels\">\n" + panels + "</div>\n");
}

std::string position_section(const ReportInput& in) {
  LineChart chart{.description = "Line chart: SQNR of out and dq by query position",
                  .x_label = "query position within its sequence",
                  .y_label = "SQNR (dB)",
                  .series = {}};
  std::string finding;
  const auto add = [&](const char* name, const std::vector<PositionBin>& bins) {
    if (bins.empty()) return;
    Series series{.name = name, .css_class = std::string("tone-") + name, .points = {}};
    for (const PositionBin& bin : bins) series.points.emplace_back(double(bin.first + bin.last) / 2, bin.sqnr_db);
    chart.x_max = std::max(1.0, double(bins.back().last));
    chart.series.push_back(series);
    finding += (finding.empty() ? "" : " ") + position_finding(name, bins);
  };
  add("out", out_by_position(in));
  add("dq", dq_by_position(in));
  if (chart.series.empty()) return "";  // no query at all
  return section("Accuracy by query position", finding, "<div class=\"scroll wide\">" + line_chart(chart) + "</div>\n");
}

std::string scales_section(const ReportInput& in, const std::vector<OperandScales>& operands) {
  constexpr int kLeastColumns = 12;
  std::string panels;
  for (const OperandScales& x : operands) {
    std::string caption = grouped(x.blocks) + " blocks";
    if (x.zero_blocks > 0) caption += ", " + grouped(x.zero_blocks) + " of them all zero";
    if (x.nan_blocks > 0) caption += ", " + grouped(x.nan_blocks) + " of them NaN";
    BarChart chart{.title = x.name,
                   .caption = caption,
                   .description = "Histogram of the scale exponents of " + x.name,
                   .css_class = "tone-scale",
                   .x_label = "scale exponent",
                   .y_label = "blocks (%)",
                   .bars = {},
                   .text_inside = false,
                   .y_max = 1,
                   .reference = kUndefined};
    const int pad = x.any() ? std::max(1, (kLeastColumns - (x.max_exponent - x.min_exponent)) / 2) : 0;
    double top = 0;
    for (int e = x.min_exponent - pad; x.any() && e <= x.max_exponent + pad; ++e) {
      const int byte = e + 127;
      const bool counted = byte > 0 && byte < 255;
      const double share = counted ? 100 * double(x.count[size_t(byte)]) / double(x.blocks) : 0;
      chart.bars.push_back(
          {std::to_string(e), share > 0 ? share : kUndefined, share < 1 ? "<1%" : fixed(share, 0) + "%"});
      top = std::max(top, share);
    }
    chart.y_max = axis_end(top);
    panels += bar_chart(chart);
  }
  return section("Scales of the operands", scales_finding(operands),
                 "<div class=\"panels\">\n" + panels + "</div>\n" +
                     paragraph("note", "Blocks are " + std::string(kBlockNames.at(size_t(in.run.recipe.block))) +
                                           "; an element is payload times 2 to the scale exponent. Operands are shown "
                                           "as quantized: after smoothing and rotation, if the recipe has them."));
}

// A share as a bar of its own row and a number; the bar is full at `full`.
std::string share_cell(int64_t n, int64_t total) {
  constexpr double kFull = 0.05;
  const double share = total > 0 ? double(n) / double(total) : 0;
  return "<td><span class=\"meter\" aria-hidden=\"true\"><i style=\"width:" +
         fixed(100 * std::min(1.0, share / kFull), 0) + "%\"></i></span>" + html_text(percent(share)) + "</td>";
}

std::string clipping_section(const ReportInput& in, const std::vector<OperandScales>& operands) {
  std::string rows;
  for (const OperandScales& x : operands) {
    rows += row(x.name, share_cell(x.stats.saturated, x.stats.total) + share_cell(x.stats.flushed, x.stats.total) +
                            cell(grouped(x.stats.nonfinite)) + cell(significant(double(x.stats.amax), 4)) +
                            cell(grouped(x.stats.total)));
  }
  return section("Saturated and flushed elements", clipping_finding(operands, in.run.recipe.rule),
                 table({"Operand", "Saturated", "Flushed to zero", "NaN or Inf", "Largest", "Elements"}, rows) +
                     paragraph("note",
                               "A full bar is 5%. Saturated: clipped to the largest element of the block. "
                               "Flushed: not zero before, zero after."));
}

}  // namespace

std::string report_page(const ReportInput& in, Progress& progress) {
  progress.phase("scales of the operands");
  const std::vector<OperandScales> operands = operand_scales(in);
  return "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
         "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<title>" +
         html_text(in.title) + ": MXFP8 attention</title>\n<style>" + kReportStyle +
         "</style>\n</head>\n<body>\n<main>\n" + header(in) + tiles(in) + advice_section(in, progress) +
         metrics_section(in) + heads_section(in) + position_section(in) + scales_section(in, operands) +
         clipping_section(in, operands) + "<footer><p>Written by mxflash " + html_text(version()) +
         ". Everything on this page was computed from the operands named above; it loads nothing.</p></footer>\n"
         "</main>\n</body>\n</html>\n";
}

}  // namespace mxflash::tools
