// Counts what a program asks of the CUDA driver, whoever asks in it: our kernels, cuBLAS, cuDNN.
//
//   gcc -shared -fPIC -o count_calls.so count_calls.c -I$CUDA/include -I$CUDA/extras/CUPTI/include -L$CUDA/extras/CUPTI/lib64 -lcupti
//   CUDA_INJECTION64_PATH=$PWD/count_calls.so COUNT_CALLS=calls.txt program
//
// With COUNT_KERNELS=kernels.txt it writes besides how often each kernel ran on how many blocks and for how many
// microseconds, most first, and how long the card stood still between two of them for less than a millisecond.
// The file gets one line at the end of the program. `tests/gpu/count` compares the lines of runs of different lengths.
#include <cupti.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

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

// Kernels by name and blocks, with their number and nanoseconds.
enum { MOST_KERNELS = 4096, NAME = 160, BREAK_NANOSECONDS = 1000000 };
static struct {
    char name[NAME];
    long count, nanoseconds;
} kernels[MOST_KERNELS];
static int kernel_count;
static uint64_t last_end;
static long still_nanoseconds;

static void CUPTIAPI asked_for_buffer(uint8_t **buffer, size_t *size, size_t *most) {
    *size = 8 << 20;
    *buffer = aligned_alloc(8, *size);
    *most = 0;
}

static void CUPTIAPI buffer_full(CUcontext context, uint32_t stream, uint8_t *buffer, size_t size, size_t valid) {
    CUpti_Activity *record = NULL;
    (void)context, (void)stream, (void)size;
    while (cuptiActivityGetNextRecord(buffer, valid, &record) == CUPTI_SUCCESS) {
        // Name and times are where they are in every version of the record.
        const CUpti_ActivityKernel9 *kernel = (const CUpti_ActivityKernel9 *)record;
        if (record->kind != CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL || !kernel->name) continue;
        char name[NAME];
        const int begin = snprintf(name, NAME, "[%d,%d,%d] ", kernel->gridX, kernel->gridY, kernel->gridZ);
        strncpy(name + begin, kernel->name, (size_t)(NAME - 1 - begin));
        name[NAME - 1] = 0;
        if (last_end && kernel->start > last_end && kernel->start - last_end < BREAK_NANOSECONDS) {
            still_nanoseconds += (long)(kernel->start - last_end);
        }
        if (kernel->end > last_end) last_end = kernel->end;
        int i = 0;
        while (i < kernel_count && strcmp(kernels[i].name, name) != 0) i++;
        if (i == MOST_KERNELS) continue;
        if (i == kernel_count) memcpy(kernels[kernel_count++].name, name, NAME);
        kernels[i].count++;
        kernels[i].nanoseconds += (long)(kernel->end - kernel->start);
    }
    free(buffer);
}

static int longer(const void *a, const void *b) {
    const long left = *(const long *)((const char *)a + NAME + sizeof(long)), right = *(const long *)((const char *)b + NAME + sizeof(long));
    return (left < right) - (left > right);
}

static void write_kernels(void) {
    cuptiActivityFlushAll(1);
    FILE *file = fopen(getenv("COUNT_KERNELS"), "w");
    if (!file) return;
    qsort(kernels, (size_t)kernel_count, sizeof *kernels, longer);
    for (int i = 0; i < kernel_count; i++) {
        fprintf(file, "%10.0f us %7ld x %s\n", (double)kernels[i].nanoseconds / 1e3, kernels[i].count, kernels[i].name);
    }
    fprintf(file, "%10.0f us between kernels\n", (double)still_nanoseconds / 1e3);
    fclose(file);
}

// A process that ends without its handlers has written what there was two seconds before.
static void *write_now_and_then(void *unused) {
    (void)unused;
    for (;;) {
        sleep(2);
        write_kernels();
    }
}

// CUDA calls it when it starts.
int InitializeInjection(void) {
    CUpti_SubscriberHandle subscriber;
    if (cuptiSubscribe(&subscriber, called, NULL) != CUPTI_SUCCESS) return 0;
    if (cuptiEnableDomain(1, subscriber, CUPTI_CB_DOMAIN_DRIVER_API) != CUPTI_SUCCESS) return 0;
    if (getenv("COUNT_KERNELS")) {
        cuptiActivityRegisterCallbacks(asked_for_buffer, buffer_full);
        cuptiActivityEnable(CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL);
        atexit(write_kernels);
        pthread_t thread;
        if (getenv("COUNT_NOW_AND_THEN")) pthread_create(&thread, NULL, write_now_and_then, NULL);
    }
    atexit(write_line);
    return 1;
}
