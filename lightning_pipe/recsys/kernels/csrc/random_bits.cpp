// Random bits that depend on a seed, a key and a column only.

#include <cstdint>

namespace {

// SplitMix64 (Steele, Lea, Flood: "Fast Splittable Pseudorandom Number Generators", 2014): step and mixer, which is
// Stafford's variant 13.
constexpr uint64_t kStep = 0x9e3779b97f4a7c15ULL;

inline uint64_t mixed(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
    return x ^ (x >> 31);
}

}  // namespace

// bits[i][j]: output j of the SplitMix64 generator whose state is derived from the seed and keys[i].
extern "C" __attribute__((visibility("default"))) void lp_random_bits(uint64_t seed, const uint64_t* keys, int64_t count,
                                                                      int64_t width, uint64_t* bits) {
    for (int64_t i = 0; i < count; ++i) {
        const uint64_t start = mixed(mixed(keys[i] + kStep) ^ seed);
        for (int64_t j = 0; j < width; ++j) *bits++ = mixed(start + static_cast<uint64_t>(j + 1) * kStep);
    }
}
