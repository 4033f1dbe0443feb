// The few things the kernels ask of a GPU. Without nvcc a test puts threads of the CPU in their place (emulated_device.h).
#pragma once

#include "common/host_device.h"

#ifndef __CUDACC__
#include "emulated_device.h"
#else

#include <cooperative_groups.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace headrace {

using Half = __half;
using BFloat16 = __nv_bfloat16;

constexpr int WARP = 32;

__device__ inline int thread_index() { return int(threadIdx.x); }
__device__ inline int64_t block_index() { return int64_t(blockIdx.x); }
__device__ inline int cluster_rank() { return int(cooperative_groups::this_cluster().block_rank()); }

__device__ inline void sync_block() { __syncthreads(); }

// All threads of all blocks of the cluster meet; what they wrote to shared memory is seen by all afterwards.
__device__ inline void sync_cluster() { cooperative_groups::this_cluster().sync(); }

// The same variable in the shared memory of another block of the cluster.
template <typename T>
__device__ T* at_peer(T* own, int rank) {
    return cooperative_groups::this_cluster().map_shared_rank(own, rank);
}

__device__ inline char* dynamic_shared() {
    extern __shared__ __align__(16) char memory[];
    return memory;
}

__device__ inline float shuffle_down(float value, int lanes) { return __shfl_down_sync(0xFFFFFFFFu, value, lanes); }
__device__ inline int32_t shuffle_down(int32_t value, int lanes) { return __shfl_down_sync(0xFFFFFFFFu, value, lanes); }

// 16 bytes from global to shared memory, past the registers and the first-level cache.
__device__ inline void copy_async(float* shared, const float* global) {
    unsigned target = static_cast<unsigned>(__cvta_generic_to_shared(shared));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target), "l"(global) : "memory");
}

// Ends a group of this thread's copies.
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most so many of this thread's groups are under way.
template <int PENDING>
__device__ void wait_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

struct Four {
    float value[4];
};

__device__ inline Four load4(const float* from) {
    float4 v = *reinterpret_cast<const float4*>(from);
    return {{v.x, v.y, v.z, v.w}};
}

__device__ inline Four load4(const Half* from) {
    uint2 raw = *reinterpret_cast<const uint2*>(from);
    float2 low = __half22float2(*reinterpret_cast<__half2*>(&raw.x)), high = __half22float2(*reinterpret_cast<__half2*>(&raw.y));
    return {{low.x, low.y, high.x, high.y}};
}

__device__ inline Four load4(const BFloat16* from) {
    uint2 raw = *reinterpret_cast<const uint2*>(from);
    float2 low = __bfloat1622float2(*reinterpret_cast<__nv_bfloat162*>(&raw.x));
    float2 high = __bfloat1622float2(*reinterpret_cast<__nv_bfloat162*>(&raw.y));
    return {{low.x, low.y, high.x, high.y}};
}

__device__ inline float load1(const float* from) { return *from; }
__device__ inline float load1(const Half* from) { return __half2float(*from); }
__device__ inline float load1(const BFloat16* from) { return __bfloat162float(*from); }

__device__ inline void store4(float* to, const Four& four) {
    *reinterpret_cast<float4*>(to) = make_float4(four.value[0], four.value[1], four.value[2], four.value[3]);
}

__device__ inline void store4(Half* to, const Four& four) {
    __half2 low = __floats2half2_rn(four.value[0], four.value[1]), high = __floats2half2_rn(four.value[2], four.value[3]);
    *reinterpret_cast<uint2*>(to) = make_uint2(*reinterpret_cast<unsigned*>(&low), *reinterpret_cast<unsigned*>(&high));
}

__device__ inline void store4(BFloat16* to, const Four& four) {
    __nv_bfloat162 low = __floats2bfloat162_rn(four.value[0], four.value[1]), high = __floats2bfloat162_rn(four.value[2], four.value[3]);
    *reinterpret_cast<uint2*>(to) = make_uint2(*reinterpret_cast<unsigned*>(&low), *reinterpret_cast<unsigned*>(&high));
}

}  // namespace headrace
#endif
