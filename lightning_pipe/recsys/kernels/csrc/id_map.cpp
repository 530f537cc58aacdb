// Slots of ids: a hash table with open addressing and linear probing, in memory that the caller owns.
//
// A table is 2^bits entries, at most half of them in use, so a search ends after few steps. An entry without a slot is
// empty: every key is legal. The tick lies beside the key, so that to find a row and to note its use is one visit.
// Searches go over the batch in two steps: entries are asked for some keys ahead, since what a search costs is the wait
// for memory.

#include <algorithm>
#include <cstdint>

namespace {

struct Entry {
    int64_t key;
    int32_t slot;  // -1: empty
    uint32_t tick;
};
static_assert(sizeof(Entry) == 16, "as the dtype in id_map.py");

// How many keys the memory is asked ahead of the search.
constexpr int64_t kAhead = 24;

// Finaliser of MurmurHash3 (Appleby): keys that differ in any bits start anywhere in the table.
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

// The entry of the key, or the empty one where it would be.
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

// Slots, -1 where there is none; each slot that did not have this tick yet, once; and the places of keys without a
// slot. How many of these two there are is written to counts.
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

// Distinct keys that are not in the table.
EXPORTED void lp_id_map_insert(Entry* table, int64_t bits, const int64_t* keys, int64_t count, const int64_t* slots,
                               uint32_t tick) {
    for_each(table, bits, keys, count, [&](int64_t i, Entry* entry) {
        *entry = {keys[i], static_cast<int32_t>(slots[i]), tick};
    });
}

// Gives the keys of an empty table slots 0, 1, ... in the order in which they first come; returned is how many.
EXPORTED int64_t lp_id_map_number(Entry* table, int64_t bits, const int64_t* keys, int64_t count, int64_t* slots,
                                  int64_t* distinct) {
    int64_t used = 0;
    for_each(table, bits, keys, count, [&](int64_t i, Entry* entry) {
        if (entry->slot < 0) {
            *entry = {keys[i], static_cast<int32_t>(used), 0};
            distinct[used++] = keys[i];
        }
        slots[i] = entry->slot;
    });
    return used;
}

// Entries behind a hole move back into it, unless that would put them before their home (Knuth, vol. 3, 6.4,
// algorithm R): no tombstones, so searches stay as short as if the keys had never been there.
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

// The tick of each slot in use.
EXPORTED void lp_id_map_ticks(const Entry* table, int64_t bits, int64_t* ticks) {
    for (const Entry* entry = table; entry != table + (1ULL << bits); ++entry) {
        if (entry->slot >= 0) ticks[entry->slot] = entry->tick;
    }
}
