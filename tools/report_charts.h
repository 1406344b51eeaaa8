// Charts of the report as inline SVG. They carry no colours of their own: the page's style sheet names them by class.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace mxflash::tools {

// Text for HTML: escapes &, <, >, ".
std::string html_text(std::string_view text);

struct Bar {
  std::string label;  // below the bar
  double value = 0;   // NaN: no bar
  std::string text;   // in or above the bar, and in its tooltip
};

struct BarChart {
  std::string title, caption;  // heading of the panel
  std::string description;     // what a screen reader says
  std::string css_class;       // colour of the bars
  std::string x_label, y_label;
  std::vector<Bar> bars;
  bool text_inside = true;  // at the foot of a bar, out of the way of the reference line; otherwise above it
  double y_max = 1;         // the axis begins at 0
  double reference = 0;     // a dashed line across; none if NaN
};
std::string bar_chart(const BarChart& chart);

struct Series {
  std::string name;  // at its right end
  std::string css_class;
  std::vector<std::pair<double, double>> points;  // ascending x; NaN y: a gap
};

struct LineChart {
  std::string description;
  std::string x_label, y_label;
  double x_max = 1;
  std::vector<Series> series;
};
std::string line_chart(const LineChart& chart);

// A round axis end at or above x.
double axis_end(double x);

}  // namespace mxflash::tools
