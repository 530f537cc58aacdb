// Counts and last uses of a batch's rows, updated in one pass.

#include <algorithm>
#include <cstdint>

namespace {

struct Header {
    int64_t count;
    int64_t last_seen;
};

// Number of rows that are prefetched ahead.
constexpr int64_t kAhead = 16;

}  // namespace

// For distinct rows: resets the count of a row last seen more than ttl steps ago (ttl < 0: of none), then adds one to
// each count and marks the row as last seen at step, and as dirty. Writes the previous last_seen to before, reset rows
// to expired, rows with counts below threshold to young, and the numbers of these two to numbers.
extern "C" __attribute__((visibility("default"))) void lp_row_headers_begin(
    Header* headers, uint8_t* dirty, const int64_t* rows, int64_t count, int64_t step, int64_t ttl, int64_t threshold,
    int64_t* before, int64_t* expired, int64_t* young, int64_t* numbers) {
    int64_t ended = 0, below = 0;
    for (int64_t i = 0; i < std::min(kAhead, count); ++i) __builtin_prefetch(headers + rows[i], 1);
    for (int64_t i = 0; i < count; ++i) {
        if (i + kAhead < count) __builtin_prefetch(headers + rows[i + kAhead], 1);
        const int64_t row = rows[i];
        Header& header = headers[row];
        before[i] = header.last_seen;
        if (ttl >= 0 && header.count > 0 && step - header.last_seen > ttl) {
            header.count = 0;
            expired[ended++] = row;
        }
        header.count += 1;
        header.last_seen = step;
        dirty[row] = 1;
        if (header.count < threshold) young[below++] = row;
    }
    numbers[0] = ended;
    numbers[1] = below;
}
