/* A CUDA driver without a GPU, for tests: two devices, whose shared memory is POSIX shared memory.

A handle holds the name of the shared memory, as a string. `CUDA_DRIVER_FAILURE` makes one function fail: its name.
The kernels of `_fused_embedding.cu` are functions in C here. */

#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define API __attribute__((visibility("default"))) int
enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NO_DEVICE = 100, INVALID_DEVICE = 101 };
enum { INVALID_CONTEXT = 201, NOT_FOUND = 500, UNKNOWN = 999 };
enum { DEVICES = 2, MAPPINGS = 32, DEPTH = 16 }; /* few: a test notices memory that is not freed */

typedef struct { char reserved[64]; } handle_t;
typedef struct { char name[64]; char *begin; size_t size; int uses; } mapping_t;

static mapping_t mappings[MAPPINGS];
static __thread void *stack[DEPTH];
static __thread int depth;
static char contexts[DEVICES];

static int fails(const char *function) {
    const char *wanted = getenv("CUDA_DRIVER_FAILURE");
    return wanted && strcmp(wanted, function) == 0;
}

/* The mapping that holds all bytes of a range, or NULL. */
static mapping_t *find(uint64_t address, size_t size) {
    for (mapping_t *m = mappings; m < mappings + MAPPINGS; m++)
        if (m->uses && address >= (uint64_t)m->begin && address + size <= (uint64_t)m->begin + m->size) return m;
    return NULL;
}

API cuInit(unsigned flags) { return fails("cuInit") ? NO_DEVICE : flags ? INVALID_VALUE : SUCCESS; }

API cuGetErrorName(int error, const char **name) {
    switch (error) {
        case INVALID_VALUE: *name = "CUDA_ERROR_INVALID_VALUE"; return SUCCESS;
        case OUT_OF_MEMORY: *name = "CUDA_ERROR_OUT_OF_MEMORY"; return SUCCESS;
        case NOT_FOUND: *name = "CUDA_ERROR_NOT_FOUND"; return SUCCESS;
        case NO_DEVICE: *name = "CUDA_ERROR_NO_DEVICE"; return SUCCESS;
        case INVALID_DEVICE: *name = "CUDA_ERROR_INVALID_DEVICE"; return SUCCESS;
        case INVALID_CONTEXT: *name = "CUDA_ERROR_INVALID_CONTEXT"; return SUCCESS;
    }
    *name = NULL;
    return INVALID_VALUE;
}

API cuDeviceGetCount(int *count) {
    *count = fails("cuDeviceGetCount") ? 0 : DEVICES;
    return SUCCESS;
}

API cuDeviceGet(int *device, int ordinal) {
    if (ordinal < 0 || ordinal >= DEVICES) return INVALID_DEVICE;
    *device = ordinal;
    return SUCCESS;
}

API cuDevicePrimaryCtxRetain(void **context, int device) {
    if (fails("cuDevicePrimaryCtxRetain")) return UNKNOWN;
    *context = &contexts[device];
    return SUCCESS;
}

API cuCtxPushCurrent_v2(void *context) {
    if (depth == DEPTH || context < (void *)contexts || context >= (void *)(contexts + DEVICES)) return INVALID_CONTEXT;
    stack[depth++] = context;
    return SUCCESS;
}

API cuCtxPopCurrent_v2(void **context) {
    if (!depth) return INVALID_CONTEXT;
    *context = stack[--depth];
    return SUCCESS;
}

