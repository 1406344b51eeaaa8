// One source, several instruction sets.
//
// The build compiles every *_cpu_kernel.cpp once per instruction set (ISA), with one of MXFLASH_ISA_AVX512,
// MXFLASH_ISA_AVX2, MXFLASH_ISA_NEON and MXFLASH_ISA_PORTABLE defined; those that have a use for dot products of BF16
// also with MXFLASH_ISA_AVX512_BF16. Between MXFLASH_ISA_BEGIN and MXFLASH_ISA_END
// code is in a namespace of its own (mxflash::avx512, ...) and the compiler may use that ISA's instructions; outside it
// may not. So an inline function that is shared with the rest of the program (std::min, sequence_at) is never compiled
// for a CPU that the process does not run on, whichever copy the linker keeps. Include everything else before
// MXFLASH_ISA_BEGIN.
#pragma once

#define MXFLASH_PRAGMA_TEXT(text) _Pragma(#text)
#define MXFLASH_PRAGMA(text) MXFLASH_PRAGMA_TEXT(text)

#if defined(MXFLASH_ISA_AVX512_BF16)
#define MXFLASH_ISA_AVX512
#define MXFLASH_ISA avx512_bf16
#define MXFLASH_TARGET "avx512bf16,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c"
#elif defined(MXFLASH_ISA_AVX512)
#define MXFLASH_ISA avx512
#define MXFLASH_TARGET "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c"
#elif defined(MXFLASH_ISA_AVX2)
#define MXFLASH_ISA avx2
#define MXFLASH_TARGET "avx2,fma,f16c"
#elif defined(MXFLASH_ISA_NEON)
#define MXFLASH_ISA neon
#elif defined(MXFLASH_ISA_PORTABLE)
#define MXFLASH_ISA portable
#else
#error "compile with one of MXFLASH_ISA_AVX512_BF16, _AVX512, _AVX2, _NEON, _PORTABLE"
#endif

#if !defined(MXFLASH_TARGET)
#define MXFLASH_PUSH_TARGET
#define MXFLASH_POP_TARGET
#elif defined(__clang__)
#define MXFLASH_PUSH_TARGET \
  MXFLASH_PRAGMA(clang attribute push(__attribute__((target(MXFLASH_TARGET))), apply_to = function))
#define MXFLASH_POP_TARGET MXFLASH_PRAGMA(clang attribute pop)
#else
#define MXFLASH_PUSH_TARGET MXFLASH_PRAGMA(GCC push_options) MXFLASH_PRAGMA(GCC target(MXFLASH_TARGET))
#define MXFLASH_POP_TARGET MXFLASH_PRAGMA(GCC pop_options)
#endif

#define MXFLASH_ISA_BEGIN \
  MXFLASH_PUSH_TARGET     \
  namespace mxflash::MXFLASH_ISA {
#define MXFLASH_ISA_END \
  }                     \
  MXFLASH_POP_TARGET

#define MXFLASH_INLINE inline __attribute__((always_inline))
