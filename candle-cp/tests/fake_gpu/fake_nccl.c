// NCCL for tests: groups of threads on the fake driver, of one process or, where FAKE_NCCL_ARENA names a file, of all that
// share it. A group of calls is one piece of work of its stream, which ends when its sends have been received. Messages of
// other lengths than expected hang, as NCCL's may. Nobody notices a rank that is gone. With OLD_NCCL defined it is of a
// version that cannot split communicators, and may be loaded beside the other.
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <unistd.h>

enum { RANKS = 8, CALLS = 64, SPLITS = 32 };
typedef struct { char bytes[128]; } Id;
typedef struct Message { size_t n; char *data; int taken; struct Message *next; } Message;
typedef struct { int called, color[RANKS], key[RANKS]; } Split;
typedef struct { Id id; int joined; Message *queue[RANKS][RANKS]; Split splits[SPLITS]; } Group;
typedef struct Comm { Group *group; int rank, size, aborted, finalized, splits; struct Comm **splitting; } Comm;
typedef struct { enum { SEND, RECV, GATHER, SUM, SCATTER, REDUCE, BROADCAST } kind; const char *from; char *to; size_t count; int type, peer; } Call;
typedef struct { Comm *comm; int n; Call calls[CALLS]; } Work;
typedef struct { size_t size; unsigned magic, version; int blocking; } Config;

void fakeStreamCall(void *stream, void (*call)(void *), void *argument);

// What ranks share lies at the same address in every process. Memory is not given back.
#ifdef OLD_NCCL
#define ARENA_AT ((void *)0x210000000000)
#else
#define ARENA_AT ((void *)0x200000000000)
#endif
#define ARENA_BYTES (1ul << 30)
static struct { pthread_mutex_t lock; size_t used; int serial, group_count; Group *groups[1024]; } *arena;
static __thread int depth;
static __thread Work *posting;
static __thread void *open_stream;

__attribute__((constructor)) static void map_arena(void) {
  const char *path = getenv("FAKE_NCCL_ARENA");
  int file = path ? open(path, O_RDWR | O_CREAT, 0600) : -1, kind = file < 0 ? MAP_ANONYMOUS : 0;
  if (path && (file < 0 || flock(file, LOCK_EX) || ftruncate(file, ARENA_BYTES))) abort();
  arena = mmap(ARENA_AT, ARENA_BYTES, PROT_READ | PROT_WRITE, kind | MAP_SHARED | MAP_NORESERVE | MAP_FIXED_NOREPLACE, file, 0);
  if (arena != ARENA_AT) abort();
  if (!arena->used) {
    pthread_mutexattr_t shared;
    pthread_mutexattr_init(&shared);
    pthread_mutexattr_setpshared(&shared, PTHREAD_PROCESS_SHARED);
    pthread_mutex_init(&arena->lock, &shared);
    arena->used = sizeof *arena;
  }
  if (path) flock(file, LOCK_UN), close(file);
}

// Zeros; under the lock.
static void *get(size_t n) {
  void *at = (char *)arena + (arena->used + 63) / 64 * 64;
  arena->used = (char *)at + n - (char *)arena;
  if (arena->used > ARENA_BYTES) abort();
  return at;
}

// A wait under the lock. Not a condition: a process that is killed while it waits for one would block the others.
static void rest(void) {
  pthread_mutex_unlock(&arena->lock);
  usleep(50);
  pthread_mutex_lock(&arena->lock);
}

static size_t size_of(int type) { return (size_t[]){1, 1, 4, 4, 8, 8, 2, 4, 8, 2}[type]; }

static Message *put(Comm *c, int to, const char *data, size_t n) {
  Message *m = get(sizeof *m), **end = &c->group->queue[c->rank][to];
  m->n = n;
  m->data = memcpy(get(n), data, n);
  while (*end) end = &(*end)->next;
  *end = m;
  return m;
}

static int take(Comm *c, int from, char *to, size_t n) {
  Message **queue = &c->group->queue[from][c->rank];
  while (!c->aborted && !(*queue && (*queue)->n == n)) rest();
  if (c->aborted) return 0;
  Message *m = *queue;
  *queue = m->next;
  memcpy(to, m->data, n);
  m->taken = 1;
  return 1;
}

