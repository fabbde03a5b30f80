// __nv_bfloat16 and __nv_bfloat162, emulated.
#pragma once
#include "emu/float16.h"

EMU_FLOAT16(__nv_bfloat16, __nv_bfloat162, bfloat16)
using nv_bfloat16 = __nv_bfloat16;
using nv_bfloat162 = __nv_bfloat162;
EMU_INLINE nv_bfloat162 make_bfloat162(nv_bfloat16 x, nv_bfloat16 y) { return nv_bfloat162(x, y); }
