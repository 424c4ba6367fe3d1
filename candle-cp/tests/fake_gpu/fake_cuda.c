// A CUDA driver for tests on machines without a GPU: eight devices (or, with NO_FAKE_GPU, none) whose memory is the host's. Streams are threads that
// work off their queues with small random delays, so that work which is not ordered by events goes wrong. Memory is filled
// with a pattern when it is allocated and when a stream passes its release. There are no kernels.
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct Event { uint64_t recorded, completed; } Event;
typedef struct Op { enum { COPY, FILL, RECORD, WAIT, CALL } kind; void *to; void *from; size_t n; int value; uint64_t serial;
  Event *event; void (*call)(void *); struct Op *next; } Op;
typedef struct Stream { Op *first, *last; uint64_t posted, done; unsigned seed; } Stream;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static __thread void *current;
static struct { char *at; size_t n; } pinned[4096];
static int pinned_count;

static void poison(void *at, int value, size_t n) { memset(at, value, n); }

static void *work(void *argument) {
  Stream *s = argument;
  for (;;) {
    pthread_mutex_lock(&lock);
    while (!s->first) pthread_cond_wait(&changed, &lock);
    Op *op = s->first;
    s->first = op->next;
    if (!s->first) s->last = NULL;
    if (op->kind == WAIT) while (op->event->completed < op->serial) pthread_cond_wait(&changed, &lock);
    int delay = rand_r(&s->seed) % 150;
    pthread_mutex_unlock(&lock);
    if (delay > 50) usleep(delay);
    if (op->kind == COPY) memcpy(op->to, op->from, op->n);
    if (op->kind == FILL) poison(op->to, op->value, op->n);
    if (op->kind == CALL) op->call(op->from);
    pthread_mutex_lock(&lock);
    if (op->kind == RECORD && op->event->completed < op->serial) op->event->completed = op->serial;
    s->done++;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
    free(op);
  }
  return NULL;
}

static void post(Stream *s, Op op) {
  Op *new = malloc(sizeof op);
  *new = op;
  new->next = NULL;
  pthread_mutex_lock(&lock);
  if (op.kind == RECORD) new->serial = ++op.event->recorded;
  if (op.kind == WAIT) new->serial = op.event->recorded;
  if (s->last) s->last->next = new; else s->first = new;
  s->last = new;
  s->posted++;
  pthread_cond_broadcast(&changed);
  pthread_mutex_unlock(&lock);
}

static void drain(Stream *s) {
  pthread_mutex_lock(&lock);
  for (uint64_t until = s->posted; s->done < until;) pthread_cond_wait(&changed, &lock);
  pthread_mutex_unlock(&lock);
}

static int is_pinned(void *at) {
  int found = 0;
  pthread_mutex_lock(&lock);
  for (int i = 0; i < pinned_count; i++) found |= (char *)at >= pinned[i].at && (char *)at < pinned[i].at + pinned[i].n;
  pthread_mutex_unlock(&lock);
  return found;
}

// For the fake NCCL.
void fakeStreamCall(void *stream, void (*call)(void *), void *argument) {
  post(stream, (Op){.kind = CALL, .call = call, .from = argument});
}

