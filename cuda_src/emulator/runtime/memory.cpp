// Which memory kernels may touch: allocations, registered tensors, the parameters of the launch, constants.
#include <sys/mman.h>

#include <algorithm>
#include <cstring>

#include "shadow.h"

namespace emu {

uint64_t regions_epoch = 1;

namespace {

std::multimap<uint64_t, Region> regions;  // by first address; tensors may be views of one another
struct Freed {
    uint64_t low, high;
    std::string name;
};
std::deque<Freed> freed;

size_t cell_bytes(const Region& r) { return (((r.high + 3) & ~3ull) - (r.low & ~3ull)) / 4 * sizeof(Cell); }

void drop_cells(Region& r) {
    if (r.cells) munmap(static_cast<void*>(r.cells), cell_bytes(r));
    r.cells = nullptr;
}

}  // namespace

Cell* region_cells(const Region& region) {
    auto& r = const_cast<Region&>(region);
    if (!r.cells) {  // ten bytes for one, but only the pages that are touched
        void* p =
            mmap(nullptr, cell_bytes(r), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (p == MAP_FAILED) throw std::bad_alloc();
        r.cells = static_cast<Cell*>(p);
    }
    return r.cells;
}

void add_region(Region::Kind kind, uint64_t low, uint64_t bytes, const std::string& name, bool watch_init,
                bool watch_races) {
    regions_epoch++;
    // Freed memory at this place belongs to the new allocation now, and so does an access beside it.
    std::erase_if(freed, [=](const Freed& f) { return f.low < low + bytes && low < f.high; });
    regions.insert({low, Region{kind, low, low + bytes, name, watch_init, watch_races}});
}

bool remove_region(uint64_t low, bool is_free) {
    auto found = regions.find(low);
    while (found != regions.end() && found->first == low && found->second.kind == Region::tensor) ++found;
    if (found == regions.end() || found->first != low) return false;
    regions_epoch++;
    if (is_free) freed.push_front({low, found->second.high, found->second.name});
    if (freed.size() > 64) freed.pop_back();
    drop_cells(found->second);
    regions.erase(found);
    return true;
}

void remove_regions(Region::Kind kind) {
    regions_epoch++;
    for (auto it = regions.begin(); it != regions.end();)
        if (it->second.kind == kind) {
            drop_cells(it->second);
            it = regions.erase(it);
        } else {
            ++it;
        }
}

Region* find_region(uint64_t address) {
    auto after = regions.upper_bound(address);
    for (int tries = 0; after != regions.begin() && tries < 64; tries++) {  // views overlap: not only the nearest below
        --after;
        if (address < after->second.high) return &after->second;
    }
    uint64_t low, high;
    const std::string module = module_of(address, &low, &high);
    if (module.empty()) return nullptr;
    add_region(Region::image, low, high - low, "the constants of " + module, false, false);
    return find_region(address);
}

void mark_written(uint64_t low, uint64_t bytes) {
    Region* r = bytes ? find_region(low) : nullptr;
    if (!r || !r->watch_init) return;
    if (low == r->low && low + bytes >= r->high) r->watch_init = false;  // wholly written: no need to look any more
    const uint64_t end = std::min(low + bytes, r->high), base = r->low & ~3ull;
    for (uint64_t a = low; r->watch_init && a < end; a++) region_cells(*r)[(a - base) / 4].written |= 1 << (a & 3);
    regions_epoch++;
}

std::string nearest(uint64_t address) {
    for (const Freed& f : freed)
        if (address >= f.low && address < f.high) return "of " + f.name + ", which has been freed";
    const Region* best = nullptr;
    uint64_t distance = 1 << 20;
    bool past = true;
    for (const auto& [low, r] : regions) {
        if (r.kind > Region::tensor) continue;
        const uint64_t d = address >= r.low ? address - std::min(address, r.high) : r.low - address;
        if (d < distance || (address < r.high && address >= r.low)) {
            best = &r;
            distance = d;
            past = address >= r.low;
        }
    }
    if (!best) return "at no device memory (a host pointer?)";
    if (distance > 4096)
        return "at no device memory (a host pointer? " + best->name + " is " + std::to_string(distance) +
               " bytes away)";
    if (past && address < best->high) return "across the end of " + best->name;
    return std::to_string(distance) + (past ? " bytes past the end of " : " bytes before the begin of ") + best->name;
}

void forget_times() {
    for (auto& [low, r] : regions)
        for (size_t i = 0; r.cells && i < cell_bytes(r) / sizeof(Cell); i++)
            r.cells[i].write_mask = r.cells[i].read_mask[0] = r.cells[i].read_mask[1] = 0;
}

}  // namespace emu
