// What the Python side compares with its own number, so that a library left from another version is not called.

#include <cstdint>

extern "C" __attribute__((visibility("default"))) int64_t lp_version() { return 2; }
