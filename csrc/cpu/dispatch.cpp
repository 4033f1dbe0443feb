#include "dispatch.h"

#include <algorithm>
#include <stdexcept>

namespace headrace {
namespace {

std::vector<const Table*> usable_tables() {
    std::vector<const Table*> tables;
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl"))
        tables.push_back(&avx512_table);
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) tables.push_back(&avx2_table);
#endif
    tables.push_back(&baseline_table);
    return tables;
}

const Table*& active() {
    static const Table* table = usable_tables().front();
    return table;
}

// A thread gets at least this many logits, some 50 µs of work: less is not worth waiting for it on a busy machine.
constexpr int64_t LOGITS_PER_THREAD = 262144;

// Pieces per thread, so that a thread that is held up leaves its share to the others.
constexpr int64_t PIECES = 4;

template <typename Args>
void over_rows(void (*kernel)(const Args&, int64_t, int64_t), const Args& args, int64_t rows, int64_t columns, int threads) {
    int64_t useful = std::min<int64_t>({threads, rows, rows * columns / LOGITS_PER_THREAD});
    if (useful <= 1) {
        kernel(args, 0, rows);
        return;
    }
    int64_t pieces = std::min(rows, useful * PIECES);
#pragma omp parallel for schedule(dynamic) num_threads(static_cast<int>(useful))
    for (int64_t piece = 0; piece < pieces; ++piece) kernel(args, rows * piece / pieces, rows * (piece + 1) / pieces);
}

}  // namespace

std::vector<std::string> instruction_sets() {
    std::vector<std::string> names;
    for (const Table* table : usable_tables()) names.emplace_back(table->name);
    return names;
}

void use_instruction_set(const std::string& name) {
    for (const Table* table : usable_tables())
        if (name == table->name) {
            active() = table;
            return;
        }
    throw std::invalid_argument("instruction set '" + name + "' does not run on this processor");
}

const Table& active_table() { return *active(); }

void run_statistics(const StatisticsArgs& args, int64_t rows, int threads) {
    over_rows(active_table().statistics, args, rows, args.columns, threads);
}

void run_gradient(const GradientArgs& args, int64_t rows, int threads) {
    over_rows(active_table().gradient, args, rows, args.columns, threads);
}

void run_pair_statistics(const PairArgs& args, int64_t rows, int threads) {
    over_rows(active_table().pair_statistics, args, rows, args.columns, threads);
}

void run_pair_divergences(const PairArgs& args, int64_t rows, int threads) {
    over_rows(active_table().pair_divergences, args, rows, args.columns, threads);
}

void run_top_token(const TopTokenArgs& args, int64_t rows, int threads) {
    over_rows(active_table().top_token, args, rows, args.columns, threads);
}

}  // namespace headrace
