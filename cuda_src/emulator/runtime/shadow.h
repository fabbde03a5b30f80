// What the sanitizer remembers of each 4-byte word: who wrote it last, two that read it since, which bytes ever were
// written.
#pragma once
#include "machine.h"

namespace emu {

enum class Op : uint8_t { load, store, atomic };
enum class Space : uint8_t { global, shared };

struct Stamp {
    uint32_t time = 0, thread, site;
};

struct Cell {
    Stamp write, read[2];
    uint8_t write_mask, read_mask[2];  // which of the four bytes; SYNC: by an atomic or volatile access
    uint8_t written;                   // the bytes that hold a value
};
constexpr uint8_t SYNC = 0x80;

struct Region {  // memory that kernels may touch
    enum Kind : uint8_t { allocation, tensor, parameters, image } kind;
    uint64_t low, high;
    std::string name;
    bool watch_init, watch_races;
    Cell* cells = nullptr;  // of word low / 4 onwards; reserved when first touched
};

struct Counts {
    uint64_t requests = 0, transactions = 0, bytes = 0;
};
struct Request {  // one access of a warp, as its lanes join it one by one
    uint32_t mask;
    uint8_t bytes;
    Space space;
    uint64_t address[32];
    Request() {}
};
struct WarpLog {
    uint32_t base = 0;        // how many requests are complete
    uint32_t count[32] = {};  // how often each lane came
    std::vector<Request> open;
    size_t first = 0;
};

struct Site {  // one load or store of the program
    const void* pc;
    uint32_t number;
    Op op;
    bool touched = false;
    uint8_t bytes = 0;
    uint32_t shared_low = 1, shared_high = 0;  // the variable it touched last: looked up once, then compared
    const Region* region = nullptr;
    uint64_t low = 1, high = 0, epoch = 0;
    uint64_t first = ~0ull, last = 0;  // what it touched of the region in this launch
    Counts counts[2];
    std::vector<WarpLog> logs;
};

Site* find_site(const void* pc, Op op);
Site* site_number(uint32_t number);

void add_region(Region::Kind kind, uint64_t low, uint64_t bytes, const std::string& name, bool watch_init,
                bool watch_races);
bool remove_region(uint64_t low, bool freed);  // freed: remembered, to tell a use after free
void remove_regions(Region::Kind kind);
void mark_written(uint64_t low, uint64_t bytes);
Region* find_region(uint64_t address);
std::string nearest(uint64_t address);  // "8 bytes past the end of z [1000 float32]"
extern uint64_t regions_epoch;
Cell* region_cells(const Region& region);
void forget_times();  // when the clock starts again

void access(const void* pc, uint64_t address, uint32_t bytes, Op op, bool sync);
void touch(Thread& t, Site& site, Cell* cells, uint64_t address, uint32_t bytes, bool sync,
           const Region* region);  // region: null for shared memory
void count_site(Site& site);       // first touched in this launch?
void note_extent(Site& site);      // the launch learns what the site touched of its region
void count(Thread& t, Site& site, uint64_t address, uint32_t bytes, Space space);

void forget_counts();
std::string report();  // JSON

}  // namespace emu
