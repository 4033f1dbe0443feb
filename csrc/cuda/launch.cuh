// One launch with thread-block clusters.
#pragma once

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

namespace headrace {

inline void check(cudaError_t status, const char* what) {
    if (status != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status));
}

template <typename Args>
void launch_clusters(void (*kernel)(Args), const Args& args, int64_t blocks, int cluster, int threads, int shared, void* stream) {
    if (blocks == 0) return;
    if (blocks > 0x7FFFFFFF) throw std::runtime_error("too many rows for one launch");
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared), "shared memory of a kernel");
    if (shared > 32 << 10)  // blocks that hold data need all of it, not a cache beside them
        check(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared),
              "shared memory of a kernel");
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = unsigned(cluster);
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(unsigned(blocks));
    config.blockDim = dim3(unsigned(threads));
    config.dynamicSmemBytes = size_t(shared);
    config.stream = static_cast<cudaStream_t>(stream);
    config.attrs = &attribute;
    config.numAttrs = 1;
    check(cudaLaunchKernelEx(&config, kernel, args), "launch of a kernel");
}

}  // namespace headrace
