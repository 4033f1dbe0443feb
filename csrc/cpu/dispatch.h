// The row operations over all rows: the best instruction set of this processor, spread over threads.
#pragma once

#include <string>
#include <vector>

#include "table.h"

namespace headrace {

// Names of the instruction sets that run here, best first.
std::vector<std::string> instruction_sets();

// Use one of them from now on. Throws std::invalid_argument for others.
void use_instruction_set(const std::string& name);

const Table& active_table();

void run_statistics(const StatisticsArgs& args, int64_t rows, int threads);
void run_gradient(const GradientArgs& args, int64_t rows, int threads);
void run_pair_statistics(const PairArgs& args, int64_t rows, int threads);
void run_pair_divergences(const PairArgs& args, int64_t rows, int threads);
void run_top_token(const TopTokenArgs& args, int64_t rows, int threads);

}  // namespace headrace
