// What main asks of every sort: keys that hurt, as unsigned and as signed ones, then a time for every rung.
#pragma once
#include "course.cuh"

#include <algorithm>
#include <random>

struct Rung {
    const char* name;
    void (*launch)(const uint32_t*, uint32_t*, uint32_t*, int64_t, int64_t, uint32_t, cudaStream_t);
};

inline void check_and_time(const std::vector<Rung>& rungs) {
    const size_t few = course::emulated ? 2048 : 32768;  // some tiles: the emulator's are smaller
    const size_t hurts = (course::small() ? few : 1 << 20) + 1021, timed = course::small() ? 1 : size_t(1) << 26;
    std::mt19937 generator(1);
    std::vector<uint32_t> keys(std::max(hurts, timed));
    for (uint32_t& key : keys) key = generator() >> (generator() % 32);  // of all lengths, so that many are equal
    for (const uint32_t flip : {0u, 1u << 31}) {
        const std::vector<uint32_t> some(keys.begin(), keys.begin() + int64_t(hurts));
        std::vector<uint32_t> expected = some;
        std::sort(expected.begin(), expected.end(), [=](uint32_t a, uint32_t b) { return (a ^ flip) < (b ^ flip); });
        const course::Buffer<uint32_t> in(some);
        course::Buffer<uint32_t> out(hurts), scratch(2 * hurts + 16384);
        for (const Rung& rung : rungs) {
            out.poison();
            rung.launch(in, out, scratch, int64_t(scratch.size()), int64_t(hurts), flip, nullptr);
            course::check(std::string(rung.name) + (flip ? ", signed" : ", unsigned"), out.host(), expected, 0);
        }
    }
    for (uint32_t& key : keys) key = generator();
    keys.resize(timed);
    const course::Buffer<uint32_t> in(keys);
    course::Buffer<uint32_t> out(timed), scratch(2 * timed + 16384);
    std::vector<course::Version> versions;
    for (const Rung& rung : rungs)
        versions.push_back({rung.name, [&, launch = rung.launch](cudaStream_t s) {
                                launch(in, out, scratch, int64_t(scratch.size()), int64_t(timed), 1u << 31, s);
                            }});
    course::time_versions(versions, {.bytes = 8.0 * double(timed)});
}