static float widen(uint16_t x) { uint32_t bits = (uint32_t)x << 16; float f; memcpy(&f, &bits, 4); return f; }
static uint16_t narrow(float f) { uint32_t bits; memcpy(&bits, &f, 4); return (bits + 0x7fff + (bits >> 16 & 1)) >> 16; }

static void add(char *sum, const char *part, size_t count, int type) {
  for (size_t i = 0; i < count; i++) switch (type) {
    case 1: ((uint8_t *)sum)[i] += ((uint8_t *)part)[i]; break;
    case 3: ((uint32_t *)sum)[i] += ((uint32_t *)part)[i]; break;
    case 4: ((int64_t *)sum)[i] += ((int64_t *)part)[i]; break;
    case 6: ((_Float16 *)sum)[i] += ((_Float16 *)part)[i]; break;
    case 7: ((float *)sum)[i] += ((float *)part)[i]; break;
    case 8: ((double *)sum)[i] += ((double *)part)[i]; break;
    case 9: ((uint16_t *)sum)[i] = narrow(widen(((uint16_t *)sum)[i]) + widen(((uint16_t *)part)[i])); break;
    default: abort();
  }
}

static void run(void *argument) {
  Work *w = argument;
  Comm *c = w->comm;
  Message *sent[CALLS * RANKS];
  int n = 0;
  usleep(100);
  pthread_mutex_lock(&arena->lock);
  for (int i = 0; i < w->n; i++) {
    Call *k = &w->calls[i];
    size_t bytes = k->count * size_of(k->type);
    int all = k->kind == GATHER || k->kind == SUM || k->kind == SCATTER || (k->kind == BROADCAST && k->peer == c->rank);
    for (int to = 0; to < c->size; to++)
      if (k->kind == SEND ? to == k->peer : to != c->rank && (all || (k->kind == REDUCE && to == k->peer)))
        sent[n++] = put(c, to, k->from + (k->kind == SCATTER ? to * bytes : 0), bytes);
  }
  for (int i = 0; i < w->n; i++) {
    Call *k = &w->calls[i];
    size_t bytes = k->count * size_of(k->type);
    if (k->kind == RECV || (k->kind == BROADCAST && k->peer != c->rank)) take(c, k->peer, k->to, bytes);
    if (k->kind == GATHER || k->kind == SUM || k->kind == SCATTER || (k->kind == REDUCE && k->peer == c->rank)) {
      char *parts = malloc(bytes * c->size + 1);
      int ok = 1;
      for (int from = 0; from < c->size; from++) {
        if (from == c->rank) memcpy(parts + from * bytes, k->from + (k->kind == SCATTER ? from * bytes : 0), bytes);
        else ok &= take(c, from, parts + from * bytes, bytes);
      }
      if (ok && k->kind == GATHER) memcpy(k->to, parts, bytes * c->size);
      if (ok && k->kind != GATHER) {
        for (int from = 1; from < c->size; from++) add(parts, parts + from * bytes, k->count, k->type);
        memcpy(k->to, parts, bytes);
      }
      free(parts);
    }
  }
  for (int i = 0; i < n; i++) while (!c->aborted && !sent[i]->taken) rest();
  pthread_mutex_unlock(&arena->lock);
  free(w);
}