int cuInit(unsigned flags) { return getenv("NO_FAKE_GPU") ? 100 : 0; }
int cuDeviceGetCount(int *n) { *n = 8; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return ordinal < 8 ? 0 : 101; }
int cuDeviceGetAttribute(int *value, int attribute, int device) { *value = 1; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)(intptr_t)(device + 1); return 0; }
int cuDevicePrimaryCtxRelease_v2(int device) { return 0; }
int cuCtxGetCurrent(void **context) { *context = current; return 0; }
int cuCtxSetCurrent(void *context) { current = context; return 0; }
int cuCtxSynchronize(void) { return 0; }
int cuCtxGetStreamPriorityRange(int *least, int *greatest) { *least = 0; *greatest = -5; return 0; }
int cuStreamCreate(void **stream, unsigned flags) {
  Stream *s = calloc(1, sizeof *s);
  pthread_t thread;
  s->seed = (unsigned)(uintptr_t)s;
  pthread_create(&thread, NULL, work, s);
  pthread_detach(thread);
  *stream = s;
  return 0;
}
int cuStreamCreateWithPriority(void **stream, unsigned flags, int priority) { return cuStreamCreate(stream, flags); }
int cuStreamDestroy_v2(void *stream) { return 0; }
int cuStreamSynchronize(void *stream) { drain(stream); return 0; }
int cuStreamIsCapturing(void *stream, int *status) { *status = 0; return 0; }
int cuStreamWaitEvent(void *stream, Event *event, unsigned flags) {
  post(stream, (Op){.kind = WAIT, .event = event});
  return 0;
}
int cuEventCreate(Event **event, unsigned flags) { *event = calloc(1, sizeof **event); return 0; }
int cuEventDestroy_v2(Event *event) { return 0; }
int cuEventRecord(Event *event, void *stream) { post(stream, (Op){.kind = RECORD, .event = event}); return 0; }
int cuEventQuery(Event *event) {
  pthread_mutex_lock(&lock);
  int done = event->completed >= event->recorded;
  pthread_mutex_unlock(&lock);
  return done ? 0 : 600;
}
int cuEventSynchronize(Event *event) {
  pthread_mutex_lock(&lock);
  for (uint64_t until = event->recorded; event->completed < until;) pthread_cond_wait(&changed, &lock);
  pthread_mutex_unlock(&lock);
  return 0;
}
// The length is kept in front. Released memory is not used again, so that its pattern stays.
int cuMemAllocAsync(uint64_t *at, size_t n, void *stream) {
  char *block = malloc(n + 64);
  *(size_t *)block = n;
  poison(block + 64, 0xA5, n);
  *at = (uint64_t)(block + 64);
  return 0;
}
int cuMemAlloc_v2(uint64_t *at, size_t n) { return cuMemAllocAsync(at, n, NULL); }
int cuMemFreeAsync(char *at, void *stream) {
  post(stream, (Op){.kind = FILL, .to = at, .value = 0xDD, .n = *(size_t *)(at - 64)});
  return 0;
}
int cuMemFree_v2(char *at) { return 0; }
int cuMemHostAlloc(void **at, size_t n, unsigned flags) {
  *at = calloc(1, n);
  pthread_mutex_lock(&lock);
  if (pinned_count == 4096) abort();
  pinned[pinned_count].at = *at;
  pinned[pinned_count++].n = n;
  pthread_mutex_unlock(&lock);
  return 0;
}
int cuMemFreeHost(void *at) { return 0; }
int cuMemsetD8Async(void *at, unsigned char value, size_t n, void *stream) {
  post(stream, (Op){.kind = FILL, .to = at, .value = value, .n = n});
  return 0;
}
int cuMemcpyHtoDAsync_v2(void *to, void *from, size_t n, void *stream) {
  if (!is_pinned(from)) from = memcpy(malloc(n), from, n);
  post(stream, (Op){.kind = COPY, .to = to, .from = from, .n = n});
  return 0;
}
int cuMemcpyDtoHAsync_v2(void *to, void *from, size_t n, void *stream) {
  post(stream, (Op){.kind = COPY, .to = to, .from = from, .n = n});
  if (!is_pinned(to)) drain(stream);
  return 0;
}
int cuMemcpyDtoDAsync_v2(void *to, void *from, size_t n, void *stream) {
  post(stream, (Op){.kind = COPY, .to = to, .from = from, .n = n});
  return 0;
}
int cuGetErrorString(int code, const char **text) {
  *text = code == 100 ? "no CUDA-capable device is detected" : code == 801 ? "not part of the fake driver" : "a fault of the fake driver";
  return 0;
}
int cuGetErrorName(int code, const char **text) { *text = "FAKE"; return 0; }
