// Counts what a program asks of the CUDA driver, whoever asks in it: our kernels, cuBLAS, cuDNN.
//
//   gcc -shared -fPIC -o count_calls.so count_calls.c -I$CUDA/include -I$CUDA/extras/CUPTI/include -L$CUDA/extras/CUPTI/lib64 -lcupti
//   CUDA_INJECTION64_PATH=$PWD/count_calls.so COUNT_CALLS=calls.txt program
//
// The file gets one line at the end of the program. `tests/gpu/count` compares the lines of runs of different lengths.
#include <cupti.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum Kind { LAUNCH, UPLOAD, DOWNLOAD, COPY, SET, ALLOCATE, FREE, WAIT, KINDS };
static const char *NAMES[KINDS] = {"launches", "uploads", "downloads", "copies", "sets", "allocations", "frees", "waits"};
static atomic_long counts[KINDS];

static int kind_of(const char *name) {
    static const struct {
        const char *begin;
        int kind;
    } TABLE[] = {
        {"cuLaunch", LAUNCH},      {"cuMemcpyHtoD", UPLOAD},  {"cuMemcpyDtoH", DOWNLOAD},
        {"cuMemcpy", COPY},        {"cuMemset", SET},         {"cuMemAlloc", ALLOCATE},
        {"cuMemCreate", ALLOCATE}, {"cuMemFree", FREE},       {"cuStreamSynchronize", WAIT},
        {"cuCtxSynchronize", WAIT}, {"cuEventSynchronize", WAIT},
    };
    for (size_t i = 0; i < sizeof TABLE / sizeof *TABLE; i++) {
        if (strncmp(name, TABLE[i].begin, strlen(TABLE[i].begin)) == 0) return TABLE[i].kind;
    }
    return KINDS;
}

static void CUPTIAPI called(void *user, CUpti_CallbackDomain domain, CUpti_CallbackId id, const void *data) {
    const CUpti_CallbackData *call = data;
    (void)user, (void)domain, (void)id;
    if (call->callbackSite != CUPTI_API_ENTER) return;
    const int kind = kind_of(call->functionName);
    if (kind < KINDS) atomic_fetch_add(&counts[kind], 1);
}

static void write_line(void) {
    const char *path = getenv("COUNT_CALLS");
    FILE *file = path ? fopen(path, "a") : stderr;
    if (!file) return;
    for (int kind = 0; kind < KINDS; kind++) fprintf(file, "%s %ld ", NAMES[kind], atomic_load(&counts[kind]));
    fprintf(file, "\n");
    if (path) fclose(file);
}

// CUDA calls it when it starts.
int InitializeInjection(void) {
    CUpti_SubscriberHandle subscriber;
    if (cuptiSubscribe(&subscriber, called, NULL) != CUPTI_SUCCESS) return 0;
    if (cuptiEnableDomain(1, subscriber, CUPTI_CB_DOMAIN_DRIVER_API) != CUPTI_SUCCESS) return 0;
    atexit(write_line);
    return 1;
}
