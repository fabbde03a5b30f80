// Words: which line an instruction belongs to, which thread did it. Asked for at faults and reports only.
#include <link.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>

#include "machine.h"

namespace emu {
namespace {

struct Found {
    uint64_t address = 0, low = 0, high = 0, bias = 0;
    std::string file;
};

Found module(uint64_t address) {
    Found found;
    found.address = address;
    dl_iterate_phdr(
        [](dl_phdr_info* info, size_t, void* data) {
            auto* f = static_cast<Found*>(data);
            for (int i = 0; i < info->dlpi_phnum; i++) {
                const auto& segment = info->dlpi_phdr[i];
                const uint64_t low = info->dlpi_addr + segment.p_vaddr, high = low + segment.p_memsz;
                if (segment.p_type != PT_LOAD || f->address < low || f->address >= high) continue;
                f->low = low;
                f->high = high;
                f->bias = info->dlpi_addr;
                f->file = info->dlpi_name && *info->dlpi_name ? info->dlpi_name : "/proc/self/exe";
            }
            return f->file.empty() ? 0 : 1;
        },
        &found);
    return found;
}

std::vector<std::string> addr2line(uint64_t address, const char* options) {
    const Found m = module(address);
    std::string file = m.file;
    char buffer[4096];
    if (file == "/proc/self/exe") {
        const ssize_t n = readlink(file.c_str(), buffer, sizeof buffer);
        if (n > 0) file.assign(buffer, n);
    }
    snprintf(buffer, sizeof buffer, "addr2line %s -e '%s' 0x%llx 2>/dev/null", options, file.c_str(),
             static_cast<unsigned long long>(address - m.bias));
    std::vector<std::string> lines;
    if (FILE* pipe = popen(buffer, "r")) {
        while (fgets(buffer, sizeof buffer, pipe)) {
            buffer[strcspn(buffer, "\n")] = 0;
            lines.push_back(buffer);
        }
        pclose(pipe);
    }
    return lines;
}

std::string ask(const void* pc) {
    // A return address is the instruction after the call. addr2line names the frames that were inlined there, innermost
    // first: the first outside the emulator's headers is the kernel's.
    for (std::string line : addr2line(uint64_t(pc) - 1, "-i")) {
        if (line[0] == '?' || line.find("/emulator/") != line.npos || line.find("/include/c++/") != line.npos) continue;
        line = line.substr(0, line.find(' '));  // without "(discriminator 2)"
        return line.substr(line.rfind('/') + 1);
    }
    return "an instruction of unknown line (is binutils' addr2line there?)";
}

std::string triple(const uint3& v) {
    return "(" + std::to_string(v.x) + "," + std::to_string(v.y) + "," + std::to_string(v.z) + ")";
}

}  // namespace

std::string line_of(const void* pc) {
    static std::map<const void*, std::string> known;
    auto [place, fresh] = known.try_emplace(pc);
    if (fresh) place->second = ask(pc);
    return place->second;
}

std::string function_name(const void* function, const char* otherwise) {
    const auto lines = function ? addr2line(uint64_t(function), "-f -C") : std::vector<std::string>();
    return lines.empty() || lines[0] == "??" ? otherwise : lines[0].substr(0, lines[0].find('('));
}

std::string who(const Thread& t) { return "thread " + triple(t.index) + " of block " + triple(t.block->index); }

std::string who(uint32_t id) {
    const dim3 &g = running->grid, &b = running->block;
    const uint32_t block = id >> 10, rank = id & 1023;
    return "thread " + triple({rank % b.x, rank / b.x % b.y, rank / b.x / b.y}) + " of block " +
           triple({block % g.x, block / g.x % g.y, block / g.x / g.y});
}

std::string module_of(uint64_t address, uint64_t* low, uint64_t* high) {
    const Found m = module(address);
    *low = m.low;
    *high = m.high;
    const size_t slash = m.file.rfind('/');
    return slash == std::string::npos ? m.file : m.file.substr(slash + 1);
}

}  // namespace emu
