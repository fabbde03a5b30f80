// __half and __half2, emulated.
#pragma once
#include "emu/float16.h"

EMU_FLOAT16(__half, __half2, half)
using half = __half;
using half2 = __half2;
EMU_INLINE half2 make_half2(half x, half y) { return half2(x, y); }
