// A line plot as an SVG file: speed by sequence length, a line a series.
#pragma once
#include <string>
#include <vector>

namespace flash::cli {

struct Series {
  std::string name;
  std::vector<std::pair<double, double>> points;  // x > 0, on a logarithmic axis; y ≥ 0
};

std::string line_plot_svg(const std::string& title, const std::string& x_label, const std::string& y_label,
                          const std::vector<Series>& series);

}  // namespace flash::cli
