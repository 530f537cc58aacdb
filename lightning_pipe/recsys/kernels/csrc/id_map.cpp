// Slots of ids: a hash table with open addressing and linear probing, in memory that the caller owns.
//
// A table has 2^bits entries, at most half of them used, so a search ends after few steps. An entry without a slot is
// empty, so every key is legal. The tick is next to the key, so that a row is found and its use recorded in one memory
// access. Entries are prefetched some keys ahead of the search, whose cost is the wait for memory.

#include <algorithm>
#include <cstdint>

namespace {

struct Entry {
    int64_t key;
    int32_t slot;  // -1: empty
    uint32_t tick;
};
static_assert(sizeof(Entry) == 16, "as the dtype in id_map.py");

// Number of keys that are prefetched ahead of the search.
constexpr int64_t kAhead = 24;

// Finalizer of MurmurHash3 (Appleby): distributes keys that differ in any bits over the whole table.
inline uint64_t mixed(int64_t key) {
    uint64_t x = static_cast<uint64_t>(key);
    x ^= x >> 33;
    x *= 0xff51afd7ed558ccdULL;
    x ^= x >> 33;
    x *= 0xc4ceb9fe1a85ec53ULL;
    x ^= x >> 33;
    return x;
}

inline uint64_t home(int64_t key, int64_t bits) { return mixed(key) >> (64 - bits); }

// The entry of the key, or the empty entry where it would be inserted.
inline Entry* search(Entry* table, int64_t bits, int64_t key) {
    const uint64_t mask = (1ULL << bits) - 1;
    uint64_t at = home(key, bits);
    while (table[at].slot >= 0 && table[at].key != key) at = (at + 1) & mask;
    return table + at;
}

template <class Visit>
inline void for_each(Entry* table, int64_t bits, const int64_t* keys, int64_t count, Visit visit) {
    for (int64_t i = 0; i < std::min(kAhead, count); ++i) __builtin_prefetch(table + home(keys[i], bits), 1);
    for (int64_t i = 0; i < count; ++i) {
        if (i + kAhead < count) __builtin_prefetch(table + home(keys[i + kAhead], bits), 1);
        visit(i, search(table, bits, keys[i]));
    }
}

}  // namespace

#define EXPORTED extern "C" __attribute__((visibility("default")))

EXPORTED void lp_id_map_find(Entry* table, int64_t bits, const int64_t* keys, int64_t count, int64_t* slots) {
    for_each(table, bits, keys, count, [&](int64_t i, const Entry* entry) { slots[i] = entry->slot; });
}

// Writes the slots of all keys (-1 if missing), each slot whose tick changes (once), and the positions of missing keys.
// The numbers of changed slots and of missing keys are written to counts.
EXPORTED void lp_id_map_touch(Entry* table, int64_t bits, const int64_t* keys, int64_t count, uint32_t tick,
                              int64_t* slots, int64_t* touched, int64_t* missing, int64_t* counts) {
    int64_t noted = 0, without = 0;
    for_each(table, bits, keys, count, [&](int64_t i, Entry* entry) {
        const int64_t slot = entry->slot;
        slots[i] = slot;
        if (slot < 0) {
            missing[without++] = i;
        } else if (entry->tick != tick) {
            entry->tick = tick;
            touched[noted++] = slot;
        }
    });
    counts[0] = noted;
    counts[1] = without;
}

// Inserts distinct keys that are not in the table.
EXPORTED void lp_id_map_insert(Entry* table, int64_t bits, const int64_t* keys, int64_t count, const int64_t* slots,
                               uint32_t tick) {
    for_each(table, bits, keys, count, [&](int64_t i, Entry* entry) {
        *entry = {keys[i], static_cast<int32_t>(slots[i]), tick};
    });
}

// Entries after a hole move back into it, unless that would put them before their home (Knuth, vol. 3, 6.4, algorithm
// R). Without tombstones, searches stay as short as if the keys had never been inserted.
EXPORTED void lp_id_map_remove(Entry* table, int64_t bits, const int64_t* keys, int64_t count) {
    const uint64_t mask = (1ULL << bits) - 1;
    for_each(table, bits, keys, count, [&](int64_t, Entry* entry) {
        if (entry->slot < 0) return;
        uint64_t hole = static_cast<uint64_t>(entry - table);
        for (uint64_t at = (hole + 1) & mask; table[at].slot >= 0; at = (at + 1) & mask) {
            const uint64_t from_home = (at - home(table[at].key, bits)) & mask;
            if (from_home >= ((at - hole) & mask)) {
                table[hole] = table[at];
                hole = at;
            }
        }
        table[hole].slot = -1;
    });
}

// Writes the tick of each used slot.
EXPORTED void lp_id_map_ticks(const Entry* table, int64_t bits, int64_t* ticks) {
    for (const Entry* entry = table; entry != table + (1ULL << bits); ++entry) {
        if (entry->slot >= 0) ticks[entry->slot] = entry->tick;
    }
}
