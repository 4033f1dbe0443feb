// The device of csrc/cuda/device.cuh on a CPU: every CUDA thread is a fiber that runs until its next barrier. For a few small
// rows at a time; what it proves is the kernels' logic, not the compiler's work or the hardware's.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <stdexcept>
#include <vector>

#define __global__
#define __device__
#define __launch_bounds__(...)

namespace headrace {

using std::min;
constexpr int WARP = 32;
constexpr size_t STACK = 32 << 10;

struct BFloat16 {
    uint16_t bits;
};
using Half = _Float16;

// Where so many threads meet; each leaves once all have come.
struct Meeting {
    explicit Meeting(int threads = WARP) : expected(threads) {}
    void come();
    int expected, present = 0;
    long round = 0;
};

struct EmulatedWarp {
    Meeting meeting;
    uint32_t lanes[WARP];
};

struct EmulatedBlock {
    EmulatedBlock(int threads, size_t shared)
        : meeting(threads), running(threads), warps(threads / WARP), memory((shared + 7) / 8) {}
    Meeting meeting;
    int running;
    std::vector<EmulatedWarp> warps;
    std::vector<double> memory;
};

struct EmulatedThread {
    std::vector<std::unique_ptr<EmulatedBlock>>* cluster;
    int thread, rank;
    int64_t block;
    std::function<void()> kernel;
    bool finished = false;
    ucontext_t context{};
    std::unique_ptr<char[]> stack{};
    EmulatedBlock& own() const { return *(*cluster)[rank]; }
};

inline EmulatedThread* self = nullptr;
inline ucontext_t scheduler;
inline long events = 0;

inline void Meeting::come() {
    ++events;
    long mine = round;
    if (++present == expected) {
        present = 0;
        ++round;
        return;
    }
    while (round == mine) swapcontext(&self->context, &scheduler);
}

inline int thread_index() { return self->thread; }
inline int64_t block_index() { return self->block; }
inline int cluster_rank() { return self->rank; }
inline void sync_block() { self->own().meeting.come(); }
inline char* dynamic_shared() { return reinterpret_cast<char*>(self->own().memory.data()); }

inline Meeting cluster_meeting;
inline void sync_cluster() { cluster_meeting.come(); }

template <typename T>
T* at_peer(T* own, int rank) {
    std::ptrdiff_t offset = reinterpret_cast<char*>(own) - dynamic_shared();
    return reinterpret_cast<T*>(reinterpret_cast<char*>((*self->cluster)[rank]->memory.data()) + offset);
}

template <typename T>
T shuffle_down(T value, int lanes) {
    EmulatedWarp& warp = self->own().warps[self->thread / WARP];
    int lane = self->thread % WARP;
    warp.lanes[lane] = std::bit_cast<uint32_t>(value);
    warp.meeting.come();
    T result = std::bit_cast<T>(warp.lanes[lane + lanes < WARP ? lane + lanes : lane]);
    warp.meeting.come();
    return result;
}

inline void copy_async(float* shared, const float* global) { std::memcpy(shared, global, 16); }
inline void commit_copies() {}
template <int PENDING>
void wait_copies() {}

struct Four {
    float value[4];
};

inline float load1(const float* from) { return *from; }
inline float load1(const Half* from) { return float(*from); }
inline float load1(const BFloat16* from) { return std::bit_cast<float>(uint32_t(from->bits) << 16); }

inline void store1(float* to, float value) { *to = value; }
inline void store1(Half* to, float value) { *to = Half(value); }
inline void store1(BFloat16* to, float value) {
    uint32_t bits = std::bit_cast<uint32_t>(value);
    to->bits = uint16_t((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

template <typename T>
Four load4(const T* from) {
    return {{load1(from), load1(from + 1), load1(from + 2), load1(from + 3)}};
}

template <typename T>
void store4(T* to, const Four& four) {
    for (int i = 0; i < 4; ++i) store1(to + i, four.value[i]);
}

inline void run_fiber() {
    self->kernel();
    self->finished = true;
    ++events;
}

inline uint32_t coin = 1;
inline bool toss() {
    coin ^= coin << 13;
    coin ^= coin >> 17;
    coin ^= coin << 5;
    return coin & 1;
}

// A block whose threads have all left: nothing of its shared memory may be needed any more.
inline void retire(EmulatedBlock& block) {
    if (--block.running == 0) std::memset(block.memory.data(), 0xFF, block.memory.size() * sizeof(double));
}

// Runs all threads of a cluster, a stretch between barriers at a time. A coin decides which warps move, so that some get far
// ahead of others and a missing barrier shows.
inline void run_cluster(std::vector<EmulatedThread>& threads) {
    for (EmulatedThread& each : threads) {
        each.stack = std::make_unique<char[]>(STACK);
        getcontext(&each.context);
        each.context.uc_stack.ss_sp = each.stack.get();
        each.context.uc_stack.ss_size = STACK;
        each.context.uc_link = &scheduler;
        makecontext(&each.context, run_fiber, 0);
    }
    size_t running = threads.size();
    for (int idle = 0; running > 0;) {
        long before = events;
        for (size_t first = 0; first < threads.size(); first += WARP) {
            if (toss()) continue;
            for (size_t i = first; i < first + WARP; ++i) {
                self = &threads[i];
                if (self->finished) continue;
                swapcontext(&scheduler, &self->context);
                if (!self->finished) continue;
                --running;
                retire(self->own());
            }
        }
        idle = events == before ? idle + 1 : 0;
        if (idle > 1000) throw std::runtime_error("the threads of a cluster wait for each other");
    }
}

// Runs the blocks of a grid cluster by cluster.
template <typename Kernel, typename Args>
void run_clusters(Kernel kernel, const Args& args, int64_t blocks, int cluster, int threads, size_t shared) {
    for (int64_t first = 0; first < blocks; first += cluster) {
        std::vector<std::unique_ptr<EmulatedBlock>> members;
        std::vector<EmulatedThread> all(size_t(cluster) * threads);
        cluster_meeting = Meeting(cluster * threads);
        for (int rank = 0; rank < cluster; ++rank) members.push_back(std::make_unique<EmulatedBlock>(threads, shared));
        for (int i = 0; i < cluster * threads; ++i) {
            all[i].cluster = &members;
            all[i].thread = i % threads;
            all[i].rank = i / threads;
            all[i].block = first + all[i].rank;
            all[i].kernel = [&] { kernel(args); };
        }
        run_cluster(all);
    }
}

}  // namespace headrace
