// The creation of a ring without the C library, as liburing has it on several distributions: the instructions between the
// number and the call, and a register of 32 bytes that the kernel keeps. With AVX-512 the C library uses the registers from
// 16 on; without, its functions clear the upper half of each register.
#include <string.h>

struct io_uring_params;

#define SET_UP(MOVE, REGISTER) \
    asm volatile(MOVE " (%3), %%" REGISTER "\n\tmov $425, %%eax\n\tmov %1, %%edi\n\tmov %2, %%rsi\n\tsyscall\n\t" \
                 MOVE " %%" REGISTER ", (%4)\n\tvzeroupper" \
                 : "=&a"(result) : "r"(entries), "r"(params), "r"(before), "r"(after) \
                 : "rdi", "rsi", "rcx", "r11", "memory", "xmm7")

long inline_setup(unsigned entries, struct io_uring_params *params) {
    long result;
    unsigned char before[32], after[32];
    memset(before, 0x5a, sizeof before);
    memcpy(after, before, sizeof after);
    if (__builtin_cpu_supports("avx512vl"))
        SET_UP("vmovdqu64", "ymm16");
    else if (__builtin_cpu_supports("avx"))
        SET_UP("vmovdqu", "ymm7");
    else
        asm volatile("syscall" : "=a"(result) : "a"(425L), "D"((long)entries), "S"(params) : "rcx", "r11", "memory");
    return memcmp(before, after, sizeof before) ? -1000 : result;
}
