// What Candle calls of the other CUDA libraries to make a device. The rest stays unresolved, and is not called.
static int handle;
int cublasCreate_v2(void **to) { *to = &handle; return 0; }
int cublasDestroy_v2(void *from) { return 0; }
int cublasSetStream_v2(void *on, void *stream) { return 0; }
int curandCreateGenerator(void **to, int kind) { *to = &handle; return 0; }
int curandDestroyGenerator(void *from) { return 0; }
int curandSetStream(void *on, void *stream) { return 0; }
int curandSetPseudoRandomGeneratorSeed(void *on, unsigned long long seed) { return 0; }
