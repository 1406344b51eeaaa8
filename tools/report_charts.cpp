#include "tools/report_charts.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "tools/number_text.h"

namespace mxflash::tools {
namespace {

// Where the plot lies in a panel, in user units; about one CSS pixel each at the page's full width.
struct Frame {
  double width, height, left, right, top, bottom;
  double plot_width() const { return width - left - right; }
  double plot_height() const { return height - top - bottom; }
  double floor() const { return height - bottom; }
};
constexpr Frame kBarFrame{.width = 480, .height = 210, .left = 44, .right = 12, .top = 26, .bottom = 40};
constexpr Frame kLineFrame{.width = 1000, .height = 300, .left = 48, .right = 64, .top = 16, .bottom = 44};

std::string attribute(const char* name, double value) {
  return std::string(" ") + name + "=\"" + fixed(value, 1) + "\"";
}

std::string line(double x1, double y1, double x2, double y2, const char* css_class) {
  return "<line" + attribute("x1", x1) + attribute("y1", y1) + attribute("x2", x2) + attribute("y2", y2) + " class=\"" +
         css_class + "\"/>";
}

std::string label(double x, double y, const char* css_class, const std::string& text) {
  return "<text" + attribute("x", x) + attribute("y", y) + " class=\"" + css_class + "\">" + html_text(text) +
         "</text>";
}

std::string open_svg(const Frame& f, const std::string& description) {
  return "<svg viewBox=\"0 0 " + fixed(f.width, 0) + " " + fixed(f.height, 0) + "\" role=\"img\" aria-label=\"" +
         html_text(description) + "\">";
}

// About four round steps from low to high.
double tick_step(double span) {
  const double raw = span / 4, base = std::pow(10, std::floor(std::log10(raw)));
  for (const double multiple : {1.0, 2.0, 5.0}) {
    if (raw <= multiple * base) return multiple * base;
  }
  return 10 * base;
}

std::string tick_text(double value, double step) {
  return fixed(value, step < 1 ? int(std::ceil(-std::log10(step))) : 0);
}

// Grid, tick labels and axis titles; y maps low..high onto the plot's height.
std::string axes(const Frame& f, double low, double high, const std::string& x_label, const std::string& y_label) {
  std::string svg;
  const double step = tick_step(high - low);
  for (double tick = std::ceil(low / step) * step; tick <= high + step / 1000; tick += step) {
    const double y = f.floor() - (tick - low) / (high - low) * f.plot_height();
    svg += line(f.left, y, f.width - f.right, y, "grid");
    svg += label(f.left - 8, y + 4, "tick end", tick_text(tick, step));
  }
  svg += label(f.left + f.plot_width() / 2, f.height - 4, "axis middle", x_label);
  svg += "<text transform=\"translate(12 " + fixed(f.top + f.plot_height() / 2, 1) +
         ") rotate(-90)\" class=\"axis middle\">" + html_text(y_label) + "</text>";
  return svg;
}

}  // namespace

std::string html_text(std::string_view text) {
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '&': out += "&amp;"; break;
      case '<': out += "&lt;"; break;
      case '>': out += "&gt;"; break;
      case '"': out += "&quot;"; break;
      default: out += c;
    }
  }
  return out;
}

double axis_end(double x) {
  if (!(x > 0)) return 1;
  const double step = tick_step(x);
  return std::ceil(x / step) * step;
}

