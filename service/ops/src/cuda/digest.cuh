// The bits of a matrix as one number, by which results are compared without a copy.
#pragma once

struct DigestArguments {
    const unsigned char* start;
    unsigned long long* sum;
    unsigned long long row_bytes;
    unsigned rows;
    unsigned words;  // of four bytes, in a row
};

// Adds up the words of all rows, each times an odd number of its own: integers, so that their order does not matter.
extern "C" __global__ void __launch_bounds__(256) digest(DigestArguments a) {
    const unsigned long long all = static_cast<unsigned long long>(a.rows) * a.words;
    const unsigned long long threads = static_cast<unsigned long long>(gridDim.x) * blockDim.x;
    unsigned long long own = 0;
    for (unsigned long long at = blockIdx.x * static_cast<unsigned long long>(blockDim.x) + threadIdx.x; at < all;
         at += threads) {
        const unsigned char* row = a.start + at / a.words * a.row_bytes;
        const unsigned word = reinterpret_cast<const unsigned*>(row)[at % a.words];
        own += word * ((2 * at + 1) * 0x9E3779B97F4A7C15ull | 1);
    }
    for (int lane = 16; lane > 0; lane /= 2) own += __shfl_xor_sync(0xFFFFFFFFu, own, lane);
    if (threadIdx.x % 32 == 0) atomicAdd(a.sum, own);
}
