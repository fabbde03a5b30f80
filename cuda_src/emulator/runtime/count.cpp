// What a warp's access costs. The k-th time that lanes of a warp execute one load or store makes one request. In global
// memory it touches 32-byte sectors; in shared memory 32 banks give one 4-byte word each in a pass, a "wavefront".
#include <algorithm>
#include <cstring>

#include "shadow.h"

namespace emu {
namespace {

std::vector<Site*> touched;
uint32_t warps = 0;

struct Kernel {
    uint64_t launches = 0, blocks = 0, threads = 0, barriers = 0;
    std::map<std::pair<uint32_t, Space>, Counts> sites;
};
std::map<std::string, Kernel> kernels;

uint32_t sectors(const Request& r) {
    uint64_t seen[64];
    uint32_t n = 0;
    for (uint32_t m = r.mask; m; m &= m - 1) {
        const uint64_t a = r.address[__builtin_ctz(m)];
        for (uint64_t s = a / 32; s <= (a + r.bytes - 1) / 32; s++)
            if (std::find(seen, seen + n, s) == seen + n) seen[n++] = s;
    }
    return n;
}

// Lanes that want the same word share it; different words of one bank wait for one another. One pass serves at most 128
// bytes: half a warp at 8 bytes a lane, a quarter of it at 16 bytes.
uint32_t wavefronts(const Request& r) {
    const uint32_t lanes = r.bytes <= 4 ? 32 : 128 / r.bytes;
    uint32_t passes = 0;
    for (uint32_t begin = 0; begin < 32; begin += lanes) {
        uint64_t words[32][32];
        uint32_t found[32] = {}, worst = 0;
        for (uint32_t lane = begin; lane < begin + lanes; lane++)
            for (uint64_t w = r.address[lane] / 4; (r.mask >> lane & 1) && w <= (r.address[lane] + r.bytes - 1) / 4;
                 w++) {
                uint64_t* bank = words[w % 32];
                uint32_t& n = found[w % 32];
                if (std::find(bank, bank + n, w) == bank + n) bank[n++] = w;
                worst = std::max(worst, n);
            }
        passes += worst;
    }
    return passes;
}

void finish(Site& s, const Request& r) {
    Counts& c = s.counts[int(r.space)];
    c.requests++;
    c.transactions += r.space == Space::global ? sectors(r) : wavefronts(r);
    c.bytes += uint64_t(r.bytes) * __builtin_popcount(r.mask);
}

void touch_first(Site& s) {
    s.touched = true;
    if (s.logs.size() < warps) s.logs.resize(warps);
    for (WarpLog& log : s.logs) {
        log.base = 0;
        std::fill(log.count, log.count + 32, 0);
        log.open.clear();
        log.first = 0;
    }
    s.counts[0] = s.counts[1] = {};
    s.shared_low = 1, s.shared_high = 0;  // this launch has its own variables
    s.first = ~0ull, s.last = 0;
    touched.push_back(&s);
}

}  // namespace

void count(Thread& t, Site& s, uint64_t address, uint32_t bytes, Space space) {
    Warp& w = *t.warp;
    s.bytes = bytes;
    WarpLog& log = s.logs[w.slot];
    size_t at = log.first + (log.count[t.lane]++ - log.base);
    if (at == log.open.size()) {
        if (log.first == at) log.open.clear(), log.first = at = 0;
        log.open.emplace_back();
        log.open.back().mask = 0;
        log.open.back().bytes = bytes;
        log.open.back().space = space;
        w.open++;
    }
    Request& r = log.open[at];
    r.address[t.lane] = address;
    r.mask |= 1u << t.lane;
    while (log.first < log.open.size() && (log.open[log.first].mask & w.live) == w.live) {
        finish(s, log.open[log.first]);
        log.first++;
        log.base++;
        w.open--;
    }
}

// After a barrier no lane can join a request that was begun before it. At a block's end the next block, which takes its
// place, begins at zero: lanes that returned early have come less often than the others.
void count_flush(Warp& warp, bool block_ends) {
    if (!warp.open && !block_ends) return;
    for (Site* s : touched) {
        WarpLog& log = s->logs[warp.slot];
        for (size_t i = log.first; i < log.open.size(); i++) finish(*s, log.open[i]);
        log.open.clear();
        log.first = 0;
        log.base = 0;
        std::fill(log.count, log.count + 32, 0);
    }
    warp.open = 0;
}

void count_site(Site& s) {
    if (!s.touched) touch_first(s);
}

// s.low, not the region's: what was freed since is still what this launch touched.
void note_extent(Site& s) {
    if (!s.last) return;
    auto [at, fresh] = running->extents.try_emplace({s.low, s.op != Op::load}, s.first, s.last);
    if (!fresh) at->second = {std::min(at->second.first, s.first), std::max(at->second.second, s.last)};
    s.first = ~0ull, s.last = 0;
}

void count_begin() {
    warps = 0;
    touched.clear();
}

void count_slots(uint32_t slots) {
    warps = slots;
    for (Site* s : touched) s->logs.resize(std::max<size_t>(s->logs.size(), slots));
}

void count_end(Running& l) {
    for (Block& b : l.blocks)
        for (Warp& w : b.warps) count_flush(w, true);
    Kernel& k = kernels[l.name];
    k.launches++;
    k.blocks += l.done_blocks;
    k.threads += l.done_blocks * l.order.size();
    k.barriers += l.barriers;
    for (Site* s : touched) {
        s->touched = false;
        note_extent(*s);
        for (Space space : {Space::global, Space::shared})
            if (const Counts& c = s->counts[int(space)]; c.requests) {
                Counts& sum = k.sites[{s->number, space}];
                sum.requests += c.requests;
                sum.transactions += c.transactions;
                sum.bytes += c.bytes;
            }
    }
    touched.clear();
}

void forget_counts() { kernels.clear(); }

std::string report() {
    std::string json = "[";
    auto quoted = [](const std::string& s) {
        std::string q = "\"";
        for (char c : s) q += c == '"' || c == '\\' ? std::string("\\") + c : std::string(1, c);
        return q + "\"";
    };
    auto figure = [](const std::string& name, uint64_t value) {
        return ", \"" + name + "\": " + std::to_string(value);
    };
    static const char* ops[] = {"load", "store", "atomic"};
    for (const auto& [name, k] : kernels) {
        Counts sums[2][3];
        std::map<std::tuple<std::string, int, int, int>, Counts> lines;
        for (const auto& [key, c] : k.sites) {
            const Site& s = *site_number(key.first);
            for (Counts* sum :
                 {&sums[int(key.second)][int(s.op)], &lines[{line_of(s.pc), int(key.second), int(s.op), s.bytes}]}) {
                sum->requests += c.requests;
                sum->transactions += c.transactions;
                sum->bytes += c.bytes;
            }
        }
        json += (json.size() > 1 ? ",\n" : "") + ("{\"kernel\": " + quoted(name)) + figure("launches", k.launches) +
                figure("blocks", k.blocks) + figure("threads", k.threads) + figure("barriers", k.barriers);
        for (int space = 0; space < 2; space++)
            for (int op = 0; op < 3; op++) {
                const std::string prefix = std::string(space ? "shared_" : "global_") + ops[op] + "_";
                json += figure(prefix + "requests", sums[space][op].requests) +
                        figure(prefix + (space ? "wavefronts" : "sectors"), sums[space][op].transactions) +
                        figure(prefix + "bytes", sums[space][op].bytes);
            }
        json += ", \"lines\": [";
        bool first = true;
        for (const auto& [key, c] : lines) {
            const auto& [place, space, op, bytes] = key;
            const size_t colon = place.rfind(':');
            json += (first ? "" : ", ") + ("{\"file\": " + quoted(place.substr(0, colon))) +
                    figure("line", colon == std::string::npos ? 0 : strtoull(place.c_str() + colon + 1, nullptr, 10)) +
                    ", \"space\": \"" + (space ? "shared" : "global") + "\", \"op\": \"" + ops[op] + "\"" +
                    figure("bytes_each", bytes) + figure("requests", c.requests) +
                    figure("transactions", c.transactions) + figure("bytes", c.bytes) + "}";
            first = false;
        }
        json += "]}";
    }
    return json + "]";
}

}  // namespace emu
