// Barriers that not everybody reaches, exchanges with lanes that never come, waits without end.
#include "cases.h"

template <bool FIXED>
__global__ void divergent_barrier(float* x) {
    if (FIXED || threadIdx.x < 32) __syncthreads();
    if (threadIdx.x >= 32) __syncwarp();
    __shared__ int n;
    if (threadIdx.x == 0) n = 1;
    __syncthreads();
    x[threadIdx.x] = float(n);
}

template <bool FIXED>
__global__ void two_barriers(float* x) {  // both branches wait, each at its own barrier
    if (FIXED || threadIdx.x % 2) {
        x[threadIdx.x] = 1.0f;
        __syncthreads();
    } else {
        x[threadIdx.x] = 2.0f;
        __syncthreads();
    }
}

template <bool FIXED>
__global__ void shuffle_in_a_branch(float* x) {
    float v = x[threadIdx.x];
    if (threadIdx.x < 16) v += __shfl_xor_sync(FIXED ? 0x0000ffff : 0xffffffff, v, 1);
    __syncthreads();
    x[threadIdx.x] = v;
}

template <bool FIXED>
__global__ void not_in_its_mask(float* x) {
    x[threadIdx.x] = __shfl_xor_sync(FIXED ? 0xffffffff : 0x0000ffff, float(threadIdx.x), 1);
}

template <bool FIXED>
__global__ void wait_for_ever(volatile int* flag, float* x) {
    if (FIXED && threadIdx.x == 31) *flag = 1;
    while (*flag == 0) __nanosleep(100);
    x[threadIdx.x] = 1.0f;
}

__global__ void early_exit(float* x, int n) {  // allowed: who has returned is not waited for
    if (int(threadIdx.x) >= n) return;
    __shared__ float s[64];
    s[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    x[threadIdx.x] = s[n - 1 - threadIdx.x];
}

__global__ void votes(unsigned* out) {
    const unsigned t = threadIdx.x;
    const unsigned even = __ballot_sync(0xffffffff, t % 2 == 0);
    const bool right = even == 0x55555555 && __any_sync(0xffffffff, t == 5) && !__all_sync(0xffffffff, t < 31) &&
                       __popc(__match_any_sync(0xffffffff, t % 4)) == 8 && __reduce_add_sync(0xffffffff, t) == 496 &&
                       __reduce_max_sync(0xffffffff, int(t) - 40) == -9 &&
                       __shfl_up_sync(0xffffffff, t, 1) == (t ? t - 1 : 0) &&
                       __shfl_sync(0xffffffff, t, 3, 8) == t / 8 * 8 + 3 &&
                       __shfl_down_sync(0xffffffff, t, 2, 4) == (t % 4 < 2 ? t + 2 : t) &&
                       __syncthreads_count(t < 7) == 7 && __syncthreads_or(t == 3) && !__syncthreads_and(t == 3);
    out[t] = right;
}

int main() {
    return run_cases({
        BOTH(divergent_barrier, Device<float> x(64); divergent_barrier<FIXED><<<1, 64>>>(x)),
        BOTH(two_barriers, Device<float> x(32); two_barriers<FIXED><<<1, 32>>>(x)),
        BOTH(shuffle_in_a_branch, Device<float> x(32, 1.0f); shuffle_in_a_branch<FIXED><<<1, 32>>>(x)),
        BOTH(not_in_its_mask, Device<float> x(32); not_in_its_mask<FIXED><<<1, 32>>>(x)),
        BOTH(wait_for_ever, Device<int> flag(1, 0); Device<float> x(32); wait_for_ever<FIXED><<<1, 32>>>(flag, x)),
        {"early_exit_fixed",
         [] {
             Device<float> x(64, 1.0f);
             early_exit<<<1, 64>>>(x, 50);
         }},
        {"votes_fixed", [] {
             Device<unsigned> x(32);
             votes<<<1, 32>>>(x);
             for (unsigned right : x.host(32)) expect(right, "votes");
         }},
    });
}
