// Plots as SVG files.
#pragma once
#include <optional>
#include <string>
#include <vector>

namespace flash::cli {

// Speed by sequence length, a line a series.
struct Series {
  std::string name;
  std::vector<std::pair<double, double>> points;  // x > 0, on a logarithmic axis; y ≥ 0
  bool dashed = false;                            // a line that is not measured, such as a bound
};

// Drawn as docs/results/svg.py draws the plots of the pages.
std::string line_plot_svg(const std::string& title, const std::string& x_label, const std::string& y_label,
                          const std::vector<Series>& series);

// Lying bars, one below the other, each with its value at its end and, where it has one, a mark at what was expected.
struct Bar {
  std::string name;
  double value;  // ≥ 0
  std::optional<double> expected;
};

std::string bar_plot_svg(const std::string& title, const std::string& label, const std::vector<Bar>& bars);

}  // namespace flash::cli
