#include "cli/rows.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <ostream>

namespace flash::cli {
namespace {

// A cell for people (tables: three digits) or for programs (csv: all of them).
std::string text_of(const nlohmann::ordered_json& cell, Format format) {
  if (cell.is_null()) return format == Format::table ? "-" : "";
  if (cell.is_string()) return cell.get<std::string>();
  if (cell.is_array()) {
    std::string joined;
    for (const auto& item : cell) joined += (joined.empty() ? "" : " ") + text_of(item, format);
    return joined;
  }
  if (cell.is_boolean()) return cell.get<bool>() ? "yes" : "no";
  if (!cell.is_number_float()) return cell.dump();
  char text[40];
  const double value = cell.get<double>();
  const bool plain = format == Format::table && (value == 0 || (std::fabs(value) >= 0.01 && std::fabs(value) < 1e5));
  std::snprintf(text, sizeof text, format == Format::csv ? "%.9g" : plain ? "%.3g" : "%.1e", value);
  if (plain && std::fabs(value) >= 1000) std::snprintf(text, sizeof text, "%.0f", value);
  return text;
}

// Quoted where a comma or a quote would break the line apart. (RFC 4180)
std::string csv_field(const std::string& text) {
  if (text.find_first_of(",\"\n") == std::string::npos) return text;
  std::string quoted = "\"";
  for (char c : text) quoted += c == '"' ? "\"\"" : std::string(1, c);
  return quoted + "\"";
}

// Characters, not bytes: a byte of UTF-8 that continues a character takes no place.
size_t width_of(const std::string& text) {
  return size_t(std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xc0) != 0x80; }));
}

void print_table(std::ostream& out, const std::vector<Row>& rows, const std::vector<std::string>& titles) {
  std::vector<std::vector<std::string>> lines;
  std::vector<bool> number;
  lines.emplace_back();
  for (const auto& [name, cell] : rows.front().items()) {
    const size_t column = lines[0].size();
    lines[0].push_back(column < titles.size() ? titles[column] : name);
    number.push_back(std::all_of(rows.begin(), rows.end(), [&name = name](const Row& r) {
      return r.at(name).is_number() || r.at(name).is_null();
    }));
  }
  for (const Row& row : rows) {
    lines.emplace_back();
    for (const auto& [name, cell] : row.items()) lines.back().push_back(text_of(cell, Format::table));
  }
  std::vector<size_t> widths(number.size());
  for (const auto& line : lines)
    for (size_t c = 0; c < line.size(); c++) widths[c] = std::max(widths[c], width_of(line[c]));
  for (const auto& line : lines) {
    std::string text;
    for (size_t c = 0; c < line.size(); c++) {
      const std::string space(widths[c] - width_of(line[c]), ' ');
      text += (c ? "  " : "") + (number[c] ? space + line[c] : line[c] + space);
    }
    out << text.substr(0, text.find_last_not_of(' ') + 1) << "\n";
  }
}

}  // namespace

void print_rows(std::ostream& out, Format format, const std::vector<Row>& rows,
                const std::vector<std::string>& titles) {
  if (format == Format::json) {
    out << Row(rows).dump(2, ' ', false, nlohmann::json::error_handler_t::replace) << "\n";
    return;
  }
  if (rows.empty()) return;
  if (format == Format::table) return print_table(out, rows, titles);
  std::string header;
  for (const auto& [name, cell] : rows.front().items()) header += (header.empty() ? "" : ",") + name;
  out << header << "\n";
  for (const Row& row : rows) {
    std::string line;
    bool first = true;
    for (const auto& [name, cell] : row.items()) {
      line += (first ? "" : ",") + csv_field(text_of(cell, Format::csv));
      first = false;
    }
    out << line << "\n";
  }
}

}  // namespace flash::cli