std::string bar_chart(const BarChart& chart) {
  constexpr Frame f = kBarFrame;
  constexpr int64_t kMostTexts = 8;
  constexpr size_t kMostLabels = 16;
  constexpr double kTextHeight = 22;
  std::string svg = "<figure class=\"" + chart.css_class + "\"><figcaption>" + html_text(chart.title) + " <span>" +
                    html_text(chart.caption) + "</span></figcaption>" + open_svg(f, chart.description) +
                    axes(f, 0, chart.y_max, chart.x_label, chart.y_label);
  const size_t count = chart.bars.size();
  const double slot = f.plot_width() / double(std::max<size_t>(count, 1));
  const size_t label_step = (count + kMostLabels - 1) / kMostLabels;
  const auto drawn =
      std::count_if(chart.bars.begin(), chart.bars.end(), [](const Bar& b) { return !std::isnan(b.value); });
  const bool texts = drawn <= kMostTexts;
  for (size_t i = 0; i < count; ++i) {
    const Bar& bar = chart.bars[i];
    const double x = f.left + slot * double(i), middle = x + slot / 2, width = std::min(slot * 0.72, 56.0);
    if (i % label_step == 0) svg += label(middle, f.floor() + 16, "tick middle", bar.label);
    if (std::isnan(bar.value)) continue;
    const double height = std::clamp(bar.value / chart.y_max, 0.0, 1.0) * f.plot_height();
    svg += "<rect" + attribute("x", middle - width / 2) + attribute("y", f.floor() - height) +
           attribute("width", width) + attribute("height", height) + " rx=\"2\" class=\"bar\"><title>" +
           html_text(chart.x_label + " " + bar.label + ": " + bar.text) + "</title></rect>";
    const bool inside = chart.text_inside && height > kTextHeight;
    if (texts)
      svg += label(middle, f.floor() - (inside ? 0 : height) - 7, inside ? "value inside middle" : "value middle",
                   bar.text);
  }
  svg += line(f.left, f.floor(), f.width - f.right, f.floor(), "base");
  if (!std::isnan(chart.reference) && chart.reference > 0) {
    const double y = f.floor() - std::min(chart.reference / chart.y_max, 1.0) * f.plot_height();
    svg += line(f.left, y, f.width - f.right, y, "reference");
  }
  return svg + "</svg></figure>";
}

std::string line_chart(const LineChart& chart) {
  constexpr Frame f = kLineFrame;
  constexpr double kLabelHeight = 15;
  double low = std::numeric_limits<double>::infinity(), high = -low;
  for (const Series& series : chart.series) {
    for (const auto& [x, y] : series.points) {
      if (std::isnan(y)) continue;
      low = std::min(low, y);
      high = std::max(high, y);
    }
  }
  if (low > high) low = 0, high = 1;  // nothing to draw
  low = std::floor(low / 5) * 5;
  high = std::max(std::ceil(high / 5) * 5, low + 5);
  const auto at_x = [&](double x) { return f.left + x / chart.x_max * f.plot_width(); };
  const auto at_y = [&](double y) { return f.floor() - (y - low) / (high - low) * f.plot_height(); };

  std::string svg = open_svg(f, chart.description) + axes(f, low, high, chart.x_label, chart.y_label);
  const double step = tick_step(chart.x_max * 0.5);
  for (double tick = 0; tick <= chart.x_max + step / 1000; tick += step) {
    svg += line(at_x(tick), f.floor(), at_x(tick), f.floor() + 5, "base");
    svg += label(at_x(tick), f.floor() + 18, "tick middle", tick_text(tick, step));
  }
  svg += line(f.left, f.floor(), f.width - f.right, f.floor(), "base");
  std::vector<std::pair<double, const Series*>> ends;
  for (const Series& series : chart.series) {
    std::string path;
    double last = std::numeric_limits<double>::quiet_NaN();
    for (const auto& [x, y] : series.points) {
      if (!std::isnan(y))
        path += (path.empty() || std::isnan(last) ? "M" : "L") + fixed(at_x(x), 1) + " " + fixed(at_y(y), 1);
      last = y;
    }
    svg += "<path d=\"" + path + "\" class=\"curve " + series.css_class + "\"/>";
    for (const auto& [x, y] : series.points) {
      if (std::isnan(y)) continue;
      svg += "<circle" + attribute("cx", at_x(x)) + attribute("cy", at_y(y)) + " r=\"2.5\" class=\"dot " +
             series.css_class + "\"><title>" + html_text(series.name) + " at " + fixed(x, 0) + ": " + fixed(y, 1) +
             "</title></circle>";
    }
    const auto end =
        std::find_if(series.points.rbegin(), series.points.rend(), [](auto p) { return !std::isnan(p.second); });
    if (end != series.points.rend()) ends.emplace_back(at_y(end->second), &series);
  }
  // Names at the ends of the curves, moved apart where they would touch.
  std::sort(ends.begin(), ends.end());
  for (size_t i = 1; i < ends.size(); ++i) ends[i].first = std::max(ends[i].first, ends[i - 1].first + kLabelHeight);
  for (const auto& [y, series] : ends) {
    svg += label(f.width - f.right + 10, y + 4, ("name " + series->css_class).c_str(), series->name);
  }
  return svg + "</svg>";
}

}  // namespace mxflash::tools
