#include "cli/plot.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <set>
#include <sstream>

namespace flash::cli {
namespace {

constexpr double kWidth = 720, kHeight = 420;
constexpr double kLeft = 70, kRight = 210, kTop = 48, kBottom = 56;
// Colours that stay apart for colour-blind readers. (Okabe and Ito 2008)
constexpr std::array<const char*, 8> kColours = {"#0072b2", "#d55e00", "#009e73", "#cc79a7",
                                                 "#e69f00", "#56b4e9", "#000000", "#999999"};

std::string escaped(const std::string& text) {
  std::string result;
  for (char c : text) result += c == '&' ? "&amp;" : c == '<' ? "&lt;" : c == '>' ? "&gt;" : std::string(1, c);
  return result;
}

// The smallest of 1, 2, 5 times a power of ten that is at least x.
double round_up(double x) {
  const double power = std::pow(10.0, std::floor(std::log10(x)));
  for (double step : {1.0, 2.0, 5.0})
    if (step * power >= x * 0.999999) return step * power;
  return 10 * power;
}

std::string number(double x) {
  char text[32];
  std::snprintf(text, sizeof text, "%g", x);
  return text;
}

std::string length_label(double n) {
  const bool whole = n >= 1024 && std::fmod(n, 1024) == 0;
  return whole ? number(n / 1024) + "k" : number(n);
}

}  // namespace

std::string line_plot_svg(const std::string& title, const std::string& x_label, const std::string& y_label,
                          const std::vector<Series>& series) {
  std::set<double> xs;
  double y_most = 0;
  for (const Series& s : series)
    for (const auto& [x, y] : s.points) xs.insert(x), y_most = std::max(y_most, y);
  if (xs.empty()) xs.insert(1);
  const double y_step = round_up(std::max(y_most, 1e-9) / 5);
  const double y_top = std::ceil(std::max(y_most, 1e-9) / y_step) * y_step;
  const double log_low = std::log2(*xs.begin()), log_high = std::log2(*xs.rbegin());
  const double log_range = log_high > log_low ? log_high - log_low : 1;
  const auto place_x = [&](double x) {
    return kLeft + (std::log2(x) - log_low) / log_range * (kWidth - kLeft - kRight);
  };
  const auto place_y = [&](double y) { return kHeight - kBottom - y / y_top * (kHeight - kTop - kBottom); };

  std::ostringstream svg;
  svg.precision(6);
  size_t longest = 0;
  for (const Series& s : series) longest = std::max(longest, s.name.size());
  const double width = kWidth - kRight + std::max(kRight, 50 + 6.2 * double(longest));  // the names are of 11 points
  svg << "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 " << width << " " << kHeight
      << "\" font-family=\"sans-serif\" font-size=\"13\" fill=\"#222\">\n"
      << "<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
      << "<text x=\"" << kLeft << "\" y=\"26\" font-size=\"16\">" << escaped(title) << "</text>\n";
  for (double y = 0; y <= y_top * 1.000001; y += y_step)
    svg << "<line x1=\"" << kLeft << "\" x2=\"" << kWidth - kRight << "\" y1=\"" << place_y(y) << "\" y2=\""
        << place_y(y) << "\" stroke=\"#ddd\"/><text x=\"" << kLeft - 8 << "\" y=\"" << place_y(y) + 4
        << "\" text-anchor=\"end\">" << number(y) << "</text>\n";
  for (double x : xs)
    svg << "<text x=\"" << place_x(x) << "\" y=\"" << kHeight - kBottom + 20 << "\" text-anchor=\"middle\">"
        << length_label(x) << "</text>\n";
  svg << "<text x=\"" << (kLeft + kWidth - kRight) / 2 << "\" y=\"" << kHeight - 14 << "\" text-anchor=\"middle\">"
      << escaped(x_label) << "</text>\n"
      << "<text transform=\"translate(18 " << (kTop + kHeight - kBottom) / 2
      << ") rotate(-90)\" text-anchor=\"middle\">" << escaped(y_label) << "</text>\n";
  for (size_t i = 0; i < series.size(); i++) {
    const char* colour = kColours[i % kColours.size()];
    const char* dash = series[i].dashed ? " stroke-dasharray=\"6 4\"" : "";
    svg << "<polyline fill=\"none\" stroke-width=\"2\" stroke=\"" << colour << "\"" << dash << " points=\"";
    for (const auto& [x, y] : series[i].points) svg << place_x(x) << "," << place_y(y) << " ";
    svg << "\"/>\n";
    for (const auto& [x, y] : series[i].points) {
      if (series[i].dashed) break;
      svg << "<circle r=\"3\" fill=\"" << colour << "\" cx=\"" << place_x(x) << "\" cy=\"" << place_y(y) << "\"/>\n";
    }
    const double y = kTop + 10 + 20 * double(i);
    svg << "<line stroke-width=\"2\" stroke=\"" << colour << "\"" << dash << " x1=\"" << kWidth - kRight + 14
        << "\" x2=\"" << kWidth - kRight + 34 << "\" y1=\"" << y << "\" y2=\"" << y << "\"/><text font-size=\"11\" x=\""
        << kWidth - kRight + 40 << "\" y=\"" << y + 4 << "\">" << escaped(series[i].name) << "</text>\n";
  }
  svg << "</svg>\n";
  return svg.str();
}

std::string bar_plot_svg(const std::string& title, const std::string& label, const std::vector<Bar>& bars) {
  constexpr double kNames = 340, kValues = 60, kRow = 24;
  double most = 1e-9;
  for (const Bar& bar : bars) most = std::max({most, bar.value, bar.expected.value_or(0)});
  const double height = kTop + kRow * double(bars.size()) + 40;
  const auto place = [&](double x) { return kNames + x / most * (kWidth - kNames - kValues); };

  std::ostringstream svg;
  svg.precision(6);
  svg << "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 " << kWidth << " " << height
      << "\" font-family=\"sans-serif\" font-size=\"13\" fill=\"#222\">\n"
      << "<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
      << "<text x=\"16\" y=\"26\" font-size=\"16\">" << escaped(title) << "</text>\n";
  double y = kTop;
  for (const Bar& bar : bars) {
    char value[32];
    std::snprintf(value, sizeof value, "%.3g", bar.value);
    svg << "<text x=\"" << kNames - 8 << "\" y=\"" << y + 15 << "\" text-anchor=\"end\">" << escaped(bar.name)
        << "</text><rect x=\"" << kNames << "\" y=\"" << y + 3 << "\" width=\"" << place(bar.value) - kNames
        << "\" height=\"16\" fill=\"" << kColours[0] << "\"/><text x=\""
        << place(std::max(bar.value, bar.expected.value_or(0))) + 6 << "\" y=\"" << y + 15 << "\">" << value
        << "</text>\n";
    if (bar.expected)
      svg << "<line stroke=\"" << kColours[1] << "\" stroke-width=\"2\" x1=\"" << place(*bar.expected) << "\" x2=\""
          << place(*bar.expected) << "\" y1=\"" << y << "\" y2=\"" << y + 22 << "\"/>\n";
    y += kRow;
  }
  svg << "<text x=\"" << kNames << "\" y=\"" << y + 22 << "\">" << escaped(label) << "; mark: "
      << "the closed form of the chapter's page</text>\n</svg>\n";
  return svg.str();
}

}  // namespace flash::cli