#ifdef OLD_NCCL
int ncclGetVersion(int *version) { *version = 21701; return 0; }
#else
int ncclGetVersion(int *version) { *version = 29999; return 0; }
#endif
int ncclGetUniqueId(Id *id) {
  memset(id, 0, sizeof *id);
  pthread_mutex_lock(&arena->lock);
  snprintf(id->bytes, 128, "fake group %d", arena->serial++);
  pthread_mutex_unlock(&arena->lock);
  return 0;
}
// Under the lock.
static Comm *join(Id id, int rank, int size) {
  int i = 0;
  while (i < arena->group_count && memcmp(&arena->groups[i]->id, &id, sizeof id)) i++;
  if (i == arena->group_count) { arena->groups[i] = get(sizeof(Group)); arena->groups[arena->group_count++]->id = id; }
  Comm *c = calloc(1, sizeof *c);
  c->group = arena->groups[i], c->rank = rank, c->size = size;
  c->group->joined++;
  return c;
}
int ncclCommInitRankConfig(Comm **comm, int size, Id id, int rank, Config *config) {
  if (config->magic != 0xcafebeef || config->size != 24 || config->version != 21400 || config->blocking != 0) return 4;
  pthread_mutex_lock(&arena->lock);
  *comm = join(id, rank, size);
  pthread_mutex_unlock(&arena->lock);
  return 7;
}
#ifndef OLD_NCCL
// As the real one, it is done when the state of `c` says so, and only then is there a new communicator.
int ncclCommSplit(Comm *c, int color, int key, Comm **made, Config *config) {
  if (config || color < 0 || c->splits == SPLITS) return 4;
  if (c->splitting || c->aborted) abort();
  *made = NULL;
  pthread_mutex_lock(&arena->lock);
  Split *s = &c->group->splits[c->splits++];
  s->color[c->rank] = color, s->key[c->rank] = key;
  s->called++;
  c->splitting = made;
  pthread_mutex_unlock(&arena->lock);
  return 7;
}
#endif
// Under the lock.
static void finish_split(Comm *c) {
  Split *s = &c->group->splits[c->splits - 1];
  if (s->called < c->size) return;
  int color = s->color[c->rank], key = s->key[c->rank], rank = 0, size = 0;
  for (int r = 0; r < c->size; r++) if (s->color[r] == color) {
    size++;
    rank += s->key[r] < key || (s->key[r] == key && r < c->rank);
  }
  Id id = {0};
  snprintf(id.bytes, 128, "%.80s, %d of %d", c->group->id.bytes, color, c->splits);
  *c->splitting = join(id, rank, size);
  c->splitting = NULL;
}
int ncclCommGetAsyncError(Comm *c, int *code) {
  pthread_mutex_lock(&arena->lock);
  if (c->splitting) finish_split(c);
  *code = c->group->joined < c->size || c->splitting ? 7 : 0;
  pthread_mutex_unlock(&arena->lock);
  return 0;
}
int ncclCommFinalize(Comm *c) { c->finalized = 1; return 0; }
int ncclCommDestroy(Comm *c) { if (!c->finalized) abort(); return 0; }
int ncclCommAbort(Comm *c) {
  pthread_mutex_lock(&arena->lock);
  c->aborted = 1;
  pthread_mutex_unlock(&arena->lock);
  return 0;
}
const char *ncclGetErrorString(int code) { return code == 4 ? "invalid argument" : "another fault"; }
const char *ncclGetLastError(Comm *c) { return "told by the fake"; }
int ncclGroupStart(void) { depth++; return 0; }
int ncclGroupEnd(void) {
  if (--depth == 0 && posting) { fakeStreamCall(open_stream, run, posting); posting = NULL; }
  return 7;
}
static int call(Comm *c, void *stream, Call k) {
  if (k.type == 1 && k.count == 13) return 4; // The planted fault: 13 bytes.
  if (!depth || c->aborted || c->splitting) abort();
  if (!posting) { posting = calloc(1, sizeof *posting); posting->comm = c; open_stream = stream; }
  if (posting->n == CALLS || posting->comm != c || open_stream != stream) abort();
  posting->calls[posting->n++] = k;
  return 0;
}
int ncclSend(char *from, size_t n, int type, int peer, Comm *c, void *s) { return call(c, s, (Call){SEND, from, NULL, n, type, peer}); }
int ncclRecv(char *to, size_t n, int type, int peer, Comm *c, void *s) { return call(c, s, (Call){RECV, NULL, to, n, type, peer}); }
int ncclAllGather(char *from, char *to, size_t n, int type, Comm *c, void *s) { return call(c, s, (Call){GATHER, from, to, n, type, 0}); }
int ncclAllReduce(char *from, char *to, size_t n, int type, int op, Comm *c, void *s) { return op ? 4 : call(c, s, (Call){SUM, from, to, n, type, 0}); }
int ncclReduceScatter(char *from, char *to, size_t n, int type, int op, Comm *c, void *s) { return op ? 4 : call(c, s, (Call){SCATTER, from, to, n, type, 0}); }
int ncclReduce(char *from, char *to, size_t n, int type, int op, int root, Comm *c, void *s) { return op ? 4 : call(c, s, (Call){REDUCE, from, to, n, type, root}); }
int ncclBroadcast(char *from, char *to, size_t n, int type, int root, Comm *c, void *s) { return call(c, s, (Call){BROADCAST, from, to, n, type, root}); }
