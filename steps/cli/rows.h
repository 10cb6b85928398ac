// Rows of results and the three ways to print them.
#pragma once
#include <iosfwd>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace flash::cli {

enum class Format { table, csv, json };

// A row: its columns in order, each a string, a number, a bool, null or a list.
using Row = nlohmann::ordered_json;

// Prints rows that all have the same columns. `titles` replaces the column names of a table, where given.
void print_rows(std::ostream& out, Format format, const std::vector<Row>& rows,
                const std::vector<std::string>& titles = {});

}  // namespace flash::cli
