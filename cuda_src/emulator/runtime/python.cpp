// The C ABI that the course's Python side calls through ctypes.
#include "shadow.h"
#include "streams.h"

extern "C" {

EMU_API void emu_begin() {
    emu::remove_regions(emu::Region::tensor);
    emu::forget_counts();
    emu::forget_log();
}

EMU_API void emu_register(uint64_t pointer, uint64_t bytes, const char* name, int initialised) {
    emu::add_region(emu::Region::tensor, pointer, bytes, name, !initialised, true);
}

EMU_API const char* emu_end() {
    static std::string json;
    json = emu::report();
    emu::remove_regions(emu::Region::tensor);
    return json.c_str();
}

EMU_API const char* emu_streams() {
    static std::string json;
    json = emu::stream_log();
    return json.c_str();
}

EMU_API const char* emu_fault_kind() { return emu::last_fault_kind().c_str(); }
EMU_API const char* emu_fault_text() { return emu::last_fault_text().c_str(); }
}
