/* libcuda.so.1 for a machine without a GPU: what vla_runtime calls of the driver's interface, over
 * host memory. The real bindings load it, so their names, signatures and conversions are tested.
 * The signatures are those of CUDA 12's cuda.h. Work runs at once, or is recorded by a capture. A
 * wait takes FAKE_CUDA_WAIT_MS milliseconds. FAKE_CUDA_VERSION is the driver's version (12060): it
 * has no function of a later one.
 *
 *     gcc -shared -fPIC -o libcuda.so.1 fake_libcuda.c -ldl
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_CONTEXT = 201, NOT_FOUND = 500 };
enum { NODES = 64, BLOCKING = 1, SCHED_BLOCKING = 4, THREAD_LOCAL = 1, NON_BLOCKING = 1 };

typedef struct { uint64_t target, source; size_t size; unsigned char value; int fill; } Node;
typedef struct { int count; Node nodes[NODES]; } Graph;

static __thread void *current;
static char context, stream;
static Graph *recording;

static int setting(const char *name, int otherwise) {
    const char *text = getenv(name);
    return text ? atoi(text) : otherwise;
}

static void run(const Node *node) {
    if (node->fill) memset((void *)node->target, node->value, node->size);
    else memmove((void *)node->target, (void *)node->source, node->size);
}

static int put(Node node, void *on) {
    if (current != &context) return INVALID_CONTEXT;
    if (on != &stream) return INVALID_VALUE;
    if (!recording) run(&node);
    else if (recording->count == NODES) return OUT_OF_MEMORY;
    else recording->nodes[recording->count++] = node;
    return OK;
}

int cuInit(unsigned flags) { return flags ? INVALID_VALUE : OK; }
static int driver_version(void) { return setting("FAKE_CUDA_VERSION", 12060); }
int cuDriverGetVersion(int *version) { *version = driver_version(); return OK; }
int cuDeviceGetCount(int *count) { *count = 1; return OK; }
int cuDeviceGet(int *device, int index) { *device = index; return index ? INVALID_VALUE : OK; }
int cuDeviceGetName(char *name, int length, int device) {
    snprintf(name, length, "Fake Orin");
    return device ? INVALID_VALUE : OK;
}
int cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = 8ul << 30; return device; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    switch (attribute) { /* numbers of cuda.h */
        case 16: *value = 8; return device;  /* multiprocessors */
        case 18: *value = 1; return device;  /* integrated */
        case 75: *value = 8; return device;  /* compute capability */
        case 76: *value = 7; return device;
    }
    return INVALID_VALUE;
}
int cuDevicePrimaryCtxSetFlags_v2(int device, unsigned flags) {
    return device || flags != SCHED_BLOCKING ? INVALID_VALUE : OK;
}
int cuDevicePrimaryCtxRetain(void **made, int device) { *made = &context; return device; }
int cuCtxSetCurrent(void *made) { current = made; return made == &context ? OK : INVALID_VALUE; }
int cuMemGetInfo_v2(size_t *unused, size_t *total) {
    *unused = 5ul << 30;
    *total = 8ul << 30;
    return OK;
}
int cuMemAlloc_v2(uint64_t *address, size_t size) {
    if (current != &context) return INVALID_CONTEXT;
    if (size > 1ul << 30) return OUT_OF_MEMORY;
    return posix_memalign((void **)address, 256, size) ? OUT_OF_MEMORY : OK;
}
int cuMemFree_v2(uint64_t address) { free((void *)address); return OK; }
int cuMemHostAlloc(void **address, size_t size, unsigned flags) {
    *address = malloc(size);
    return flags ? INVALID_VALUE : OK;
}
int cuMemFreeHost(void *address) { free(address); return OK; }
int cuMemsetD8Async(uint64_t target, unsigned char value, size_t size, void *on) {
    return put((Node){.target = target, .value = value, .size = size, .fill = 1}, on);
}
int cuMemcpyHtoDAsync_v2(uint64_t target, const void *source, size_t size, void *on) {
    return put((Node){.target = target, .source = (uint64_t)source, .size = size}, on);
}
int cuMemcpyDtoHAsync_v2(void *target, uint64_t source, size_t size, void *on) {
    return put((Node){.target = (uint64_t)target, .source = source, .size = size}, on);
}
int cuMemcpyDtoDAsync_v2(uint64_t target, uint64_t source, size_t size, void *on) {
    return put((Node){.target = target, .source = source, .size = size}, on);
}
int cuStreamCreate(void **made, unsigned flags) {
    *made = &stream;
    return flags == NON_BLOCKING ? OK : INVALID_VALUE;
}
int cuStreamDestroy_v2(void *made) { return made == &stream ? OK : INVALID_VALUE; }
int cuStreamBeginCapture_v2(void *on, int mode) {
    if (on != &stream || mode != THREAD_LOCAL || recording) return INVALID_VALUE;
    recording = calloc(1, sizeof(Graph));
    return OK;
}
int cuStreamEndCapture(void *on, void **graph) {
    *graph = recording;
    recording = NULL;
    return on == &stream && *graph ? OK : INVALID_VALUE;
}
int cuGraphInstantiateWithFlags(void **made, void *graph, unsigned long long flags) {
    *made = malloc(sizeof(Graph));
    memcpy(*made, graph, sizeof(Graph));
    return flags ? INVALID_VALUE : OK;
}
int cuGraphLaunch(void *made, void *on) {
    Graph *graph = made;
    int error = OK;
    for (int i = 0; i < graph->count && !error; i++) error = put(graph->nodes[i], on);
    return error;
}
int cuGraphDestroy(void *graph) { free(graph); return OK; }
int cuGraphExecDestroy(void *made) { free(made); return OK; }
int cuEventCreate(void **event, unsigned flags) {
    *event = malloc(1);
    return flags == BLOCKING ? OK : INVALID_VALUE;
}
int cuEventRecord(void *event, void *on) { return event && on == &stream ? OK : INVALID_VALUE; }
int cuEventSynchronize(void *event) {
    usleep(1000 * setting("FAKE_CUDA_WAIT_MS", 0));
    return event ? OK : INVALID_VALUE;
}
int cuEventElapsedTime(float *milliseconds, void *start, void *end) {
    *milliseconds = 1.5f;
    return start && end ? OK : INVALID_VALUE;
}
int cuEventDestroy_v2(void *event) { free(event); return OK; }
int cuGetErrorString(int error, const char **text) {
    *text = error == OUT_OF_MEMORY ? "out of memory" : "fake";
    return OK;
}

/* The bindings find every function through this one. FAKE_CUDA_LACKS names one that is missing. */
int cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *found) {
    char versioned[128];
    const char *lacks = getenv("FAKE_CUDA_LACKS");
    void *self = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    (void)flags;
    *function = NULL;
    if (!strcmp(name, "cuGraphInstantiate")) name = "cuGraphInstantiateWithFlags";
    if (version <= driver_version() && (!lacks || strcmp(name, lacks))) {
        snprintf(versioned, sizeof versioned, "%s_v2", name);
        *function = dlsym(self, versioned);
        if (!*function) *function = dlsym(self, name);
    }
    if (found) *found = *function ? 0 : 1;
    return *function ? OK : NOT_FOUND;
}
