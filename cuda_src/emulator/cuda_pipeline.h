// cp.async: a copy from global to shared memory that goes on while the thread does other things. Here it happens at the
// wait, and until then its target counts as never written, so that a forgotten wait is seen.
#pragma once
#include "emu/device.h"

EMU_INLINE void __pipeline_memcpy_async(void* to, const void* from, size_t bytes, size_t zeros = 0) {
    emu::async_copy(to, from, bytes, zeros);
}
EMU_INLINE void __pipeline_commit() { emu::async_commit(); }
EMU_INLINE void __pipeline_wait_prior(size_t pending) { emu::async_wait(pending); }