API cuIpcOpenMemHandle_v2(uint64_t *address, handle_t handle, unsigned flags) {
    if (!depth) return INVALID_CONTEXT;
    if (flags != 1 || memchr(handle.reserved, 0, sizeof handle.reserved) == NULL) return INVALID_VALUE;
    mapping_t *unused = NULL;
    for (mapping_t *m = mappings; m < mappings + MAPPINGS; m++) {
        if (m->uses && strcmp(m->name, handle.reserved) == 0) return INVALID_VALUE; /* opened twice */
        if (!m->uses) unused = m;
    }
    struct stat found;
    int file = unused ? shm_open(handle.reserved, O_RDWR, 0) : -1;
    if (file < 0) return INVALID_VALUE;
    void *begin = fstat(file, &found) ? MAP_FAILED : mmap(NULL, found.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (begin == MAP_FAILED) return INVALID_VALUE;
    strcpy(unused->name, handle.reserved);
    unused->begin = begin;
    unused->size = found.st_size;
    unused->uses = 1;
    *address = (uint64_t)begin;
    return SUCCESS;
}

API cuIpcCloseMemHandle(uint64_t address) {
    mapping_t *m = find(address, 0);
    if (!depth || !m || fails("cuIpcCloseMemHandle")) return INVALID_VALUE;
    munmap(m->begin, m->size);
    m->uses = 0;
    return SUCCESS;
}

API cuMemGetAddressRange_v2(uint64_t *base, size_t *size, uint64_t address) {
    mapping_t *m = find(address, 0);
    if (!depth || !m || fails("cuMemGetAddressRange_v2")) return INVALID_VALUE;
    *base = (uint64_t)m->begin;
    *size = m->size;
    return SUCCESS;
}

/* The source may be any memory: onnxruntime on the CPU stands for a GPU. */
API cuMemcpyDtoH_v2(void *target, uint64_t source, size_t size) {
    if (!depth || fails("cuMemcpyDtoH_v2")) return INVALID_VALUE;
    memcpy(target, (void *)source, size);
    return SUCCESS;
}

API cuMemcpyHtoD_v2(uint64_t target, const void *source, size_t size) {
    if (!depth || !find(target, size) || fails("cuMemcpyHtoD_v2")) return INVALID_VALUE;
    memcpy((void *)target, source, size);
    return SUCCESS;
}

/* The source may be any memory here, too. */
API cuMemcpyDtoD_v2(uint64_t target, uint64_t source, size_t size) {
    if (!depth || !find(target, size) || fails("cuMemcpyDtoD_v2")) return INVALID_VALUE;
    memcpy((void *)target, (void *)source, size);
    return SUCCESS;
}

API cuMemAllocHost_v2(void **address, size_t size) {
    if (!depth || fails("cuMemAllocHost_v2")) return INVALID_VALUE;
    *address = malloc(size);
    return SUCCESS;
}

API cuMemFreeHost(void *address) {
    if (!depth) return INVALID_CONTEXT;
    free(address);
    return SUCCESS;
}

API cuMemAlloc_v2(uint64_t *address, size_t size) {
    if (!depth || !size) return INVALID_VALUE;
    mapping_t *m = mappings;
    while (m < mappings + MAPPINGS && m->uses) m++;
    if (m == mappings + MAPPINGS || fails("cuMemAlloc_v2")) return OUT_OF_MEMORY;
    *m = (mapping_t){.begin = aligned_alloc(256, (size + 255) / 256 * 256), .size = size, .uses = 1};
    *address = (uint64_t)m->begin;
    return SUCCESS;
}

API cuMemFree_v2(uint64_t address) {
    mapping_t *m = find(address, 0);
    if (!depth || !m || m->begin != (char *)address) return INVALID_VALUE;
    free(m->begin);
    m->uses = 0;
    return SUCCESS;
}

/* A module is its PTX, and a kernel the number of values that a thread reads at once. */
API cuModuleLoadData(void **module, const char *ptx) {
    if (!depth || fails("cuModuleLoadData") || !strstr(ptx, ".version")) return INVALID_VALUE;
    *module = strdup(ptx);
    return SUCCESS;
}

API cuModuleGetFunction(void **kernel, void *module, const char *name) {
    char entry[64];
    snprintf(entry, sizeof entry, ".entry %s(", name);
    if (!strstr(module, entry)) return NOT_FOUND;
    *kernel = (void *)(strcmp(name, "add_rows_by_4") == 0 ? (intptr_t)4 : (intptr_t)1);
    return SUCCESS;
}

API cuLaunchKernel(void *kernel, unsigned blocks, unsigned y, unsigned z, unsigned threads, unsigned ty, unsigned tz,
                   unsigned shared, void *stream, void **given, void **extra) {
    unsigned at_once = (unsigned)(intptr_t)kernel, length = *(unsigned *)given[1], stride = *(unsigned *)given[3];
    int64_t *ids = *(int64_t **)given[0], *offsets = *(int64_t **)given[2];
    float *table = *(float **)given[4], scale = *(float *)given[5], *positions = *(float **)given[6];
    size_t width = (size_t)at_once * *(unsigned *)given[7];
    float *out = *(float **)given[8];
    uint64_t bits = (uint64_t)table | (uint64_t)positions | (uint64_t)out;
    if (!depth || fails("cuLaunchKernel") || !blocks || !threads || y * z * ty * tz != 1 || shared || stream || extra ||
        bits % (4 * at_once))
        return INVALID_VALUE;
    for (unsigned token = 0; token < blocks; token++)
        for (size_t column = 0; column < width; column++) {
            int64_t position = offsets[token / length * stride] + token % length;
            out[token * width + column] = table[ids[token] * width + column] * scale + positions[position * width + column];
        }
    return SUCCESS;
}

/* A stream is a number; the sessions of the tests compute on the CPU. */
API cuStreamCreate(void **stream, unsigned flags) {
    static intptr_t streams;
    if (!depth || flags != 1 || fails("cuStreamCreate")) return INVALID_VALUE;
    *stream = (void *)++streams;
    return SUCCESS;
}

API cuStreamSynchronize(void *stream) { return stream || !depth ? INVALID_VALUE : SUCCESS; }
