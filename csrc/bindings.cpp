// Python bindings of the CPU kernels: addresses and sizes in, nothing out. No torch headers; kernels/native.py does the checking.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "cpu/dispatch.h"
#include "cpu/loss_rows.h"

namespace py = pybind11;
using namespace headrace;

namespace {

using Address = std::uintptr_t;  // 0 stands for null

template <typename T>
T* at(Address address) {
    return reinterpret_cast<T*>(address);
}

void statistics(Address logits, Address targets, Address inv_temperature, Address state, int64_t rows, int64_t columns, int64_t offset,
                int threads) {
    run_statistics({at<const float>(logits), at<const int64_t>(targets), at<const float>(inv_temperature), at<float>(state), columns,
                    offset},
                   rows, threads);
}

void gradient(Address logits, Address targets, Address inv_temperature, Address state, Address grad_logprobs, Address grad_entropies,
              Address sources, int64_t rows, int64_t columns, int64_t offset, int threads) {
    run_gradient({at<float>(logits), at<const int64_t>(targets), at<const float>(inv_temperature), at<const float>(state),
                  at<const float>(grad_logprobs), at<const float>(grad_entropies), at<const int64_t>(sources), columns, offset},
                 rows, threads);
}

void pair_statistics(Address logits, Address logits_cf, Address targets, Address inv_temperature, Address state, int64_t rows,
                     int64_t columns, int64_t offset, int threads) {
    run_pair_statistics({at<const float>(logits), at<const float>(logits_cf), at<const int64_t>(targets), at<const float>(inv_temperature),
                         at<float>(state), nullptr, nullptr, columns, offset},
                        rows, threads);
}

void pair_divergences(Address logits, Address logits_cf, Address inv_temperature, Address state, Address js, Address tv, int64_t rows,
                      int64_t columns, int threads) {
    run_pair_divergences({at<const float>(logits), at<const float>(logits_cf), nullptr, at<const float>(inv_temperature), at<float>(state),
                          at<float>(js), at<float>(tv), columns, 0},
                         rows, threads);
}

void top_token(Address logits, int64_t stride, int64_t rows, int64_t columns, Address eligible, Address threshold, Address banned,
               int64_t banned_count, Address spared, Address fired, Address top_id, Address top_prob, Address raw_lse, Address masked_lse,
               int threads) {
    TopTokenArgs args{};
    args.logits = at<const float>(logits);
    args.stride = stride;
    args.columns = columns;
    args.eligible = at<const bool>(eligible);
    args.threshold = at<const float>(threshold);
    args.banned = at<const int64_t>(banned);
    args.banned_count = banned_count;
    args.spared = at<const bool>(spared);
    args.fired = at<bool>(fired);
    args.top_id = at<int64_t>(top_id);
    args.top_prob = at<float>(top_prob);
    args.raw_lse = at<float>(raw_lse);
    args.masked_lse = at<float>(masked_lse);
    run_top_token(args, rows, threads);
}

void top_token_sample(Address logits, int64_t stride, int64_t rows, int64_t columns, Address eligible, Address threshold, Address seeds,
                      Address positions, Address temperature, Address banned, int64_t banned_count, Address spared, Address token,
                      Address fired, Address top_id, Address top_prob, Address logprob, Address raw_logprob, int threads) {
    TopTokenArgs args{};
    args.logits = at<const float>(logits);
    args.stride = stride;
    args.columns = columns;
    args.eligible = at<const bool>(eligible);
    args.threshold = at<const float>(threshold);
    args.seeds = at<const int64_t>(seeds);
    args.positions = at<const int64_t>(positions);
    args.temperature = at<const float>(temperature);
    args.banned = at<const int64_t>(banned);
    args.banned_count = banned_count;
    args.spared = at<const bool>(spared);
    args.token = at<int64_t>(token);
    args.fired = at<bool>(fired);
    args.top_id = at<int64_t>(top_id);
    args.top_prob = at<float>(top_prob);
    args.logprob = at<float>(logprob);
    args.raw_logprob = at<float>(raw_logprob);
    run_top_token(args, rows, threads);
}

void policy_loss(Address logprobs, Address entropies, Address old_logprobs, Address advantages, Address weights, Address gates,
                 Address mask, Address ref_logprobs, Address proximal_logprobs, Address log_ratios, Address losses, Address grad_logprobs,
                 Address grad_entropies, Address metrics, int64_t rows, int kind, int kl_kind, float clip_low, float clip_high,
                 float dual_clip, float tis_cap, float kl_coef, float entropy_coef, float surprisal_coef) {
    token_loss({at<const float>(logprobs), at<const float>(entropies), at<const float>(old_logprobs), at<const float>(advantages),
                at<const float>(weights), at<const float>(gates), at<const float>(ref_logprobs), at<const float>(proximal_logprobs),
                at<const float>(log_ratios), at<const bool>(mask), at<float>(losses), at<float>(grad_logprobs), at<float>(grad_entropies),
                at<float>(metrics)},
               {static_cast<LossKind>(kind), static_cast<KlKind>(kl_kind), clip_low, clip_high, dual_clip, tis_cap, kl_coef, entropy_coef,
                surprisal_coef},
               rows);
}

}  // namespace

PYBIND11_MODULE(_native, module) {
    using Unlocked = py::call_guard<py::gil_scoped_release>;
    module.doc() = "CPU kernels of headrace.kernels.native: raw addresses of checked, contiguous fp32 tensors.";
    module.def("statistics", &statistics, Unlocked());
    module.def("gradient", &gradient, Unlocked());
    module.def("pair_statistics", &pair_statistics, Unlocked());
    module.def("pair_divergences", &pair_divergences, Unlocked());
    module.def("top_token", &top_token, Unlocked());
    module.def("top_token_sample", &top_token_sample, Unlocked());
    module.def("token_loss", &policy_loss, Unlocked());
    module.def("instruction_sets", &instruction_sets, "Names of the instruction sets that run here, best first.");
    module.def("instruction_set", [] { return std::string(active_table().name); });
    module.def("use_instruction_set", &use_instruction_set);
    module.def("exponential", [](Address values, int64_t count) { active_table().exponential(at<float>(values), count); });
    module.def("logarithm", [](Address values, int64_t count) { active_table().logarithm(at<float>(values), count); });
}
