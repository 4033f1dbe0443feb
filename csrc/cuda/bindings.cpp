// Python bindings of the CUDA kernels: addresses, sizes and a stream in, nothing out. No torch headers; kernels/cuda.py does the
// checking.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <limits>
#include <optional>
#include <string>

#include "common/token_loss.h"
#include "cuda/arguments.h"
#include "cuda/launch.h"

namespace py = pybind11;
using namespace headrace;

namespace {

using Address = std::uintptr_t;  // 0 stands for null

template <typename T>
T* at(Address address) {
    return reinterpret_cast<T*>(address);
}

Element element(const std::string& name) {
    if (name == "float32") return Element::float32;
    if (name == "float16") return Element::float16;
    if (name == "bfloat16") return Element::bfloat16;
    throw py::value_error("no kernel for elements of " + name);
}

LossSpec loss_spec(bool cispo, const std::string& kl_kind, float clip_low, float clip_high, std::optional<float> dual_clip,
                     std::optional<float> tis_cap, float kl_coef, float entropy_coef, float surprisal_coef) {
    constexpr float none = std::numeric_limits<float>::infinity();
    const KlKind kind = kl_kind == "k1" ? KlKind::k1 : kl_kind == "k2" ? KlKind::k2 : KlKind::k3;
    return {cispo ? LossKind::cispo : LossKind::ppo, kind, clip_low, clip_high, dual_clip.value_or(none), tis_cap.value_or(none), kl_coef, entropy_coef, surprisal_coef};
}

TokenInputs token_inputs(Address old_logprobs, Address advantages, Address weights, Address gates, Address mask, Address ref_logprobs,
                         Address proximal_logprobs) {
    return {at<const float>(old_logprobs), at<const float>(advantages),   at<const float>(weights),        at<const float>(gates),
            at<const float>(ref_logprobs), at<const float>(proximal_logprobs), at<const uint8_t>(mask)};
}

void loss_gradient(Address logits, int64_t stride, Address out, int64_t out_stride, const std::string& out_element, int64_t rows,
                   int64_t columns, Address targets, Address inv_temperature, Address state, const TokenInputs& inputs,
                   const LossSpec& spec, Address stream) {
    LossGradientArgs args{};
    args.logits = at<const float>(logits);
    args.stride = stride;
    args.out = at<void>(out);
    args.out_stride = out_stride;
    args.columns = int32_t(columns);
    args.targets = at<const int64_t>(targets);
    args.inv_temperature = at<const float>(inv_temperature);
    args.state = at<float>(state);
    args.inputs = inputs;
    args.spec = spec;
    launch_loss_gradient(args, rows, element(out_element), at<void>(stream));
}

void pair_scores(Address logits, int64_t stride, Address logits_cf, int64_t stride_cf, int64_t rows, int64_t columns, Address targets,
                 Address inv_temperature, Address state, Address js, Address tv, Address stream) {
    PairClusterArgs args{};
    args.logits = at<const float>(logits);
    args.stride = stride;
    args.logits_cf = at<const float>(logits_cf);
    args.stride_cf = stride_cf;
    args.columns = int32_t(columns);
    args.targets = at<const int64_t>(targets);
    args.inv_temperature = at<const float>(inv_temperature);
    args.state = at<float>(state);
    args.js = at<float>(js);
    args.tv = at<float>(tv);
    launch_pair(args, rows, at<void>(stream));
}

void top_token(Address logits, int64_t stride, const std::string& in_element, int64_t rows, int64_t columns, Address eligible,
               Address threshold, Address banned, Address spared, Address fired, Address top_id, Address top_prob, Address raw,
               Address masked, Address seeds, Address positions, Address temperature, Address token, Address stream) {
    TopTokenArgs args{};
    args.logits = at<const void>(logits);
    args.stride = stride;
    args.columns = int32_t(columns);
    args.eligible = at<const uint8_t>(eligible);
    args.threshold = at<const float>(threshold);
    args.banned = at<const uint8_t>(banned);
    args.spared = at<const uint8_t>(spared);
    args.fired = at<uint8_t>(fired);
    args.top_id = at<int64_t>(top_id);
    args.top_prob = at<float>(top_prob);
    args.raw = at<float>(raw);
    args.masked = at<float>(masked);
    args.seeds = at<const int64_t>(seeds);
    args.positions = at<const int64_t>(positions);
    args.temperature = at<const float>(temperature);
    args.token = at<int64_t>(token);
    launch_top_token(args, rows, element(in_element), at<void>(stream));
}

}  // namespace

PYBIND11_MODULE(_cuda, module) {
    module.doc() = "CUDA row kernels for compute capability 9.0";
    py::class_<LossSpec>(module, "LossSpec")
        .def(py::init(&loss_spec), py::kw_only(), py::arg("cispo"), py::arg("kl_kind"), py::arg("clip_low"), py::arg("clip_high"),
             py::arg("dual_clip"), py::arg("tis_cap"), py::arg("kl_coef"), py::arg("entropy_coef"), py::arg("surprisal_coef"));
    py::class_<TokenInputs>(module, "TokenInputs")
        .def(py::init(&token_inputs), py::kw_only(), py::arg("old_logprobs"), py::arg("advantages"), py::arg("weights"), py::arg("gates"),
             py::arg("mask"), py::arg("ref_logprobs"), py::arg("proximal_logprobs"));
    module.def("loss_gradient_cluster", &loss_gradient_cluster, py::arg("columns"));
    module.def("loss_gradient", &loss_gradient, py::kw_only(), py::arg("logits"), py::arg("stride"), py::arg("out"), py::arg("out_stride"),
               py::arg("out_element"), py::arg("rows"), py::arg("columns"), py::arg("targets"), py::arg("inv_temperature"),
               py::arg("state"), py::arg("inputs"), py::arg("spec"), py::arg("stream"));
    module.def("pair_cluster", &pair_cluster, py::arg("columns"));
    module.def("pair_scores", &pair_scores, py::kw_only(), py::arg("logits"), py::arg("stride"), py::arg("logits_cf"), py::arg("stride_cf"),
               py::arg("rows"), py::arg("columns"), py::arg("targets"), py::arg("inv_temperature"), py::arg("state"), py::arg("js"),
               py::arg("tv"), py::arg("stream"));
    module.def("top_token", &top_token, py::kw_only(), py::arg("logits"), py::arg("stride"), py::arg("in_element"), py::arg("rows"),
               py::arg("columns"), py::arg("eligible"), py::arg("threshold"), py::arg("banned"), py::arg("spared"), py::arg("fired"),
               py::arg("top_id"), py::arg("top_prob"), py::arg("raw"), py::arg("masked"), py::arg("seeds"), py::arg("positions"),
               py::arg("temperature"), py::arg("token"), py::arg("stream"));
}
