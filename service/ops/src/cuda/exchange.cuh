// Signals between two cards that exchange rows: numbers in memory that each card reads and the other one writes.
#pragma once

struct ExchangeArguments {
    // The number that is written or waited for, in memory of one of the cards.
    unsigned* number;
    // In the machine's memory: 1 ends all waiting, 2 tells that a wait was too long.
    unsigned* stop;
    unsigned long long most_nanoseconds;
    unsigned value;
    unsigned unused;
};

namespace moored {

__device__ inline unsigned long long nanoseconds() {
    unsigned long long now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    return now;
}

}  // namespace moored

// Writes the number, after all that kernels before it on the stream have written, as the other card sees it.
extern "C" __global__ void __launch_bounds__(1) exchange_signal(ExchangeArguments a) {
    __threadfence_system();
    *static_cast<volatile unsigned*>(a.number) = a.value;
    __threadfence_system();
}

// Waits until the number is the value or one of the next 2^31.
extern "C" __global__ void __launch_bounds__(1) exchange_wait(ExchangeArguments a) {
    const volatile unsigned* number = a.number;
    volatile unsigned* stop = a.stop;
    const unsigned long long began = moored::nanoseconds();
    for (unsigned turn = 0; static_cast<int>(*number - a.value) < 0; ++turn) {
        if (turn % 256 != 0) continue;
        // The machine's memory is far: it is read rarely.
        if (*stop != 0) return;
        if (moored::nanoseconds() - began > a.most_nanoseconds) {
            *stop = 2;
            return;
        }
    }
    __threadfence_system();
}
