// Vectors of the ISA that this translation unit is compiled for: the types F32, I32, Mask and some forty functions.
// vector_portable.h defines what each of them means; the others do the same in one or a few instructions.
#pragma once

#include "simd/isa.h"

#if defined(MXFLASH_ISA_AVX512)
#include "simd/vector_avx512.h"
#elif defined(MXFLASH_ISA_AVX2)
#include "simd/vector_avx2.h"
#elif defined(MXFLASH_ISA_NEON)
#include "simd/vector_neon.h"
#else
#include "simd/vector_portable.h"
#endif
